"""The KL codec: its layout read off any file, decoder and encoder, and against the reference classes."""

import importlib
from dataclasses import replace

import pytest
import torch
from scd_pack.scd_core.budget import codec_bytes
from scd_pack.scd_core.checkpoint import Source, save_safetensors
from scd_pack.scd_core.codecs.kl import SCALE, KLCodec, KLConfig, find_kl, kl_layout
from scd_pack.scd_core.codecs.layouts import find_codec
from scd_pack.scd_core.errors import UserError

CONFIG = KLConfig(embed=4, z_channels=6, ch=32, ch_mult=(1, 2, 3), encoder_blocks=1, decoder_blocks=2,
                  encoder_attn=(2,), attn_levels=(1,))  # fmt: skip


def random_codec(config=CONFIG, seed=0):
    net = KLCodec(config).requires_grad_(False).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, weight in net.named_parameters():
        base = 1.0 if "norm" in name and name.endswith("weight") else 0.0
        weight.copy_(base + torch.randn(weight.shape, generator=generator) * 0.05)
    return net


def written(net, path, prefix="", drop=(), **extra):
    state = {prefix + name: t for name, t in net.state_dict().items() if not name.startswith(tuple(drop))}
    save_safetensors({**state, **extra}, path)
    return Source.open(path)


@pytest.mark.parametrize("config", [
    CONFIG, replace(CONFIG, ch_mult=(1, 1), encoder_attn=(), attn_levels=()),
    replace(CONFIG, embed=6, decoder_blocks=3),
])  # fmt: skip
@pytest.mark.parametrize("prefix", ["", "first_stage_model."])
def test_layout_is_read_off_the_file(tmp_path, config, prefix):
    net = random_codec(config)
    source = written(net, tmp_path / "kl.safetensors", prefix)
    assert find_kl(source) == prefix and find_codec(source) is None
    found, refs = kl_layout(source, prefix)
    assert found == config
    assert all(torch.equal(ref.read(), net.state_dict()[name]) for name, ref in refs.items())
    assert set(refs) == set(net.state_dict())


def test_decoder_without_an_encoder_and_what_trainers_leave(tmp_path):
    net = random_codec()
    source = written(net, tmp_path / "kl.safetensors", drop=("encoder.down",), **{"loss.logvar": torch.zeros(1)})
    config, refs = kl_layout(source)
    assert not config.encoder and not any(name.startswith(("encoder", "quant_conv")) for name in refs)
    assert config.ch * config.ch_mult[0] == 32 and config.factor == 4
    alone = KLCodec(config)
    alone.load_state_dict({name: ref.read() for name, ref in refs.items()})
    latents = torch.randn(2, 4, 3, 5, generator=torch.Generator().manual_seed(1))
    assert torch.equal(alone.decode_raw(latents), net.decode_raw(latents))
    with pytest.raises(UserError, match="no encoder"):
        alone.encode(torch.zeros(1, 8, 8, 3))


@pytest.mark.parametrize(("drop", "extra", "named"), [
    (("decoder.mid.attn_1.q",), {}, "decoder.mid.attn_1.q"), ((), {"adapter.weight": torch.zeros(1)}, "adapter.weight"),
])  # fmt: skip
def test_missing_and_unknown_tensors_are_named(tmp_path, drop, extra, named):
    source = written(random_codec(), tmp_path / "kl.safetensors", drop=drop, **extra)
    with pytest.raises(UserError, match=named):
        kl_layout(source)


def test_decode_scales_and_clamps_and_encode_gives_scaled_means():
    net = random_codec()
    latents = torch.randn(2, 4, 2, 3, generator=torch.Generator().manual_seed(2))
    frames = net.decode(latents * SCALE)
    assert frames.shape == (2, 8, 12, 3) and frames.min() >= 0 and frames.max() <= 1
    torch.testing.assert_close(frames, (net.decode_raw(latents).permute(0, 2, 3, 1) / 2 + 0.5).clamp(0, 1))
    pictures = torch.rand(2, 8, 12, 3, generator=torch.Generator().manual_seed(3))
    moments = net.quant_conv(net.encoder(pictures.permute(0, 3, 1, 2) * 2 - 1))
    assert moments.shape == (2, 8, 2, 3)
    torch.testing.assert_close(net.encode(pictures), moments[:, :4] * SCALE)
    with pytest.raises(UserError, match="10x8"):
        net.encode(torch.zeros(1, 8, 10, 3))


def test_host_is_told_what_decoding_needs():
    assert codec_bytes(CONFIG, 256, 256, 4) == 4 * codec_bytes(CONFIG, 256, 256, 1) > 4 * 256 * 256 * 32 * 4


def test_decoder_and_encoder_are_the_reference_ones():
    pytest.importorskip("diffusers")
    vae = importlib.import_module("diffusers.models.autoencoders.vae")
    net = random_codec(replace(CONFIG, encoder_attn=(), attn_levels=()))
    sizes = {"block_out_channels": (32, 64, 96), "norm_num_groups": 32}
    decoder = vae.Decoder(in_channels=6, up_block_types=("UpDecoderBlock2D",) * 3, layers_per_block=1, **sizes)
    ours = net.decoder.state_dict()
    names = {}
    for name in decoder.state_dict():
        mine = name.replace("conv_norm_out", "norm_out").replace("mid_block.resnets.0", "mid.block_1")
        mine = mine.replace("mid_block.resnets.1", "mid.block_2").replace("mid_block.attentions.0", "mid.attn_1")
        for theirs, other in (("group_norm", "norm"), ("to_q", "q"), ("to_k", "k"), ("to_v", "v"),
                              ("to_out.0", "proj_out"), ("conv_shortcut", "nin_shortcut")):  # fmt: skip
            mine = mine.replace(theirs, other)
        for level in range(3):
            mine = mine.replace(f"up_blocks.{level}.resnets.", f"up.{2 - level}.block.")
            mine = mine.replace(f"up_blocks.{level}.upsamplers.0.", f"up.{2 - level}.upsample.")
        names[name] = mine
    assert set(names.values()) == set(ours)
    shapes = {name: t.shape for name, t in decoder.state_dict().items()}
    decoder.load_state_dict({name: ours[mine].reshape(shapes[name]) for name, mine in names.items()})
    h = torch.randn(1, 6, 3, 4, generator=torch.Generator().manual_seed(4))
    torch.testing.assert_close(net.decoder(h), decoder.eval()(h), atol=3e-5, rtol=1e-4)
