"""First drafts: where they come from, and that the recorded law is the law they were drawn from."""

import numpy as np
import pytest
import torch
from scd_pack.scd_core.acceptance import METHODS
from scd_pack.scd_core.drafting import STARTS, automatic_start, draft_laws, draft_tokens, source_positions, stride_of
from scd_pack.scd_core.noise import Noise
from scd_pack.scd_core.plan import TokenPlan
from scd_pack.scd_core.state import WindowState
from scd_tests.toys import row_end_plan

PLAN = TokenPlan(2, 3, 4, 6, base=10)


def state_of(method, batch=1, plan=PLAN, reach=4, seed=3):
    """A state whose tokens are set by hand."""
    fixed = np.full((batch, plan.length), -1)
    state = WindowState(plan, METHODS[method], fixed, Noise(seed, range(batch)), plan.length, reach, "cpu", False)
    state.tokens[:] = plan.base + np.arange(plan.length + 1) % plan.vocab
    return state


def test_strides():
    ends = row_end_plan(rows=4, cols=5)
    clip = TokenPlan(2, 3, 4, 6)
    want = {"random": (0, 0), "uniform": (0, 0), "left": (1, 1), "left_law": (1, 1), "above": (6, 4),
            "above_law": (6, 4), "previous_frame": (0, 12), "previous_frame_law": (0, 12)}
    assert set(want) == set(STARTS)
    for name, strides in want.items():
        assert (stride_of(STARTS[name], ends), stride_of(STARTS[name], clip)) == strides, name


def test_automatic_start():
    still, clip = TokenPlan(1, 3, 4, 6), PLAN
    names = {m: (automatic_start(METHODS[m], still), automatic_start(METHODS[m], clip)) for m in METHODS}
    assert names["seed-exact"] == ("random", "previous_frame")
    assert names["scd-maximal"] == names["scd-gumbel"] == names["sjd"] == ("uniform", "previous_frame_law")


@pytest.mark.parametrize("stride", [0, 1, 3, 7])
def test_sources_by_the_long_way(stride):
    """Step back by the stride until a position is known (or the sequence begins)."""
    known = np.array([0, 5, 9])
    positions = known[:, None] + np.arange(20)
    got = source_positions(positions, known, stride)
    for b in range(3):
        for j, source in zip(positions[b].tolist(), got[b].tolist()):
            if stride == 0:
                assert source < 0
                continue
            want = j - stride
            while want >= known[b]:
                want -= stride
            assert source == want if want >= 0 else source < 0


@pytest.mark.parametrize("name", ["left", "above", "previous_frame"])
def test_copies(name):
    """The token of the source; without a source any token."""
    stride = stride_of(STARTS[name], PLAN)
    state, known = state_of("seed-exact", reach=stride), np.array([stride + 2])
    positions = known[:, None] + np.arange(min(stride + 3, PLAN.length - known[0]))
    source = source_positions(positions, known, stride)
    columns = draft_tokens(state, positions, source)
    assert (columns[0] == state.tokens[0, source[0]] - PLAN.base).all()
    first = draft_tokens(state, np.array([[0, 1]]), source_positions(np.array([[0, 1]]), np.array([0]), stride))
    assert ((first >= 0) & (first < PLAN.vocab)).all()
    none = np.full((1, 40), -1)
    free = draft_tokens(state, np.arange(40)[None] % 24, none)
    assert set(free.ravel().tolist()) == set(range(PLAN.vocab))


@pytest.mark.parametrize("name", ["random", "left", "above", "previous_frame"])
def test_copied_drafts_have_one_hot_laws(name):
    """Through the state, as the loop does it."""
    stride = stride_of(STARTS[name], PLAN)
    state = state_of("scd-maximal", reach=stride)
    assert state.enter(STARTS[name], stride, np.array([stride]), np.array([stride + 6])) is None
    positions = stride + np.arange(6)[None]
    law = state.laws.read(positions)
    assert torch.equal(law.argmax(-1), torch.from_numpy(state.columns_at(positions)))
    assert torch.equal(law.sum(-1), torch.ones(1, 6)) and torch.equal(law.max(-1).values, torch.ones(1, 6))


def test_a_format_token_is_no_source():
    """A copied row end would be no id of the picture: any token instead, with its own one-hot law."""
    plan = row_end_plan(rows=3, cols=2, vocab=6, base=10, end=3)
    state = state_of("scd-maximal", plan=plan, reach=1)
    state.tokens[:, 2] = 3
    column = int(draft_tokens(state, np.array([[3]]), np.array([[2]]))[0, 0])
    assert 0 <= column < 6
    state.enter(STARTS["left"], 1, np.array([3]), np.array([4]))
    assert state.tokens[0, 3] == column + 10 and float(state.laws.read(np.array([[3]]))[0, 0, column]) == 1


def counts_fit(columns, p):
    """Every bin within 5 sigma, impossible ones empty."""
    n = columns.numel()
    counts = torch.bincount(columns.flatten(), minlength=len(p))
    assert (counts[p == 0] == 0).all()
    assert ((counts - n * p).abs() <= 5 * (n * p * (1 - p)).sqrt()).all()


@pytest.mark.parametrize("name", ["random", "uniform"])
def test_drafts_without_a_source_are_uniform(name):
    """In both cases; they differ in the law that is recorded."""
    batch, where = 6000, np.zeros((6000, 1), dtype=np.int64)
    state, uniform = state_of("scd-maximal", batch=batch), torch.full((6,), 1 / 6)
    if name == "random":
        counts_fit(torch.from_numpy(draft_tokens(state, where, where - 1)), uniform)
    else:
        columns, law = draft_laws(state, where, where - 1)
        counts_fit(columns, uniform)
        assert torch.allclose(law, uniform.expand(batch, 1, 6))


@pytest.mark.parametrize("method", ["scd-maximal", "scd-gumbel"])
@pytest.mark.parametrize("name", ["left_law", "above_law", "previous_frame_law"])
def test_law_starts_draw_from_the_law_they_record(name, method):
    batch = 8000
    stride = stride_of(STARTS[name], PLAN)
    state, known = state_of(method, batch=batch, reach=stride), np.full((batch, 1), stride + 1)
    p = torch.tensor([0.5, 0.0, 0.2, 0.1, 0.0, 0.2])
    state.laws.write(known - stride, p.expand(batch, 1, -1))
    if state.gumbels is not None:
        state.gumbels.write(known, state.noise.gumbel(known, PLAN.vocab))
    columns, law = draft_laws(state, known, source_positions(known, known[:, 0], stride))
    assert torch.equal(law, p.expand(batch, 1, -1))
    counts_fit(columns, p)
    if method == "scd-gumbel":  # the start shares the position's own noise
        assert torch.equal(columns, (p.log() + state.gumbels.read(known)).argmax(-1))


def test_a_law_that_was_never_computed_is_uniform():
    """The source may be a given cell: nothing was drawn there, so nothing is known."""
    state = state_of("scd-maximal")
    _, law = draft_laws(state, np.array([[5]]), np.array([[4]]))
    assert torch.allclose(law, torch.full((1, 1, 6), 1 / 6))


def test_drafts_are_keyed_by_position():
    """The same position gets the same first draft whichever pass it enters in."""
    state, none = state_of("seed-exact"), np.full((1, 8), -1)
    one = draft_tokens(state, np.arange(8)[None], none)
    two = draft_tokens(state, np.arange(3, 8)[None], none[:, 3:])
    assert (one[:, 3:] == two).all()
