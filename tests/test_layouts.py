"""Codecs in every public layout, renamed here from ours, give back the configuration and the very tensors."""

import re

import pytest
import torch
from scd_pack.scd_core.checkpoint import check_keys
from scd_pack.scd_core.codecs.conv2d import ConvCodec, ConvCodecConfig
from scd_pack.scd_core.codecs.layouts import codec_layout, find_codec
from scd_pack.scd_core.errors import UserError

CONFIG = ConvCodecConfig(
    codes=20,
    code_dim=4,
    z_channels=6,
    ch=4,
    ch_mult=(1, 3, 2),
    encoder_blocks=1,
    decoder_blocks=2,
    attn_levels=(2,),
    groups=4,
)
MIDDLE = {"block_1": "0", "attn_1": "1", "block_2": "2"}
JUNK = {
    "loss.discriminator.main.0.weight": (4, 3, 4, 4),
    "quantize.codebook_used": (7,),
    "ema.decay": (),
    "ema_decoder.num_updates": (),
    "model_ema.decay": (),
}


class Files:
    """Tensors by name, as a source shows them."""

    def __init__(self, tensors):
        self.tensors = tensors

    def keys(self):
        return self.tensors.keys()

    def shape(self, key):
        return tuple(self.tensors[key].shape)

    def dtype(self, key):
        return self.tensors[key].dtype

    def raw(self, key):
        return self.tensors[key], None


def highest_first(name, levels):
    return name


def lowest_first(name, levels):
    return re.sub(r"decoder\.up\.(\d+)", lambda m: f"decoder.up.{levels - 1 - int(m[1])}", name)


def vq16(name, levels):
    name = lowest_first(name, levels)
    name = name.replace("decoder.up.", "decoder.conv_blocks.").replace("encoder.down.", "encoder.conv_blocks.")
    name = re.sub(r"(conv_blocks\.\d+)\.block\.", r"\1.res.", name)
    return re.sub(r"\.mid\.(\w+)\.", lambda m: f".mid.{MIDDLE[m[1]]}.", name)


LAYOUTS = {"highest first": highest_first, "lowest first": lowest_first, "vq-16": vq16}


def make(config=CONFIG, seed=0):
    """A codec with random weights."""
    codec = ConvCodec(config)
    generator = torch.Generator().manual_seed(seed)
    state = {k: torch.randn(t.shape, generator=generator) * 0.2 for k, t in codec.state_dict().items()}
    codec.load_state_dict(state)
    return codec.requires_grad_(False)


def lay_out(codec, layout, prefix="", drop=(), extra=None):
    """The codec's tensors under a layout's names."""
    levels = len(codec.cfg.ch_mult)
    named = {prefix + layout(k, levels): t for k, t in codec.state_dict().items() if not k.startswith(tuple(drop))}
    return Files(named | {prefix + k: torch.zeros(shape) for k, shape in (extra or {}).items()})


def rebuild(layout):
    codec = ConvCodec(layout.config)
    codec.load_state_dict({name: ref.read() for name, ref in layout.refs.items()}, strict=True)
    return codec.requires_grad_(False)


def left_over(files, layout, prefix):
    """Keys that neither a part uses nor the layout knows to be useless."""
    used = {ref.key for ref in layout.refs.values()}
    check_keys([key for key in files.keys() if key not in used and key.startswith(prefix)], (), layout.ignored)


@pytest.mark.parametrize("prefix", ["", "gen_vision_model.", "model.vqmodel."])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_round_trip(layout, prefix):
    codec = make()
    files = lay_out(codec, layout, prefix, extra=JUNK)
    files.tensors["text.norm.weight"] = torch.zeros(3)
    assert find_codec(files) == prefix
    found = codec_layout(files, prefix, groups=4)
    assert found.config == CONFIG
    del files.tensors["text.norm.weight"]
    left_over(files, found, prefix)
    again = rebuild(found)
    frames = torch.rand(1, 8, 12, 3)
    assert torch.equal(again.encode(frames), codec.encode(frames))
    codes = torch.arange(6).view(1, 2, 3)
    assert torch.equal(again.decode_raw(codes), codec.decode_raw(codes))


CHANGES = {
    "one level": {"ch_mult": (2,), "attn_levels": ()},
    "two levels, attention in both": {"ch_mult": (1, 2), "attn_levels": (0, 1)},
    "five levels": {"ch_mult": (1, 1, 2, 2, 4), "encoder_blocks": 2, "decoder_blocks": 3, "attn_levels": (4,)},
    "encoder levels without blocks": {"ch_mult": (1, 1, 2), "encoder_blocks": 0, "decoder_blocks": 1},
    "no convolution behind the codebook": {"post_quant": False, "z_channels": 4},
    "norms fed by the codes": {"spatial_norm": True},
    "unit-length codebook": {"l2_codebook": True},
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_shapes_tell_the_configuration(layout, changes):
    config = ConvCodecConfig(**{**vars(CONFIG), **changes})
    codec = make(config)
    found = codec_layout(lay_out(codec, layout), l2_codebook=config.l2_codebook, groups=4)
    assert found.config == config
    side = config.factor
    again, codes = rebuild(found), torch.arange(6).view(1, 2, 3)
    assert torch.equal(again.decode_raw(codes), codec.decode_raw(codes))
    assert codec.encode(torch.rand(1, 2 * side, 3 * side, 3)).shape == (1, 2, 3)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_linear_attention(layout):
    """Some conversions keep the 1x1 convolutions of the attention as linear layers."""
    codec = make()
    files = lay_out(codec, layout)
    for key, tensor in files.tensors.items():
        if re.search(r"\.(q|k|v|proj_out)\.weight$", key):
            files.tensors[key] = tensor[:, :, 0, 0].clone()
    again, codes = rebuild(codec_layout(files, groups=4)), torch.arange(6).view(1, 2, 3)
    assert torch.equal(again.decode_raw(codes), codec.decode_raw(codes))


PARTS = {
    "no encoder": ("encoder.", "quant_conv."),
    "half an encoder": ("encoder.down.1",),
    "encoder without its last convolution": ("quant_conv.",),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("drop", PARTS.values(), ids=PARTS)
def test_decoder_alone(layout, drop):
    """An encoder that is not whole is left out, and said so when a picture is to be read."""
    codec = make()
    files = lay_out(codec, layout, "vq.", drop)
    found = codec_layout(files, "vq.", groups=4)
    assert not found.config.encoder
    left_over(files, found, "vq.")
    again, codes = rebuild(found), torch.arange(6).view(1, 2, 3)
    assert torch.equal(again.decode_raw(codes), codec.decode_raw(codes))
    with pytest.raises(ValueError, match="has no encoder"):
        again.encode(torch.rand(1, 8, 12, 3))


@pytest.mark.parametrize("name", ["encoder.conv_out.weight", "encoder.down.2.block.0.conv1.weight"])
def test_encoder_of_another_shape(name):
    """A doubled latent or other channels: not the encoder of this decoder."""
    files = lay_out(make(), highest_first)
    files.tensors[name] = files.tensors[name].repeat(2, 1, 1, 1)
    assert not codec_layout(files, groups=4).config.encoder


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize(
    "name", ["decoder.up.1.block.0.conv2.weight", "decoder.mid.attn_1.k.bias", "quantize.embedding.weight"]
)
def test_missing_tensor_is_named_as_in_the_file(layout, name):
    files = lay_out(make(), layout, "vq.")
    gone = "vq." + layout(name, 3)
    del files.tensors[gone]
    with pytest.raises(UserError, match=re.escape(gone)):
        codec_layout(files, "vq.", groups=4)


def test_nothing_there():
    files = Files({"encoder.conv_in.weight": torch.zeros(4, 3, 3, 3), "quantize.embedding.weight": torch.zeros(3, 2)})
    assert find_codec(files) is None
    with pytest.raises(UserError, match="no decoder levels"):
        codec_layout(files)


def test_unknown_tensor_is_left_over():
    files = lay_out(make(), vq16, extra={"decoder.conv_blocks.1.gate.weight": (3,)})
    with pytest.raises(UserError, match=r"decoder\.conv_blocks\.1\.gate\.weight"):
        left_over(files, codec_layout(files, groups=4), "")
