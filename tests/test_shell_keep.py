"""Kept tokens from the shell: the same run as with VQ Encode, files of any kind, a sentence for what cannot be kept."""

import json
import re

import numpy as np
import pytest
import torch
from PIL import Image
from scd_pack.scd_core import shell_keep
from scd_pack.scd_core.__main__ import main
from scd_pack.scd_core.generate import Request, generate
from scd_pack.scd_core.given import Reading, for_plan, prepare
from scd_pack.scd_core.models.load import load_model
from scd_pack.scd_core.video import read_video, write_frames
from scd_tests.host.miniatures import COSMOS, place

QUICK = ["fox on snow", "--temperature", "0", "--cfg", "1", "--window", "64", "--dtype", "fp32", "--seed", "5"]
BASE = next(iter(COSMOS))


@pytest.fixture
def shell(capsys, tmp_path):
    """generate with these options -> (exit code, figures or None, stderr); files go into tmp_path / "out"."""

    def run(*options):
        code = main(["generate", *map(str, options), "--json", "--out", str(tmp_path / "out")])
        out = capsys.readouterr()
        return code, json.loads(out.out) if out.out else None, out.err.strip()

    return run


@pytest.fixture(scope="module")
def model():
    return load_model(dtype="fp32")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A picture, a mask and a clip of 6 frames."""
    folder, g = tmp_path_factory.mktemp("files"), torch.Generator().manual_seed(2)
    frames = torch.nn.functional.interpolate(torch.rand(6, 3, 8, 8, generator=g), 96).permute(0, 2, 3, 1)
    write_frames(frames, folder / "clip.mp4", rate=8, fmt="mp4 (h264)", quality=95)
    Image.fromarray((frames[0, :, :80] * 255).byte().numpy()).save(folder / "picture.png")
    mask = np.zeros((96, 80), np.uint8)
    mask[70:, 45:] = 255
    Image.fromarray(mask).save(folder / "mask.png")
    return folder


@torch.inference_mode()
def by_hand(model, image, mask, how, **wishes):
    """sha256 of the tokens that prepare, encode and generate give for the same wish."""
    given = prepare(image, mask, model.family, model.codec.cfg, how)
    codes = model.codec.encode_clip(given.frames)[None] if how.clip else model.codec.encode(given.frames)[:, None]
    request = Request(seed=5, window=64, temperature=0, cfg=1, width=given.width, height=given.height, **wishes)
    plan = model.family.plan(model.family.size(given.width, given.height, request.frames))
    prompt = model.family.text.encode("fox on snow")
    drawn = generate(model.decoder, model.family, prompt, None, request, for_plan(codes, given.kept, plan))
    return drawn.report.to_dict()["sha256_tokens"]


@pytest.mark.parametrize("options, how, tokens", [
    (["--redraw", "middle", "--batch", "2"], Reading(redraw="middle"), 128),
    (["--mask", "mask.png", "--fit", "stretch"], Reading(fit="stretch"), 35),
])  # fmt: skip
def test_a_picture_is_kept_as_by_vq_encode(shell, model, files, options, how, tokens):
    masked = "mask.png" in options
    options = [str(files / name) if name == "mask.png" else name for name in options]
    code, data, _ = shell(*QUICK, "--keep", files / "picture.png", *options)
    assert code == 0 and data["tokens"] == tokens
    image, mask = shell_keep.frames_of(files / "picture.png"), shell_keep.mask_of(files / "mask.png")
    assert data["sha256_tokens"] == by_hand(model, image, mask if masked else None, how, batch=1 if masked else 2)


@pytest.mark.parametrize("options, how, tokens", [
    (["--keep-frames", "2", "--keep-from", "end"], Reading(clip=True, frames=2, end="end"), 64),
    (["--keep-frames", "1", "--redraw", "lower-half"], Reading(clip=True, frames=1, redraw="lower half"), 160),
])  # fmt: skip
def test_a_clip_is_continued_as_by_vq_encode(shell, model, files, options, how, tokens):
    code, data, _ = shell(*QUICK, "--frames", "3", "--keep", files / "clip.mp4", *options)
    assert code == 0 and data["tokens"] == tokens
    assert data["sha256_tokens"] == by_hand(model, read_video(files / "clip.mp4")[0], None, how, frames=3)
    assert read_video(data["outputs"][0])[0].shape == (3, 32, 32, 3)


def test_a_picture_begins_a_clip(shell, files):
    code, data, _ = shell(*QUICK, "--frames", 2, "--keep", files / "picture.png")
    assert code == 0 and data["tokens"] == 64


def test_cosmos_goes_on_from_the_last_nine_frames(shell, tmp_path):
    place(tmp_path / "host" / "models", [BASE])
    frames = torch.linspace(0, 1, 12)[:, None, None, None].expand(-1, 40, 40, 3)
    write_frames(frames, tmp_path / "twelve.mp4", rate=25, fmt="mp4 (h264)")
    model = tmp_path / "host" / "models" / BASE
    options = ["", "--model", model, "--dtype", "fp32", "--window", 4, "--frames", 17]
    code, data, _ = shell(*options, "--keep", tmp_path / "twelve.mp4")
    assert code == 0 and data["tokens"] == 4  # one grid of 2x2 behind two that are kept
    made, rate = read_video(data["outputs"][0])
    assert made.shape == (17, 32, 32, 3) and rate == 25
    end = shell(*options, "--keep", tmp_path / "twelve.mp4", "--keep-from", "end")[1]
    start = shell(*options, "--keep", tmp_path / "twelve.mp4", "--keep-from", "start")[1]
    assert data["sha256_tokens"] == end["sha256_tokens"] != start["sha256_tokens"]
    code, _, told = shell(*options)
    assert code == 1 and "cannot start by itself" in told


@pytest.mark.parametrize("options, words", [
    (["--redraw", "middle"], "--redraw is about what is kept: add --keep"),
    (["--keep-frames", "0"], "--keep-frames is about what is kept"),
    (["--keep", "none.png"], "none.png is not there"),
    (["--keep", "clip.mp4"], "a clip of 6 frames: say with --frames"),
    (["--keep", "words.png"], "words.png"),
    (["--keep", "cut.png"], "cut.png' cannot be read|cut.png cannot be read"),
    (["--keep", "picture.png", "--mask", "clip.mp4"], "clip.mp4 is no picture"),
    (["--keep", "picture.png", "--width", "100"], "cannot draw 100xany"),
    (["--keep", "clip.mp4", "--frames", "4"], "hold 6 frames of tokens, this run draws 4: raise frames"),
    (["--keep", "clip.mp4", "--frames", "4", "--keep-frames", "9"], "1 to 8 frames"),
    (["--keep", "clip.mp4", "--frames", "4", "--keep-frames", "-1"], "from 0"),
])  # fmt: skip
def test_what_cannot_be_kept_is_told_in_one_sentence(shell, files, tmp_path, options, words):
    (files / "words.png").write_text("no picture")
    (files / "cut.png").write_bytes((files / "picture.png").read_bytes()[:300])
    options = [str(files / word) if "." in word else word for word in options]
    code, data, told = shell(*QUICK, *options)
    assert code == 1 and data is None and len(told.splitlines()) == 1
    assert re.search(words, told), told
    assert not (tmp_path / "out").exists()


def test_a_codec_that_can_only_draw_says_what_is_missing(model, files):
    class Blind:
        encoder, compression, factor = False, 1, 4

    args = type("Args", (), dict.fromkeys(shell_keep.OPTIONS) | {"keep": files / "picture.png"})
    painter = type("Painter", (), {"codec": type("Codec", (), {"cfg": Blind}), "family": model.family, "name": "it"})
    with pytest.raises(ValueError, match=r"it can draw but not read pictures.*complete image tokenizer"):
        shell_keep.read(painter, args, Request())


def test_pictures_of_any_kind_are_read(files, tmp_path):
    want = shell_keep.frames_of(files / "picture.png")
    picture = Image.open(files / "picture.png")
    turned = picture.transpose(Image.Transpose.ROTATE_90)
    exif = Image.Exif()
    exif[0x0112] = 6  # shown turned by a quarter to the right
    turned.save(tmp_path / "turned.png", exif=exif)
    picture.convert("RGBA").save(tmp_path / "alpha.webp", lossless=True)
    for name in ("turned.png", "alpha.webp"):
        assert torch.equal(shell_keep.frames_of(tmp_path / name), want), name
    deep = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    Image.fromarray(deep).save(tmp_path / "deep.png")
    grey = shell_keep.frames_of(tmp_path / "deep.png")
    assert grey.shape == (1, 8, 8, 3) and (grey[0, :, :, 0] - torch.from_numpy(deep / 65535)).abs().max() < 1 / 255
    picture.save(tmp_path / "moving.gif", save_all=True, append_images=[turned.resize(picture.size)])
    assert len(shell_keep.frames_of(tmp_path / "moving.gif")) == 2
