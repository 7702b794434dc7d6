"""Follows the pickles in PyTorch's files without running them.

A pickle is a program: to unpickle it may call any function. Here nothing is unpickled. The
instructions are listed by pickletools, which runs none, and followed one by one if they are among
the few that a dict of tensors needs. The functions that such a pickle names are not called either:
what they would make is described as a `StoredTensor`. Any other instruction or name is refused.
"""

from __future__ import annotations

import math
import pickletools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

_ORDERED_DICT = "collections OrderedDict"
_REBUILD = "torch._utils _rebuild_tensor_v2"
_BFLOAT16 = np.dtype("<u2")  # which NumPy lacks: the upper half of a float32
_STORAGES = {
    "torch FloatStorage": np.dtype("<f4"),
    "torch DoubleStorage": np.dtype("<f8"),
    "torch HalfStorage": np.dtype("<f2"),
    "torch BFloat16Storage": _BFLOAT16,
    "torch LongStorage": np.dtype("<i8"),
    "torch ByteStorage": np.dtype("u1"),
    "torch BoolStorage": np.dtype("?"),
}
_LITERALS = ("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE")
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_EMPTY = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_MOST_SIDES = 64  # of a tensor, as in NumPy


class StoredTensor(NamedTuple):
    """A tensor of a file; `read` gives its numbers."""

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]


class _Global(NamedTuple):
    """The name of a function or type, "module name". It is never looked up."""

    name: str


class Storage(NamedTuple):
    """A row of `count` numbers, kept beside the pickle under a key."""

    dtype: np.dtype
    key: str
    count: int


class PickleReader:
    """Follows the instructions of one pickle in a file, from where the file stands.

    Args:
        file: has `read` and `readline`, which give no more than there is.
        contents: storage -> its bytes, for when a tensor is read; None where there may be none.
    """

    def __init__(self, file, contents: Callable[[Storage], Any] | None = None):
        self._file = file
        self._contents = contents
        self._stack: list[Any] = []
        self._outer: list[list[Any]] = []  # the stacks below the marks
        self._memo: dict[int, Any] = {}
        self.storages: dict[str, Storage] = {}

    def read(self) -> Any:
        """The value that the pickle makes."""
        for opcode, argument, _ in pickletools.genops(self._file):
            try:
                if opcode.name == "STOP":
                    return self._stack.pop()
                self._follow(opcode.name, argument)
            except (IndexError, KeyError):
                raise ValueError("a damaged pickle") from None
        raise AssertionError("genops ends with STOP, or raises")

    def _follow(self, name: str, argument) -> None:
        """One instruction; those with arguments of their own have them as `argument`."""
        stack = self._stack
        if name in _LITERALS:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _EMPTY:
            stack.append(_EMPTY[name]())
        elif name in ("BINPUT", "LONG_BINPUT"):
            self._memo[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(self._memo[argument])
        elif name == "MARK":
            self._outer.append(stack)
            self._stack = []
        elif name == "TUPLE":
            items = tuple(self._to_mark())
            self._stack.append(items)
        elif name in _TUPLES:
            stack.append(tuple(self._popped(_TUPLES[name])))
        elif name in ("SETITEM", "SETITEMS"):
            self._set_items(self._popped(2) if name == "SETITEM" else self._to_mark())
        elif name in ("APPEND", "APPENDS"):
            items = self._popped(1) if name == "APPEND" else self._to_mark()
            self._top(list).extend(items)
        elif name == "GLOBAL":
            stack.append(_known_global(argument))
        elif name == "REDUCE":
            stack.append(self._made(*self._popped(2)))
        elif name == "BUILD":
            # The attributes of an OrderedDict: a state dict's versions of its modules. Not needed.
            self._popped(1)
            self._top(dict)
        elif name == "BINPERSID":
            stack.append(self._storage(*self._popped(1)))
        elif name != "PROTO":
            raise ValueError(f"a pickle with the instruction {name}, which tensors do not need")

    def _popped(self, count: int) -> list[Any]:
        """The uppermost values, in the order in which they were pushed."""
        values = [self._stack.pop() for _ in range(count)]
        return values[::-1]

    def _to_mark(self) -> list[Any]:
        items, self._stack = self._stack, self._outer.pop()
        return items

    def _top(self, kind: type) -> Any:
        if type(self._stack[-1]) is not kind:
            raise ValueError("a damaged pickle")
        return self._stack[-1]

    def _set_items(self, items: list[Any]) -> None:
        keys, values = items[::2], items[1::2]
        if len(keys) != len(values) or not all(type(key) in (str, int) for key in keys):
            raise ValueError("a dict whose keys are neither texts nor whole numbers")
        self._top(dict).update(zip(keys, values, strict=True))

    def _made(self, function, arguments) -> Any:
        """What a call would give: an empty OrderedDict, or a tensor."""
        if type(function) is _Global and type(arguments) is tuple:
            if function.name == _ORDERED_DICT and not arguments:
                return {}
            if function.name == _REBUILD and len(arguments) >= 4:
                return self._tensor(*arguments[:4])
        raise ValueError("a pickle with a call that tensors do not need")

    def _storage(self, identity) -> Storage:
        """A storage by what the pickle says of it: kind, key, device, count."""
        if type(identity) is not tuple or len(identity) < 5 or identity[0] != "storage":
            raise ValueError("a damaged pickle")
        _, kind, key, _, count, *view = identity
        if type(kind) is not _Global or kind.name not in _STORAGES or any(view):
            raise ValueError("a pickle with an unknown kind of storage")
        if type(key) is not str or not is_size(count) or self._contents is None:
            raise ValueError("a damaged pickle")
        storage = Storage(_STORAGES[kind.name], key, count)
        if self.storages.setdefault(key, storage) != storage:
            raise ValueError(f"two storages with the key {printable(key)!r}")
        return storage

    def _tensor(self, storage, offset, shape, strides) -> StoredTensor:
        """A tensor that lies in a storage, all of it."""
        sizes = (offset, *shape, *strides) if type(shape) is type(strides) is tuple else (None,)
        if type(storage) is not Storage or not all(map(is_size, sizes)) or len(shape) > _MOST_SIDES:
            raise ValueError("a damaged pickle")
        last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        # No tensor repeats numbers (stride 0): a small file does not become a large array.
        if math.prod(shape) > storage.count or (0 not in shape and offset + last >= storage.count):
            raise ValueError(f"a tensor of shape {shape} in a storage of {storage.count} numbers")
        dtype = storage.dtype

        def read():
            steps = tuple(dtype.itemsize * stride for stride in strides)
            buffer = self._contents(storage)
            numbers = np.ndarray(shape, dtype, buffer, offset * dtype.itemsize, steps)
            if dtype == _BFLOAT16:
                return (numbers.astype(np.uint32) << 16).view(np.float32)
            return numbers.copy()

        return StoredTensor(shape, np.dtype("f4") if dtype == _BFLOAT16 else dtype, read)


def is_size(value) -> bool:
    return type(value) is int and 0 <= value < 2**62


def _known_global(name: str) -> _Global:
    if name not in (_ORDERED_DICT, _REBUILD, *_STORAGES):
        shown = printable(name.replace(" ", "."))
        raise ValueError(f"a pickle that names {shown}, which tensors do not need; nothing was run")
    return _Global(name)


def printable(text: str, most: int = 120) -> str:
    """A text from a file as one short line without control characters."""
    text = " ".join(text.split()).rstrip(".")
    text = text if text.isprintable() else ascii(text)
    return text if len(text) <= most else f"{text[:most]}…"
