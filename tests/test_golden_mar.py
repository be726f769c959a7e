"""`verify` on a MAR: the true fixture agrees, and whatever is changed in numbers, facts or files is caught."""

import copy
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from scd_pack.scd_core import golden_mar
from scd_pack.scd_core.__main__ import main
from scd_pack.scd_core.errors import UserError
from scd_pack.scd_core.golden import Fixture
from scd_pack.scd_core.verify import attempt, table, verify

GOLDEN = Path(__file__).parent / "data" / "golden" / "mar"
FIXTURE = Fixture(GOLDEN)
# noise of the steps that add none: nothing can be computed from it
IDLE = {"sample_a_noise": -1, "sample_b_noise": -1, "gen_noise": -1, "step_noise": 0}


@pytest.fixture(scope="module")
def subject():
    return golden_mar.Subject(FIXTURE, GOLDEN / "model" / "mar_base" / "checkpoint-last.pth")


def rows_with(subject, **tensors):
    """All comparisons of the same model with other numbers."""
    twin = copy.copy(subject)
    twin.want = {**subject.want, **tensors}
    twin.__dict__.pop("schedule", None)
    return {name: attempt(*twin.comparison(name, want, "")) for name, want in twin.want.items()}


def test_the_true_fixture_agrees_for_every_file(capsys):
    assert main(["verify", str(GOLDEN)]) == 0
    printed = capsys.readouterr().out
    listed = [line.split()[0] for line in printed.splitlines() if line]
    for name in FIXTURE.tensors:
        assert listed.count(name) == 2, f"{name} of both files"
    assert "NO" not in printed


def changed(name, tensor):
    """One number in the middle, or of the first step that counts, is off by ten times the limit."""
    wrong = tensor.clone()
    if name == "mask":  # another cell is to be drawn
        wrong[0, int((wrong[0] == 0).nonzero()[0])] = 1.0
    elif name == "order":
        wrong = wrong.roll(1)
    elif name == "tokens":
        wrong[0, int((FIXTURE.tensors["mask"][0] == 0).nonzero()[0]), 3] += 0.05
    else:
        wrong.view(-1)[wrong.numel() // 2] += 1 if not wrong.is_floating_point() else 0.1
    return wrong


@pytest.mark.parametrize("name", sorted(FIXTURE.tensors))
def test_each_falsified_tensor_is_caught(subject, name):
    tensor = FIXTURE.tensors[name]
    if name in IDLE:
        assert tensor.shape[0] > 2, "the middle is a step that counts"
    rows = rows_with(subject, **{name: changed(name, tensor)})
    assert any(not row.ok for row in rows.values()), f"{name} was falsified and nothing noticed"


@pytest.mark.parametrize("name", ["z", "gen_latents", "pixels", "betas"])
def test_shapes_and_nan_count(subject, name):
    tensor = FIXTURE.tensors[name]
    nan = tensor.clone()
    nan.view(-1)[0] = math.nan
    for wrong in (tensor[..., :-1], nan, tensor[:0]):
        assert not rows_with(subject, **{name: wrong})[name].ok


def test_a_masked_token_that_is_not_zero_is_caught(subject):
    tokens = FIXTURE.tensors["tokens"].clone()
    tokens[0, int((FIXTURE.tensors["mask"][0] == 1).nonzero()[0]), 0] = 0.5
    assert not rows_with(subject, tokens=tokens)["tokens"].ok


def test_unknown_tensors_and_lonely_inputs_are_failures(subject):
    rows = rows_with(subject, mystery=torch.zeros(3))
    assert not rows["mystery"].ok and "no comparison knows" in rows["mystery"].note
    twin = copy.copy(subject)
    twin.want = {name: t for name, t in subject.want.items() if name != "pixels"}
    assert not attempt(*twin.comparison("latents", twin.want["latents"], "")).ok


@pytest.mark.parametrize(("place", "value"), [
    (("dims", "D"), 24), (("dims", "H"), 5), (("grid",), [4, 5]), (("buffer_size",), 9), (("class_num",), 11),
    (("diffloss_depth",), 3), (("vae", "scale"), 0.18215), (("vae", "pixels_per_token"), 16), (("mlp_ratio",), 2),
])  # fmt: skip
def test_falsified_facts_are_caught(tmp_path, place, value):
    shutil.copytree(GOLDEN, tmp_path / "mar")
    meta = json.loads((tmp_path / "mar" / "meta.json").read_text(encoding="utf-8"))
    inner = meta
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    (tmp_path / "mar" / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    if place == ("dims", "H") and 20 % value == 0:
        rows = verify(tmp_path / "mar")
        assert any(not row.ok for row in rows), table(rows)
        return
    files = Fixture(tmp_path / "mar")
    rows = [attempt(*each) for each in golden_mar.comparisons(files) if each[0].startswith("facts")]
    assert rows and not any(row.ok for row in rows)


def test_wrong_number_of_heads_is_caught_by_the_numbers(subject):
    twin = copy.copy(subject)
    twin.__dict__["net"] = copy.deepcopy(subject.net)
    for block in twin.net.encoder_blocks:
        block.attn.heads = 5
    assert not attempt(*twin.comparison("z", twin.want["z"], "")).ok


def test_plain_weights_instead_of_the_averaged_ones_are_caught(tmp_path):
    stored = torch.load(GOLDEN / "model/mar_base/checkpoint-last.pth", weights_only=False)  # our own fixture
    shutil.copytree(GOLDEN, tmp_path / "mar")
    torch.save({"model": stored["model"]}, tmp_path / "mar/model/mar_base/checkpoint-last.pth")
    failed = [row.what for row in verify(tmp_path / "mar") if not row.ok]
    assert "z [checkpoint-last.pth]" in failed and "z" not in failed


def test_folder_without_a_mar_is_told(tmp_path):
    shutil.copytree(GOLDEN, tmp_path / "mar")
    shutil.rmtree(tmp_path / "mar/model/mar_base")
    (tmp_path / "mar/model/mar-base.safetensors").unlink()
    with pytest.raises(UserError, match="holds no MAR"):
        verify(tmp_path / "mar")


def test_tolerances_of_the_fixture_count_up_to_the_cap():
    want = torch.full((2,), 3.0)
    assert golden_mar.limit_of("z", {"tolerance": {"z": 1e-5}}, want) == pytest.approx(1e-5 + 9e-6)
    assert golden_mar.limit_of("z", {"tolerance": {"z": 5.0}}, want) == pytest.approx(2e-4 + 9e-6)
    assert golden_mar.limit_of("exact", {"tolerance": {"": 1.0}}, want) == 0
