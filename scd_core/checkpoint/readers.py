"""One weight file each: shapes and types at once, tensors when they are asked for."""

import zipfile

import torch
from safetensors import safe_open

from ..errors import UserError
from .files import PROGRAM_ENDINGS, SAFE_ENDINGS
from .header import STORED, label, read_header
from .jit import JitReader
from .pickles import load_tensors


def open_reader(path, part=None):
    """The reader for a weight file (Path) of any kind; `part`: see `load_tensors`."""
    name = path.name.lower()
    if name.endswith(PROGRAM_ENDINGS):
        return JitReader(path)
    return SafetensorsReader(path) if name.endswith(SAFE_ENDINGS) else PickleReader(path, part)


class SafetensorsReader:
    """One safetensors file: shapes and types from its header, tensors mapped on demand."""

    def __init__(self, path):
        self.path = path
        self.entries, self.metadata = read_header(path)
        self._open = None

    def keys(self):
        return self.entries.keys()

    def shape(self, key):
        return tuple(self.entries[key]["shape"])

    def dtype(self, key):
        stored = self.entries[key]["dtype"]
        dtype = getattr(torch, STORED.get(stored, (0, ""))[1], None)
        if dtype is None:
            raise UserError(f"{label(self.path)} stores '{key}' as {stored}, which this PyTorch "
                            f"{torch.__version__} does not have; use a bf16 or fp16 file of the model, or a "
                            "newer PyTorch.")
        return dtype

    def tensor(self, key):
        self.dtype(key)
        try:
            if self._open is None:
                self._open = safe_open(self.path, framework="pt", device="cpu")
            return self._open.get_tensor(key)
        except MemoryError:
            raise
        except Exception as error:  # the library's own types, and OSError for a drive that went away
            raise UserError(f"{label(self.path)}: the tensor '{key}' cannot be read ({error}); check the "
                            "drive or download the file again.") from error

    def release(self):
        self._open = None  # the mapping goes with the last tensor that was read from it

    close = release


class PickleReader:
    """One pickled PyTorch file; its tensors are mapped, or in memory when the file is of the old format."""

    metadata = {}

    def __init__(self, path, part):
        self.path, self.part = path, part
        self._tensors = load_tensors(path, part)
        self._known = {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in self._tensors.items()}

    def keys(self):
        return self._known.keys()

    def shape(self, key):
        return self._known[key][0]

    def dtype(self, key):
        return self._known[key][1]

    def tensor(self, key):
        if self._tensors is None:
            self._tensors = load_tensors(self.path, self.part)
        return self._tensors[key]

    def release(self):
        if zipfile.is_zipfile(self.path):  # the old format is no mapping: reading it again would cost a whole load
            self._tensors = None

    def close(self):
        self._tensors = None
