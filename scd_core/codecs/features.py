"""The features of a VQ codec as continuous tokens: what its encoder says before the codebook rounds it.

A token stands for a square of cells. Their features lie close to a space of fewer dimensions, and the token is a place
in it: features = mean + basis @ token. Decoding is that sum and the VQ codec's own decoder.
"""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import nn

from .. import operations as plain_operations
from ..operations import cast_to, empty_parameter
from .conv2d import ConvCodecConfig, Decoder


@dataclass(frozen=True)
class FeatureConfig:
    """Shape of the codec.

    Attributes:
        cells: `ConvCodecConfig` of the VQ codec. embed: numbers of a token. patch: cells a token in each direction.
    """

    cells: ConvCodecConfig
    embed: int
    patch: int

    codes = 0  # its codebook is not used
    encoder = False

    @property
    def factor(self):
        """Pixels a token in each direction."""
        return self.cells.factor * self.patch

    @property
    def range(self):
        return self.cells.range

    @property
    def ch(self):
        return self.cells.ch

    @property
    def ch_mult(self):
        return self.cells.ch_mult


class FeatureCodec(nn.Module):
    """`decode` turns tokens into pictures.

    Args:
        cfg: `FeatureConfig`. operations: namespace of layers (default plain torch without initialisation).
    """

    def __init__(self, cfg, operations=None, device=None, dtype=None):
        super().__init__()
        ops, kw, cells = operations or plain_operations, {"device": device, "dtype": dtype}, cfg.cells
        self.cfg = cfg
        numbers = cells.code_dim * cfg.patch**2
        self.mean = empty_parameter(numbers, **kw)
        self.basis = empty_parameter(numbers, cfg.embed, **kw)
        self.post_quant_conv = ops.Conv2d(cells.code_dim, cells.z_channels, 1, **kw)
        self.decoder = Decoder(cells, ops, **kw)

    @property
    def dtype(self):
        return self.decoder.conv_in.weight.dtype

    def features(self, tokens):
        """Tokens [B,embed,h,w] -> features of the cells [B,code_dim,h*patch,w*patch]."""
        x = tokens.to(self.dtype).permute(0, 2, 3, 1)
        x = F.linear(x, cast_to(self.basis, x), cast_to(self.mean, x))
        return F.pixel_shuffle(x.permute(0, 3, 1, 2), self.cfg.patch)

    def decode(self, tokens):
        """Tokens [B,embed,h,w] -> frames float32 [B,H,W,3] in 0..1."""
        low, high = self.cfg.range
        pixels = self.decoder(self.post_quant_conv(self.features(tokens))).float().permute(0, 2, 3, 1)
        return ((pixels - low) / (high - low)).clamp(0, 1)


FeatureConfig.network = FeatureCodec  # what `ModelFiles.build` makes of a configuration
