"""Pictures of the fixtures to codes and back: what is drawn is what the original's own codes draw."""

import pytest
import torch
from scd_pack.scd_core.golden import Fixture, Subject
from scd_tests.cosmos_files import GOLDEN

STILLS = ("anole-hf", "chameleon-tokenizer", "emu3-hf", "llamagen-vq-ds16")


@pytest.mark.parametrize("name", STILLS)
@torch.inference_mode()
def test_a_still_comes_back_as_its_codes_are_drawn(name):
    fixture = Fixture(GOLDEN / name)
    subject = Subject(fixture, {"codec"})
    codec, (low, high) = subject.codec, subject.codec.cfg.range
    picture = ((fixture.tensors["picture"] - low) / (high - low)).permute(0, 2, 3, 1)
    codes = codec.encode(picture)
    back = codec.decode(codes)
    assert back.shape == picture.shape and 0 <= back.min() < back.max() <= 1
    assert torch.equal(codes.flatten(), fixture.tensors["encoder_codes"].flatten().long())
    raw = codec.decode_raw(fixture.tensors["encoder_codes"].view(codes.shape).long())
    want = (raw.float().permute(0, 2, 3, 1) - low) / (high - low)
    assert (back - want.clamp(0, 1)).abs().max() < 1e-5


@pytest.mark.parametrize("frames", [1, 9])
@torch.inference_mode()
def test_a_clip_comes_back_as_its_codes_are_drawn(frames):
    fixture = Fixture(GOLDEN / "cosmos-dv8x16x16")
    codec = Subject(fixture, {"codec"}).codec
    clip = (fixture.tensors[f"video_F{frames}"][0].permute(1, 2, 3, 0) + 1) / 2
    codes = codec.encode_clip(clip)
    back = codec.decode_clip(codes)
    assert torch.equal(codes, fixture.tensors[f"encoder_codes_F{frames}"][0].long())
    assert back.shape == clip.shape
    first = codec.decode_clip(fixture.tensors[f"encoder_codes_F{frames}"][0, :1].long())
    assert (back[:1] - first).abs().max() < 1e-5, "the first frame needs the first grid alone"
