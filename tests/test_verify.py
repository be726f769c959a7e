"""`verify`: true fixtures agree, falsified ones do not, and what cannot be compared is a failure too."""

import copy
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from scd_pack.scd_core import verify as verification
from scd_pack.scd_core.__main__ import main
from scd_pack.scd_core.errors import UserError
from scd_pack.scd_core.golden import Fixture, Subject
from scd_pack.scd_core.verify import compare, compare_bf16, find_check, limit_of, run_check, table, verify

GOLDEN = Path(__file__).parent / "data" / "golden"
# a MAR has a table of its own: test_golden_mar
NAMES = sorted(f.name for f in GOLDEN.iterdir() if (f / "meta.json").is_file() and f.name != "mar")
CACHED = ("plan", "prompt", "streams", "positions")  # of a Subject, depending on the numbers
INPUTS = ("codes", "picture", "text_features", "text_mask", "context")


def subject_of(fixture):
    checks = [find_check(name) for name in fixture.tensors]
    return Subject(fixture, {check.part for check in checks})


@pytest.fixture(scope="module")
def subjects():
    """One loaded model a fixture."""
    found = {}

    def get(name):
        if name not in found:
            found.clear()
            found[name] = subject_of(Fixture(GOLDEN / name))
        return found[name]

    return get


def with_numbers(subject, **tensors):
    """The same model before other numbers; nothing that was computed from the old ones is kept."""
    twin = copy.copy(subject)
    twin.fixture = copy.copy(subject.fixture)
    twin.fixture.tensors = {**subject.fixture.tensors, **tensors}
    twin._forced = {}
    for name in CACHED:
        twin.__dict__.pop(name, None)
    return twin


def falsified(name, tensor):
    """One number in the middle is off by ten times the limit; inputs are turned round, as one number may not matter."""
    if name in INPUTS or name.startswith("video_F"):
        return tensor.flip(-1) if name != "text_features" else tensor.flip(1)
    wrong = tensor.clone()
    if wrong.dtype == torch.bool:
        wrong.view(-1)[tensor.numel() // 2] ^= True
        return wrong
    step = 1 if not tensor.is_floating_point() else 5.0 if "bf16" in name else 2e-3
    wrong.view(-1)[tensor.numel() // 2] += step
    return wrong


@pytest.mark.parametrize("name", NAMES)
def test_true_numbers_agree_and_each_falsified_one_is_caught(subjects, name):
    subject = subjects(name)
    numbers = subject.fixture.tensors
    rows = [run_check(subject, key, find_check(key)) for key in numbers]
    assert all(row.ok for row in rows), table(rows)
    for key, tensor in numbers.items():
        twin = with_numbers(subject, **{key: falsified(key, tensor)})
        keys = [key, *(other for other in numbers if other != key)]
        caught = any(not run_check(twin, other, find_check(other)).ok for other in keys)
        assert caught, f"{key} was falsified and nothing noticed"


@pytest.mark.parametrize("name", ["llamagen-c2i", "chameleon-tokenizer", "lumina-mgpt-hf"])
def test_command_prints_a_table_and_tells_by_its_status(name, capsys):
    assert main(["verify", str(GOLDEN / name)]) == 0
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    assert lines[0].split() == ["what", "largest", "error", "limit", "ok"]
    listed = {line.split()[0] for line in lines[1:] if line}
    assert set(Fixture(GOLDEN / name).tensors) <= listed and "NO" not in printed
    assert lines[-1].startswith("all ")


# --- numbers that are wrong in other ways -----------------------------------------------------------------------------


def nan(tensor):
    tensor = tensor.clone()
    tensor.view(-1)[0] = math.nan
    return tensor


WRONG = {
    "NaN": nan,
    "a row less": lambda t: t[:, :-1],
    "a row more": lambda t: torch.cat([t, t[:, -1:]], 1),
    "another kind": lambda t: t.long(),
    "nothing": lambda t: t[:0],
    "one stream": lambda t: t[0],
}


@pytest.mark.parametrize("how", WRONG)
def test_shape_kind_and_nan_count(subjects, how):
    subject = subjects("llamagen-c2i")
    twin = with_numbers(subject, logits=WRONG[how](subject.fixture.tensors["logits"]))
    row = run_check(twin, "logits", find_check("logits"))
    assert not row.ok and row.note and math.isinf(row.error)


def test_numbers_of_the_model_that_are_not_finite_are_a_failure():
    row = compare("x", torch.tensor([1.0, math.nan]), torch.tensor([1.0, 2.0]), 1.0)
    assert not row.ok and "not finite" in row.note


@pytest.mark.parametrize("codes", [torch.full((16,), 500), torch.zeros(15, dtype=torch.int64), torch.full((16,), -1)])
def test_codes_that_are_none_fail_without_a_crash(subjects, codes):
    twin = with_numbers(subjects("llamagen-c2i"), codes=codes)
    for key in ("codes", "logits", "cfg_logits"):
        row = run_check(twin, key, find_check(key))
        assert not row.ok and "\n" not in row.note


def test_codes_and_token_sequence_must_tell_the_same(subjects):
    subject = subjects("lumina-mgpt-hf")
    codes = subject.fixture.tensors["codes"].clone()
    codes[-1] = (codes[-1] + 1) % 64
    twin = with_numbers(subject, codes=codes)
    assert not run_check(twin, "codes", find_check("codes")).ok
    assert not run_check(twin, "image_seq_ids", find_check("image_seq_ids")).ok


def test_bf16_is_compared_loosely_and_not_blindly():
    generator = torch.Generator().manual_seed(1)
    exact = torch.randn(16, 64, generator=generator)
    one, other = (exact + 0.01 * torch.randn(16, 64, generator=generator) for _ in range(2))
    assert compare_bf16("x", one, other, exact).ok
    assert not compare_bf16("x", one + 0.05, other, exact).ok, "all numbers shifted"
    spoilt = one.clone()
    spoilt[3, 3] += 1.0
    assert not compare_bf16("x", one, spoilt, exact).ok and not compare_bf16("x", spoilt, other, exact).ok
    noise = exact + torch.randn(16, 64, generator=generator)
    assert not compare_bf16("x", noise, noise, exact).ok, "an expectation that is nowhere near fp32"


def test_limits_follow_the_fixture_up_to_a_cap():
    assert limit_of("logits", {}) == (2e-4, False)
    assert limit_of("logits", {"tolerance": {"fp32 logits": 3e-4}}) == (3e-4, False)
    assert limit_of("logits", {"tolerance": {"fp32 logits": 1.0}}) == (verification.CAPS["logits"], False)
    assert limit_of("logits", {"tolerance": {"fp32 logits": 1e-6}}) == (1e-6, False)
    assert limit_of("pixels", {"tolerance": {"pixels": math.nan}}) == (1e-4, False)
    assert limit_of("pixels", {"tolerance": {"pixels, relative": 5e-5}}) == (5e-5, True)
    assert limit_of("exact", {"tolerance": {"encoder_codes": 3}}) == (0.0, False)
    assert limit_of("logits", {"tolerance": "none"}) == (2e-4, False)
    assert compare("x", torch.tensor([1000.01]), torch.tensor([1000.0]), 1e-4, relative=True).ok
    assert not compare("x", torch.tensor([1000.01]), torch.tensor([1000.0]), 1e-4).ok


# --- whole fixtures that are wrong -----------------------------------------------------------------------------------


@pytest.fixture
def fixture(tmp_path):
    """A copy of a small fixture, and how to change it."""
    folder = tmp_path / "a" / "b" / "llamagen-c2i"
    shutil.copytree(GOLDEN / "llamagen-c2i", folder)
    return folder


def edit(folder, tensors=None, **facts):
    """Change numbers ({name: tensor, None: gone}) and facts; the list of files goes, so that numbers alone decide."""
    path = folder / "expected.safetensors"
    numbers = {key: t for key, t in {**load_file(path), **(tensors or {})}.items() if t is not None}
    save_file(numbers, path)
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    meta = {key: value for key, value in {**meta, "files": None, **facts}.items() if value is not None}
    (folder / "meta.json").write_text(json.dumps(meta), encoding="utf-8")


def wrong_rows(folder):
    return {row.what: row.note for row in verify(folder) if not row.ok}


def test_a_language_model_is_checked_without_its_image_tokenizer(fixture):
    assert wrong_rows(fixture) == {}


def test_a_tensor_that_nothing_compares_is_a_failure(fixture, capsys):
    edit(fixture, {"surprise": torch.zeros(3)})
    assert "surprise" in wrong_rows(fixture)
    assert main(["verify", str(fixture)]) == 1
    assert "surprise" in capsys.readouterr().out


def test_an_input_that_nothing_needs_is_a_failure(fixture):
    edit(fixture, {"picture": torch.zeros(1, 3, 8, 8)})
    assert "encoder_codes" in wrong_rows(fixture)["picture"]


def test_numbers_that_are_not_those_of_the_list(fixture):
    path = fixture / "expected.safetensors"
    numbers = load_file(path)
    numbers["codes"][-1] = (numbers["codes"][-1] + 1) % 96  # nothing is drawn behind the last code
    save_file(numbers, path)
    assert set(wrong_rows(fixture)) == {"expected.safetensors"}


def test_settings_of_filters_are_read_from_the_fixtures_words(fixture):
    edit(fixture)
    meta = json.loads((fixture / "meta.json").read_text(encoding="utf-8"))
    assert wrong_rows(fixture) == {}
    meta["tensors"]["probs_topk"]["what"] = "original temperature 1, top_k 19, top_p 1 -> probabilities"
    (fixture / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    assert set(wrong_rows(fixture)) == {"probs_topk"}


@pytest.mark.parametrize(
    ("facts", "rows"),
    [
        ({"cfg_scale": 3.5}, {"cfg_logits", "greedy_codes"}),
        ({"class_id": 4}, {"class_ids", "logits"}),
        ({"codebook": 95}, {"facts"}),
        ({"norm_eps": 1e-6}, {"facts"}),
        ({"dims": {"D": 48, "L": 3, "H": 4, "F": 128}}, {"facts"}),
        ({"grid": [4, 5]}, {"codes", "logits"}),
        ({"dims": {"D": 48, "L": 2, "H": 2, "F": 128}}, {"logits", "rope_table"}),  # the file tells no heads
    ],
)
def test_facts_count(fixture, facts, rows):
    edit(fixture, **facts)
    wrong = wrong_rows(fixture)
    assert all(any(row in what for what in wrong) for row in rows), wrong


def test_another_models_weights_are_caught(fixture):
    source = GOLDEN / "llamagen-t2i-jadohu"
    shutil.rmtree(fixture / "model")
    shutil.copytree(source / "model", fixture / "model")
    edit(fixture)
    assert {"logits", "greedy_codes", "class_ids"} <= set(wrong_rows(fixture))


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda f: (f / "meta.json").unlink(), "meta.json"),
        (lambda f: (f / "meta.json").write_text("{"), "meta.json"),
        (lambda f: (f / "expected.safetensors").unlink(), "expected.safetensors"),
        (lambda f: (f / "expected.safetensors").write_bytes(b"x" * 100), "expected.safetensors"),
        (lambda f: shutil.rmtree(f / "model"), "model"),
        (lambda f: (f / "model" / "c2i_B_64.pt").write_bytes(b"PK\x03\x04"), "c2i_B_64.pt"),
    ],
)
def test_broken_fixtures_are_one_sentence(fixture, spoil, told, capsys):
    spoil(fixture)
    assert main(["verify", str(fixture)]) == 1
    printed = capsys.readouterr()
    assert told in printed.err and len(printed.err.strip().splitlines()) == 1 and "Traceback" not in printed.err


def test_a_missing_part_is_told(tmp_path):
    """Pixels are asked for where no image tokenizer lies around."""
    folder = tmp_path / "a" / "b" / "llamagen-c2i"
    shutil.copytree(GOLDEN / "llamagen-c2i", folder)
    edit(folder, {"pixels": torch.zeros(1, 3, 8, 8)})
    with pytest.raises(UserError, match="image tokenizer: MISSING"):
        verify(folder)


def test_the_model_is_found_among_other_files(fixture):
    """A folder of single files, as of LlamaGen's downloads: language model and image tokenizer."""
    shutil.copy(GOLDEN / "llamagen-vq-ds16" / "model" / "vq_ds16_c2i.pt", fixture / "model")
    shutil.copy(GOLDEN / "llamagen-t2i" / "model" / "t2i_XL_stage1_64.pt", fixture)
    assert wrong_rows(fixture) == {}


def test_parts_are_found_in_sibling_fixtures(tmp_path):
    for name in ("lumina-mgpt-34b-like", "chameleon-tokenizer"):
        shutil.copytree(GOLDEN / name, tmp_path / "a" / name)
    assert wrong_rows(tmp_path / "a" / "lumina-mgpt-34b-like") == {}
    shutil.rmtree(tmp_path / "a" / "chameleon-tokenizer")
    with pytest.raises(UserError, match="text tokenizer: MISSING"):
        verify(tmp_path / "a" / "lumina-mgpt-34b-like")
