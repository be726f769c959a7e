"""The MAR pair that ships with the pack: real weights through the continuous sampler and the shell."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from scd_pack.scd_core.__main__ import main
from scd_pack.scd_core.codecs.conv2d import ConvCodecConfig
from scd_pack.scd_core.codecs.features import FeatureCodec, FeatureConfig
from scd_pack.scd_core.continuous.cspd import MODES
from scd_pack.scd_core.continuous.sampler import Settings, sample
from scd_pack.scd_core.errors import UserError
from scd_pack.scd_core.models.load import BUNDLED, SHIPPED, load_model, open_model

QUICK = {"steps": 12, "diffusion_steps": 12, "seed": 5}
MIDDLE = (slice(None), slice(22, 52), slice(18, 50))  # of a picture: subject alone
# mean colour of it in training pictures: red, green, blue
COLOURS = {"fox": (0.92, 0.57, 0.33), "earth": (0.27, 0.65, 0.75), "apple": (0.89, 0.22, 0.35)}


@pytest.fixture(scope="module")
def pair():
    """(target, draft) as the shell loads them."""
    return load_model(SHIPPED["mar"]), load_model(SHIPPED["mar-draft"])


def drawn(model, text, draft=None, **settings):
    told = Settings(**{**QUICK, **settings})
    return sample(model.decoder, model.family, model.family.text.encode(text), told,
                  draft and (draft.decoder, draft.family))  # fmt: skip


@torch.inference_mode()
def pictures(model, text, **settings):
    """fp32 [B, 64, 64, 3]."""
    return model.codec.decode(drawn(model, text, **settings).latents)


# --- files ------------------------------------------------------------------------------------------------------------


def test_the_pair_is_small_and_complete(pair):
    assert sum(SHIPPED[name].stat().st_size for name in ("mar", "mar-draft")) <= 4_000_000
    target, draft = (sum(p.numel() for p in model.decoder.parameters()) for model in pair)
    assert draft < target / 2
    for model in pair:
        assert all(p.isfinite().all() and p.dtype == torch.float32 for p in model.decoder.parameters())
        assert model.family.sizes[0].width == model.family.sizes[0].height == 64


def test_the_codec_is_that_of_the_bundled_model(pair):
    files = open_model(SHIPPED["mar"])
    assert set(files.source.all_files()) == {SHIPPED["mar"], BUNDLED}
    other = load_model(BUNDLED).codec
    assert torch.equal(pair[0].codec.decoder.conv_in.weight, other.decoder.conv_in.weight)


def test_a_pair_without_the_bundled_file_says_what_is_missing(tmp_path):
    copy = tmp_path / "far" / "off" / "mar.safetensors"  # folders nearby are looked into
    copy.parent.mkdir(parents=True)
    copy.write_bytes(SHIPPED["mar"].read_bytes())
    with pytest.raises(UserError, match=r"MISSING.*model\.safetensors.*install the pack again"):
        load_model(copy)


def test_features_are_laid_out_as_they_were_taken_apart():
    cells = ConvCodecConfig(codes=4, code_dim=3, z_channels=4, ch=8, ch_mult=(1, 1), decoder_blocks=1, groups=4)
    net = FeatureCodec(FeatureConfig(cells, embed=12, patch=2))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        net.basis.copy_(torch.linalg.qr(torch.randn(12, 12, generator=generator))[0])
        net.mean.copy_(torch.randn(12, generator=generator))
    features = torch.randn(2, 3, 8, 8, generator=generator)
    patches = F.pixel_unshuffle(features, 2).permute(0, 2, 3, 1)
    tokens = ((patches - net.mean) @ net.basis).permute(0, 3, 1, 2)
    assert net.cfg.factor == 4 and torch.allclose(net.features(tokens), features, atol=1e-5)


# --- names ------------------------------------------------------------------------------------------------------------


def test_classes_are_known_by_the_names_in_the_file(pair):
    text = pair[0].family.text
    assert text.number("fox") == text.number(" The  FOX ") == text.number("0") == 0
    assert text.number("panda bear") == text.number("panda") and text.number("") is None
    assert text.names == pair[1].family.text.names
    for wrong in ("fox on snow", "unicorn", "fo"):
        with pytest.raises(UserError, match="it knows one subject at a time, fox, panda"):
            text.number(wrong)
    with pytest.raises(UserError, match="classes are 0 to"):
        text.number(str(len(text.names)))


# --- pictures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("who", [0, 1])
def test_subjects_have_their_colours_and_are_no_noise(pair, who):
    for text, colour in COLOURS.items():
        frames = pictures(pair[who], text, batch=3)
        found = frames[MIDDLE].mean((0, 1, 2))
        assert (found - torch.tensor(colour)).abs().max() < 0.12, (text, found)
        steps = frames.diff(dim=2).abs().mean()
        assert 0.012 < steps < 0.045, "neither flat nor noise: pixels are about as like their neighbours as in training"


# --- speculation ------------------------------------------------------------------------------------------------------


def test_draft_is_taken_with_the_published_code_s_tau(pair):
    report = drawn(*pair_and("fox", pair), mode="block", tau=42.0, gamma=4).report
    assert 0.2 < report.accepted_share < 1 and report.passes < report.settings["steps"] / 2
    strict = drawn(*pair_and("fox", pair), mode="block", tau=1.0, gamma=4).report
    assert strict.accepted_share < report.accepted_share


def pair_and(text, pair):
    """Arguments of `drawn` for a text and both models."""
    return pair[0], text, pair[1]


@pytest.mark.parametrize("mode", MODES)
def test_target_as_its_own_draft_draws_the_target_s_picture(pair, mode):
    net, settings = pair[0], {"steps": 8, "diffusion_steps": 5}
    alone = drawn(net, "penguin", **settings)
    twice = drawn(net, "penguin", net, mode=mode, gamma=1 if mode == "block" else 3, **settings)
    assert twice.report.accepted_share == 1
    assert (twice.latents - alone.latents).abs().max() < 2e-3


def test_exact_keeps_the_law_of_the_target(pair):
    """Mean and mean square of the tokens' averages over a batch, in standard errors."""
    settings = {"steps": 6, "diffusion_steps": 4, "batch": 48, "cfg": 1.0}
    one = drawn(pair[0], "apple", **{**settings, "seed": 11}).latents.mean((2, 3))
    two = drawn(*pair_and("apple", pair), mode="exact", gamma=2, **{**settings, "seed": 12}).latents.mean((2, 3))
    for power in (1, 2):
        a, b = one**power, two**power
        error = (a.var(0) / len(a) + b.var(0) / len(b)).sqrt()
        assert ((a.mean(0) - b.mean(0)).abs() / error).max() < 4


# --- the shell --------------------------------------------------------------------------------------------------------


def shell(*words):
    return main(["generate", *words])


def test_shell_draws_with_a_draft(capsys, tmp_path):
    code = shell("earth", "--model", "mar", "--draft", "mar-draft", "--mode", "prefix", "--gamma", "3", "--tau", "42",
                 "--steps", "6", "--diffusion-steps", "4", "--batch", "2", "--json", "--out", str(tmp_path))
    figures = json.loads(capsys.readouterr().out)
    assert code == 0 and figures["method"] == "cspd-prefix" and figures["settings"]["gamma"] == 3
    assert figures["tokens"] == 128 and figures["draft_passes"] > 0
    files = [Path(path) for path in figures["outputs"]]
    assert [path.name for path in files] == ["earth_001.png", "earth_002.png"]
    assert np.asarray(Image.open(files[0])).shape == (64, 64, 3)


@pytest.mark.parametrize(("words", "told"), [
    (["--model", "mar", "--window", "8"], "--window"),
    (["--gamma", "8"], "--gamma"),
    (["--model", "mar", "--draft", "bundled"], "discrete tokens"),
    (["--model", "mar", "--steps", "65"], "1 to 64 steps"),
])  # fmt: skip
def test_shell_refuses_what_does_nothing(capsys, tmp_path, words, told):
    assert shell("fox", *words, "--out", str(tmp_path / "none")) == 1
    err = capsys.readouterr().err
    assert told in err and len(err.strip().splitlines()) == 1 and not (tmp_path / "none").exists()
