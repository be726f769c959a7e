"""Small networks that guess hidden states of cells nearby, to the right or below (SSD, arXiv 2606.20543).

A head maps [h; e] of a cell (the hidden state that its token was drawn from, before the last norm, and the embedding of
that token) to the hidden state of a cell so many columns to the right or rows below. The model's own norm and output
head make a law of it. A file of heads lies beside the model that it was trained for and names its shape.
"""

import pathlib

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from .. import operations as plain_operations
from ..checkpoint import Source
from ..errors import UserError

FORMAT = "ssd-heads-1"
SHAPE = ("dim", "layers", "head_rows")  # of the decoder: what heads must fit
TRAIN = "train them with tools/train_ssd_heads.py, or choose row-block, which needs none"


class SpatialHead(nn.Module):
    """One offset: u = W0 [h; e], then u + SwiGLU(RMSNorm(u))."""

    def __init__(self, dim, width, eps, **kw):
        super().__init__()
        ops = plain_operations
        self.w0 = ops.Linear(2 * dim, dim, bias=False, **kw)
        self.norm = ops.RMSNorm(dim, eps=eps, **kw)
        self.w1 = ops.Linear(dim, width, bias=False, **kw)
        self.w2 = ops.Linear(dim, width, bias=False, **kw)
        self.w3 = ops.Linear(width, dim, bias=False, **kw)

    def forward(self, z):
        """[.., 2 * dim] -> [.., dim]."""
        u = self.w0(z)
        n = self.norm(u)
        return u + self.w3(F.silu(self.w1(n)) * self.w2(n))


class SpatialHeads(nn.Module):
    """The heads of a model.

    Attributes:
        horizontal: heads for 1, 2, .. columns to the right. vertical: heads for 1, 2, .. rows below.
        decoder: `Decoder` that they serve; it is no part of them.
    """

    def __init__(self, decoder, width, horizontal, vertical, **kw):
        super().__init__()
        cfg = decoder.cfg
        self._decoder = (decoder,)  # in a tuple, or torch would take its weights for ours
        self.horizontal, self.vertical = (
            nn.ModuleList(SpatialHead(cfg.dim, width, cfg.eps, **kw) for _ in range(count))
            for count in (horizontal, vertical)
        )

    @property
    def decoder(self):
        return self._decoder[0]

    @property
    def right(self):
        """Columns that the heads reach to the right."""
        return len(self.horizontal)

    def states(self, hidden, token, right, down):
        """Hidden states of the cells `right` columns to the right or `down` rows below.

        Args:
            hidden: [A, M, S, dim] of the sources under each guidance stream, before the last norm.
            token: int64 [A, M] id that each source drew.
            right, down: integer arrays [A, M] on the host; what no head reaches, such as 0, asks for none.

        Returns:
            [A, M, S, dim]; 0 where nothing was asked for.
        """
        embedded = self.decoder.embed.image(token, hidden.dtype)
        z = torch.cat([hidden, embedded[:, :, None].expand_as(hidden)], -1).flatten(0, 1)
        out = torch.zeros_like(hidden).flatten(0, 1)
        for heads, steps in ((self.horizontal, right), (self.vertical, down)):
            for number, head in enumerate(heads, 1):
                at = np.flatnonzero(steps == number)
                if len(at):
                    at = torch.from_numpy(at).to(out.device)
                    out[at] = head(z[at])
        return out.view_as(hidden)

    def logits(self, hidden, token, right, down):
        """Logits [A, S, M, V] of the cells that `states` guesses, through the decoder's own norm and output head."""
        guess = self.states(hidden.to(self.decoder.dtype), token, right, down)
        return self.decoder.logits(self.decoder.norm(guess)).transpose(1, 2)


class HeadFile:
    """Where the heads of a model lie, if it has any: beside its file, or in its folder.

    Args:
        model: path of the model's file or folder. name: the model's, for messages.
    """

    def __init__(self, model, name):
        self.model, self.name = pathlib.Path(model), name

    def places(self):
        """Paths that are looked at, best first."""
        own, common = f"{self.model.stem}.ssd.safetensors", "ssd_heads.safetensors"
        if self.model.is_dir():
            return [self.model / common, self.model.with_name(f"{self.model.name}.ssd.safetensors")]
        return [self.model.with_name(own), self.model.with_name(common)]

    def open(self, decoder):
        """`Source` of the heads of a `Decoder`.

        Raises:
            UserError: there are none, or they are another model's or damaged.
        """
        path = next((place for place in self.places() if place.is_file()), None)
        if path is None:
            first, second = (place.name for place in self.places())
            raise UserError(f"{self.name} has no SSD heads ({first} or {second} beside it): {TRAIN}")
        source = Source.open(path)
        try:
            check_heads(source, path.name, decoder)
        except UserError:
            source.close()
            raise
        return source

    def reach(self, decoder):
        """(columns to the right, rows below) that the heads guess; their weights are not read."""
        with self.open(decoder) as source:
            return source.config["horizontal"], source.config["vertical"]

    def sizes(self, decoder):
        """(width, number of heads), for estimates of memory; their weights are not read."""
        with self.open(decoder) as source:
            return source.config["width"], source.config["horizontal"] + source.config["vertical"]

    def load(self, decoder, device):
        """`SpatialHeads` on `device`, in the decoder's dtype.

        Raises:
            UserError: as `open`.
        """
        with self.open(decoder) as source:
            heads, state = empty_heads(source.config, decoder), {}
            for key in heads.state_dict():
                state[key] = source.read(key, decoder.dtype, device)
                source.release()  # or both copies would be there at the end, as stored and as wanted
        heads.load_state_dict(state, assign=True)
        return heads.requires_grad_(False).eval()


def check_heads(source, name, decoder):
    """Refuse what cannot be the heads of a `Decoder`.

    Raises:
        UserError: no heads, another model's, tensors missing or of other shapes.
    """
    config, own = source.config, shape_of(decoder.cfg)
    model = config.get("model")
    sizes = ((config.get(key), least) for key, least in (("width", 1), ("horizontal", 0), ("vertical", 1)))
    sound = isinstance(model, dict) and all(isinstance(n, int) and least <= n < 1 << 16 for n, least in sizes)
    if config.get("format") != FORMAT or not sound:
        raise UserError(f"{name} holds no SSD heads that this version reads: {TRAIN}")
    wrong = [key for key in SHAPE if model.get(key) != own[key]]
    if wrong:
        words = {"dim": "hidden states {} wide", "layers": "{} layers", "head_rows": "a vocabulary of {}"}
        theirs, ours = (", ".join(words[key].format(shape.get(key)) for key in wrong) for shape in (model, own))
        raise UserError(f"{name} was trained for a model with {theirs}, this one has {ours}: {TRAIN}")
    for key, tensor in empty_heads(config, decoder).state_dict().items():
        if key not in source.keys():
            raise UserError(f"{name} is incomplete, {key} is missing: copy it again, or {TRAIN}")
        if source.shape(key) != tuple(tensor.shape):
            raise UserError(
                f"{name} is damaged, {key} has the shape {list(source.shape(key))} instead of {list(tensor.shape)}: "
                f"copy it again, or {TRAIN}"
            )


def shape_of(cfg):
    """What tells the decoders of different models apart: {name: number}."""
    return {key: getattr(cfg, key) for key in SHAPE}


def empty_heads(config, decoder):
    """`SpatialHeads` of the sizes that a file's `config` names, without memory for their weights."""
    with torch.device("meta"):
        return SpatialHeads(decoder, config["width"], config["horizontal"], config["vertical"])


def pack_heads(heads, name):
    """(tensors, metadata) of a file of heads, for `checkpoint.save_safetensors`. Weights are stored in bf16.

    Args:
        name: of the model, for people.
    """
    config = {
        "format": FORMAT, "model": shape_of(heads.decoder.cfg), "name": name,
        "width": len(heads.vertical[0].w1.weight), "horizontal": heads.right, "vertical": len(heads.vertical),
    }  # fmt: skip
    tensors = {key: tensor.to(torch.bfloat16) for key, tensor in heads.state_dict().items()}
    return tensors, {"config": config, "format": "pt"}
