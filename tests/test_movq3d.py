"""Emu3's image tokenizer: both spellings of its names, stills and clips, time that only looks back."""

import pytest
import torch
from scd_pack.scd_core.codecs.layouts import codec_layout, find_codec
from scd_pack.scd_core.codecs.movq3d import MoVQ3d, MoVQ3dConfig, hub_name
from scd_pack.scd_core.errors import UserError
from scd_tests.emu3_files import random_codec, to_original
from scd_tests.test_layouts import Files

CONFIG = MoVQ3dConfig(
    codes=40, code_dim=4, z_channels=4, ch=8, ch_mult=(1, 2, 1), encoder_blocks=1, decoder_blocks=2, attn_levels=(2,),
    groups=4, spatial_norm=True, time_levels=2, time_blocks=1,
)  # fmt: skip


@pytest.fixture(scope="module")
def codec():
    return random_codec(MoVQ3d(CONFIG).requires_grad_(False), 4)


def stored(codec, layout):
    """The codec's tensors under a layout's names, and the counters that training left."""
    state = dict(codec.state_dict())
    state["encoder.time_res_stack.0.norm1.num_batches_tracked"] = torch.tensor(7)
    if layout == "original":
        return Files(state)
    linear = {key for key, t in state.items() if ".attn" in key and "norm" not in key and t.dim() == 4}
    return Files({f"vqmodel.{hub_name(key)}": t[:, :, 0, 0] if key in linear else t for key, t in state.items()})


@pytest.mark.parametrize("layout", ["original", "transformers"])
def test_configuration_and_tensors_come_back_from_either_layout(codec, layout):
    files = stored(codec, layout)
    prefix = find_codec(files)
    assert prefix == ("" if layout == "original" else "vqmodel.")
    found = codec_layout(files, prefix, groups=4)
    assert found.config == CONFIG
    for name, tensor in codec.state_dict().items():
        assert torch.equal(found.refs[name].read(), tensor), name


def test_names_of_the_two_layouts_correspond(codec):
    """Against a renaming in the other direction that was written by hand."""
    hub = {f"vqmodel.{hub_name(name)}": torch.zeros(1, 1) for name in codec.state_dict()}
    assert list(to_original(hub)[1]) == list(codec.state_dict())


@pytest.mark.parametrize("gone", ["time_conv.1.conv.conv.bias", "time_res_stack.0.norm2.running_var"])
def test_a_missing_tensor_of_the_stack_is_named(codec, gone):
    files = stored(codec, "transformers")
    del files.tensors[f"vqmodel.decoder.{gone}"]
    with pytest.raises(UserError, match=f"'vqmodel.decoder.{gone}'"):
        codec_layout(files, "vqmodel.", groups=4)


@torch.inference_mode()
def test_a_still_is_the_first_frame(codec):
    codes = torch.randint(0, CONFIG.codes, (2, 3, 5), generator=torch.Generator().manual_seed(1))
    frames = codec.decode_raw_frames(codes)
    assert frames.shape == (2, 4, 3, 12, 20)
    assert (codec.decode_raw(codes) - frames[:, 0]).abs().max() < 1e-5
    assert (frames[:, 1] - frames[:, 0]).abs().max() > 0.1


@torch.inference_mode()
def test_frames_do_not_depend_on_later_ones(codec):
    h = torch.randn(1, 4, 3, 2, 2, generator=torch.Generator().manual_seed(2))
    assert torch.allclose(codec.decoder.stretch(h)[:, :, :4], codec.decoder.stretch(h[:, :, :1]), atol=1e-6)
    h = torch.randn(1, 4, 8, 2, 2, generator=torch.Generator().manual_seed(3))
    assert torch.allclose(codec.encoder.shrink(h)[:, :, :1], codec.encoder.shrink(h[:, :, :4]), atol=1e-6)


@torch.inference_mode()
def test_running_statistics_count(codec):
    norm = codec.decoder.time_res_stack[0].norm1
    x = torch.randn(2, 4, 3, 2, 2, generator=torch.Generator().manual_seed(4))
    shape = (1, -1, 1, 1, 1)
    mean, var, weight, bias = (t.view(shape) for t in (norm.running_mean, norm.running_var, norm.weight, norm.bias))
    assert (norm(x) - ((x - mean) / (var + 1e-5).sqrt() * weight + bias)).abs().max() < 1e-5


@torch.inference_mode()
def test_clips_are_read_and_drawn_four_frames_at_a_time(codec):
    frames = torch.rand(8, 8, 12, 3, generator=torch.Generator().manual_seed(5))
    codes = codec.encode_clip(frames)
    assert codes.shape == (2, 2, 3) and CONFIG.frames(2) == 8 and CONFIG.frames(1) == 1 and CONFIG.compression == 4
    again = codec.encode_clip(torch.cat([frames[4:], frames[:4]]))
    assert torch.equal(again, codes.flip(0))  # every grid is a world of its own
    drawn = codec.decode_clip(codes)
    assert drawn.shape == frames.shape
    raw = codec.decode_raw_frames(codes).flatten(0, 1).permute(0, 2, 3, 1)
    assert (drawn - (raw / 2 + 0.5).clamp(0, 1)).abs().max() < 1e-5
    still = codec.encode_clip(frames[:1])
    assert torch.equal(still, codec.encode(frames[:1])) and codec.decode_clip(still).shape == frames[:1].shape


@torch.inference_mode()
def test_a_still_goes_in_as_equal_frames(codec):
    frames = torch.rand(2, 8, 12, 3, generator=torch.Generator().manual_seed(6))
    clip = frames.repeat_interleave(4, 0)
    assert torch.equal(codec.encode(frames), codec.encode_clip(clip))


@pytest.mark.parametrize("count", [2, 4, 7])
def test_other_numbers_of_frames_are_refused(codec, count):
    with pytest.raises(UserError, match=f"^{count} frames do not divide .* 1 frame, or a multiple of 4 from 8 on"):
        codec.encode_clip(torch.zeros(count, 8, 8, 3))


def test_sides_are_checked(codec):
    with pytest.raises(ValueError, match="a picture of 8x9 does not divide into 4-pixel tokens"):
        codec.encode(torch.zeros(1, 9, 8, 3))


@torch.inference_mode()
def test_nearest_rows_are_looked_up_in_parts(codec, monkeypatch):
    """The answer does not depend on how many cells are compared at a time."""
    z = torch.randn(2, 4, 9, 7, generator=torch.Generator().manual_seed(7))
    whole = codec.nearest(z)
    book = codec.quantize["embedding"].weight
    distance = (z.permute(0, 2, 3, 1)[..., None, :] - book).square().sum(-1)
    assert torch.equal(whole, distance.argmin(-1))
    monkeypatch.setattr("scd_pack.scd_core.codecs.conv2d.CELLS", 10)
    assert torch.equal(codec.nearest(z), whole)
