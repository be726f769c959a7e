"""Where the weights of a network lie: references from names inside a network to tensors (or rows of them) in files."""

import math
import re
from dataclasses import dataclass, field

from ..checkpoint.scales import unscaled
from ..errors import UserError


@dataclass(frozen=True)
class Ref:
    """A tensor in a file, or some of its rows.

    Attributes:
        source: `Source` it is read from. key: name there.
        rows: (start, stop) of dimension 0, or None for all: fused projections, the image part of a head.
        dims: wanted number of dimensions (None: as stored); ones are dropped from, or added to, the end, since some
            files keep 1x1 convolutions as linear layers.
        front: ones are added in front instead: a vector that serves all heads is a table of one row here.
    """

    source: object = field(repr=False)
    key: str
    rows: tuple | None = None
    dims: int | None = None
    front: bool = False

    @property
    def shape(self):
        shape = tuple(self.source.shape(self.key))
        if self.rows is not None:
            shape = (self.rows[1] - self.rows[0], *shape[1:])
        return self._fit(shape)

    @property
    def dtype(self):
        return self.source.dtype(self.key)

    @property
    def bytes(self):
        """Size of the part that is read, as stored."""
        return math.prod(self.shape) * self.source.stored(self.key).itemsize

    @property
    def scaled(self):
        """Is it an fp8 weight with one scale for the whole tensor?"""
        return self.source.scaled(self.key)

    def read_scaled(self, device="cpu"):
        """(fp8 tensor, fp32 scale [])."""
        tensor, scale = self.source.raw(self.key)
        tensor = tensor if self.rows is None else tensor[slice(*self.rows)]
        return tensor.reshape(self._fit(tuple(tensor.shape))).to(device), scale.reshape(()).to(device)

    def read(self, dtype=None, device="cpu"):
        """The tensor; rows are cut before anything is copied."""
        tensor, scale = self.source.raw(self.key)
        if self.rows is not None:
            rows = slice(*self.rows)
            tensor, scale = tensor[rows], scale.flatten()[rows] if scale is not None and scale.numel() > 1 else scale
        tensor = tensor.reshape(self._fit(tuple(tensor.shape)))
        if scale is not None:
            return unscaled(tensor.to(device), scale.to(device), dtype or self.dtype)
        return tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None)

    def _fit(self, shape):
        """Shape with ones dropped or added until it has `dims` dimensions."""
        if self.dims is None:
            return shape
        while len(shape) > self.dims and shape[-1] == 1:
            shape = shape[:-1]
        ones = (1,) * (self.dims - len(shape))
        return ones + shape if self.front else shape + ones


@dataclass(frozen=True)
class Part:
    """One part of a model as it was found on disk, for the list that a missing part is told with.

    Attributes:
        title: "language model", "image tokenizer", "text tokenizer", "token map", ...
        where: file or folder it was found in; None: missing.
        looked: where it was looked for. get: where users get it.
    """

    title: str
    where: object = None
    looked: str = ""
    get: str = ""


def layer_count(names, lead=""):
    """Layers that weights named `<lead>layers.N. ...` belong to: 1 + the largest N, 0 without any."""
    pattern = re.compile(re.escape(lead) + r"layers\.(\d+)\.")
    return 1 + max((int(match[1]) for match in map(pattern.match, names) if match), default=-1)


def require(parts, name):
    """Raise one sentence naming every part of a model, found or missing, when one is missing."""
    if all(part.where is not None for part in parts):
        return
    told = "; ".join(
        f"{p.title}: found in {p.where}"
        if p.where is not None
        else f"{p.title}: MISSING, looked for {p.looked} ({p.get})"
        for p in parts
    )
    raise UserError(f"{name} is not complete: {told}")

