"""MAR (Li et al. 2024, arXiv 2406.11838): a bidirectional encoder and decoder over a masked grid of vectors.

The encoder reads the tokens that are known, the decoder adds the masked ones, and a small network draws each token
by diffusion from the decoder's output at its place. Key names are those of the published checkpoints.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from .. import operations as plain_operations
from ..operations import cast_to, empty_parameter

EPS = 1e-6  # of every layer norm
PERIOD = 10000  # longest wave of the time embedding


@dataclass(frozen=True)
class MarConfig:
    """Sizes of a MAR. The decoder may be as wide as it likes; in the published models it is as wide as the encoder."""

    dim: int
    decoder_dim: int
    encoder_layers: int
    decoder_layers: int
    heads: int
    decoder_heads: int
    ffn: int
    decoder_ffn: int
    tokens: int  # cells of the grid
    channels: int  # of a token
    buffer: int  # class tokens in front of the grid
    classes: int
    head_layers: int  # of the diffusion head
    head_width: int
    waves: int = 256  # width of the time embedding

    @property
    def side(self):
        """Tokens a row: grids are square."""
        return math.isqrt(self.tokens)


class Attention(nn.Module):
    """Self-attention without a causal mask."""

    def __init__(self, dim, heads, ops, **kw):
        super().__init__()
        self.heads = heads
        self.qkv = ops.Linear(dim, 3 * dim, **kw)
        self.proj = ops.Linear(dim, dim, **kw)

    def forward(self, x, mask=None):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        x = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.proj(x.transpose(1, 2).reshape(b, n, d))


class Mlp(nn.Module):
    def __init__(self, dim, inner, ops, **kw):
        super().__init__()
        self.fc1 = ops.Linear(dim, inner, **kw)
        self.fc2 = ops.Linear(inner, dim, **kw)

    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(x)))


class Block(nn.Module):
    """Pre-norm transformer block of a vision transformer."""

    def __init__(self, dim, heads, inner, ops, **kw):
        super().__init__()
        self.norm1 = ops.LayerNorm(dim, eps=EPS, **kw)
        self.attn = Attention(dim, heads, ops, **kw)
        self.norm2 = ops.LayerNorm(dim, eps=EPS, **kw)
        self.mlp = Mlp(dim, inner, ops, **kw)

    def forward(self, x, mask=None):
        x = x + self.attn(self.norm1(x), mask)
        return x + self.mlp(self.norm2(x))


class TimeEmbed(nn.Module):
    """Training time -> vector: sines and cosines through two layers."""

    def __init__(self, waves, width, ops, **kw):
        super().__init__()
        self.waves = waves
        self.mlp = nn.Sequential(ops.Linear(waves, width, **kw), nn.SiLU(), ops.Linear(width, width, **kw))

    def forward(self, times, dtype):
        half = self.waves // 2
        rates = torch.exp(-math.log(PERIOD) * torch.arange(half, dtype=torch.float32, device=times.device) / half)
        angles = times[:, None].float() * rates
        return self.mlp(torch.cat([angles.cos(), angles.sin()], -1).to(dtype))


def _modulation(width, count, ops, kw):
    return nn.Sequential(nn.SiLU(), ops.Linear(width, count * width, **kw))


class HeadBlock(nn.Module):
    """Two layers around a residual, shifted, scaled and gated by condition and time."""

    def __init__(self, width, ops, **kw):
        super().__init__()
        self.in_ln = ops.LayerNorm(width, eps=EPS, **kw)
        self.mlp = nn.Sequential(ops.Linear(width, width, **kw), nn.SiLU(), ops.Linear(width, width, **kw))
        self.adaLN_modulation = _modulation(width, 3, ops, kw)

    def forward(self, x, y):
        shift, scale, gate = self.adaLN_modulation(y).chunk(3, -1)
        return x + gate * self.mlp(self.in_ln(x) * (1 + scale) + shift)


class HeadEnd(nn.Module):
    def __init__(self, width, out, ops, **kw):
        super().__init__()
        self.linear = ops.Linear(width, out, **kw)
        self.adaLN_modulation = _modulation(width, 2, ops, kw)

    def forward(self, x, y):
        shift, scale = self.adaLN_modulation(y).chunk(2, -1)
        return self.linear(F.layer_norm(x, x.shape[-1:], eps=EPS) * (1 + scale) + shift)


class Head(nn.Module):
    """Noisy token, training time and condition -> noise and spread of the variance."""

    def __init__(self, cfg, ops, **kw):
        super().__init__()
        width = cfg.head_width
        self.time_embed = TimeEmbed(cfg.waves, width, ops, **kw)
        self.cond_embed = ops.Linear(cfg.decoder_dim, width, **kw)
        self.input_proj = ops.Linear(cfg.channels, width, **kw)
        self.res_blocks = nn.ModuleList(HeadBlock(width, ops, **kw) for _ in range(cfg.head_layers))
        self.final_layer = HeadEnd(width, 2 * cfg.channels, ops, **kw)

    def forward(self, x, times, cond):
        """x [R, C], times int64 [R], cond [R, decoder_dim] -> [R, 2C]."""
        x, y = self.input_proj(x), self.time_embed(times, cond.dtype) + self.cond_embed(cond)
        for block in self.res_blocks:
            x = block(x, y)
        return self.final_layer(x, y)


class Mar(nn.Module):
    """The whole network.

    Args:
        cfg: `MarConfig`. operations: namespace of layers (default plain torch without initialisation).
    """

    def __init__(self, cfg, operations=None, device=None, dtype=None):
        super().__init__()
        ops, kw = operations or plain_operations, {"device": device, "dtype": dtype}
        self.cfg = cfg
        slots = cfg.buffer + cfg.tokens
        self.class_emb = ops.Embedding(cfg.classes, cfg.dim, **kw)
        self.fake_latent = empty_parameter(1, cfg.dim, **kw)
        self.z_proj = ops.Linear(cfg.channels, cfg.dim, **kw)
        self.z_proj_ln = ops.LayerNorm(cfg.dim, eps=EPS, **kw)
        self.encoder_pos_embed_learned = empty_parameter(1, slots, cfg.dim, **kw)
        self.encoder_blocks = nn.ModuleList(
            Block(cfg.dim, cfg.heads, cfg.ffn, ops, **kw) for _ in range(cfg.encoder_layers)
        )
        self.encoder_norm = ops.LayerNorm(cfg.dim, eps=EPS, **kw)
        self.decoder_embed = ops.Linear(cfg.dim, cfg.decoder_dim, **kw)
        self.mask_token = empty_parameter(1, 1, cfg.decoder_dim, **kw)
        self.decoder_pos_embed_learned = empty_parameter(1, slots, cfg.decoder_dim, **kw)
        self.decoder_blocks = nn.ModuleList(
            Block(cfg.decoder_dim, cfg.decoder_heads, cfg.decoder_ffn, ops, **kw) for _ in range(cfg.decoder_layers)
        )
        self.decoder_norm = ops.LayerNorm(cfg.decoder_dim, eps=EPS, **kw)
        self.diffusion_pos_embed_learned = empty_parameter(1, cfg.tokens, cfg.decoder_dim, **kw)
        self.diffloss = nn.ModuleDict({"net": Head(cfg, ops, **kw)})

    @property
    def dtype(self):
        """Compute dtype: the host may set `compute_dtype` when weights are stored in another one."""
        return getattr(self, "compute_dtype", None) or self.z_proj.weight.dtype

    def conditions(self, classes):
        """Class numbers int64 [B], -1 for none -> class vectors [B, dim]."""
        table = self.class_emb(classes.clamp(min=0))
        return torch.where((classes < 0)[:, None], cast_to(self.fake_latent, table), table).to(self.dtype)

    def encode(self, tokens, known, conditions):
        """Encoder over the class tokens and the known tokens of each row.

        Args:
            tokens: [B, n, C]. known: bool [B, n]. conditions: [B, dim].

        Returns:
            (features [B, buffer + most known, dim], slots int64 of the same rows and columns: which slot each column
            is; columns beyond a row's own count have slot buffer + n).
        """
        cfg = self.cfg
        x = self.z_proj(tokens.to(self.dtype))
        x = torch.cat([conditions[:, None].expand(-1, cfg.buffer, -1), x], 1)
        x = self.z_proj_ln(x + cast_to(self.encoder_pos_embed_learned, x))
        slots = self._slots(known)
        padded = slots >= cfg.buffer + cfg.tokens
        x = x.gather(1, slots.clamp(max=x.shape[1] - 1)[..., None].expand(-1, -1, cfg.dim))
        mask = None if not bool(padded.any()) else ~padded[:, None, None]
        for block in self.encoder_blocks:
            x = block(x, mask)
        return self.encoder_norm(x), slots

    def _slots(self, known):
        """Slots of class tokens and known tokens in order, short rows filled up with one that does not exist."""
        cfg = self.cfg
        number = torch.arange(cfg.tokens, device=known.device) + cfg.buffer
        found = torch.where(known, number, cfg.buffer + cfg.tokens).sort(1).values[:, : int(known.sum(1).max())]
        return torch.cat([torch.arange(cfg.buffer, device=known.device).expand(len(known), -1), found], 1)

    def decode(self, features, slots):
        """Encoder output -> conditions of all tokens [B, n, decoder_dim], position embedding of the head included."""
        cfg = self.cfg
        x = self.decoder_embed(features)
        full = cast_to(self.mask_token, x).repeat(len(x), cfg.buffer + cfg.tokens + 1, 1)  # one slot for the padding
        full = full.scatter(1, slots[..., None].expand(-1, -1, cfg.decoder_dim), x)[:, :-1]
        full = full + cast_to(self.decoder_pos_embed_learned, full)
        for block in self.decoder_blocks:
            full = block(full)
        full = self.decoder_norm(full)[:, cfg.buffer :]
        return full + cast_to(self.diffusion_pos_embed_learned, full)

    def forward(self, tokens, known, conditions):
        """Conditions for the head at every place: see `encode` and `decode`."""
        return self.decode(*self.encode(tokens, known, conditions))

    def noise(self, x, times, cond, scale=None):
        """What the head makes of noisy tokens, guided where there are two conditions a token.

        Args:
            x: fp32 [R, C]. times: int64 [R]. cond: [R, decoder_dim], or [2R, decoder_dim]: conditional rows, then
                unconditional ones. scale: guidance fp32 [R, 1] of the second form.

        Returns:
            (eps, spread) fp32 [R, C]; the spread is the conditional row's own.
        """
        net = self.diffloss["net"]
        rows, x = len(x), x.to(self.dtype)
        if scale is None:
            return net(x, times, cond.to(self.dtype)).float().chunk(2, -1)
        out = net(x.repeat(2, 1), times.repeat(2), cond.to(self.dtype)).float()
        eps, spread = out.chunk(2, -1)
        return eps[rows:] + scale * (eps[:rows] - eps[rows:]), spread[:rows]


MarConfig.network = Mar  # what `ModelFiles.build` makes of a configuration
