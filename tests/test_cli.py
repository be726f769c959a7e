"""The shell: JSON keys that scripts rely on, files that are not overwritten, one sentence for what cannot be read."""

import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from scd_pack.scd_core.__main__ import main
from scd_pack.scd_core.models.load import BUNDLED
from scd_pack.scd_core.video import read_video

QUICK = ["--temperature", "0", "--cfg", "1", "--window", "64", "--dtype", "fp32"]  # greedy drafts settle in few passes


def shell(capsys, *argv):
    """(exit code, stdout, stderr) of one command."""
    code = main(list(argv))
    out = capsys.readouterr()
    return code, out.out, out.err


def test_generate_writes_a_picture_and_its_figures(capsys, tmp_path):
    folder = tmp_path / "new folder"
    command = ["generate", "fox on snow", *QUICK, "--batch", "2", "--seed", "5", "--json", "--out", str(folder)]
    code, out, _ = shell(capsys, *command)
    data = json.loads(out)
    assert code == 0
    keys = ["passes", "tokens", "tokens_per_pass", "seconds", "method", "lossless", "sha256_tokens", "outputs"]
    assert set(keys) <= set(data)
    assert data["method"] == "seed-exact" and data["lossless"] is True and data["tokens"] == 512
    assert data["settings"]["seed"] == 5 and data["settings"]["temperature"] == 0.0
    assert len(data["outputs"]) == 2 and all(Image.open(p).size == (64, 64) for p in data["outputs"])
    before = [Path(p).read_bytes() for p in data["outputs"]]
    again = json.loads(shell(capsys, *command)[1])
    assert again["sha256_tokens"] == data["sha256_tokens"]
    assert not set(again["outputs"]) & set(data["outputs"]), "a second run overwrites nothing"
    assert before == [Path(p).read_bytes() for p in data["outputs"]]


def test_generate_writes_a_clip(capsys, tmp_path):
    code, out, _ = shell(
        capsys, "generate", "car moving left on sand", *QUICK, "--frames", "3", "--json", "--out", str(tmp_path)
    )
    frames, rate = read_video(json.loads(out)["outputs"][0])
    assert code == 0 and frames.shape == (3, 32, 32, 3) and rate == 8
    assert float(frames.std()) > 0


def test_generate_tells_people(capsys, tmp_path):
    figures = tmp_path / "figures.json"
    code, out, _ = shell(
        capsys, "generate", "fox on zork", *QUICK, "--json", str(figures), "--out", str(tmp_path / "o")
    )
    assert code == 0 and "seed-exact (lossless)" in out and "'zork'" in out and "fox-on-zork_001.png" in out
    assert json.loads(figures.read_text())["notes"]


def test_negative_and_guidance_change_the_picture(capsys, tmp_path):
    def tokens(*more):
        base = ["generate", "fox on snow", "--temperature", "0", "--window", "64", "--dtype", "fp32", "--json"]
        return json.loads(shell(capsys, *base, "--out", str(tmp_path), *more)[1])["sha256_tokens"]

    seen = {tokens("--cfg", "1"), tokens("--cfg", "3"), tokens("--cfg", "3", "--negative", "dog on grass")}
    assert len(seen) == 3


def test_compare_prints_identity(capsys, tmp_path):
    figures = tmp_path / "rows.json"
    code, out, _ = shell(
        capsys,
        "compare",
        "fox on snow",
        "--frames",
        "2",
        "--window",
        "16",
        "--dtype",
        "fp32",
        "--methods",
        "autoregressive,scd-maximal,seed-exact",
        "--json",
        str(figures),
    )
    rows = {row["method"]: row for row in json.loads(figures.read_text())}
    assert code == 0 and list(rows) == ["autoregressive", "scd-maximal", "seed-exact"]
    assert rows["autoregressive"]["passes"] == 128 > rows["seed-exact"]["passes"]
    assert rows["autoregressive"]["sha256_tokens"] == rows["seed-exact"]["sha256_tokens"]
    assert rows["autoregressive"]["sha256_tokens"] != rows["scd-maximal"]["sha256_tokens"]
    lines = out.splitlines()
    assert lines[0].split()[:2] == ["method", "window"] and lines[3].rstrip().endswith("yes")


def test_info(capsys):
    code, out, _ = shell(capsys, "info", "bundled", "--json")
    data = json.loads(out)
    assert code == 0 and data["parts"]["decoder"]["parameters"] > 1e6 and "64x64" in data["sizes"]
    total = sum(t.numel() * t.element_size() for t in torch_tensors(BUNDLED))
    assert total <= 16e6, "the bundled model stays within its 16 MB"


def torch_tensors(path):
    from safetensors.torch import load_file

    return load_file(path).values()


@pytest.mark.parametrize("command", ["info", "generate"])
def test_what_cannot_be_read_is_told_in_one_sentence(capsys, tmp_path, command):
    page = tmp_path / "model.safetensors"
    page.write_text("<!DOCTYPE html><html></html>")
    for path in (page, tmp_path / "missing.safetensors", tmp_path):
        argv = ["info", str(path)] if command == "info" else ["generate", "fox", "--model", str(path)]
        code, out, err = shell(capsys, *argv)
        assert code == 1 and out == "" and "Traceback" not in err
        assert err.strip() and len(err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        ["--frames", "9"],
        ["--width", "100"],
        ["--seed", "-1"],
        ["--seed", str(1 << 64)],
        ["--temperature", "-3"],
        ["--top-p", "2"],
        ["--batch", "0"],
        ["--window", "-2"],
        ["--cfg", "nan"],
    ],
)
def test_settings_that_make_no_sense(capsys, tmp_path, wrong):
    code, _, err = shell(capsys, "generate", "fox", "--out", str(tmp_path / "none"), *wrong)
    assert code == 1 and len(err.strip().splitlines()) == 1
    assert not (tmp_path / "none").exists()


def test_devices_are_checked(capsys, tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    code, _, err = shell(capsys, "generate", "fox", "--device", "cuda", "--out", str(tmp_path))
    assert code == 1 and len(err.strip().splitlines()) == 1
