"""First drafts: where they come from, and that the recorded law is the law they were drawn from."""

import pytest
import torch
from scd_pack.scd_core.acceptance import METHODS
from scd_pack.scd_core.drafting import STARTS, automatic_start, first_drafts, source_positions, stride_of
from scd_pack.scd_core.noise import Noise
from scd_pack.scd_core.plan import TokenPlan
from scd_pack.scd_core.state import WindowState
from scd_tests.toys import row_end_plan

PLAN = TokenPlan(2, 3, 4, 6, base=10)


def state_of(method, batch=1, plan=PLAN, reach=4, seed=3):
    """A state whose tokens are set by hand."""
    fixed = torch.full((batch, plan.length), -1)
    state = WindowState(
        plan, METHODS[method], fixed, Noise(seed, range(batch)), plan.length, reach, "cpu", memory=False
    )
    state.tokens[:] = plan.base + torch.arange(plan.length + 1) % plan.vocab
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
    known = torch.tensor([0, 5, 9])
    positions = known[:, None] + torch.arange(20)
    got = source_positions(positions, known, stride)
    for b in range(3):
        for j, source in zip(positions[b].tolist(), got[b].tolist()):
            if stride == 0:
                assert source < 0
                continue
            want = j - stride
            while want >= int(known[b]):
                want -= stride
            assert source == want if want >= 0 else source < 0


@pytest.mark.parametrize("name", ["left", "above", "previous_frame"])
@pytest.mark.parametrize("method", ["seed-exact", "scd-maximal"])
def test_copies(name, method):
    """The token of the source, one-hot law; without a source any token."""
    start = STARTS[name]
    stride = stride_of(start, PLAN)
    state, known = state_of(method, reach=stride), torch.tensor([stride + 2])
    positions = known[:, None] + torch.arange(stride + 3)
    columns, law = first_drafts(start, state, positions, known, stride)
    source = source_positions(positions, known, stride)
    assert torch.equal(columns, (state.tokens.gather(1, source) - PLAN.base))
    if method == "seed-exact":
        assert law is None
    else:
        assert torch.equal(law, torch.nn.functional.one_hot(columns, PLAN.vocab).float())
    first, _ = first_drafts(start, state, torch.tensor([[0, 1]]), torch.tensor([0]), stride)
    assert ((first >= 0) & (first < PLAN.vocab)).all()


def test_a_format_token_is_no_source():
    """A copied row end would be no id of the picture: any token instead, with its own one-hot law."""
    plan = row_end_plan(rows=3, cols=2, vocab=6, base=10, end=3)
    state = state_of("scd-maximal", plan=plan, reach=1)
    state.tokens[:, 2] = 3
    columns, law = first_drafts(STARTS["left"], state, torch.tensor([[3]]), torch.tensor([3]), 1)
    assert 0 <= int(columns) < 6 and float(law[0, 0, columns[0, 0]]) == 1


@pytest.mark.parametrize("name", ["random", "uniform"])
def test_random_drafts_cover_the_vocabulary(name):
    """Uniform in both cases; they differ in the law that is recorded."""
    batch = 6000
    state = state_of("scd-maximal", batch=batch)
    columns, law = first_drafts(STARTS[name], state, torch.zeros(batch, 1, dtype=torch.int64),
                                torch.zeros(batch, dtype=torch.int64), 0)
    counts = torch.bincount(columns.flatten(), minlength=PLAN.vocab)
    assert ((counts - batch / 6).abs() < 5 * (batch * 5 / 36) ** 0.5).all()
    want = torch.nn.functional.one_hot(columns, 6).float() if name == "random" else torch.full((batch, 1, 6), 1 / 6)
    assert torch.allclose(law, want)


@pytest.mark.parametrize("method", ["scd-maximal", "scd-gumbel"])
@pytest.mark.parametrize("name", ["left_law", "above_law", "previous_frame_law"])
def test_law_starts_draw_from_the_law_they_record(name, method):
    batch, start = 8000, STARTS[name]
    stride = stride_of(start, PLAN)
    state, known = state_of(method, batch=batch, reach=stride), torch.full((batch,), stride + 1)
    p = torch.tensor([0.5, 0.0, 0.2, 0.1, 0.0, 0.2])
    everywhere = torch.arange(PLAN.length).expand(batch, -1)
    valid = torch.ones(batch, PLAN.length, dtype=torch.bool)
    state.laws.write(everywhere[:, : stride + 1], p, valid[:, : stride + 1])
    if state.gumbels is not None:
        state.gumbels.write(everywhere, state.noise.gumbel(everywhere, PLAN.vocab), valid)
    columns, law = first_drafts(start, state, known[:, None], known, stride)
    assert torch.equal(law, p.expand(batch, 1, -1))
    counts = torch.bincount(columns.flatten(), minlength=6)
    assert (counts[p == 0] == 0).all()
    assert ((counts - batch * p).abs() <= 5 * (batch * p * (1 - p)).sqrt()).all()
    if method == "scd-gumbel":  # the start shares the position's own noise
        want = (p.log() + state.gumbels.read(known[:, None])).argmax(-1)
        assert torch.equal(columns, want)


def test_drafts_are_keyed_by_position():
    """The same position gets the same first draft whichever pass it enters in."""
    state = state_of("seed-exact")
    one, _ = first_drafts(STARTS["random"], state, torch.arange(8)[None], torch.tensor([0]), 0)
    two, _ = first_drafts(STARTS["random"], state, torch.arange(3, 8)[None], torch.tensor([3]), 0)
    assert torch.equal(one[:, 3:], two)
