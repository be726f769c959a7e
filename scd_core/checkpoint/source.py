"""Reading model files safely: safetensors, shards with or without an index, and weights-only pickles.

`Source` presents one file, a set of shards or a hub folder as one dict of named tensors. Tensors stay on
disk, memory mapped, until they are read. Names of models in the models folders: names; which files
belong together: files; whether a file is whole: header.
"""

import json
import math
import re
from contextlib import suppress
from copy import copy
from fnmatch import fnmatchcase
from pathlib import Path

import torch

from ..errors import UserError
from .beside import SideFile, accepted, far_folders, matches, own_folders
from .files import INDEX, SETTINGS, pick
from .header import label as named
from .header import read_json, some
from .packed import packed_parts, stored_sides
from .readers import open_reader
from .scales import find_scales, is_scale, unscaled
from .settings import check_settings


class Source:
    """The weights of one model as it lies on disk.

    root      folder of the weight files (Path)
    files     weight files in use (tuple of Path)
    config    dict: the metadata entry "config" of the file, else config.json or params.json, else {}
    metadata  str -> str stored in the safetensors files, or {}
    sides     name -> `SideFile` of all side files that were asked for and found
    parts     label -> `Source` of all other weights that were asked for and found

    Scaled fp8 weights (`X.weight` with `X.scale_weight` or `X.weight_scale`) read as bf16, already multiplied.
    """

    def __init__(self, picked, part=None):
        self.root = picked.folder
        self.files = tuple(picked.folder / name for name in picked.names)
        self._whole = picked.whole
        self._readers = {name: open_reader(file, part) for name, file in zip(picked.names, self.files)}
        self.metadata = {}
        for reader in self._readers.values():
            self.metadata = reader.metadata | self.metadata
        where = self._merge() if picked.weight_map is None else self._follow(picked.weight_map)
        self.config = self._find_config()
        self._packed = packed_parts(self.metadata)
        self._stored_sides = stored_sides(self.metadata)
        self._place({key: (name, key) for key, name in where.items() if not self._in_part(key)})
        self._elsewhere = {key: name for key, name in where.items() if self._in_part(key)}

    def _place(self, where):
        """Take tensors {name: (file, name in the file)}; the scales of fp8 weights leave the list of names."""
        self.sides, self.parts = {}, {}
        self._scales = find_scales(where, lambda key: self._readers[where[key][0]].dtype(where[key][1]))
        hidden = {key for key in where if is_scale(key, self._scales)}
        self._where = {key: place for key, place in where.items() if key not in hidden}
        self._hidden = {key: where[key] for key in hidden}

    def _in_part(self, key):
        return any(key.startswith(packed["prefix"]) for packed in self._packed.values())

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
        config = None
        with suppress(ValueError, RecursionError):
            config = json.loads(self.metadata.get("config", ""))
        if isinstance(config, dict):
            return check_settings(config, f"the configuration inside '{self.files[0]}'")
        found = next((name for name in SETTINGS if (self.root / name).is_file()), None)
        return check_settings(read_json(self.root / found), named(self.root / found)) if found else {}

    def keys(self):
        """Names of all tensors (a view that supports `in` and len)."""
        return self._where.keys()

    def _reader(self, key):
        """(reader, name in its file) of a tensor."""
        place = self._where.get(key) or self._hidden.get(key)
        if place is None:
            raise UserError(f"'{self.root}' has no tensor '{key}' among its {len(self._where)}; the file is "
                            "of another model or incomplete.")
        return self._readers[place[0]], place[1]

    def shape(self, key):
        """Shape of a tensor (tuple of int), without reading it."""
        reader, name = self._reader(key)
        return reader.shape(name)

    def dtype(self, key):
        """torch dtype that a tensor reads as; UserError when this torch has no such type."""
        return torch.bfloat16 if key in self._scales else self.stored(key)

    def stored(self, key):
        """torch dtype of a tensor in the file."""
        reader, name = self._reader(key)
        return reader.dtype(name)

    def scaled(self, key):
        """Is this an fp8 weight with one scale for the whole tensor? (Scales by row are multiplied on reading.)"""
        return key in self._scales and math.prod(self.shape(self._scales[key])) == 1

    def raw(self, key):
        """(stored tensor, its fp32 scale or None); the tensor is a private view of the mapped file."""
        reader, name = self._reader(key)
        tensor = reader.tensor(name)
        if key not in self._scales:
            return tensor, None
        reader, name = self._reader(self._scales[key])
        return tensor, reader.tensor(name).float()

    def read(self, key, dtype=None, device="cpu"):
        """Read one tensor, shape `shape(key)`, on `device`.

        `dtype` casts floating-point tensors only, so that index tables stay whole numbers. On the CPU without
        a cast the result is a private view of the mapped file: writing to it never reaches the disk. Raises
        UserError.
        """
        tensor, scale = self.raw(key)
        if scale is not None:
            tensor = unscaled(tensor.to(device), scale.to(device), dtype or torch.bfloat16)
        return tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None)

    def find(self, *names):
        """First side file that exists, e.g. find("tokenizer.json", "vqgan.yaml") -> Path or None.

        Names, best first, may carry a subfolder. Searched: the folder itself, then its subfolders if the
        folder is this model's own, and for Meta's layout (models/7b/params.json) the release folder and its
        tokenizer/.
        """
        places = (folder / name for name in names for folder in own_folders(self.root, self._whole))
        return next((place for place in places if place.is_file()), None)

    def side(self, *names, fits=None):
        """First side file of these names -> `SideFile` or None: stored in the file, beside it, or farther away.

        Args:
            names: best first; wildcards and subfolders are allowed.
            fits: called with a `SideFile`; False or a UserError refuses it. Without it only the model's own
                folders are searched (see `find`), with it also the folders around the model.

        Raises:
            UserError: `fits` told why a file in the model's own folder is of no use.
        """
        for name in names:
            for stored in self._stored_sides:
                if fnmatchcase(stored, Path(name).name):
                    where = f"{stored} inside {self.files[0]}"
                    found = self.sides[stored] = SideFile(stored, where, stored=self._stored_sides[stored])
                    return found
        refused = None
        for near, path in self._candidates(names, far=fits is not None):
            if refused and not near:
                break
            found = SideFile(path.name, str(path), path)
            try:
                if not accepted(fits, found, near):
                    continue
            except UserError as error:  # told when no other of the model's own folders has a better one
                refused = refused or error
                continue
            self.sides[found.name] = found
            return found
        if refused:
            raise refused
        return None

    def part(self, label, *names, fits=None):
        """Other weights that belong to this model -> `Source` or None: packed into its file, beside it, or farther.

        Args:
            label: short name, unique in the model ("vq"). names, fits: as in `side`, `fits` gets a `Source`;
                an index file stands for its folder.

        Raises:
            UserError: a file in the model's own folder cannot be opened, or `fits` told why it is of no use.
        """
        if label in self._packed:
            found = self._unpack(label)
            if accepted(fits, found, True):
                self.parts[label] = found
                return found
        for near, path in self._candidates(names, far=fits is not None):
            if path in self.files:
                continue
            try:
                found = Source.open(path.parent if INDEX.match(path.name) else path)
            except UserError:
                if near:
                    raise
                continue
            if accepted(fits, found, near):
                self.parts[label] = found
                return found
            found.close()
        return None

    def _candidates(self, names, far):
        """(belongs to the model itself, path) of all files of these names, best first."""
        for near, listed in ((True, own_folders), (False, far_folders)):
            folders = list(listed(self.root, self._whole)) if near or far else []
            yield from ((near, path) for name in names for folder in folders for path in matches(folder, name))

    def _unpack(self, label):
        """A part that the converter put into this file, with its own names, settings and side files."""
        packed, view = self._packed[label], copy(self)
        view.config = check_settings(packed["config"], f"the configuration of '{label}' inside '{self.files[0]}'")
        view._packed, view._stored_sides = {}, packed["sides"]
        prefix = packed["prefix"]
        view._place(
            {key.removeprefix(prefix): (name, key) for key, name in self._elsewhere.items() if key.startswith(prefix)}
        )
        return view

    def all_files(self):
        """Paths of all that was read for this model: weights, settings, side files, and those of its parts."""
        settings = [self.root / name for name in SETTINGS if (self.root / name).is_file()]
        sides = [side.path for side in self.sides.values() if side.path is not None]
        parts = [path for part in self.parts.values() for path in part.all_files()]
        return tuple(dict.fromkeys((*self.files, *settings, *sides, *parts)))

    def release(self):
        """Let go of mapped files as far as no tensor read from them is in use; they are opened again when needed."""
        for reader in self._readers.values():
            reader.release()

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
