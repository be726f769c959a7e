"""The KL autoencoder behind continuous models (KL-16 of MAR): latents are vectors, not entries of a codebook.

Encoder and decoder are those of the 2-D VQ codecs; the encoder gives a mean and a log variance.
"""

import math
import re
from dataclasses import dataclass, replace

import torch
from torch import nn

from .. import operations as plain_operations
from ..checkpoint import check_keys
from ..errors import UserError
from ..models.parts import Ref
from .conv2d import ConvCodecConfig, Decoder, Encoder

SCALE = 0.2325  # latents of KL-16 times this have unit variance on ImageNet, and MAR draws those
FIRST, LAST = "decoder.conv_in.weight", "post_quant_conv.weight"
CODEBOOK = "quantize.embedding.weight"
TRAINED = r"loss\."  # what trainers leave beside the codec
ENCODER = r"(?:encoder|quant_conv)\."


@dataclass(frozen=True)
class KLConfig:
    """Shape of a KL codec.

    Attributes:
        embed: channels of a latent. z_channels: channels between the 1x1 convolutions and the networks.
        encoder_attn: levels of the encoder with attention after every block; the decoder's are `attn_levels`.
        Others: see `ConvCodecConfig`.
    """

    embed: int
    z_channels: int
    ch: int = 128
    ch_mult: tuple = (1, 1, 2, 2, 4)
    encoder_blocks: int = 2
    decoder_blocks: int = 3
    attn_levels: tuple = ()
    encoder_attn: tuple = ()
    groups: int = 32
    encoder: bool = True
    scale: float = SCALE
    range: tuple = (-1.0, 1.0)

    codes = 0  # it has no codebook

    @property
    def factor(self):
        """Pixels a latent in each direction."""
        return 2 ** (len(self.ch_mult) - 1)

    def conv(self, encoder):
        """`ConvCodecConfig` of one of the two networks."""
        return ConvCodecConfig(
            codes=0,
            code_dim=self.embed,
            z_channels=2 * self.z_channels if encoder else self.z_channels,
            ch=self.ch,
            ch_mult=self.ch_mult,
            encoder_blocks=self.encoder_blocks,
            decoder_blocks=self.decoder_blocks,
            attn_levels=self.encoder_attn if encoder else self.attn_levels,
            groups=self.groups,
        )


class KLCodec(nn.Module):
    """`decode` turns scaled latents into pictures, `encode` pictures into the mean of their latents.

    Args:
        cfg: `KLConfig`. operations: namespace of layers (default plain torch without initialisation).
    """

    def __init__(self, cfg, operations=None, device=None, dtype=None):
        super().__init__()
        ops, kw = operations or plain_operations, {"device": device, "dtype": dtype}
        self.cfg = cfg
        if cfg.encoder:
            self.encoder = Encoder(cfg.conv(True), ops, **kw)
            self.quant_conv = ops.Conv2d(2 * cfg.z_channels, 2 * cfg.embed, 1, **kw)
        self.post_quant_conv = ops.Conv2d(cfg.embed, cfg.z_channels, 1, **kw)
        self.decoder = Decoder(cfg.conv(False), ops, **kw)

    @property
    def dtype(self):
        return self.decoder.conv_in.weight.dtype

    def encode(self, frames):
        """Frames [B,H,W,3] in 0..1 -> scaled latents fp32 [B,embed,H/f,W/f], the mean of their law.

        Raises:
            UserError: the files hold no encoder, or the sides are no multiples of the codec's factor.
        """
        if not self.cfg.encoder:
            raise UserError("the files of this model's picture codec hold no encoder: it draws, but reads no pictures")
        f = self.cfg.factor
        if frames.shape[1] % f or frames.shape[2] % f:
            raise UserError(f"a picture of {frames.shape[2]}x{frames.shape[1]} does not divide into {f}-pixel latents")
        low, high = self.cfg.range
        x = frames.permute(0, 3, 1, 2).to(self.dtype) * (high - low) + low
        return self.quant_conv(self.encoder(x))[:, : self.cfg.embed].float() * self.cfg.scale

    def decode_raw(self, latents):
        """Latents of the codec itself [B,embed,h,w], not scaled -> picture [B,3,H,W], not clamped."""
        return self.decoder(self.post_quant_conv(latents.to(self.dtype)))

    def decode(self, latents):
        """Scaled latents [B,embed,h,w] -> frames float32 [B,H,W,3] in 0..1."""
        low, high = self.cfg.range
        pixels = self.decode_raw(latents / self.cfg.scale).float().permute(0, 2, 3, 1)
        return ((pixels - low) / (high - low)).clamp(0, 1)


KLConfig.network = KLCodec  # what `ModelFiles.build` makes of a configuration


def find_kl(source):
    """Prefix of a KL codec's keys in a `Source`, or None."""
    found = (key.removesuffix(FIRST) for key in source.keys() if key.endswith(FIRST))
    fits = (p for p in found if p + LAST in source.keys() and p + CODEBOOK not in source.keys())
    return min(fits, key=len, default=None)


def kl_layout(source, prefix=""):
    """(`KLConfig`, {name inside `KLCodec`: `Ref`}) of the codec under a prefix, read off names and shapes.

    Raises:
        UserError: tensors of the decoder are missing or left over, by their names in the file.
    """
    names = {key.removeprefix(prefix) for key in source.keys() if key.startswith(prefix)}
    where = f"'{source.files[0]}'"

    def shape(name):
        check_keys([prefix + name] if name in names else (), [prefix + name], where=where)
        return source.shape(prefix + name)

    def last(pattern):
        found = (re.match(pattern, name) for name in names)
        return max((int(match[1]) for match in found if match), default=-1)

    def attn(part):
        return tuple(level for level in range(levels) if f"{part}.{level}.attn.0.norm.weight" in names)

    levels = 1 + last(r"decoder\.up\.(\d+)\.")
    if levels == 0:
        raise UserError(f"{where} holds a picture codec without decoder levels: it is incomplete or of another kind")
    channels = [shape(f"decoder.up.{level}.block.0.conv1.weight")[0] for level in range(levels)]
    config = KLConfig(
        embed=shape(LAST)[1],
        z_channels=shape(LAST)[0],
        encoder_blocks=1 + last(r"encoder\.down\.\d+\.block\.(\d+)\."),
        decoder_blocks=1 + last(r"decoder\.up\.\d+\.block\.(\d+)\."),
        attn_levels=attn("decoder.up"),
        encoder_attn=attn("encoder.down"),
    )
    config = _with_encoder(config, channels, names, source, prefix)
    wanted = [prefix + name for name in _shapes(config)]
    useless = [re.escape(prefix) + TRAINED] + ([] if config.encoder else [re.escape(prefix) + ENCODER])
    check_keys([prefix + name for name in names], wanted, useless, where)
    # some files keep 1x1 convolutions as linear layers
    refs = {name: Ref(source, prefix + name, dims=len(shape)) for name, shape in _shapes(config).items()}
    return config, refs


def _with_encoder(config, channels, names, source, prefix):
    """The configuration with channel counts, and with its encoder where the file holds one that fits."""
    first = "encoder.conv_in.weight"
    ch = source.shape(prefix + first)[0] if first in names else 0
    if ch and not any(c % ch for c in channels):
        full = replace(config, ch=ch, ch_mult=tuple(c // ch for c in channels), encoder=True)
        if all(name in names for name in _shapes(full) if re.match(ENCODER, name)):
            return full
    ch = math.gcd(*channels)
    return replace(config, ch=ch, ch_mult=tuple(c // ch for c in channels), encoder=False)


def _shapes(config):
    """{name: shape} of a `KLCodec` of this configuration."""
    with torch.device("meta"):
        return {name: tuple(t.shape) for name, t in KLCodec(config).state_dict().items()}
