"""Locks on directories, for programs that must not fill the same one at the same time."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pathlib
from collections.abc import Iterator

from amdim_tf.errors import warn

# Of file systems without locks, or with none for directories.
_NO_LOCKS = (errno.EBADF, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextlib.contextmanager
def locked(directory: pathlib.Path, wait: bool = False) -> Iterator[None]:
    """Holds a lock on a directory, which leaves no file and ends with the process at the latest.

    Args:
        directory: to be locked.
        wait: until another process that holds the lock lets go.

    Raises:
        BlockingIOError: at once, where another process holds it, unless `wait`.
    """
    handle = os.open(directory, os.O_RDONLY)
    try:
        _lock(handle, directory, wait)
        yield
    finally:
        os.close(handle)


def _lock(handle: int, directory: pathlib.Path, wait: bool) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if not wait:
            raise
        warn(f"{directory}: another process is writing there; waiting for it.")
        fcntl.flock(handle, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        warn(f"{directory}: this file system has no locks; nothing keeps a second process out.")
