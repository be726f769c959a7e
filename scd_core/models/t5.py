"""The encoder of T5 (Raffel et al. 2020, and v1.1 with gated GELU): text features for models that read them.

Key names are those of the public checkpoints without their leading "encoder.".
"""

import math
from dataclasses import dataclass
from functools import cached_property, partial

import torch
import torch.nn.functional as F
from torch import nn

from .. import operations as plain_operations
from ..checkpoint import check_keys
from ..errors import UserError
from ..prompt import Prompt
from .parts import Ref
from .tokenizer import HubTokenizer

END = "</s>"
ACTIVATIONS = {"gelu": partial(F.gelu, approximate="tanh"), "relu": F.relu, "silu": F.silu}


@dataclass(frozen=True)
class T5Config:
    """Shape of a T5 encoder."""

    vocab: int
    dim: int
    layers: int
    heads: int
    head_dim: int
    ffn: int
    eps: float = 1e-6
    act: str = "gelu"
    gated: bool = True
    buckets: int = 32
    max_distance: int = 128

    @classmethod
    def read(cls, config):
        """From the dict of a config.json.

        Raises:
            UserError: a field is missing, or the activation is unknown.
        """
        kind = str(config.get("feed_forward_proj", "relu"))
        act = kind.removeprefix("gated-")
        if act not in ACTIVATIONS:
            raise UserError(f"the T5 encoder's config.json asks for the activation {kind!r}, known are gated or plain "
                            f"{', '.join(ACTIVATIONS)}: use the folder of google/flan-t5-xl")
        try:
            return cls(
                vocab=config["vocab_size"],
                dim=config["d_model"],
                layers=config["num_layers"],
                heads=config["num_heads"],
                head_dim=config["d_kv"],
                ffn=config["d_ff"],
                eps=config.get("layer_norm_epsilon", 1e-6),
                act=act,
                gated=kind.startswith("gated-"),
                buckets=config.get("relative_attention_num_buckets", 32),
                max_distance=config.get("relative_attention_max_distance", 128),
            )
        except KeyError as error:
            raise UserError(f"the T5 encoder's config.json lacks {error}: download it again") from error


def distance_buckets(length, buckets, max_distance, device=None):
    """Bucket of the distance key - query, int64 [length, length] (query, key).

    Half of the buckets serve each direction; in each, the near half is exact, the far half logarithmic up to
    max_distance (T5's relative attention, bidirectional).
    """
    place = torch.arange(length, device=device)
    distance = place[None] - place[:, None]
    half = buckets // 2
    exact, far = half // 2, distance.abs()
    scale = (half - exact) / math.log(max_distance / exact)
    steps = exact + ((far.clamp(min=1).float() / exact).log() * scale).long()
    return half * (distance > 0) + torch.where(far < exact, far, steps.clamp(max=half - 1))


class SelfAttention(nn.Module):
    """Attention over all tokens with a learned bias by distance and no scaling."""

    def __init__(self, cfg, ops, first, **kw):
        super().__init__()
        self.head_dim, inner = cfg.head_dim, cfg.heads * cfg.head_dim
        for name in ("q", "k", "v"):
            setattr(self, name, ops.Linear(cfg.dim, inner, bias=False, **kw))
        self.o = ops.Linear(inner, cfg.dim, bias=False, **kw)
        if first:  # the first layer's table serves all
            self.relative_attention_bias = ops.Embedding(cfg.buckets, cfg.heads, **kw)

    def forward(self, x, bias):
        q, k, v = (p(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for p in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=1.0)
        return self.o(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, cfg, ops, **kw):
        super().__init__()
        self.act = ACTIVATIONS[cfg.act]
        for name in ("wi_0", "wi_1") if cfg.gated else ("wi",):
            setattr(self, name, ops.Linear(cfg.dim, cfg.ffn, bias=False, **kw))
        self.wo = ops.Linear(cfg.ffn, cfg.dim, bias=False, **kw)

    def forward(self, x):
        h = self.act(self.wi_0(x)) * self.wi_1(x) if hasattr(self, "wi_0") else self.act(self.wi(x))
        return self.wo(h)


class Layer(nn.Module):
    """x + part(norm(x)), under the part's public name."""

    def __init__(self, name, part, cfg, ops, **kw):
        super().__init__()
        self.layer_norm = ops.RMSNorm(cfg.dim, eps=cfg.eps, **kw)
        self.name = name
        setattr(self, name, part)

    def forward(self, x, *extra):
        return x + getattr(self, self.name)(self.layer_norm(x), *extra)


class T5Encoder(nn.Module):
    """Token ids int64 [B, S] -> features [B, S, dim].

    Args:
        cfg: `T5Config`. operations: namespace of layers (default plain torch without initialisation).
    """

    def __init__(self, cfg, operations=None, device=None, dtype=None):
        super().__init__()
        ops, kw = operations or plain_operations, {"device": device, "dtype": dtype}
        self.cfg = cfg
        self.embed_tokens = ops.Embedding(cfg.vocab, cfg.dim, **kw)
        self.block = nn.ModuleList()
        for i in range(cfg.layers):
            block = nn.Module()
            attention = Layer("SelfAttention", SelfAttention(cfg, ops, i == 0, **kw), cfg, ops, **kw)
            block.layer = nn.ModuleList(
                [attention, Layer("DenseReluDense", FeedForward(cfg, ops, **kw), cfg, ops, **kw)]
            )
            self.block.append(block)
        self.final_layer_norm = ops.RMSNorm(cfg.dim, eps=cfg.eps, **kw)

    def forward(self, ids):
        cfg, dtype = self.cfg, self.final_layer_norm.weight.dtype
        x = self.embed_tokens(ids, out_dtype=dtype)
        table = self.block[0].layer[0].SelfAttention.relative_attention_bias
        buckets = distance_buckets(ids.shape[1], cfg.buckets, cfg.max_distance, ids.device)
        bias = table(buckets, out_dtype=dtype).permute(2, 0, 1)[None]
        for block in self.block:
            x = block.layer[0](x, bias)
            x = block.layer[1](x)
        return self.final_layer_norm(x)


def t5_refs(source):
    """{name inside `T5Encoder`: `Ref`} of an opened hub folder that holds the encoder alone or the whole model.

    Raises:
        UserError: names or shapes that are no T5 encoder's.
    """
    where, keys, refs = f"'{source.root}'", source.keys(), {}
    with torch.device("meta"):
        shapes = {name: tuple(t.shape) for name, t in T5Encoder(T5Config.read(source.config)).state_dict().items()}
    for name in shapes:
        shared = name == "embed_tokens.weight" and "shared.weight" in keys
        refs[name] = Ref(source, "shared.weight" if shared else f"encoder.{name}")
    useless = (r"decoder\.", r"lm_head\.", r"encoder\.embed_tokens\.weight$", r"shared\.weight$")
    check_keys(keys, [ref.key for ref in refs.values()], useless, where)
    for name, ref in refs.items():
        if tuple(ref.shape) != shapes[name]:
            raise UserError(
                f"{where}: tensor {ref.key} has the shape {list(ref.shape)}, its config.json asks for "
                f"{list(shapes[name])}: the configuration and the weights belong to different models"
            )
    return refs


def read_t5(source, operations=None, device="cpu", dtype=torch.float32):
    """The T5 encoder in an opened hub folder.

    Args:
        source: `Source`. operations, device, dtype: as for every network.

    Raises:
        UserError: unreadable files, or see `t5_refs`.
    """
    state = {name: ref.read(dtype, device) for name, ref in t5_refs(source).items()}
    with torch.device("meta"):
        net = T5Encoder(T5Config.read(source.config), operations, dtype=dtype)
    net.load_state_dict(state, strict=True, assign=True)
    return net.requires_grad_(False).eval()


class SpieceTokenizer:
    """spiece.model, for folders without tokenizer.json.

    Args:
        side: `SideFile`.

    Raises:
        UserError: the file is no tokenizer, or the library that reads it is missing.
    """

    def __init__(self, side):
        try:
            import sentencepiece  # the host has it; wanted for old folders alone
        except ImportError as error:
            raise UserError(
                f"'{side.where}' needs the sentencepiece library, which this Python lacks: put the tokenizer.json of "
                "the same model beside it"
            ) from error
        try:
            self.tokenizer = sentencepiece.SentencePieceProcessor(model_proto=side.bytes())
        except RuntimeError as error:
            raise UserError(f"'{side.where}' is no tokenizer file: download it again") from error

    def ids(self, text):
        """Text -> list of token ids; nothing is added."""
        return self.tokenizer.encode(text)

    def id(self, name):
        """Id of a token by its exact name; the unknown token's for names that it lacks."""
        return self.tokenizer.piece_to_id(name)


class T5Text:
    """Reads prompts with a T5 encoder that has a folder of its own.

    The weights stay mapped to their file and are let go after each prompt: they are used once a prompt, and a run
    needs the memory for other things.

    Args:
        source: `Source` of a hub folder, or None: then `missing` is called when a text is to be read.
        tokens: prompt tokens that the model reads. missing: raises a UserError that says what is missing.
        as_written: the model was trained on texts as they were; else on captions in lower case with single spaces.
    """

    def __init__(self, source, tokens, missing, as_written=False):
        self.source, self.tokens, self.missing, self.as_written = source, tokens, missing, as_written
        # asked for at once, so that it counts as a part of the model
        self.side = source and source.side("tokenizer.json", "spiece.model")

    @cached_property
    def tokenizer(self):
        """`HubTokenizer` or `SpieceTokenizer`. Raises UserError."""
        if self.side is None:
            raise UserError(
                f"'{self.source.root}' holds no tokenizer: put tokenizer.json or spiece.model of the same model there"
            )
        return (SpieceTokenizer if self.side.name == "spiece.model" else HubTokenizer)(self.side)

    def ids(self, text):
        """(token ids with the end token, number of tokens left out)."""
        ids = self.tokenizer.ids(text if self.as_written else " ".join(text.lower().split()))
        kept = ids[: self.tokens - 1]
        return [*kept, self.tokenizer.id(END)], len(ids) - len(kept)

    @torch.no_grad()
    def encode(self, text):
        """Text -> `Prompt` with features fp32 [P, dim]; an empty text has none and stands for the unconditional.

        Raises:
            UserError: there is no encoder, or it cannot be read.
        """
        if not text.strip():
            return Prompt(text=text, encoder=self)
        if self.source is None:
            self.missing()
        ids, left_out = self.ids(text)
        notes = ()
        if left_out:
            notes = (f"the model reads {self.tokens} tokens of text; the last {left_out} were left out",)
        features = read_t5(self.source)(torch.tensor([ids]))[0]
        self.source.release()
        return Prompt(text=text, encoder=self, features=features, notes=notes)
