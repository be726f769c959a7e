"""Reading a codec's shape off the names and shapes of its tensors, for every public layout of 2-D VQ codecs.

Levels are numbered from the highest resolution in `decoder.up.L` of taming and Chameleon, from the lowest in
`decoder.up.L` of transformers' Janus and in `decoder.conv_blocks.L` of VQ-16; `ConvCodec` counts from the highest.
"""

import math
import re
from dataclasses import dataclass, replace

import torch

from ..checkpoint import check_keys
from ..errors import UserError
from ..models.parts import Ref
from .conv2d import ConvCodecConfig
from .movq3d import COUNTERS, TIME_CONV, MoVQ3dConfig, hub_name

FIRST = "decoder.conv_in.weight"  # every layout has it, and no other network of a release does
# What trainers leave beside the codec, relative to its prefix.
USELESS = (r"loss\.", r"(model_)?ema(_\w+)?\.", r"quantize\.codebook_used$", COUNTERS)
MIDDLE = {"block_1": "0", "attn_1": "1", "block_2": "2"}  # VQ-16 numbers the middle


@dataclass(frozen=True)
class CodecLayout:
    """A codec as it lies in a file.

    Attributes:
        config: `ConvCodecConfig`; its `encoder` is False when the file holds no complete encoder.
        refs: {name inside `ConvCodec`: `Ref`}.
        ignored: regular expressions of the file's keys under the prefix that decoding does not need.
    """

    config: ConvCodecConfig
    refs: dict
    ignored: tuple


def find_codec(source):
    """Prefix of the codec's keys in a `Source` ("" or e.g. "model.vqmodel."), or None when it holds no decoder."""
    found = (key.removesuffix(FIRST) for key in source.keys() if key.endswith(FIRST))
    return min((p for p in found if p + "quantize.embedding.weight" in source.keys()), key=len, default=None)


def codec_layout(source, prefix="", **extra):
    """Derive configuration and names of a 2-D VQ codec.

    Args:
        source: `Source`, or anything with keys() and shape(key). prefix: in front of every key, with its dot.
        extra: fields of `ConvCodecConfig` that no tensor tells (l2_codebook, range, groups).

    Returns:
        `CodecLayout`.

    Raises:
        UserError: tensors of the decoder are missing, by their names in the file.
    """
    reader = _Reader(source, prefix)
    config = reader.config(extra)
    if not config.encoder:
        return CodecLayout(config, reader.refs(config), _ignored(prefix, *USELESS, r"encoder\.", r"quant_conv\."))
    return CodecLayout(config, reader.refs(config), _ignored(prefix, *USELESS))


def _ignored(prefix, *tails):
    return tuple(re.escape(prefix) + tail for tail in tails)


def _shapes(config):
    """{name: shape} of the network of this configuration."""
    with torch.device("meta"):
        return {name: tuple(t.shape) for name, t in config.network(config).state_dict().items()}


class _Reader:
    """One codec in one source: its layout, and the file's name for each of ours."""

    def __init__(self, source, prefix):
        self.source, self.prefix = source, prefix
        self.keys = {key.removeprefix(prefix) for key in source.keys() if key.startswith(prefix)}
        self.vq16 = any(key.startswith("decoder.conv_blocks.") for key in self.keys)
        self.hub3d = any(key.startswith("decoder.middle_block.") for key in self.keys)  # transformers' Emu3
        self.levels = 1 + self._last(r"decoder\.(?:up|up_block\.up|conv_blocks)\.(\d+)\.")
        if self.levels == 0:
            raise UserError(f"the image tokenizer at {prefix or 'the top level'} has no decoder levels: it is "
                            "incomplete or of another kind")
        self.lowest_first = self.vq16 or "decoder.up.0.upsample.conv.weight" in self.keys

    def _last(self, pattern):
        """Largest number that a pattern catches among the keys, -1 without any."""
        found = (re.match(pattern, key) for key in self.keys)
        return max((int(match[1]) for match in found if match), default=-1)

    def file_name(self, name):
        """Our name -> the file's, without prefix."""
        if self.hub3d:
            return hub_name(name)
        level = re.match(r"(encoder\.down|decoder\.up)\.(\d+)\.(.*)", name)
        if level:
            stem, number, tail = level[1], int(level[2]), level[3]
            if stem == "decoder.up" and self.lowest_first:
                number = self.levels - 1 - number
            if self.vq16:
                stem, tail = stem.split(".")[0] + ".conv_blocks", re.sub(r"^block\.", "res.", tail)
            return f"{stem}.{number}.{tail}"
        if self.vq16:
            return re.sub(r"\.mid\.(\w+)\.", lambda match: f".mid.{MIDDLE[match[1]]}.", name)
        return name

    def has(self, name):
        return self.file_name(name) in self.keys

    def shape(self, name):
        """Shape of one of our names, as stored.

        Raises:
            UserError: the file lacks it.
        """
        if not self.has(name):
            check_keys((), [self.prefix + self.file_name(name)], where="the image tokenizer's file")
        return tuple(self.source.shape(self.prefix + self.file_name(name)))

    def config(self, extra):
        """The configuration that the shapes tell."""
        decoder_in = self.shape("decoder.conv_in.weight")
        codes, code_dim = self.shape("quantize.embedding.weight")
        channels, attn, below = [], [], decoder_in[0]
        for level in reversed(range(self.levels)):
            first = f"decoder.up.{level}.block.0.conv1.weight"
            below = self.shape(first)[0] if self.has(first) else below
            channels.insert(0, below)
            if self.has(f"decoder.up.{level}.attn.0.norm.weight") or self.has(
                f"decoder.up.{level}.attn.0.norm.norm_layer.weight"
            ):
                attn.insert(0, level)
        kind, extra = ConvCodecConfig, dict(extra)
        if TIME_CONV in self.keys:
            kind = MoVQ3dConfig
            extra["time_levels"] = 1 + self._last(r"decoder\.time_conv\.(\d+)\.")
            extra["time_blocks"] = 1 + self._last(r"decoder\.time_res_stack\.(\d+)\.")
        config = kind(
            codes=codes,
            code_dim=code_dim,
            z_channels=decoder_in[1],
            encoder_blocks=1 + self._last(r"encoder\.(?:\w+\.)?(?:down|conv_blocks)\.\d+\.(?:block|res)\.(\d+)\."),
            decoder_blocks=1 + self._last(r"decoder\.(?:\w+\.)?(?:up|conv_blocks)\.\d+\.(?:block|res)\.(\d+)\."),
            attn_levels=tuple(attn),
            spatial_norm=self.has("decoder.norm_out.conv_y.weight"),
            post_quant=self.has("post_quant_conv.weight") or self.has("post_quant_conv.conv.weight"),
            **extra,
        )
        return self._with_encoder(config, channels) or _scaled(config, math.gcd(*channels), channels, False)

    def _with_encoder(self, config, channels):
        """The configuration with its encoder, or None when the file holds none, a part of one, or one that differs."""
        if not self.has("encoder.conv_in.weight"):
            return None
        ch = self.shape("encoder.conv_in.weight")[0]
        if any(c % ch for c in channels):
            return None
        config = _scaled(config, ch, channels, True)
        wanted = {n: s for n, s in _shapes(config).items() if n.startswith(("encoder.", "quant_conv."))}
        fits = all(self.has(name) and self._ref(name, shape).shape == shape for name, shape in wanted.items())
        return config if fits else None

    def _ref(self, name, shape):
        # some files keep 1x1 convolutions as linear layers
        return Ref(self.source, self.prefix + self.file_name(name), dims=len(shape))

    def refs(self, config):
        """{our name: `Ref`}.

        Raises:
            UserError: the file lacks some.
        """
        shapes = _shapes(config)
        wanted = [self.file_name(name) for name in shapes]
        check_keys(
            [self.prefix + name for name in wanted if name in self.keys],
            [self.prefix + name for name in wanted],
            where="the image tokenizer's file",
        )
        return {name: self._ref(name, shape) for name, shape in shapes.items()}


def _scaled(config, ch, channels, encoder):
    return replace(config, ch=ch, ch_mult=tuple(c // ch for c in channels), encoder=encoder)
