"""The loop: it ends in time, commits in every pass, can be stopped, holds what it needs and no more."""

import gc
import json
import weakref

import pytest
import torch
from scd_pack.scd_core import loop, ring, state
from scd_pack.scd_core.acceptance import METHODS
from scd_pack.scd_core.errors import UserError
from scd_pack.scd_core.law import LawSettings
from scd_pack.scd_core.plan import TokenPlan
from scd_tests.biased import rule, stale
from scd_tests.statistics import combined_z, entropy_z
from scd_tests.toys import Toy, draw, grid, prefix_tables, row_end_plan, run, tiny_decoder

PLAN = TokenPlan(1, 5, 6, 12)


@pytest.fixture(scope="module")
def decoder():
    return tiny_decoder()


@pytest.fixture(scope="module")
def picture():
    """Grid G at medium entropy."""
    return grid()


def half_kept():
    kept = torch.full((1, 1, 5, 6), -1)
    kept[0, 0, 0] = 2
    kept[0, 0, 2, ::2] = 4
    return kept


# termination --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [None, half_kept()], ids=["free", "kept"])
@pytest.mark.parametrize("window", [1, 2, 7, 100])
@pytest.mark.parametrize("method", METHODS)
def test_every_pass_commits(decoder, method, window, kept):
    frontiers = []
    tokens, report = draw(decoder, PLAN, method=method, window=window, batch=3, kept=kept, seed=2,
                          callback=lambda p: frontiers.append(p.frontier))
    free = 30 if kept is None else 21
    assert report.tokens == 3 * free and report.passes == max(report.per_sample) <= free
    for accepted in report.accepted:
        assert min(accepted) >= 1 and sum(accepted) == free
        rule = METHODS[method]
        if rule.layout == "window":
            assert max(accepted) <= (1 if rule.sequential else window)
    for before, after in zip(frontiers, frontiers[1:]):
        assert all(a > b or b == 30 for a, b in zip(after, before))
    assert ((tokens >= 0) & (tokens < 12)).all()
    if kept is not None:
        given = kept.flatten() >= 0
        assert (tokens[:, given] == kept.flatten()[given]).all()


def test_worst_case_is_one_token_a_pass():
    """Certain tokens that no draft ever guesses: every other pass must still move on, and no law may break."""
    cycle = Toy(TokenPlan(1, 1, 20, 2), lambda known, positions: torch.full((*positions.shape, 2), -60.0).scatter(
        -1, ((1 + known.gather(1, (positions - 1).clamp(min=0)).clamp(min=0)) % 2)[..., None], 60.0))
    for method in METHODS:
        codes, report = run(cycle, method=method, window=8, batch=2)
        assert report.passes <= 20
        assert (codes.diff(dim=1) != 0).all()


def test_certain_drafts_take_a_window_a_pass():
    """A model that always says the same token is drawn in ceil(N / window) passes once the drafts have settled."""
    flat = torch.full((5,), -60.0)
    flat[3] = 60.0
    toy = Toy(TokenPlan(1, 4, 10, 5), lambda known, positions: flat.expand(*positions.shape, -1))
    codes, report = run(toy, method="seed-exact", window=8, start="left", seed=1)
    assert (codes == 3).all()
    assert report.passes <= 1 + 40 // 8 + 1


def test_no_progress_is_an_error(decoder):
    """A rule that commits nothing cannot exist: the last lane decides. A run past its limit says so."""
    toy = prefix_tables(3, 4, seed=1)
    never = rule(METHODS["scd-maximal"], accept=lambda view: (view.draft * 0, view.draft < 0))
    _, report = run(toy, variant=never, window=3)
    assert report.passes == 4


# the callback -------------------------------------------------------------------------------------------------------


def test_callback_sees_the_truth(decoder):
    seen = []
    tokens, report = draw(decoder, PLAN, window=7, batch=3, callback=seen.append)
    assert [p.passes for p in seen] == list(range(1, report.passes + 1))
    assert all(p.total == 90 for p in seen) and seen[-1].done == 90
    assert all(a.done < b.done for a, b in zip(seen, seen[1:]))
    assert seen[-1].frontier == [30] * 3
    for p in seen:
        assert p.tokens.shape == (3, 30)
        for b, front in enumerate(p.frontier):
            assert torch.equal(p.tokens[b, :front].cpu(), tokens[b, :front])  # decided tokens never change
    assert torch.equal(seen[-1].tokens.cpu(), tokens)


def test_a_meddling_callback_changes_nothing(decoder):
    want, _ = draw(decoder, PLAN, window=7, batch=2)

    def meddle(progress):
        progress.tokens.fill_(0)
        progress.frontier.clear()

    got, _ = draw(decoder, PLAN, window=7, batch=2, callback=meddle)
    assert torch.equal(got, want)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, RuntimeError])
def test_raising_stops_within_the_pass_and_frees_everything(decoder, error, monkeypatch):
    sessions, states, passes = [], [], []
    real, real_state = loop.Session, loop.WindowState

    def session(*args):
        made = real(*args)
        sessions.append(weakref.ref(made))
        sessions.append(weakref.ref(made.cache.k[0]))
        return made

    def state(*args):
        made = real_state(*args)
        states.append(weakref.ref(made))
        return made

    monkeypatch.setattr(loop, "Session", session)
    monkeypatch.setattr(loop, "WindowState", state)

    def stop(progress):
        passes.append(progress.passes)
        if progress.passes == 3:
            raise error("stop")

    with pytest.raises(error, match="stop"):
        draw(decoder, PLAN, method="scd-gumbel", window=4, callback=stop)
    assert passes == [1, 2, 3]
    gc.collect()
    assert [ref() for ref in sessions + states] == [None] * 3


def test_nothing_outlives_a_run(decoder, monkeypatch):
    real, sessions = loop.Session, []
    monkeypatch.setattr(loop, "Session", lambda *a: sessions.append(weakref.ref(s := real(*a))) or s)
    draw(decoder, PLAN, window=4)
    gc.collect()
    assert sessions[0]() is None


# memory -------------------------------------------------------------------------------------------------------------


class Enough(Exception):
    """Raised by a callback that has seen enough."""


@pytest.mark.parametrize("method", METHODS)
def test_nothing_of_size_n_by_v_is_allocated(method, monkeypatch):
    """Where that would not be small: the longest tensor with a vocabulary axis has window + row places."""
    vocab, side, window, largest = 500, 20, 4, []
    monkeypatch.setattr(ring, "EASY", window * vocab)
    monkeypatch.setattr(state, "NUMBERS", window * vocab)

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.is_floating_point():
                largest.append(out.numel())
            return out

    def stop(progress):
        if progress.passes == 3:
            raise Enough

    toy = Toy(TokenPlan(1, side, side, vocab), lambda known, positions: torch.zeros(*positions.shape, vocab))
    with Watch(), pytest.raises(Enough):
        run(toy, method=method, window=window, start="above_law", callback=stop)
    rule = METHODS[method]
    # by rows: those that a quarter of the columns lets run at a time and the one above, or one whole row and that
    places = {"window": window + side + 1, "rows": (side // 5 + 2) * side + 1, "row-block": 3 * side + 1}[rule.layout]
    assert window * vocab <= max(largest) <= places * vocab or rule.sequential


# bad input ----------------------------------------------------------------------------------------------------------


def test_unknown_names_are_told_with_the_choices(decoder):
    with pytest.raises(UserError, match=r"unknown method 'sdj'.*seed-exact"):
        draw(decoder, PLAN, method="sdj")
    with pytest.raises(UserError, match=r"unknown draft start 'up'.*auto.*above"):
        draw(decoder, PLAN, start="up")


@pytest.mark.parametrize("method", METHODS)
def test_not_finite_is_told_where_it_happens(method):
    """The sentence names pass, place, picture and dtype; rows that nobody looks at do not count."""

    def logits(known, positions):
        out = torch.zeros(*positions.shape, 4)
        sick = (positions == 6) & (torch.arange(len(known)) == 1)[:, None]
        return torch.where(sick[..., None], torch.nan, out)

    toy = Toy(TokenPlan(1, 3, 4, 4), logits)
    with pytest.raises(UserError, match=r"not finite in pass \d+, near token \d+ of picture 2.*float32.*bf16 or fp32"):
        run(toy, method=method, batch=3, window=3)
    kept = torch.full((1, 1, 3, 4), -1)
    kept.flatten()[6] = 2
    kept.flatten()[5] = 1
    kept.flatten()[7] = 1
    healthy = Toy(toy.plan, lambda known, positions: logits(known[:1], positions[:1]).expand(len(known), -1, -1))
    run(healthy, method=method, batch=2, window=3, kept=kept)


def test_everything_given_costs_nothing(decoder):
    kept = torch.arange(30).view(1, 1, 5, 6) % 12
    called = []
    tokens, report = draw(decoder, PLAN, kept=kept, batch=2, callback=called.append)
    assert torch.equal(tokens, kept.view(1, -1).expand(2, -1)) and not called
    assert report.passes == report.tokens == 0 and report.per_sample == [0, 0]
    assert (report.visits == 0).all() and report.tokens_per_pass == 0
    json.dumps(report.to_dict())
    report.text()


def test_one_sample_given_whole_and_one_not(decoder):
    kept = torch.stack([torch.arange(30).view(1, 5, 6) % 12, torch.full((1, 5, 6), -1)])
    fronts = []
    tokens, report = draw(decoder, PLAN, kept=kept, batch=2, window=7, callback=lambda p: fronts.append(p.frontier))
    alone, _ = draw(decoder, PLAN, window=7, first_sample=1)
    assert torch.equal(tokens[0], kept[0].flatten()) and torch.equal(tokens[1], alone[0])
    assert report.per_sample[0] == 0 and all(f[0] == 30 for f in fronts)


def test_only_allowed_ids_are_drawn(decoder):
    allowed = torch.arange(12) % 3 == 0
    plan = TokenPlan(1, 5, 6, 12, allowed=allowed)
    for method in METHODS:
        for start in ("random", "uniform", "above_law"):
            tokens, _ = draw(decoder, plan, method=method, window=7, start=start)
            assert allowed[tokens].all(), (method, start)


@pytest.mark.parametrize("method", METHODS)
def test_row_ends_are_forced(decoder, method):
    plan = row_end_plan()
    tokens, report = draw(decoder, plan, method=method, window=7, batch=2)
    table = tokens.view(2, 4, 6)
    assert (table[..., 5] == 13).all() and (table[..., :5] < 12).all()
    assert report.tokens == 40 and plan.codes(tokens).shape == (2, 1, 4, 5)


def test_single_cell(decoder):
    for method in METHODS:
        tokens, report = draw(decoder, TokenPlan(1, 1, 1, 12), method=method, window=7, start="above")
        assert tokens.shape == (1, 1) and report.passes == 1


# step counts on the grid toy ----------------------------------------------------------------

SAMPLES = 24


def passes(toy, **settings):
    codes, report = run(toy, batch=SAMPLES, seed=3, **settings)
    return sum(report.per_sample) / SAMPLES, codes


def likelihood_z(toy, codes):
    """z of the mean NLL of all samples together."""
    padded = torch.cat([codes, torch.zeros_like(codes[:, :1])], 1)
    logits = toy.logits(padded, torch.arange(codes.shape[1]).expand(len(codes), -1))
    return combined_z(entropy_z(logits.log_softmax(-1), codes))


@pytest.mark.slow
def test_step_counts(picture):
    """Coupling pays, SJD does not gain from long windows, and nobody's samples are too likely."""
    count = {}
    for method in ("sjd", "scd-maximal", "scd-gumbel", "seed-exact"):
        for window in (16, 32, 64):
            count[method, window], codes = passes(picture, method=method, window=window)
            assert abs(likelihood_z(picture, codes)) < 4, (method, window)
    assert count["scd-maximal", 32] < 0.5 * count["sjd", 32]
    for method in ("scd-maximal", "scd-gumbel", "seed-exact"):
        assert count[method, 16] > count[method, 32] > count[method, 64], count
        assert count[method, 32] < 1.12 * count["scd-maximal", 32], count
    sjd = [count["sjd", w] for w in (16, 32, 64)]
    assert max(sjd) < 1.06 * min(sjd), sjd


@pytest.mark.slow
def test_stale_laws_cost_passes_and_show(picture):
    """The released rule on the same toy: more passes, and samples that are too likely."""
    right, _ = passes(picture, method="scd-maximal", window=32)
    wrong, codes = passes(picture, variant=rule(METHODS["scd-maximal"], remember=stale), window=32)
    assert wrong > 1.1 * right
    assert likelihood_z(picture, codes) < -6


@pytest.mark.slow
def test_greedy_jacobi_is_the_greedy_chain(picture):
    """Jacobi finds the chain of best tokens, in fewer passes than tokens."""
    jacobi, codes = passes(picture, method="jacobi", window=32)
    one, want = passes(picture, method="autoregressive", law=LawSettings(temperature=0.0))
    assert torch.equal(codes, want) and jacobi < 0.7 * one
