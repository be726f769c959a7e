"""Reading the shape of Cosmos' discrete video codec off its tensors; encoder and decoder may lie in two files."""

import re
from dataclasses import replace

import torch

from ..checkpoint import check_keys
from ..errors import UserError
from ..models.parts import Ref
from .dv3d import DVConfig, DVHalf
from .layouts import CodecLayout

FIRST, QUANTISER = "decoder.conv_in.0.conv3d.weight", "post_quant_conv.conv3d.weight"
ENCODER = "encoder.conv_in.0.conv3d.weight"
OWN = ("encoder.", "quant_conv.")  # names of the encoder's side
LEVELS = ("inv_quant.quantizer._levels", "quantizer._levels")
# Tables that are computed here, relative to the codec's prefix.
USELESS = (r"inv_quant\.", r"quantizer\.", r"(en|de)coder\.(un)?patcher3d\.")


def find_dv(source):
    """Prefix of a discrete video codec's keys in a `Source` ("" or such as "vq."), or None when it holds no decoder."""
    for key in source.keys():
        prefix = key.removesuffix(FIRST)
        if prefix != key and prefix + QUANTISER in source.keys():
            # the continuous tokenizers have the same names, and wider latents
            return prefix if source.shape(prefix + QUANTISER)[1] == len(read_levels(source, prefix)) else None
    return None


def find_dv_encoder(source):
    """Prefix of the keys of such a codec's encoder in a `Source`, or None."""
    return next((key.removesuffix(ENCODER) for key in source.keys() if key.endswith(ENCODER)), None)


def read_levels(source, prefix=""):
    """Levels of the codes' values: the file's table, or those of the release."""
    table = next((prefix + name for name in LEVELS if prefix + name in source.keys()), None)
    return DVConfig.levels if table is None else tuple(int(n) for n in source.read(table))


def dv_layout(source, prefix="", encoder=None):
    """Derive configuration and names of a codec.

    Args:
        source: `Source` of the decoder. prefix: in front of its keys, with its dot.
        encoder: `Source` of the encoder; None: it is in the decoder's file, or nowhere.

    Returns:
        `CodecLayout`; its configuration has an encoder when one is there that is complete and fits.

    Raises:
        UserError: tensors of the decoder are missing, by their names in the file.
    """
    draws = _Half(source, prefix, "decoder.up", "upsample", space="conv2", time="conv1")
    z, dims = draws.shape("post_quant_conv.conv3d")[:2]
    numbers, levels = draws.shape("decoder.conv_out.0.conv3d")[0], read_levels(source, prefix)
    patch = round((numbers / 3) ** (1 / 3))
    if 3 * patch**3 != numbers or patch & (patch - 1) or len(levels) != dims:
        raise UserError(
            f"the video tokenizer in {source.root} is of another kind: its codes have {dims} values where "
            f"{len(levels)} are expected, and it draws {numbers} numbers a cell where three cubes of 2, 4 or 8 are"
        )
    config = DVConfig(draws.read(z), None, levels, patch)
    config, refs = _with_encoder(config, encoder or source, prefix if encoder is None else find_dv_encoder(encoder))
    wanted = [name for name in _shapes(config) if not name.startswith(OWN)]
    check_keys(draws.keys, wanted, (r".",), where=f"the video tokenizer '{source.files[0]}'")
    refs |= {name: Ref(source, prefix + name) for name in wanted}
    useless = USELESS if config.encoder and encoder is None else USELESS + OWN
    return CodecLayout(config, refs, tuple(re.escape(prefix) + tail for tail in useless))


def _with_encoder(config, source, prefix):
    """(configuration with the encoder in `source`, its references); as it was and none when it is not all there."""
    reads = _Half(source, prefix or "", "encoder.down", "downsample", space="conv1", time="conv2")
    try:
        half = reads.read(reads.shape("encoder.conv_out.1.conv3d")[0])
    except UserError:
        return config, {}
    both = replace(config, encoder=half)
    wanted = {name: shape for name, shape in _shapes(both).items() if name.startswith(OWN)}
    fits = all(name in reads.keys and source.shape(reads.prefix + name) == shape for name, shape in wanted.items())
    same = (len(half.space), len(half.time)) == (len(config.decoder.space), len(config.decoder.time))
    if not (fits and same):
        return config, {}
    return both, {name: Ref(source, reads.prefix + name) for name in wanted}


def _shapes(config):
    """{name: shape} of the network of this configuration."""
    with torch.device("meta"):
        return {name: tuple(t.shape) for name, t in config.network(config).state_dict().items()}


class _Half:
    """Encoder or decoder in one source.

    Args:
        stem: of its levels. change: name of a level's resampling. space, time: its layers that resample those.
    """

    def __init__(self, source, prefix, stem, change, space, time):
        self.source, self.prefix = source, prefix
        self.keys = {key.removeprefix(prefix) for key in source.keys() if key.startswith(prefix)}
        self.stem, self.change, self.space, self.time = stem, change, space, time

    def shape(self, layer):
        """Shape of a layer's weight.

        Raises:
            UserError: the file lacks it.
        """
        name = self.prefix + layer + ".weight"
        if name not in self.source.keys():
            check_keys((), [name], where=f"the video tokenizer '{self.source.files[0]}'")
        return tuple(self.source.shape(name))

    def _numbers(self, pattern):
        """Sorted numbers that a pattern behind the stem catches among the keys."""
        matches = (re.match(re.escape(self.stem) + pattern, key) for key in self.keys)
        return sorted({int(match[1]) for match in matches if match})

    def read(self, z):
        """`DVHalf` with `z` channels towards the quantiser.

        Raises:
            UserError: weights are missing.
        """
        levels = self._numbers(r"\.(\d+)\.block\.0\.")
        return DVHalf(
            channels=tuple(self.shape(f"{self.stem}.{i}.block.0.conv1.0.conv3d")[0] for i in levels),
            z=z,
            blocks=len(self._numbers(r"\.\d+\.block\.(\d+)\.")),
            entry=self.shape(self.stem.partition(".")[0] + ".conv_in.0.conv3d")[0],
            space=tuple(self._numbers(rf"\.(\d+)\.{self.change}\.{self.space}\.")),
            time=tuple(self._numbers(rf"\.(\d+)\.{self.change}\.{self.time}\.")),
            attn=tuple(self._numbers(r"\.(\d+)\.attn\.")),
        )
