"""The report: figures that add up, plain data, lines for people."""

import hashlib
import json
import struct

import numpy as np
import pytest
import torch
from scd_pack.scd_core.acceptance import METHODS
from scd_pack.scd_core.plan import TokenPlan
from scd_pack.scd_core.report import token_hash
from scd_tests.toys import draw, row_end_plan, tiny_decoder

PLAN = TokenPlan(2, 3, 5, 12)


@pytest.fixture(scope="module")
def decoder():
    return tiny_decoder()


def kept_cells():
    kept = torch.full((2, 2, 3, 5), -1)
    kept[0, 0] = 1
    kept[1, 1, 1] = 2
    return kept


@pytest.mark.parametrize("kept", [None, kept_cells()], ids=["free", "kept"])
@pytest.mark.parametrize("method", METHODS)
def test_figures_add_up(decoder, method, kept):
    tokens, report = draw(decoder, PLAN, method=method, window=7, batch=2, kept=kept, seed=11)
    free = [30, 30] if kept is None else [15, 25]
    assert report.tokens == sum(free)
    assert [sum(a) for a in report.accepted] == free
    assert report.per_sample == [len(a) for a in report.accepted]
    assert report.passes == max(report.per_sample)
    assert report.tokens_per_pass == sum(free) / sum(report.per_sample)
    assert report.visits.shape == (2, 2, 3, 5)
    drawn = np.ones((2, 2, 3, 5), bool) if kept is None else kept.numpy() < 0
    assert (report.visits[drawn] >= 1).all()
    if METHODS[method].sequential:
        assert (report.visits[drawn] == 1).all()
        assert report.settings["window"] == 1
    assert set(report.seconds) == {"backbone", "kernel", "rest"} and min(report.seconds.values()) >= 0
    assert report.sha256_tokens == token_hash(tokens)


def test_visits_are_window_rows(decoder):
    """Free cells looked at in all passes together: window rows, less at the end of the sequence."""
    _, report = draw(decoder, PLAN, method="scd-maximal", window=7, seed=11)
    left, rows = 30, 0
    for n in report.accepted[0]:
        rows += min(7, left)
        left -= n
    assert int(report.visits.sum()) == rows


@pytest.mark.parametrize("method", METHODS)
def test_given_cells_cost_nothing(decoder, method):
    """A cell that was given is no work, wherever it lies: 0 on the map."""
    kept = kept_cells()
    _, report = draw(decoder, PLAN, method=method, window=7, batch=2, kept=kept, seed=11)
    assert (report.visits[kept.numpy() >= 0] == 0).all()


def test_format_tokens_are_not_on_the_map(decoder):
    _, report = draw(decoder, row_end_plan(), window=7, method="scd-gumbel")
    assert report.visits.shape == (1, 1, 4, 5) and report.visits.min() >= 1 and report.tokens == 20


def test_hash_is_equal_exactly_when_the_tokens_are(decoder):
    one, a = draw(decoder, PLAN, window=7, seed=4, batch=2)
    two, b = draw(decoder, PLAN, window=3, seed=4, batch=2)
    three, c = draw(decoder, PLAN, window=7, seed=5, batch=2)
    assert torch.equal(one, two) and a.sha256_tokens == b.sha256_tokens
    assert not torch.equal(one, three) and a.sha256_tokens != c.sha256_tokens
    changed = one.clone()
    changed[1, -1] ^= 1
    assert token_hash(changed) != token_hash(one)
    assert token_hash(one[:1]) != token_hash(one)
    plain = hashlib.sha256(struct.pack("<60i", *one.flatten().tolist())).hexdigest()
    assert a.sha256_tokens == plain  # little-endian int32, row by row: others can recompute it


@pytest.mark.parametrize("method", METHODS)
def test_plain_data(decoder, method):
    _, report = draw(decoder, PLAN, method=method, window=7, batch=2, kept=kept_cells(), seed=(1 << 64) - 1)
    report.notes = ["a note"]
    data = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert data["passes"] == report.passes and data["tokens"] == report.tokens and data["method"] == method
    assert {"tokens_per_pass", "seconds", "lossless", "sha256_tokens"} <= set(data)
    assert data["settings"]["seed"] == (1 << 64) - 1
    assert data["settings"]["start"] != "auto" and data["settings"]["temperature"] is not None
    assert np.array(data["visits"]).shape == (2, 2, 3, 5)
    assert sum(map(sum, data["accepted_per_pass"])) == data["tokens"]
    assert data["notes"] == ["a note"]


def test_text_says_what_matters(decoder):
    _, report = draw(decoder, PLAN, window=7, batch=2, seed=77)
    report.notes = ["a sentence for the user"]
    text = report.text()
    for part in ("method seed-exact (lossless)", "window 7", "2 x 2 frames of 3x5 tokens", f"{report.passes} passes",
                 "60 tokens", "seed 77", "memory on", report.sha256_tokens[:16], "a sentence for the user",
                 "same tokens as one-at-a-time"):
        assert part in text, part
    _, slow = draw(decoder, PLAN, method="autoregressive", seed=77)
    assert "1.00 tokens a pass, 1.0x" in slow.text() and "same tokens" not in slow.text()
    assert "drafts rarely survive" not in slow.text()


def test_memory_is_reported_as_used(decoder):
    used = {m: draw(decoder, PLAN, method=m, window=7)[1].settings["memory"] for m in METHODS}
    assert [m for m, on in used.items() if on] == ["jacobi", "seed-exact"]
    assert not draw(decoder, PLAN, window=7, memory=False)[1].settings["memory"]


def test_identity_is_promised_in_fp32_only(decoder):
    _, report = draw(decoder, PLAN, window=7)
    assert "exact in fp32" not in report.text()
    report.dtype = "bfloat16"
    assert "up to rounding ties (bfloat16; exact in fp32)" in report.text()
