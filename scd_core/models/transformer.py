"""ONE decoder-only transformer for every family; a family is a `DecoderConfig` and a renaming of keys.

Key names follow the public Llama layout (`layers.N.self_attn.q_proj.weight`, `mlp.gate_proj`, `norm`, `lm_head`).
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from .. import operations as plain_operations
from .embedding import build_embedding
from .rope import rotate, spread


@dataclass(frozen=True)
class DecoderConfig:
    """All that differs between the decoders of the supported families."""

    dim: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int  # rows of the token embedding
    head_rows: int  # rows of the output head: the size of the law
    eps: float = 1e-5
    norm_offset: float = 0.0  # Gemma multiplies by 1 + weight
    embed_scale: float = 1.0
    norm_place: str = "pre"  # "pre", "post" (Chameleon 34B: x + norm(f(x))), "sandwich" (GLM: both)
    qk_norm: str | None = None  # None, "rms" (one weight [head_dim]) or "layer" (weight and bias, several rows)
    qk_norm_rows: tuple = (1, 1)  # rows of q's and k's "layer" weights; each serves heads/rows heads
    qk_eps: float = 1e-5
    qkv_bias: bool = False
    rope_pairing: str = "half"
    act: str = "silu"  # or "gelu_tanh"
    context_dim: int | None = None  # width of cross-attended text (Cosmos video2world)
    context_every: int = 1  # layers 0, k, 2k, .. attend to it
    abs_pos: str | None = None  # absolute position vectors added at the "input" or before "every_layer"
    grid_embed: tuple | None = None  # (frames, rows, cols) of learned embeddings of the position to be drawn
    in_embed: str = "table"  # "table", "codebook" (Janus), "class" or "caption" (LlamaGen)
    embed_args: tuple = ()  # sizes for in_embed, see embedding.py
    out_head: str = "linear"  # or "mlp" (Janus: linear, GELU, linear)
    head_width: int = 0  # inner width of an "mlp" head; 0: dim
    tied_head: bool = False


@dataclass
class Positions:
    """Position tables of a run, one row a slot: cos, sin [S, rope_dim/2] and absolute vectors [S, dim] or None."""

    cos: torch.Tensor
    sin: torch.Tensor
    absolute: torch.Tensor | None = None

    def ready(self, pairing, dtype):
        """The tables as the layers want them, made once a run: entries instead of pairs, in the model's dtype."""
        cos, sin = (t.to(dtype) for t in spread(self.cos, self.sin, pairing))
        return Positions(cos, sin, None if self.absolute is None else self.absolute.to(dtype))

    def rows(self, slots):
        """(cos, sin, absolute) of `ready` tables for slots [R, W], broadcasting over heads."""
        cos, sin = (t[slots].unsqueeze(2) for t in (self.cos, self.sin))
        return cos, sin, None if self.absolute is None else self.absolute[slots]


class OffsetRMSNorm(nn.Module):
    """RMS norm whose weight is stored as a difference from `offset`, applied in fp32 (Gemma)."""

    def __init__(self, dim, eps, offset, device=None, dtype=None):
        super().__init__()
        self.weight = plain_operations.empty_parameter(dim, device=device, dtype=dtype)
        self.eps, self.offset = eps, offset

    def forward(self, x):
        weight = self.offset + self.weight.to(device=x.device, dtype=torch.float32)
        return F.rms_norm(x.float(), x.shape[-1:], weight, self.eps).to(x.dtype)


class HeadLayerNorm(nn.Module):
    """Layer norm over head_dim with one weight row for each group of heads (Chameleon's q and k norms)."""

    def __init__(self, rows, heads, head_dim, eps, device=None, dtype=None):
        super().__init__()
        self.weight = plain_operations.empty_parameter(rows, head_dim, device=device, dtype=dtype)
        self.bias = plain_operations.empty_parameter(rows, head_dim, device=device, dtype=dtype)
        self.heads, self.eps = heads, eps

    def forward(self, x):
        repeat = self.heads // len(self.weight)
        weight, bias = (
            plain_operations.cast_to(t, x).repeat_interleave(repeat, 0) for t in (self.weight, self.bias)
        )
        return F.layer_norm(x, x.shape[-1:], eps=self.eps) * weight + bias


def _rms(cfg, ops, dim=None, **kw):
    if cfg.norm_offset:
        return OffsetRMSNorm(dim or cfg.dim, cfg.eps, cfg.norm_offset, **kw)
    return ops.RMSNorm(dim or cfg.dim, eps=cfg.eps, **kw)


def _head_norm(cfg, ops, heads, rows, **kw):
    if cfg.qk_norm == "rms":
        return ops.RMSNorm(cfg.head_dim, eps=cfg.qk_eps, **kw)
    return HeadLayerNorm(rows, heads, cfg.head_dim, cfg.qk_eps, **kw)


class Attention(nn.Module):
    """Grouped-query attention over the cache, or over a fixed context when `context_dim` is given."""

    def __init__(self, cfg, ops, context_dim=None, **kw):
        super().__init__()
        self.cfg, bias = cfg, cfg.qkv_bias and context_dim is None
        source = context_dim or cfg.dim
        self.q_proj = ops.Linear(cfg.dim, cfg.heads * cfg.head_dim, bias=bias, **kw)
        self.k_proj = ops.Linear(source, cfg.kv_heads * cfg.head_dim, bias=bias, **kw)
        self.v_proj = ops.Linear(source, cfg.kv_heads * cfg.head_dim, bias=bias, **kw)
        self.o_proj = ops.Linear(cfg.heads * cfg.head_dim, cfg.dim, bias=False, **kw)
        if cfg.qk_norm:
            self.q_norm = _head_norm(cfg, ops, cfg.heads, cfg.qk_norm_rows[0], **kw)
            self.k_norm = _head_norm(cfg, ops, cfg.kv_heads, cfg.qk_norm_rows[1], **kw)

    def _queries(self, x):
        """Projected and normalised q [R,W,H,D]."""
        q = self.q_proj(x).unflatten(-1, (-1, self.cfg.head_dim))
        return self.q_norm(q) if self.cfg.qk_norm else q

    def states(self, source):
        """Keys (normalised) and values [R,S,Hkv,D] of what is attended to."""
        k, v = (p.unflatten(-1, (-1, self.cfg.head_dim)) for p in (self.k_proj(source), self.v_proj(source)))
        return (self.k_norm(k) if self.cfg.qk_norm else k), v

    def _attend(self, q, k, v, mask=None, causal=False):
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=self.cfg.heads != self.cfg.kv_heads
        )
        return self.o_proj(y.transpose(1, 2).flatten(2))

    def forward(self, x, rope, cache=None, step=None, layer=0):
        """x [R,W,dim]. Without a cache: causal attention inside x."""
        q, (k, v) = self._queries(x), self.states(x)
        q, k = (rotate(t, *rope, self.cfg.rope_pairing) for t in (q, k))
        if cache is None:
            return self._attend(q, k, v, causal=True)
        k, v = cache.write(layer, k, v, step)
        return self._attend(q, k, v, mask=step.mask)

    def cross(self, x, states):
        """Attend from x [R,W,dim] to the `states` of a text [R,C,context_dim], all visible, no rotation."""
        return self._attend(self._queries(x), *states)


class MLP(nn.Module):
    def __init__(self, cfg, ops, **kw):
        super().__init__()
        self.gate_proj = ops.Linear(cfg.dim, cfg.ffn, bias=False, **kw)
        self.up_proj = ops.Linear(cfg.dim, cfg.ffn, bias=False, **kw)
        self.down_proj = ops.Linear(cfg.ffn, cfg.dim, bias=False, **kw)
        self.act = F.silu if cfg.act == "silu" else (lambda x: F.gelu(x, approximate="tanh"))

    def forward(self, x):
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, cfg, ops, layer=0, **kw):
        super().__init__()
        self.place = cfg.norm_place
        self.input_layernorm = _rms(cfg, ops, **kw)
        self.self_attn = Attention(cfg, ops, **kw)
        self.post_attention_layernorm = _rms(cfg, ops, **kw)
        self.mlp = MLP(cfg, ops, **kw)
        if self.place == "sandwich":
            self.post_self_attn_layernorm = _rms(cfg, ops, **kw)
            self.post_mlp_layernorm = _rms(cfg, ops, **kw)
        self.crosses = bool(cfg.context_dim) and layer % cfg.context_every == 0
        if self.crosses:
            self.cross_attn = Attention(cfg, ops, context_dim=cfg.context_dim, **kw)
            self.cross_attn_layernorm = _rms(cfg, ops, **kw)

    def forward(self, x, rope, cache, step, layer, context):
        before = self.place != "post"
        h = self.input_layernorm(x) if before else x
        h = self.self_attn(h, rope, cache, step, layer)
        x = x + self._after(h, "input_layernorm", "post_self_attn_layernorm")
        if context is not None:
            x = x + self.cross_attn.cross(self.cross_attn_layernorm(x), context)
        h = self.mlp(self.post_attention_layernorm(x) if before else x)
        return x + self._after(h, "post_attention_layernorm", "post_mlp_layernorm")

    def _after(self, h, post, sandwich):
        if self.place == "pre":
            return h
        return getattr(self, post if self.place == "post" else sandwich)(h)


class Decoder(nn.Module):
    """Tokens of a window -> logits of the image vocabulary.

    Args:
        cfg: `DecoderConfig`.
        operations: namespace of layers (default plain torch without initialisation).
    """

    def __init__(self, cfg, operations=None, device=None, dtype=None):
        super().__init__()
        ops, kw = operations or plain_operations, {"device": device, "dtype": dtype}
        self.cfg = cfg
        self.embed = build_embedding(cfg, ops, **kw)
        if cfg.grid_embed:
            for name, size in zip(("frame_embed", "row_embed", "col_embed"), cfg.grid_embed):
                setattr(self, name, ops.Embedding(size, cfg.dim, **kw))
        self.layers = nn.ModuleList(Block(cfg, ops, i, **kw) for i in range(cfg.layers))
        self.norm = _rms(cfg, ops, **kw)
        if cfg.out_head == "mlp":
            width = cfg.head_width or cfg.dim
            self.head_proj = ops.Linear(cfg.dim, width, **kw)
            self.lm_head = ops.Linear(width, cfg.head_rows, **kw)
        elif not cfg.tied_head:
            self.lm_head = ops.Linear(cfg.dim, cfg.head_rows, bias=False, **kw)

    @property
    def dtype(self):
        """Compute dtype: the host may set `compute_dtype` when weights are stored in another one."""
        return getattr(self, "compute_dtype", None) or self.norm.weight.dtype

    def cross_states(self, context):
        """What every layer sees of a text [R,C,context_dim]: (k, v), or None where it attends to none."""
        return [block.cross_attn.states(context) if block.crosses else None for block in self.layers]

    def hidden(self, x, rows, cache=None, step=None, context=None):
        """Normed hidden states [R,W,dim]: `norm` of `states`, whose arguments it takes."""
        return self.norm(self.states(x, rows, cache, step, context))

    def states(self, x, rows, cache=None, step=None, context=None):
        """Embedded tokens x [R,W,dim] and their position rows -> hidden states before the last norm [R,W,dim].

        `context` is a text [R,C,context_dim], or its `cross_states` where more than one pass attends to it.
        """
        cos, sin, absolute = rows
        if isinstance(context, torch.Tensor):
            context = self.cross_states(context)
        if absolute is not None and self.cfg.abs_pos == "input":
            x = x + absolute
        for i, block in enumerate(self.layers):
            if absolute is not None and self.cfg.abs_pos == "every_layer":
                x = x + absolute
            x = block(x, (cos, sin), cache, step, i, None if context is None else context[i])
        return x

    def logits(self, hidden):
        """Hidden states [R,W,dim] -> logits [R,W,head_rows] in the model's dtype."""
        if self.cfg.out_head == "mlp":
            hidden = F.gelu(self.head_proj(hidden))
        if self.cfg.tied_head:
            return self.embed.project(hidden)
        return self.lm_head(hidden)

    def grid_vectors(self, frames, rows, cols, device=None):
        """Learned vectors of a grid in raster order, [len(frames)*len(rows)*len(cols), dim] (needs grid_embed).

        Each argument is a range of indices into its table. device: of the result; None: that of each table.
        """

        def table(layer, ids):
            return layer(torch.as_tensor(list(ids), device=device or layer.weight.device))

        f, r, c = table(self.frame_embed, frames), table(self.row_embed, rows), table(self.col_embed, cols)
        return (f[:, None, None] + r[None, :, None] + c[None, None]).reshape(-1, self.cfg.dim)


DecoderConfig.network = Decoder  # what `ModelFiles.build` makes of a configuration
