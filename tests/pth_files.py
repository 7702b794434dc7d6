"""PyTorch files for tests, made without PyTorch, good and hostile; and how they are compared."""

import importlib.util
import math
import os
import pickle
import struct
import zipfile

import numpy as np
import pytest
from conftest import DATA

from amdim_tf import reference_checkpoints
from amdim_tf.errors import UserError

needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None,
    reason="PyTorch is not installed: pip install -r requirements-torch.txt",
)
REBUILD = b"ctorch._utils\n_rebuild_tensor_v2\n"
ORDERED_DICT = b"ccollections\nOrderedDict\n)R"
STORAGES = {
    "float32": "Float",
    "float16": "Half",
    "bfloat16": "BFloat16",
    "int64": "Long",
    "uint8": "Byte",
}
FORMATS = ("zip", "old")


def golden_state(name="reference_32"):
    """(state dict, hyper-parameters) of a golden file."""
    with np.load(DATA / f"{name}.npz") as arrays:
        parts = [
            {key.removeprefix(prefix): arrays[key] for key in arrays if key.startswith(prefix)}
            for prefix in ("state_dict/", "hyper/")
        ]
    return parts[0], {key: value.item() for key, value in parts[1].items()}


class PthWriter:
    """Writes what torch.save writes, opcode by opcode, so that the tests need no PyTorch."""

    def __init__(self):
        self.storages = []
        self.views = ()  # the older format says of each storage that it is no view of another

    def value(self, value):
        """The opcodes that make a value; bytes are opcodes already."""
        if isinstance(value, bytes):
            return value
        if isinstance(value, dict):
            items = b"".join(self.value(part) for item in value.items() for part in item)
            attributes = b"}" + self.value("_metadata") + ORDERED_DICT + b"sb"
            return ORDERED_DICT + b"(" + items + b"u" + attributes
        if isinstance(value, np.ndarray):
            return self._tensor(value)
        if isinstance(value, tuple):
            return b"(" + b"".join(map(self.value, value)) + b"t"
        if value is None or isinstance(value, bool):
            return {None: b"N", True: b"\x88", False: b"\x89"}[value]
        if isinstance(value, str):
            return b"X" + struct.pack("<I", len(value.encode())) + value.encode()
        return b"G" + struct.pack(">d", value) if isinstance(value, float) else _whole(value)

    def _tensor(self, array):
        kind = f"ctorch\n{STORAGES[array.dtype.name]}Storage\n".encode()
        identity = ("storage", kind, str(len(self.storages)), "cuda:0", array.size, *self.views)
        self.storages.append(array)
        strides = tuple(math.prod(array.shape[axis + 1 :]) for axis in range(array.ndim))
        return self.tensor_of(identity, 0, array.shape, strides)

    def tensor_of(self, identity, offset, shape, strides):
        """A call of the function that makes a tensor; `identity` is of its storage."""
        storage = self.value(identity) + b"Q"
        return REBUILD + self.value((storage, offset, shape, strides, False, ORDERED_DICT)) + b"R"

    def write(self, path, value, kind):
        """Writes a file in either format; returns its path."""
        self.views = () if kind == "zip" else (None,)
        program = b"\x80\x02" + self.value(value) + b"."
        (write_zip if kind == "zip" else write_old)(path, program, self.storages)
        return path


def _whole(value):
    size = (value.bit_length() + 8) // 8
    return b"\x8a" + bytes([size]) + value.to_bytes(size, "little", signed=True)


def write_zip(path, program, storages=()):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", program)
        archive.writestr("archive/byteorder", "little")
        archive.writestr("archive/version", "3\n")
        for key, array in enumerate(storages):
            archive.writestr(f"archive/data/{key}", array.tobytes())


def write_old(path, program, storages=()):
    keys = [str(key) for key in range(len(storages))]
    machine = {"protocol_version": 1001, "little_endian": True}
    parts = [pickle.dumps(value, 2) for value in (0x1950A86A20F9469CFC6C, 1001, machine)]
    parts += [program, pickle.dumps(keys, 2)]
    parts += [struct.pack("<q", array.size) + array.tobytes() for array in storages]
    path.write_bytes(b"".join(parts))


def write_npz(path, state, **others):
    np.savez(path, **{f"state_dict/{name}": value for name, value in state.items()}, **others)
    return path


def read_all(path):
    return {name: t.read() for name, t in reference_checkpoints.load(path).tensors.items()}


def assert_same(actual, expected):
    assert set(actual) == set(expected)
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype, name
        np.testing.assert_array_equal(actual[name], value, err_msg=name)


def refused(function, *arguments):
    """The one line with which something is refused."""
    with pytest.raises(UserError) as error:
        function(*arguments)
    assert "\n" not in str(error.value) and str(error.value).isprintable()
    return str(error.value)


class Call:
    """An object whose pickle calls a function."""

    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


def hostile_programs(marker):
    """Pickles that make a file `marker` when they are loaded, by name."""
    shell = f"touch {marker}"
    python = f"open({str(marker)!r}, 'w')"
    text = PthWriter().value(shell)
    return {
        "os.system": pickle.dumps(Call(os.system, shell), 2),
        "protocol 0": pickle.dumps(Call(os.system, shell), 0),
        "protocol 4": pickle.dumps({"model": Call(os.system, shell)}, 4),
        "eval": pickle.dumps(Call(eval, python), 2),
        "nested": pickle.dumps({"model": [Call(dict, [("a", Call(eval, python))])]}, 2),
        "in an OrderedDict": b"\x80\x02ccollections\nOrderedDict\n]U\x01acposix\nsystem\n"
        + text + b"\x85R\x86a\x85R.",
        "instance": b"(" + text + b"iposix\nsystem\n.",
        "object": b"(cposix\nsystem\n" + text + b"o.",
    }  # fmt: skip
