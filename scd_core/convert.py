"""A model of several files -> one .safetensors that holds all that drawing needs, and loads by the same road.

Tensors keep the names they have, so that a family recognises its own; weights of other files (an image tokenizer, a
text encoder) lie under "label.". Configuration and side files (tokenizers) travel as metadata.
"""

import base64
import math
import shutil
from pathlib import Path

import torch
from torch import nn

from .checkpoint import header, packed, stream_safetensors
from .checkpoint.scales import MARKER, scale_down
from .errors import UserError
from .models.load import open_model
from .models.transformer import Decoder

KINDS = ("bf16", "fp8")
CHUNK = 1 << 28  # bytes of the sources that may stay mapped
SCALE = "scale_weight"


def convert(path, target, kind=None):
    """Write a model to one file, tensor by tensor.

    Args:
        path: file or folder of a supported model. target: file to make; it must not exist.
        kind: None keeps every number as it is stored; "bf16" halves an fp32 language model; "fp8" stores the matrices
            of its layers in 8 bits with a scale each, and the rest of it in bf16. Image tokenizers stay as they are:
            they are small, and half precision shows in the picture.

    Returns:
        Path of the file.

    Raises:
        UserError: no complete model of a supported family, a target that exists or cannot be written, or a family that
            cannot read its own file back.
    """
    if kind is not None and kind not in KINDS:
        raise UserError(f"unknown dtype {kind!r}: choose {' or '.join(KINDS)}, or none to keep what the files have")
    target = Path(target)
    if target.exists():
        raise UserError(f"{header.label(target)} exists already and is not overwritten; choose another name.")
    files = open_model(path)
    if kind == "fp8" and files.family.continuous:
        raise UserError(f"{files.name} draws by diffusion, which 8 bits spoil; choose bf16, or keep it as it is")
    writer = Packer(files, kind)
    metadata = writer.metadata()
    check_space(target, sum(math.prod(shape) * dtype.itemsize for shape, dtype in writer.entries.values()))
    stream_safetensors(writer.entries, writer.read, target, metadata)
    try:
        open_model(target)
    except UserError as error:
        target.unlink()
        raise UserError(f"{files.name} cannot be kept in one file ({error})") from error
    return target


def check_space(target, size):
    """Refuse early what will not fit: filling a disk helps nobody."""
    folder = next(folder for folder in target.absolute().parents if folder.is_dir())
    free = shutil.disk_usage(folder).free
    if free < size:
        raise UserError(
            f"{header.label(target)} needs {size / 2**30:.1f} GB, the disk has {free / 2**30:.1f} GB free; make room "
            "or choose another disk."
        )


class Packer:
    """What goes into the one file.

    Attributes:
        entries: {name in the new file: (shape, dtype)} in the order of the old files.

    Args:
        files: opened `ModelFiles`. kind: see `convert`.
    """

    def __init__(self, files, kind):
        self.files, self.family, self.kind, self.mapped = files, files.family, kind, 0
        self.sources = {"": files.source} | {f"{label}.": part for label, part in files.source.parts.items()}
        refs = {part: self.family.refs(part) for part in self.family.networks}
        self.used = {(id(r.source), r.key) for part in refs.values() for r in part.values()}
        self.matrices = matrices(files) if kind == "fp8" else set()
        self.words = {(id(r.source), r.key) for part in refs if part != "codec" for r in refs[part].values()}
        self.entries, self._reads = {}, {}
        for prefix, source in self.sources.items():
            for key in self._wanted(source):
                self._add(prefix, source, key)
        if any(dtype == torch.float8_e4m3fn for _, dtype in self.entries.values()):
            self._put(MARKER, (0,), torch.float8_e4m3fn, lambda: torch.empty(0, dtype=torch.float8_e4m3fn))

    def _wanted(self, source):
        """Names of a source's tensors to keep; all of them when no network of the family says what it reads."""
        own = [key for key in source.keys() if (id(source), key) in self.used]
        return own or list(source.keys())

    def _put(self, name, shape, dtype, read):
        if name in self.entries:
            raise UserError(f"{self.files.name} has two tensors that would be called '{name}' in one file")
        self.entries[name], self._reads[name] = (tuple(shape), dtype), read

    def _add(self, prefix, source, key):
        place, shape = (id(source), key), source.shape(key)
        stem = prefix + key.removesuffix("weight")
        if source.scaled(key) and self.kind in (None, "fp8"):  # in 8 bits already
            self._put(prefix + key, shape, source.stored(key), lambda: source.raw(key)[0])
            self._put(stem + SCALE, (), torch.float32, lambda: source.raw(key)[1].reshape(()))
        elif place in self.matrices:
            self._put(prefix + key, shape, torch.float8_e4m3fn, lambda: scale_down(source.read(key))[0])
            self._put(stem + SCALE, (), torch.float32, lambda: scale_down(source.read(key))[1])
        else:
            dtype = source.dtype(key)
            if self.kind and dtype.is_floating_point and place in self.words:
                dtype = torch.bfloat16
            self._put(prefix + key, shape, dtype, lambda: source.read(key, dtype))

    def read(self, name):
        """The tensor of an entry; what was mapped for it is let go before long."""
        shape, dtype = self.entries[name]
        self.mapped += math.prod(shape) * max(dtype.itemsize, 2)
        if self.mapped > CHUNK:
            self.mapped = 0
            for source in self.sources.values():
                source.release()
        return self._reads[name]()

    def metadata(self):
        """Configuration, side files and the list of parts."""
        source = self.files.source
        parts = {
            label: {"prefix": f"{label}.", "config": part.config, "sides": texts(part)}
            for label, part in source.parts.items()
        }
        own = {key: text for key, text in source.metadata.items() if key not in (packed.PARTS, packed.SIDES)}
        marks = {"scd": self.family.marks} if self.family.marks else {}
        return {
            **own,
            "format": "pt",
            "config": {**source.config, **marks},
            packed.PARTS: parts,
            packed.SIDES: texts(source),
        }


def texts(source):
    """{file name: text, or {"base64": bytes}} of the side files that the model reads."""
    found = {}
    for name, side in source.sides.items():
        raw = side.bytes()
        try:
            found[name] = raw.decode("utf-8")
        except UnicodeDecodeError:
            found[name] = {"base64": base64.b64encode(raw).decode()}
    return found


def matrices(files):
    """(source id, key) of all matrices inside the decoder's layers: most of its weights, and what hosts keep in fp8."""
    with torch.device("meta"):
        layers = Decoder(files.family.decoder_config).layers
    names = {f"layers.{name}.weight" for name, module in layers.named_modules() if isinstance(module, nn.Linear)}
    refs = files.family.refs("decoder")
    return {(id(refs[name].source), refs[name].key) for name in names}
