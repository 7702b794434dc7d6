"""Locks on directories, for programs that must not fill the same one at the same time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
from collections.abc import Iterator


@contextlib.contextmanager
def locked(directory: pathlib.Path) -> Iterator[None]:
    """Holds a lock on a directory, which leaves no file and ends with the process at the latest.

    Raises:
        BlockingIOError: at once, where another process holds it.
    """
    handle = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)
