"""Emu3's image tokenizer (arXiv 2409.18869): a MoVQ codec whose codes stand for four frames each.

The 2-D encoder and decoder of `conv2d` work frame by frame; between them and the codebook lies a thin stack of causal
convolutions in time. A still goes in as four equal frames, and the first of the four that come out is the picture.
Every token grid is a world of its own, as in the authors' example: a clip is encoded and decoded four frames at a time.

Names are those of the original release; `hub_name` tells what transformers calls them.
"""

import re
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from .. import operations as plain_operations
from ..errors import UserError
from .conv2d import ConvCodec, ConvCodecConfig, Decoder, Encoder

TIME_CONV = "decoder.time_conv.0.conv.conv.weight"  # a name that only codecs of this kind have
COUNTERS = r"(?:en|de)coder\.time_res_stack\.\d+\.norm\d\.num_batches_tracked$"  # of training
# The release's names -> transformers', one after the other.
HUB = (
    (r"\.mid\.attn_1\.norm\.", ".middle_block.attn_norm."),
    (r"\.mid\.", ".middle_block."),
    (r"\.(down|up)\.(\d+)\.", r".\1_block.\1.\2."),
    (r"\.attn\.(\d+)\.norm\.", r".attn_norms.\1."),
    (r"\.(attn_1|attn\.\d+)\.([qkv])\.", r".\1.\2_proj."),
    (r"\.(attn_1|attn\.\d+)\.proj_out\.", r".\1.out_proj."),
)


def hub_name(name):
    """Name of a tensor in the original release -> in transformers' layout."""
    for pattern, new in HUB:
        name = re.sub(pattern, new, name)
    return name


@dataclass(frozen=True)
class MoVQ3dConfig(ConvCodecConfig):
    """Shape of a codec with a stack in time."""

    time_levels: int = 2  # halvings of the frame rate
    time_blocks: int = 2  # residual blocks of either stack

    @property
    def compression(self):
        """Frames that a token grid of a clip stands for."""
        return 2**self.time_levels

    def frames(self, grids):
        """Pictures that come out of `grids` token grids: one grid alone is a still."""
        return 1 if grids == 1 else grids * self.compression


class CausalConv3d(nn.Module):
    """Convolution over [B,C,T,h,w] that sees earlier frames only, zeros before the first."""

    def __init__(self, cin, cout, ops, kernel=(3, 3, 3), stride=1, **kw):
        super().__init__()
        self.conv = ops.Conv3d(cin, cout, kernel, stride=(stride, 1, 1), **kw)
        around = (kernel[2] // 2,) * 2 + (kernel[1] // 2,) * 2
        self.padding = (*around, 2, 0)  # two frames in front for every kernel, as it was trained

    def forward(self, x):
        return self.conv(F.pad(x, self.padding))


class TimeStep(nn.Module):
    """One step of the stack that halves or doubles the frame rate: its convolution lies one name deeper."""

    def __init__(self, channels, ops, **kw):
        super().__init__()
        self.conv = CausalConv3d(channels, channels, ops, **kw)

    def forward(self, x):
        return F.silu(self.conv(x))


class RunningNorm(nn.Module):
    """Batch norm as training left it: by the file's running mean and variance."""

    def __init__(self, channels, **kw):
        super().__init__()
        for name in ("weight", "bias", "running_mean", "running_var"):
            setattr(self, name, plain_operations.empty_parameter(channels, **kw))

    def forward(self, x):
        names = (self.running_mean, self.running_var, self.weight, self.bias)
        return F.batch_norm(x, *(plain_operations.cast_to(t, x) for t in names), training=False, eps=1e-5)


class TimeBlock(nn.Module):
    """norm, swish, conv in time and space, twice, around a shortcut."""

    def __init__(self, channels, ops, **kw):
        super().__init__()
        self.norm1 = RunningNorm(channels, **kw)
        self.conv1 = CausalConv3d(channels, channels, ops, **kw)
        self.norm2 = RunningNorm(channels, **kw)
        self.conv2 = CausalConv3d(channels, channels, ops, **kw)

    def forward(self, x):
        h = self.conv1(F.silu(self.norm1(x)))
        return x + self.conv2(F.silu(self.norm2(h)))


def _blocks(cfg, ops, kw):
    return nn.Sequential(*(TimeBlock(cfg.z_channels, ops, **kw) for _ in range(cfg.time_blocks)))


class TimeEncoder(Encoder):
    """The 2-D encoder, and the stack behind it that makes one grid of `compression` frames."""

    def __init__(self, cfg, ops, **kw):
        super().__init__(cfg, ops, **kw)
        down = {"kernel": (4, 3, 3), "stride": 2, **kw}
        self.time_conv = nn.ModuleList(TimeStep(cfg.z_channels, ops, **down) for _ in range(cfg.time_levels))
        self.time_res_stack = _blocks(cfg, ops, kw)

    def shrink(self, h):
        """Features of frames [B,z,F,h,w] -> of grids [B,z,F/compression,h,w]."""
        for step in self.time_conv:
            h = step(h)
        return self.time_res_stack(h)


class TimeDecoder(Decoder):
    """The 2-D decoder, and the stack before it that makes `compression` frames of one grid."""

    def __init__(self, cfg, ops, **kw):
        super().__init__(cfg, ops, **kw)
        self.time_res_stack = _blocks(cfg, ops, kw)
        self.time_conv = nn.ModuleList(TimeStep(cfg.z_channels, ops, **kw) for _ in range(cfg.time_levels))

    def stretch(self, h):
        """Features of grids [B,z,T,h,w] -> of frames [B,z,T*compression,h,w]."""
        h = self.time_res_stack(h)
        for step in self.time_conv:
            h = step(h.repeat_interleave(2, 2))
        return h


class MoVQ3d(ConvCodec):
    """`ConvCodec` with the stacks in time; `encode` and `decode` are for stills."""

    encoder_type, decoder_type = TimeEncoder, TimeDecoder

    @staticmethod
    def pointwise(cin, cout, ops, kw):
        return CausalConv3d(cin, cout, ops, kernel=(3, 1, 1), **kw)

    def features(self, pictures):
        """Pictures [B,3,H,W] in the codec's range -> features before quantisation [B,code_dim,h,w]."""
        h = self.encoder(pictures)[:, :, None]
        return self._grids(h.expand(-1, -1, self.cfg.compression, -1, -1))

    def _grids(self, h):
        """Features of `compression` frames each [B,z,F,h,w] -> [B,code_dim,h,w]."""
        return self.quant_conv(self.encoder.shrink(h)).squeeze(2)

    def encode_clip(self, frames):
        """Frames [F,H,W,3] in 0..1 of one clip -> codes int64 [T,h,w] with cfg.frames(T) = F.

        Raises:
            UserError: so many frames do not divide into grids.
        """
        each = self.cfg.compression
        if len(frames) == 1:
            return self.encode(frames)
        if len(frames) % each or len(frames) == each:
            raise UserError(
                f"{len(frames)} frames do not divide into this image tokenizer's tokens: give 1 frame, or a multiple "
                f"of {each} from {2 * each} on"
            )
        h = torch.cat([self.encoder(picture[None]) for picture in self.pictures(frames)])
        return self.nearest(self._grids(h.unflatten(0, (-1, each)).transpose(1, 2)))

    def _stretched(self, codes):
        """Codes [B,h,w] -> what the 2-D decoder reads, and the codes that modulate it, [B,C,compression,h,w] each."""
        zq = self._rows(self.quantize["embedding"](codes)).permute(0, 3, 1, 2)[:, :, None].to(self.dtype)
        return self.decoder.stretch(torch.cat([self.post_quant_conv(zq), zq])).chunk(2)

    def decode_raw(self, codes):
        """Codes [B,h,w] of stills -> pictures [B,3,H,W] in the codec's own range, not clamped."""
        return self.decoder(*(part[:, :, 0] for part in self._stretched(codes)))

    def decode_raw_frames(self, codes):
        """Codes [B,h,w] -> the frames that each grid stands for [B,compression,3,H,W], as `decode_raw`."""
        parts = zip(*(part.unbind(2) for part in self._stretched(codes)))
        return torch.stack([self.decoder(h, zq) for h, zq in parts], 1)

    def decode_clip(self, codes):
        """Codes int64 [T,h,w] of one clip -> frames float32 [cfg.frames(T),H,W,3] in 0..1."""
        if len(codes) == 1:
            return self.decode(codes)
        frames = (self.decode_raw_frames(grid[None])[0] for grid in codes)
        return torch.cat([self.pixels(raw) for raw in frames])


MoVQ3dConfig.network = MoVQ3d
