"""Files and directories that are whole or not there, and that nobody can trick us with.

A file is written aside and made current by one rename, so that neither a crash nor a full disk
leaves half of one. Links and pipes that lie in the way are not followed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import stat
from collections.abc import Iterator


def write_whole(path: pathlib.Path, contents: bytes) -> None:
    """Puts a file in place, durably, replacing the one before.

    Raises:
        OSError: that names the file, with the one before untouched and nothing left aside.
    """
    aside = path.with_name(path.name + ".partial")
    try:
        with named(path), create(aside) as file:
            file.write(contents)
            sync(file)
        rename(aside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise
    sync_directory(path.parent)


def rename(aside: pathlib.Path, path: pathlib.Path) -> None:
    """Makes what was written aside current.

    Raises:
        OSError: that names `path`, where whatever is in the way lies.
    """
    try:
        aside.replace(path)
    except OSError as error:
        raise type(error)(error.errno, error.strerror, str(path)) from None


@contextlib.contextmanager
def named(path: pathlib.Path) -> Iterator[None]:
    """Gives an OSError that names no file, as when a disk is full, the name of this one."""
    try:
        yield
    except OSError as error:
        if isinstance(error.filename, str):
            raise
        # NumPy's errors have no number either.
        number, reason = error.errno or errno.EIO, error.strerror or str(error)
        raise type(error)(number, reason, str(path)) from None


def put_directory(aside: pathlib.Path, target: pathlib.Path) -> None:
    """Renames a directory that is whole to `target`.

    What was there makes room, as "replaced" beside `aside`, and comes back on failure.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    replaced = aside.with_name("replaced")
    try:
        if target.exists():
            target.rename(replaced)
        aside.rename(target)
    except BaseException:
        if replaced.exists() and not target.exists():
            replaced.rename(target)
        raise


def create(path: pathlib.Path):
    """A new binary file, open for writing; what had the name, such as a link, is removed first."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    return open(os.open(path, flags, 0o666), "wb")


def append(path: pathlib.Path):
    """An existing text file, open for more lines; a link or a pipe in its place is refused.

    Raises:
        OSError: where it is not there, or is no regular file.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is not a regular file")
    return os.fdopen(descriptor, "a", newline="")


def sync(file) -> None:
    """Sends what was written on to the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_directory(path: pathlib.Path) -> None:
    """Makes a rename in this directory survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _opened(path: pathlib.Path):
    # Without O_NONBLOCK, opening a pipe waits for somebody to write into it.
    with named(path):  # of a directory only the descriptor is named
        return open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb")


def read_limited(path: pathlib.Path, most_bytes: int) -> bytes:
    """The contents of a regular file; a pipe or a device, which might never end, is refused.

    Raises:
        OSError: where it cannot be read, is no regular file, or is larger.
    """
    with _opened(path) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{path} is not a regular file")
        # Memory is taken for as much as is asked for, whatever the file has.
        with named(path):
            contents = file.read(min(status.st_size, most_bytes) + 1)
    if len(contents) > most_bytes:
        raise OSError(f"{path} has more than {most_bytes} bytes")
    return contents
