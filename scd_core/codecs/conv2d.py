"""One 2-D convolutional VQ codec for every picture family (taming-style encoder and decoder).

Level 0 is always the highest resolution; a family whose file counts from the lowest renames its keys.
Key names are those of the public VQGAN checkpoints:
`encoder.down.L.block.B`, `decoder.up.L.block.B`, `quantize.embedding.weight`, `quant_conv`, `post_quant_conv`.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from .. import operations as plain_operations

CELLS = 1024  # compared with the codebook at a time


@dataclass(frozen=True)
class ConvCodecConfig:
    """Shape of a codec. `ch_mult` lists channel multipliers from the highest to the lowest resolution."""

    codes: int  # rows of the codebook
    code_dim: int  # channels of a codebook row
    z_channels: int  # channels between quantiser and network
    ch: int = 128
    ch_mult: tuple = (1, 1, 2, 2, 4)
    encoder_blocks: int = 2  # residual blocks a level
    decoder_blocks: int = 3
    attn_levels: tuple = ()  # levels with attention after every block
    groups: int = 32
    spatial_norm: bool = False  # MoVQ: decoder norms modulated by the codes
    l2_codebook: bool = False  # compare and emit unit-length codebook rows (VQ-16 of LlamaGen and Janus)
    post_quant: bool = True
    encoder: bool = True  # False: the checkpoint holds the decoder alone
    range: tuple = (-1.0, 1.0)  # decoder output for black and white

    @property
    def factor(self):
        """Pixels a token in each direction."""
        return 2 ** (len(self.ch_mult) - 1)

    @property
    def compression(self):
        """Frames that a token grid after the first of a clip stands for: every grid is a picture of its own."""
        return 1

    def frames(self, grids):
        """Pictures that come out of `grids` token grids of one clip."""
        return 1 + (grids - 1) * self.compression


class SpatialNorm(nn.Module):
    """Group norm scaled and shifted by the codes, resized to the feature map (MoVQ)."""

    def __init__(self, channels, zq_channels, groups, ops, **kw):
        super().__init__()
        self.norm_layer = ops.GroupNorm(groups, channels, eps=1e-6, **kw)
        self.conv_y = ops.Conv2d(zq_channels, channels, 1, **kw)
        self.conv_b = ops.Conv2d(zq_channels, channels, 1, **kw)

    def forward(self, x, zq):
        zq = F.interpolate(zq, size=x.shape[-2:], mode="nearest")
        return self.norm_layer(x) * self.conv_y(zq) + self.conv_b(zq)


def _norm(layer, x, zq):
    return layer(x, zq) if isinstance(layer, SpatialNorm) else layer(x)


class ResBlock(nn.Module):
    """norm, swish, conv, twice, around a shortcut."""

    def __init__(self, cin, cout, norm, ops, **kw):
        super().__init__()
        self.norm1 = norm(cin)
        self.conv1 = ops.Conv2d(cin, cout, 3, padding=1, **kw)
        self.norm2 = norm(cout)
        self.conv2 = ops.Conv2d(cout, cout, 3, padding=1, **kw)
        if cin != cout:
            self.nin_shortcut = ops.Conv2d(cin, cout, 1, **kw)

    def forward(self, x, zq=None):
        h = self.conv1(F.silu(_norm(self.norm1, x, zq)))
        h = self.conv2(F.silu(_norm(self.norm2, h, zq)))
        return h + (self.nin_shortcut(x) if hasattr(self, "nin_shortcut") else x)


class AttnBlock(nn.Module):
    """Single-head self-attention over all cells of the feature map."""

    def __init__(self, channels, norm, ops, **kw):
        super().__init__()
        self.norm = norm(channels)
        for name in ("q", "k", "v", "proj_out"):
            setattr(self, name, ops.Conv2d(channels, channels, 1, **kw))

    def forward(self, x, zq=None):
        b, c, h, w = x.shape
        y = _norm(self.norm, x, zq)
        q, k, v = (layer(y).reshape(b, 1, c, h * w).transpose(2, 3) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v)
        return x + self.proj_out(y.transpose(2, 3).reshape(b, c, h, w))


class Downsample(nn.Module):
    def __init__(self, channels, ops, **kw):
        super().__init__()
        self.conv = ops.Conv2d(channels, channels, 3, stride=2, **kw)

    def forward(self, x):
        return self.conv(F.pad(x, (0, 1, 0, 1)))


class Upsample(nn.Module):
    def __init__(self, channels, ops, **kw):
        super().__init__()
        self.conv = ops.Conv2d(channels, channels, 3, padding=1, **kw)

    def forward(self, x):
        return self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))


def _mid(channels, norm, ops, kw):
    return nn.ModuleDict(
        {
            "block_1": ResBlock(channels, channels, norm, ops, **kw),
            "attn_1": AttnBlock(channels, norm, ops, **kw),
            "block_2": ResBlock(channels, channels, norm, ops, **kw),
        }
    )


def _level(cin, cout, count, attn, norm, ops, kw):
    """One resolution: `count` residual blocks, each followed by attention where the family has it."""
    level = nn.Module()
    sizes = [cin] + [cout] * count
    level.block = nn.ModuleList(ResBlock(a, b, norm, ops, **kw) for a, b in zip(sizes, sizes[1:]))
    level.attn = nn.ModuleList(AttnBlock(cout, norm, ops, **kw) for _ in range(count if attn else 0))
    return level


def _run_level(level, h, zq=None):
    for i, block in enumerate(level.block):
        h = block(h, zq)
        if len(level.attn):
            h = level.attn[i](h, zq)
    return h


class Encoder(nn.Module):
    """Picture [B,3,H,W] -> features [B,z,H/f,W/f]."""

    def __init__(self, cfg, ops, **kw):
        super().__init__()

        def norm(c):
            return ops.GroupNorm(cfg.groups, c, eps=1e-6, **kw)

        chans = [cfg.ch * m for m in cfg.ch_mult]
        self.conv_in = ops.Conv2d(3, cfg.ch, 3, padding=1, **kw)
        self.down = nn.ModuleList()
        c = cfg.ch
        for i, wanted in enumerate(chans):
            cin, c = c, wanted if cfg.encoder_blocks else c  # a level without blocks keeps its channels
            level = _level(cin, c, cfg.encoder_blocks, i in cfg.attn_levels, norm, ops, kw)
            if i < len(chans) - 1:
                level.downsample = Downsample(c, ops, **kw)
            self.down.append(level)
        self.mid = _mid(c, norm, ops, kw)
        self.norm_out = norm(c)
        self.conv_out = ops.Conv2d(c, cfg.z_channels, 3, padding=1, **kw)

    def forward(self, x):
        h = self.conv_in(x)
        for level in self.down:
            h = _run_level(level, h)
            if hasattr(level, "downsample"):
                h = level.downsample(h)
        for block in self.mid.values():
            h = block(h)
        return self.conv_out(F.silu(self.norm_out(h)))


class Decoder(nn.Module):
    """Features [B,z,h,w] (and the codes that modulate spatial norms) -> picture [B,3,h*f,w*f]."""

    def __init__(self, cfg, ops, **kw):
        super().__init__()

        def norm(c):
            if cfg.spatial_norm:
                return SpatialNorm(c, cfg.code_dim, cfg.groups, ops, **kw)
            return ops.GroupNorm(cfg.groups, c, eps=1e-6, **kw)

        chans = [cfg.ch * m for m in cfg.ch_mult]
        self.conv_in = ops.Conv2d(cfg.z_channels, chans[-1], 3, padding=1, **kw)
        self.mid = _mid(chans[-1], norm, ops, kw)
        levels = []
        for i in reversed(range(len(chans))):
            cin = chans[min(i + 1, len(chans) - 1)]
            level = _level(cin, chans[i], cfg.decoder_blocks, i in cfg.attn_levels, norm, ops, kw)
            if i:
                level.upsample = Upsample(chans[i], ops, **kw)
            levels.insert(0, level)
        self.up = nn.ModuleList(levels)
        self.norm_out = norm(chans[0])
        self.conv_out = ops.Conv2d(chans[0], 3, 3, padding=1, **kw)

    def forward(self, h, zq=None):
        h = self.conv_in(h)
        for block in self.mid.values():
            h = block(h, zq)
        for level in reversed(self.up):
            h = _run_level(level, h, zq)
            if hasattr(level, "upsample"):
                h = level.upsample(h)
        return self.conv_out(F.silu(_norm(self.norm_out, h, zq)))


class ConvCodec(nn.Module):
    """Encoder, codebook and decoder behind two calls: `encode` pictures to codes, `decode` codes to pictures.

    Args:
        cfg: `ConvCodecConfig`.
        operations: namespace of layers (default plain torch without initialisation).
    """

    encoder_type, decoder_type = Encoder, Decoder

    def __init__(self, cfg, operations=None, device=None, dtype=None):
        super().__init__()
        ops, kw = operations or plain_operations, {"device": device, "dtype": dtype}
        self.cfg = cfg
        if cfg.encoder:
            self.encoder = self.encoder_type(cfg, ops, **kw)
            self.quant_conv = self.pointwise(cfg.z_channels, cfg.code_dim, ops, kw)
        self.quantize = nn.ModuleDict({"embedding": ops.Embedding(cfg.codes, cfg.code_dim, **kw)})
        if cfg.post_quant:
            self.post_quant_conv = self.pointwise(cfg.code_dim, cfg.z_channels, ops, kw)
        self.decoder = self.decoder_type(cfg, ops, **kw)

    @staticmethod
    def pointwise(cin, cout, ops, kw):
        """Layer between codebook and network, without a view of neighbouring cells."""
        return ops.Conv2d(cin, cout, 1, **kw)

    @property
    def dtype(self):
        return self.decoder.conv_in.weight.dtype

    def _rows(self, rows):
        return F.normalize(rows, dim=-1) if self.cfg.l2_codebook else rows

    def features(self, pictures):
        """Pictures [B,3,H,W] in the codec's range -> features before quantisation [B,code_dim,h,w]."""
        return self.quant_conv(self.encoder(pictures))

    def nearest(self, z):
        """Features [B,D,h,w] -> index of the nearest codebook row, int64 [B,h,w]. Distances in fp32."""
        book = self.quantize["embedding"](torch.arange(self.cfg.codes, device=z.device)).float()
        book, z = self._rows(book), self._rows(z.permute(0, 2, 3, 1).float())
        norms, cells = book.square().sum(1), z.reshape(-1, z.shape[-1])
        # some cells at a time: all distances of a large picture at once would take a gigabyte
        found = [(norms - 2 * some @ book.t()).argmin(-1) for some in cells.split(CELLS)]
        return torch.cat(found).view(z.shape[:-1])

    def decode_features(self, zq):
        """Codebook rows [B,D,h,w] -> picture [B,3,h*f,w*f], not clamped, in the codec's range."""
        h = self.post_quant_conv(zq) if self.cfg.post_quant else zq
        return self.decoder(h, zq if self.cfg.spatial_norm else None)

    def encode(self, frames):
        """Frames [B,H,W,3] in 0..1 -> codes int64 [B,H/f,W/f]. Raises as `pictures`."""
        return self.nearest(self.features(self.pictures(frames)))

    def pictures(self, frames):
        """Frames [B,H,W,3] in 0..1 -> pictures [B,3,H,W] in the codec's range.

        Raises ValueError when the sides are no multiples of the codec's factor, or the codec has no encoder.
        """
        if not self.cfg.encoder:
            raise ValueError(
                "this model's image tokenizer has no encoder in its files: it can draw, but not read pictures"
            )
        f = self.cfg.factor
        if frames.shape[1] % f or frames.shape[2] % f:
            raise ValueError(f"a picture of {frames.shape[2]}x{frames.shape[1]} does not divide into {f}-pixel tokens")
        low, high = self.cfg.range
        return frames.permute(0, 3, 1, 2).to(self.dtype) * (high - low) + low

    def encode_clip(self, frames):
        """Frames [F,H,W,3] in 0..1 of one clip -> codes int64 [T,h,w] with cfg.frames(T) = F."""
        return self.encode(frames)

    def decode_clip(self, codes):
        """Codes int64 [T,h,w] of one clip -> frames float32 [cfg.frames(T),H,W,3] in 0..1."""
        return self.decode(codes)

    def decode_raw(self, codes):
        """Codes [B,h,w] -> picture [B,3,H,W] in the codec's own range, not clamped."""
        zq = self._rows(self.quantize["embedding"](codes)).permute(0, 3, 1, 2)
        return self.decode_features(zq.to(self.dtype))

    def decode(self, codes):
        """Codes int64 [B,h,w] -> frames float32 [B,H,W,3] in 0..1."""
        return self.pixels(self.decode_raw(codes))

    def pixels(self, raw):
        """Pictures [B,3,H,W] in the codec's range -> frames float32 [B,H,W,3] in 0..1."""
        low, high = self.cfg.range
        return ((raw.float().permute(0, 2, 3, 1) - low) / (high - low)).clamp(0, 1)


ConvCodecConfig.network = ConvCodec  # what `ModelFiles.build` makes of a configuration
