"""Cosmos' discrete video codec (arXiv 2501.03575): pictures and clips as grids of FSQ codes (arXiv 2309.15505).

A clip of 1 + 8k frames is 1 + k token grids. Every layer looks back in time only, so a clip is drawn and read in steps.
Names are those of the release's state dicts, of which encoder and decoder lie in two files.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from .. import operations as plain_operations
from .causal import CausalConv, Downsample, FrameNorm, Level, Past, Upsample, conv, haar, middle, unhaar

PIXELS = 1 << 21  # of a clip that are decoded in one step, at least one token grid
BOUND = 1e-3  # by which the encoder's numbers may leave the outermost levels before they are rounded


@dataclass(frozen=True)
class DVHalf:
    """Shape of the encoder or the decoder. Levels count from the highest resolution.

    Attributes:
        channels: of each level. z: between network and quantiser. blocks: residual blocks a level.
        entry: channels behind the first convolution. space, time: levels that resample pixels, and frames.
        attn: levels with attention after every block.
    """

    channels: tuple
    z: int
    blocks: int
    entry: int
    space: tuple = ()
    time: tuple = ()
    attn: tuple = ()


@dataclass(frozen=True)
class DVConfig:
    """Shape of a codec.

    Attributes:
        decoder: `DVHalf`. encoder: `DVHalf`, or None where the files hold none. levels: of the codes' values.
        patch: pixels and frames a side of the wavelet cells. range: decoder output for black and white.
    """

    decoder: DVHalf
    encoder: DVHalf | None = None
    levels: tuple = (8, 8, 8, 5, 5, 5)
    patch: int = 4
    range: tuple = (-1.0, 1.0)

    @property
    def codes(self):
        """Number of codes."""
        return math.prod(self.levels)

    @property
    def factor(self):
        """Pixels a token in each direction."""
        return self.patch * 2 ** len(self.decoder.space)

    @property
    def compression(self):
        """Frames that a token grid after the first of a clip stands for."""
        return self.patch * 2 ** len(self.decoder.time)

    def frames(self, grids):
        """Frames that come out of `grids` token grids of one clip."""
        return 1 + (grids - 1) * self.compression

    def grids(self, width, height):
        """Token grids that are decoded in one step of a clip of this size."""
        return max(1, PIXELS // (self.compression * width * height))

    def numbers(self, width, height, frames, clip=False):
        """fp32 numbers a pixel that `frames` pictures at once need, or those of one clip.

        A few feature maps with two frames in front, as layers add them for what came before; a clip goes in steps,
        between which those are kept.
        """
        wide, last = max(self.decoder.channels[:2]) / self.patch**2, self.decoder.channels[0] / self.patch**2
        if not clip:
            return 6 * (1 + 2) * frames * wide
        grids = min(self.grids(width, height), 1 + frames // self.compression)
        return 6 * (grids * self.compression / self.patch + 2) * wide + 2 * (2 * self.decoder.blocks + 2) * last


class Encoder(nn.Module):
    """Frames [B,3,F,H,W] -> features [B,z,T,H/f,W/f]."""

    def __init__(self, cfg, ops, kw):
        super().__init__()
        half, self.patch = cfg.encoder, cfg.patch
        self.conv_in = conv(3 * cfg.patch**3, half.entry, ops, **kw)
        self.down = nn.ModuleList()
        c = half.entry
        for i, wanted in enumerate(half.channels):
            level = Level(half, i, c, ops, kw)
            c = wanted
            if i in half.space + half.time:
                level.downsample = Downsample(c, i in half.space, i in half.time, ops, **kw)
            self.down.append(level)
        self.mid = middle(c, ops, kw)
        self.norm_out = FrameNorm(c, ops, **kw)
        self.conv_out = conv(c, half.z, ops, **kw)

    def forward(self, x, past):
        if past.start:  # the first frame fills a cell of its own
            x = torch.cat([x[:, :, :1].expand(-1, -1, self.patch - 1, -1, -1), x], 2)
        for _ in range(int(math.log2(self.patch))):
            x = haar(x)
        x = self.conv_in(x, past)
        for layer in (*self.down, *self.mid.values()):
            x = layer(x, past)
        return self.conv_out(F.silu(self.norm_out(x)), past)


class Decoder(nn.Module):
    """Features [B,z,T,h,w] -> frames [B,3,F,h*f,w*f]."""

    def __init__(self, cfg, ops, kw):
        super().__init__()
        half, self.patch = cfg.decoder, cfg.patch
        self.conv_in = conv(half.z, half.entry, ops, **kw)
        self.mid = middle(half.entry, ops, kw)
        levels, c = [], half.entry
        for i in reversed(range(len(half.channels))):
            level = Level(half, i, c, ops, kw)
            c = half.channels[i]
            if i in half.space + half.time:
                level.upsample = Upsample(c, i in half.space, i in half.time, ops, **kw)
            levels.insert(0, level)
        self.up = nn.ModuleList(levels)
        self.norm_out = FrameNorm(c, ops, **kw)
        self.conv_out = conv(c, 3 * cfg.patch**3, ops, **kw)

    def forward(self, x, past):
        x = self.conv_in(x, past)
        for layer in (*self.mid.values(), *reversed(self.up)):
            x = layer(x, past)
        x = self.conv_out(F.silu(self.norm_out(x)), past)
        for _ in range(int(math.log2(self.patch))):
            x = unhaar(x)
        return x[:, :, self.patch - 1 :] if past.start else x


class DVCodec(nn.Module):
    """Encoder, codes and decoder for pictures (`encode`, `decode`) and for clips (`encode_clip`, `decode_clip`).

    Args:
        cfg: `DVConfig`.
        operations: namespace of layers (default plain torch without initialisation).
    """

    def __init__(self, cfg, operations=None, device=None, dtype=None):
        super().__init__()
        ops, kw = operations or plain_operations, {"device": device, "dtype": dtype}
        self.cfg, dims = cfg, len(cfg.levels)
        if cfg.encoder:
            self.encoder = Encoder(cfg, ops, kw)
            self.quant_conv = CausalConv(cfg.encoder.z, dims, (1, 1, 1), ops, **kw)
        self.post_quant_conv = CausalConv(dims, cfg.decoder.z, (1, 1, 1), ops, **kw)
        self.decoder = Decoder(cfg, ops, kw)

    @property
    def dtype(self):
        return self.post_quant_conv.conv3d.weight.dtype

    # --- codes ----------------------------------------------------------------------------------------------------

    def _levels(self, device):
        """int64 [D] each: levels of the values, steps from the middle one to the lowest, and what a step counts."""
        levels = torch.tensor(self.cfg.levels, device=device)
        return levels, levels // 2, torch.cat([levels.new_ones(1), levels[:-1].cumprod(0)])

    def values(self, codes):
        """Codes int64 [..] -> their values fp32 [.., D], from -1 to 1."""
        levels, middle, count = self._levels(codes.device)
        return (codes[..., None] // count % levels - middle) / middle

    def rounded(self, values):
        """Values fp32 [.., D] -> codes int64 [..] of the nearest levels."""
        _, middle, count = self._levels(values.device)
        return (((values * middle).round().long() + middle) * count).sum(-1)

    def nearest(self, z):
        """Features [B,D,T,h,w] -> codes int64 [B,T,h,w], rounded in fp32."""
        levels, middle, _ = self._levels(z.device)
        half = (levels - 1) * (1 + BOUND) / 2
        offset = (levels % 2 == 0) / 2  # an even number of levels has no middle one
        z = (z.movedim(1, -1).float() + (offset / half).atanh()).tanh() * half - offset
        return self.rounded(z / middle)

    # --- pictures and clips -----------------------------------------------------------------------------------------

    def features(self, video, past=None):
        """Frames [B,3,F,H,W] in the codec's range -> features before rounding [B,D,T,h,w]."""
        past = past or Past()
        return self.quant_conv(self.encoder(video, past), past)

    def encode(self, frames):
        """Pictures [B,H,W,3] in 0..1, each by itself -> codes int64 [B,H/f,W/f].

        Raises ValueError when the sides are no multiples of the codec's factor, or the codec has no encoder.
        """
        return self.nearest(self.features(self._video(frames[:, None])))[:, 0]

    def encode_clip(self, frames, grids=0):
        """Frames [F,H,W,3] in 0..1 of one clip -> codes int64 [T,h,w] with cfg.frames(T) = F.

        Args:
            grids: token grids a step, 0: by the size of the frames.

        Raises ValueError as `encode` does, and for a number of frames that no clip has.
        """
        step = self.cfg.compression
        if len(frames) % step != 1:
            raise ValueError(f"a clip of {len(frames)} frames is no clip of this model: it needs {step} times k + 1")
        step *= grids or self.cfg.grids(frames.shape[2], frames.shape[1])
        ends = [0, *range(1 + step, len(frames), step), len(frames)]  # the first frame goes with the first step
        past = Past()
        parts = past.steps([frames[a:b] for a, b in zip(ends, ends[1:])])
        return torch.cat([self.nearest(self.features(self._video(part[None]), past))[0] for part in parts])

    def _video(self, frames):
        """Frames [B,F,H,W,3] in 0..1 -> [B,3,F,H,W] in the codec's range, checked."""
        height, width = frames.shape[2:4]
        if not self.cfg.encoder:
            raise ValueError("this model's video tokenizer has no encoder in its files: it can draw, but not read")
        if height % self.cfg.factor or width % self.cfg.factor:
            raise ValueError(f"a picture of {width}x{height} does not divide into {self.cfg.factor}-pixel tokens")
        low, high = self.cfg.range
        return frames.movedim(-1, 1).to(self.dtype) * (high - low) + low

    def decode_raw(self, codes, past=None):
        """Codes of pictures [B,h,w] -> [B,3,H,W], or of clips [B,T,h,w] -> [B,3,F,H,W]; codec's range, not clamped."""
        if codes.dim() == 3:
            return self.decode_raw(codes[:, None])[:, :, 0]
        past = past or Past()
        z = self.values(codes).movedim(-1, 1).to(self.dtype)
        return self.decoder(self.post_quant_conv(z, past), past)

    def _frames(self, pixels):
        """[3,..,H,W] in the codec's range -> [..,H,W,3] in 0..1."""
        low, high = self.cfg.range
        return ((pixels.float().movedim(0, -1) - low) / (high - low)).clamp(0, 1)

    def decode(self, codes):
        """Codes int64 [B,h,w] of pictures, each by itself -> float32 [B,H,W,3] in 0..1."""
        return self._frames(self.decode_raw(codes).transpose(0, 1))

    def decode_steps(self, codes, grids=0):
        """Codes int64 [T,h,w] of one clip -> its frames [n,H,W,3], step by step (a generator).

        Args:
            grids: token grids a step, 0: by the size of the frames. Memory grows with it, not with the clip.
        """
        grids = grids or self.cfg.grids(codes.shape[2] * self.cfg.factor, codes.shape[1] * self.cfg.factor)
        past = Past()
        for part in past.steps(codes.split(grids)):
            yield self._frames(self.decode_raw(part[None], past)[0])

    def decode_clip(self, codes, grids=0):
        """Codes int64 [T,h,w] of one clip -> frames float32 [cfg.frames(T),H,W,3] in 0..1; see `decode_steps`."""
        return torch.cat(list(self.decode_steps(codes, grids)))


DVConfig.network = DVCodec  # what `ModelFiles.build` makes of a configuration
