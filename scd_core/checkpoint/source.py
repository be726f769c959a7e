"""Reading model files safely: safetensors, shards with or without an index, and weights-only pickles.

`Source` presents one file, a set of shards or a hub folder as one dict of named tensors. Tensors stay on
disk, memory mapped, until they are read. Names of models in the models folders: names; which files
belong together: files; whether a file is whole: header.
"""

import json
import os
import re
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..errors import UserError
from .files import SAFE_ENDINGS, SETTINGS, pick, scan
from .header import STORED, label, read_header, read_json, some
from .pickles import load_tensors


class _Safetensors:
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

    def close(self):
        self._open = None


class _Pickle:
    """One pickled PyTorch file; its tensors are mapped, or in memory when the file is of the old format."""

    metadata = {}

    def __init__(self, path, part):
        self._tensors = load_tensors(path, part)

    def keys(self):
        return self._tensors.keys()

    def shape(self, key):
        return tuple(self._tensors[key].shape)

    def dtype(self, key):
        return self._tensors[key].dtype

    def tensor(self, key):
        return self._tensors[key]

    def close(self):
        self._tensors = {}


class Source:
    """The weights of one model as it lies on disk.

    root      folder of the weight files (Path)
    files     weight files in use (tuple of Path)
    config    dict: the metadata entry "config" of the file, else config.json or params.json, else {}
    metadata  str -> str stored in the safetensors files, or {}
    """

    def __init__(self, picked, part=None):
        self.root = picked.folder
        self.files = tuple(picked.folder / name for name in picked.names)
        self._whole = picked.whole
        self._readers = {
            name: _Safetensors(file) if name.lower().endswith(SAFE_ENDINGS) else _Pickle(file, part)
            for name, file in zip(picked.names, self.files)
        }
        self.metadata = {}
        for reader in self._readers.values():
            self.metadata = reader.metadata | self.metadata
        self._where = self._merge() if picked.weight_map is None else self._follow(picked.weight_map)
        self.config = self._find_config()

    @classmethod
    def open(cls, path, part=None):
        """Open a weight file or model folder (str or path).

        A shard opens the whole set. `part` names the dict inside a pickled checkpoint that holds the wanted
        weights when it is not the usual one, e.g. "model_ema"; safetensors files have no parts. Raises
        UserError when the path is missing, unreadable, incomplete, damaged, ambiguous or holds refused
        objects.
        """
        return cls(pick(path), part)

    def _merge(self):
        where = {}
        for name, reader in self._readers.items():
            for key in reader.keys():
                if key in where:
                    raise UserError(f"'{self.root}' has the tensor '{key}' in '{where[key]}' and in "
                                    f"'{name}', and no index says which counts; add the *.index.json of the "
                                    "model.")
                where[key] = name
        return where

    def _follow(self, weight_map):
        lost = [key for key, name in weight_map.items() if key not in self._readers[name].keys()]
        if lost:
            raise UserError(f"'{self.root}': the index names {len(lost)} tensors that their files lack "
                            f"(first: '{lost[0]}' in '{weight_map[lost[0]]}'), so index and files are of "
                            "different downloads; download the folder again.")
        return weight_map

    def _find_config(self):
        # The file's own config first: it travels with these weights, a config.json may be a neighbour's.
        with suppress(ValueError, RecursionError):
            config = json.loads(self.metadata.get("config", ""))
            if isinstance(config, dict):
                return config
        return next((read_json(self.root / name) for name in SETTINGS if (self.root / name).is_file()), {})

    def keys(self):
        """Names of all tensors (a view that supports `in` and len)."""
        return self._where.keys()

    def _reader(self, key):
        if key not in self._where:
            raise UserError(f"'{self.root}' has no tensor '{key}' among its {len(self._where)}; the file is "
                            "of another model or incomplete.")
        return self._readers[self._where[key]]

    def shape(self, key):
        """Shape of a tensor (tuple of int), without reading it."""
        return self._reader(key).shape(key)

    def dtype(self, key):
        """Stored torch dtype of a tensor, without reading it; UserError when this torch has no such type."""
        return self._reader(key).dtype(key)

    def read(self, key, dtype=None, device="cpu"):
        """Read one tensor, shape `shape(key)`, on `device`.

        `dtype` casts floating-point tensors only, so that index tables stay whole numbers. On the CPU without
        a cast the result is a private view of the mapped file: writing to it never reaches the disk. Raises
        UserError.
        """
        tensor = self._reader(key).tensor(key)
        return tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None)

    def find(self, *names):
        """First side file that exists, e.g. find("tokenizer.json", "vqgan.yaml") -> Path or None.

        Names, best first, may carry a subfolder. Searched: the folder itself, then its subfolders if the
        folder is this model's own, and for Meta's layout (models/7b/params.json) the release folder and its
        tokenizer/.
        """
        folders = [self.root]
        if self._whole:
            folders += [self.root / sub for sub in scan(self.root)[1]]
        if self.root.parent.name == "models" and (self.root / "params.json").is_file():
            release = self.root.parent.parent
            folders += [release, release / "tokenizer"]
        places = (folder / name for name in names for folder in folders)
        return next((place for place in places if place.is_file()), None)

    def close(self):
        """Let go of the files; tensors already read stay valid."""
        for reader in self._readers.values():
            reader.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def check_keys(found, wanted, ignore=(), where="the file"):
    """Compare the tensor names of a file with those a model needs; no name may be missing and none left over.

    found, wanted: iterables of str. ignore: regular expressions, matched from the start of a name (so a plain
    prefix works), of left-over names that the family knows to be useless; a missing name is never forgiven,
    because its weight would silently be random. Raises UserError with counts and the first few names.
    """
    found, wanted = list(found), list(wanted)
    have, need = set(found), set(wanted)
    useless = [re.compile(pattern) for pattern in ignore]
    missing = [key for key in wanted if key not in have]
    extra = [key for key in found if key not in need and not any(pattern.match(key) for pattern in useless)]
    if missing or extra:
        told = []
        if missing:
            told.append(f"{len(missing)} of {len(need)} needed weights are missing ({some(missing, 4)})")
        if extra:
            told.append(f"{len(extra)} are unexpected ({some(extra, 4)})")
        raise UserError(f"The names in {where} do not fit the model: {' and '.join(told)}; select the "
                        "complete files of a supported release.")


def save_safetensors(tensors, path, metadata=None, overwrite=False):
    """Write tensors (dict name -> tensor, any device) to a .safetensors file, whole or not at all -> Path.

    metadata: dict of str to str; other values are stored as JSON, so {"config": {...}} comes back as
    `Source.config`. Raises UserError when the file exists and `overwrite` is False, the ending is wrong, or
    the disk refuses; then nothing is left behind and an older file stays as it was.
    """
    path = Path(path)
    if not path.name.lower().endswith(SAFE_ENDINGS):
        raise UserError(f"{label(path)} must end in .safetensors to be written.")
    if path.exists() and not overwrite:
        raise UserError(f"{label(path)} exists already and is not overwritten; choose another name or ask "
                        "for overwriting.")
    texts = {k: v if isinstance(v, str) else json.dumps(v) for k, v in (metadata or {}).items()}
    part = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(part, "wb"):
            mode = os.stat(part).st_mode
        save_file(_separate(tensors), part, metadata=texts)
        os.chmod(part, mode)  # the library makes files that only their owner can read
        os.replace(part, path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{label(path)} cannot be written ({error}); check the free space, the permissions "
                        "and that no program has it open.") from error
    finally:
        with suppress(OSError):
            part.unlink()
    return path


def _separate(tensors):
    """The tensors as the format wants them: dense, on the CPU, none sharing memory with another."""
    seen, result = set(), {}
    for key, tensor in tensors.items():
        dense = tensor.detach().cpu().contiguous()
        memory = dense.untyped_storage()
        if memory.data_ptr() in seen or memory.nbytes() != dense.nbytes:  # tied, or a part of more
            dense = dense.clone()
        seen.add(dense.untyped_storage().data_ptr())
        result[key] = dense
    return result
