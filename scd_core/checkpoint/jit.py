"""TorchScript files (.jit): their weights alone. The program inside is neither loaded nor run.

Such a file is a zip archive: `data.pkl` describes the tree of modules, `data/N` holds the bytes of storage N. The
description is a pickle, which is read here opcode by opcode as plain data: no object that it names is looked up or
called, so it cannot do anything.
"""

import pickletools
import zipfile
from dataclasses import dataclass, field

import torch

from ..errors import UserError
from .header import AGAIN, HEADER_LIMIT, label, reading
from .pickles import archive_names

STORAGES = {
    "DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8, "BoolStorage": torch.bool,
}  # fmt: skip
FAULTS = (
    ValueError, KeyError, IndexError, TypeError, AttributeError, OverflowError, RecursionError, zipfile.BadZipFile,
)  # fmt: skip


@dataclass
class Thing:
    """Something that the pickle would make: what kind, from which arguments, with which attributes."""

    kind: str
    given: tuple = ()
    state: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Stored:
    """A tensor in the archive: entry, type, and what part of the entry it is."""

    entry: str
    dtype: torch.dtype
    offset: int
    shape: tuple
    stride: tuple


class Tape:
    """A pickle machine whose objects are inert. `run` gives the value that the pickle stands for."""

    ARGUMENTS = ("GLOBAL", "BINUNICODE", "SHORT_BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT")
    CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}

    def __init__(self):
        self.stack, self.marks, self.memo = [], [], {}

    def run(self, data):
        for op, arg, _ in pickletools.genops(data):
            if op.name in self.ARGUMENTS:
                self.stack.append(Thing(arg.replace(" ", ".")) if op.name == "GLOBAL" else arg)
            elif op.name in self.CONSTANTS:
                self.stack.append(self.CONSTANTS[op.name])
            else:
                getattr(self, "_" + op.name.lower())(arg)
        return self.stack.pop()

    def _pop(self, count):
        taken = self.stack[len(self.stack) - count :]
        del self.stack[len(self.stack) - count :]
        return taken

    def _marked(self):
        return self._pop(len(self.stack) - self.marks.pop())

    def _proto(self, arg):
        pass

    _stop = _frame = _proto

    def _mark(self, arg):
        self.marks.append(len(self.stack))

    def _binput(self, arg):
        self.memo[arg] = self.stack[-1]

    def _binget(self, arg):
        self.stack.append(self.memo[arg])

    _long_binput, _long_binget = _binput, _binget

    def _tuple(self, arg):
        self.stack.append(tuple(self._marked()))

    def _tuple1(self, arg):
        self.stack.append(tuple(self._pop(1)))

    def _tuple2(self, arg):
        self.stack.append(tuple(self._pop(2)))

    def _tuple3(self, arg):
        self.stack.append(tuple(self._pop(3)))

    def _empty_dict(self, arg):
        self.stack.append({})

    def _empty_list(self, arg):
        self.stack.append([])

    def _append(self, arg):
        self.stack[-2].append(self.stack[-1])
        self._pop(1)

    def _appends(self, arg):
        items = self._marked()
        self.stack[-1].extend(items)

    def _setitem(self, arg):
        key, value = self._pop(2)
        self.stack[-1][key] = value

    def _setitems(self, arg):
        items = self._marked()
        self.stack[-1].update(zip(items[::2], items[1::2]))

    def _binpersid(self, arg):
        self.stack.append(Thing("storage", self._pop(1)[0]))

    def _reduce(self, arg):
        made, given = self._pop(2)
        self.stack.append(Thing(made.kind, given))

    _newobj = _reduce

    def _build(self, arg):
        (state,) = self._pop(1)
        if isinstance(state, dict):
            self.stack[-1].state = state


def state_dict(root, prefix=""):
    """Tree of modules -> {name: `Stored`}, named as in the module's own state dict."""
    found = {}
    for name, value in root.state.items():
        if not isinstance(value, Thing):
            continue
        if value.kind == "torch._utils._rebuild_parameter":
            value = value.given[0]
        if value.kind.startswith("torch._utils._rebuild_tensor"):
            found[prefix + name] = _stored(*value.given[:4])
        elif value.kind.startswith("__torch__"):
            found |= state_dict(value, f"{prefix}{name}.")
    return found


def _stored(storage, offset, shape, stride):
    _, kind, key = storage.given[:3]
    numbers = (offset, *shape, *stride)
    if not all(type(n) is int and n >= 0 for n in numbers) or len(shape) != len(stride):
        raise ValueError(f"a tensor of shape {shape} at {offset}")
    return Stored(f"data/{key}", STORAGES[kind.kind.rpartition(".")[2]], offset, shape, stride)


class JitReader:
    """One TorchScript file; tensors are read when they are asked for."""

    metadata = {}

    def __init__(self, path):
        self.path = path
        if not {"constants.pkl", "data.pkl"} <= (archive_names(path) or set()):
            raise UserError(f"{label(path)} is no TorchScript file as its name promises; {AGAIN}.")
        try:
            with reading(path), zipfile.ZipFile(path) as archive:
                names = archive.namelist()
                self._root = next(n for n in names if n.endswith("/data.pkl")).removesuffix("data.pkl")
                if archive.getinfo(self._root + "data.pkl").file_size > HEADER_LIMIT:
                    raise ValueError("a description of more than 100 MB")
                self._tensors = state_dict(Tape().run(archive.read(self._root + "data.pkl")))
        except FAULTS as error:
            self._damaged(error)
        if not self._tensors:
            raise UserError(f"{label(path)} holds a program without weights; select a file with the weights of a "
                            "model.")

    def _damaged(self, error):
        if isinstance(error, UserError):
            raise error
        raise UserError(f"{label(self.path)} is no TorchScript file that can be read ({type(error).__name__}: "
                        f"{error}), so it was damaged on the way or made by another program; {AGAIN}.") from error

    def keys(self):
        return self._tensors.keys()

    def shape(self, key):
        return self._tensors[key].shape

    def dtype(self, key):
        return self._tensors[key].dtype

    def tensor(self, key):
        stored = self._tensors[key]
        size = stored.dtype.itemsize
        last = stored.offset + sum((n - 1) * step for n, step in zip(stored.shape, stored.stride))
        count = 0 if 0 in stored.shape else last + 1
        try:
            with reading(self.path), zipfile.ZipFile(self.path) as archive:
                with archive.open(self._root + stored.entry) as file:
                    raw = bytearray(file.read(count * size))
                if len(raw) != count * size:
                    raise ValueError(f"{len(raw)} of {count * size} bytes of '{key}'")
            flat = torch.frombuffer(raw, dtype=stored.dtype) if raw else torch.empty(0, dtype=stored.dtype)
        except FAULTS as error:
            self._damaged(error)
        return flat.as_strided(stored.shape, stored.stride, stored.offset)

    def release(self):
        """Nothing is kept: each tensor is read by itself."""

    close = release
