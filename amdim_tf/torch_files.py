"""Reads files of PyTorch tensors, .pth and .npz, without PyTorch.

Nothing that a file holds is run (see torch_pickles.py). Sizes are checked against the file's length
before memory is asked for; numbers are read tensor by tensor, when they are wanted.

TensorFlow is not imported here: a bad file is answered at once.
"""

from __future__ import annotations

import contextlib
import functools
import io
import math
import mmap
import os
import stat
import struct
import zipfile
from typing import Any

import numpy as np

from amdim_tf.errors import UserError
from amdim_tf.torch_pickles import PickleReader, StoredTensor, is_size, printable

_MAGIC = 0x1950A86A20F9469CFC6C  # what a file in the older format begins with
_OLD_PROTOCOL = 1001
# Exceptions whose texts speak of how a parser is made, not of the file.
_OF_PARSERS = (
    *(UnicodeError, IndexError, TypeError, AttributeError, AssertionError, EOFError),
    *(OverflowError, RecursionError, struct.error),
)


def read_pth(path: str | os.PathLike[str]) -> Any:
    """What torch.save wrote, in either of its formats: dicts, lists, texts, numbers, tensors.

    Returns:
        The saved value, with a StoredTensor in the place of each tensor.

    Raises:
        UserError: for anything but tensors and plain values, and for damaged files.
    """
    with refusing(path, "a PyTorch checkpoint of tensors and plain values"):
        _check_regular(path)
        return _read_zip(path) if zipfile.is_zipfile(path) else _read_old_format(path)


def read_npz(path: str | os.PathLike[str]) -> dict[str, StoredTensor]:
    """The arrays of an .npz file by name; pickled objects are refused."""
    with refusing(path, "an .npz file of plain arrays"):
        _check_regular(path)
        archive = zipfile.ZipFile(path)
        _check_unique([name.removesuffix(".npy") for name in archive.namelist()])
        return {
            entry.filename.removesuffix(".npy"): _npy_array(archive, entry)
            for entry in archive.infolist()
        }


def is_npz(path: str | os.PathLike[str]) -> bool:
    """Whether a file is an archive of NumPy arrays, whatever it is called."""
    with refusing(path, "a PyTorch checkpoint (.pth) or an .npz file"):
        _check_regular(path)
        if not zipfile.is_zipfile(path):
            return False
        return any(name.endswith(".npy") for name in zipfile.ZipFile(path).namelist())


def _check_regular(path: str | os.PathLike[str]) -> None:
    """Refuses pipes and devices before they are opened: one waits, the other never ends."""
    status = os.stat(path)
    if stat.S_ISDIR(status.st_mode):
        return  # opening it fails by itself
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("a pipe or a device, which is not read")
    if not status.st_size:
        raise ValueError("an empty file")


def _check_unique(names: list[str]) -> None:
    """Refuses an archive with two entries of one name, of which readers choose differently."""
    seen = set()
    for name in names:
        if name in seen:
            raise ValueError(f"an archive with the entry {printable(name)} twice")
        seen.add(name)


@contextlib.contextmanager
def refusing(path: str | os.PathLike[str], wanted: str):
    """Turns whatever goes wrong with the bytes of a file into one line that names it.

    Bytes from anywhere make parsers (zipfile, pickletools, NumPy) fail in more ways than can be
    listed, so that every exception counts as the file's fault here, except for those that name a
    file already.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, UserError) or getattr(error, "filename", None) is not None:
            raise
        reason = printable(str(error)) or type(error).__name__
        if isinstance(error, _OF_PARSERS):
            reason = "a damaged file, or one of another kind"
        raise UserError(f"{path}: expected {wanted}. Received: {reason}.") from None


def _read_zip(path):
    """The format of PyTorch 1.6 and later: data.pkl, and one entry per storage, uncompressed."""
    archive = zipfile.ZipFile(path)
    names = archive.namelist()
    _check_unique(names)
    pickles = [name for name in names if name.rpartition("/")[2] == "data.pkl"]
    if len(pickles) != 1:
        raise ValueError(f"an archive with {len(pickles)} entries data.pkl")
    root = pickles[0].removesuffix("data.pkl")
    if f"{root}byteorder" in names and _entry(archive, f"{root}byteorder") != b"little":
        raise ValueError("numbers that are not little-endian")

    def contents(storage):
        with refusing(path, f"the numbers of {root}data/{storage.key}"):
            return _entry(archive, f"{root}data/{storage.key}")

    pickle = PickleReader(io.BytesIO(_entry(archive, pickles[0])), contents)
    value = pickle.read()
    for key, storage in pickle.storages.items():
        size = storage.count * storage.dtype.itemsize
        if _stored_size(archive, f"{root}data/{key}") != size:
            raise ValueError(f"a storage {key} that is not of {storage.count} numbers")
    return value


def _stored_size(archive: zipfile.ZipFile, name: str) -> int:
    """Bytes of an entry that is kept as it is, so that it cannot be larger than the file."""
    entry = archive.getinfo(name)
    if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
        raise ValueError(f"an entry {name} that is compressed")
    if entry.header_offset + entry.file_size > os.path.getsize(archive.filename):
        raise ValueError(f"an entry {name} that is larger than the file")
    return entry.file_size


def _entry(archive: zipfile.ZipFile, name: str) -> bytes:
    _stored_size(archive, name)
    return archive.read(name)


def _read_old_format(path):
    """The format before PyTorch 1.6: five pickles, then the storages one after the other."""
    with open(path, "rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    starts: dict[str, int] = {}
    if PickleReader(data).read() != _MAGIC or PickleReader(data).read() != _OLD_PROTOCOL:
        raise ValueError("a pickle that torch.save has not written")
    machine = PickleReader(data).read()
    if type(machine) is not dict or machine.get("little_endian") is not True:
        raise ValueError("numbers that are not little-endian")
    pickle = PickleReader(data, lambda storage: memoryview(data)[starts[storage.key] :])
    value, keys = pickle.read(), PickleReader(data).read()
    if type(keys) is not list or not all(type(key) is str for key in keys):
        raise ValueError("a damaged list of storages")
    if sorted(keys) != sorted(pickle.storages):
        raise ValueError("other storages than its tensors use")
    for key in keys:
        storage = pickle.storages[key]
        count = int.from_bytes(data.read(8), "little")
        starts[key] = data.tell()
        end = data.tell() + count * storage.dtype.itemsize
        if count != storage.count or end > len(data):
            raise ValueError(f"a storage {key} that is not of {storage.count} numbers")
        data.seek(end)
    return value


def _npy_array(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> StoredTensor:
    """One array of an .npz file, its header checked against the entry's size."""
    name = printable(entry.filename)
    with archive.open(entry) as file:
        if np.lib.format.read_magic(file) != (1, 0):
            raise ValueError(f"{name} in a later format than plain arrays need")
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        size = file.tell() + math.prod(shape) * dtype.itemsize
    if dtype.hasobject:
        raise ValueError(f"{name} with pickled objects, which are not read")
    if not all(map(is_size, shape)) or size != entry.file_size:
        raise ValueError(f"{name} of shape {shape} in {entry.file_size} bytes")
    return StoredTensor(shape, dtype, functools.partial(_read_npy, archive, entry))


def _read_npy(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> np.ndarray:
    with refusing(archive.filename, "whole arrays"), archive.open(entry) as file:
        return np.lib.format.read_array(file, allow_pickle=False)
