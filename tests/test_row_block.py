"""Whole rows drafted from the row above, corrected in some rounds: how many passes, how near to the law."""

import pytest
import torch
from scd_pack.scd_core.errors import UserError
from scd_pack.scd_core.generate import Request, check_request
from scd_pack.scd_core.plan import TokenPlan
from scd_tests.row_spy import row_counts, watch
from scd_tests.statistics import combined_z, entropy_z, law_test
from scd_tests.test_identity import GUIDED, PLANS, kept_cells
from scd_tests.test_rows import clip_windows
from scd_tests.toys import Toy, draw, grid, pairs_in_rows, prefix_tables, row_end_plan, run, tiny_decoder

CHAINS = 20_000
SAMPLES = 24


@pytest.fixture(scope="module")
def decoder():
    return tiny_decoder()


@pytest.fixture(scope="module")
def picture():
    return grid()


@pytest.mark.parametrize("kept", [False, True], ids=["free", "kept"])
@pytest.mark.parametrize("start", ["above", "above_law"])
@pytest.mark.parametrize("plan", [p for p in PLANS.values() if p.frames == 1], ids=[n for n in PLANS if n != "clip"])
def test_exact_is_scd_with_rows_for_windows(decoder, monkeypatch, plan, start, kept):
    settings = {"window": 3, "batch": 3, "seed": 6, "law": GUIDED, "start": start}
    settings["kept"] = kept_cells(plan) if kept else None
    got, report = draw(decoder, plan, method="row-block", rounds=0, **settings)
    assert report.lossless and report.settings["rounds"] == 0 and "exact" in report.text()
    clip_windows(monkeypatch, plan, first=True)
    want, raster = draw(decoder, plan, method="scd-maximal", **settings)
    if not kept:  # the raster window drafts rows behind given ones earlier, after other cells
        assert torch.equal(got, want) and report.accepted == raster.accepted
    assert report.passes <= sum(report.accepted[0])


@pytest.mark.slow
@pytest.mark.parametrize("start", ["above", "above_law", "uniform"])
@pytest.mark.parametrize("shape", [(1, 2, 3), (1, 3, 2), (2, 2, 2)], ids=str)
def test_exact_rounds_have_the_law(shape, start):
    """As many rounds as columns are exact too: after round t column t is right."""
    toy = pairs_in_rows(shape=shape) if shape[0] == 1 else prefix_tables(2, 8, seed=5, shape=shape)
    for rounds in (0, shape[2]):
        codes, report = run(toy, "row-block", batch=CHAINS, window=20, seed=1, rounds=rounds, start=start)
        result = law_test(toy.index(codes), toy.joint())
        assert result.exact and report.lossless, (rounds, result)


@pytest.mark.slow
def test_given_tokens_leave_the_law_of_the_rest():
    toy, given = prefix_tables(3, 6, seed=5, shape=(1, 3, 2)), {1: 2, 4: 0}
    kept = torch.tensor([given.get(j, -1) for j in range(6)]).view(1, 1, 3, 2)
    codes, _ = run(toy, "row-block", batch=CHAINS, window=20, seed=2, rounds=0, kept=kept)
    assert law_test(toy.index(codes), toy.joint(given=given)).exact


@pytest.mark.slow
def test_one_round_is_seen():
    toy = pairs_in_rows()
    codes, report = run(toy, "row-block", batch=CHAINS, window=20, seed=1, rounds=1)
    assert law_test(toy.index(codes), toy.joint()).clearly_biased and not report.lossless


def block(toy, rounds, **settings):
    """(report, passes that the first row took, codes)."""
    first = {}

    def look(progress):
        for sample, done in enumerate(row_counts(toy.plan, progress.settled)[:, 0] == toy.plan.cols):
            if done:
                first.setdefault(sample, progress.passes)

    codes, report = run(toy, "row-block", batch=SAMPLES, window=8, seed=3, rounds=rounds, callback=look, **settings)
    return report, [first[sample] for sample in range(SAMPLES)], codes


def nll_gap(toy, codes):
    """(mean excess of the NLL over the entropy a token, in nats; its z)."""
    padded = torch.cat([codes, torch.zeros_like(codes[:, :1])], 1)
    log_p = toy.logits(padded, torch.arange(codes.shape[1]).expand(len(codes), -1)).log_softmax(-1)
    p = log_p.exp()
    gap = -log_p.gather(-1, codes[..., None]).mean() + (p * log_p).sum(-1).mean()
    return float(gap), combined_z(entropy_z(log_p, codes))


@pytest.mark.slow
def test_rounds_trade_passes_for_the_law(picture):
    """Passes of the first row + (R - 1) * r exactly; the likelihood gap falls with r and is gone in exact rounds."""
    gaps, lines = [], picture.plan.rows
    for rounds in (1, 2, 3, 8, 0):
        report, first, codes = block(picture, rounds)
        gap, z = nll_gap(picture, codes)
        gaps.append(gap)
        if 0 < rounds < 4:
            assert report.per_sample == [n + (lines - 1) * rounds for n in first]
        if rounds == 0:
            assert abs(z) < 4 and report.lossless
        else:
            assert all(n <= f + (lines - 1) * rounds for n, f in zip(report.per_sample, first))
    assert gaps[0] > gaps[1] > gaps[2] > abs(gaps[3]) and gaps[0] > 0.2, gaps


def test_passes_of_one_sample(decoder):
    for plan in (TokenPlan(1, 6, 12, 12), row_end_plan(6, 12), TokenPlan(2, 3, 12, 12)):
        for rounds in (1, 2):
            _, report, _, settled = watch(decoder, plan, method="row-block", window=4, seed=2, rounds=rounds)
            first = next(t for t, decided in enumerate(settled) if row_counts(plan, decided)[0, 0] == plan.cols)
            assert report.per_sample == [first + (plan.frames * plan.rows - 1) * rounds]


def test_a_round_that_keeps_everything_is_the_last():
    flat = torch.full((5,), -60.0)
    flat[3] = 60.0
    toy = Toy(TokenPlan(1, 4, 10, 5), lambda known, positions: flat.expand(*positions.shape, -1))
    codes, report = run(toy, "row-block", window=5, rounds=8, start="above", seed=1)
    assert (codes == 3).all() and report.passes <= 10 + 3


def test_commits_in_order_and_in_every_pass(decoder):
    for plan in PLANS.values():
        kept = kept_cells(plan)
        _, report, _, settled = watch(decoder, plan, method="row-block", window=3, seed=2, batch=3, kept=kept)
        assert all(min(accepted) >= 1 for accepted in report.accepted)
        for decided in settled[1:]:
            counts = row_counts(plan, decided)
            assert ((counts > 0) & (counts < plan.cols)).sum() <= len(counts)  # one row at a time
            assert (counts[:, 1:] <= counts[:, :-1]).all()


def test_rows_are_told_and_checked():
    plan = TokenPlan(1, 5, 6, 12)
    text = draw(tiny_decoder(), plan, method="row-block", window=3, rounds=2)[1].text()
    assert "lossy" in text and "2 rounds" in text and "relaxation" not in text
    text = draw(tiny_decoder(), plan, method="pjd-c", window=3)[1].text()
    assert "lossy" in text and "2 of 6 columns" in text
    text = draw(tiny_decoder(), plan, method="pjd", window=3, row_context=6)[1].text()
    assert "lossy" in text and "published" in text
    for name, value in (("rounds", 9), ("rounds", -1), ("row_context", 0)):
        with pytest.raises(UserError, match=f"{name.replace('_', ' ')} {value}"):
            check_request(Request(**{name: value}))
