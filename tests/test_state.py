"""Rings and frontiers against the long way."""

import random

import numpy as np
import pytest
import torch
from scd_pack.scd_core.acceptance import METHODS
from scd_pack.scd_core.noise import Noise
from scd_pack.scd_core.plan import TokenPlan
from scd_pack.scd_core.state import Frontier, Ring, WindowState


def test_ring_remembers_the_last_capacity_positions():
    ring, rng, kept = Ring(2, 5, 3, "cpu", fill=-1.0), random.Random(0), {}
    for position in range(40):
        values = torch.rand(2, 1, 3)
        valid = torch.tensor([[True], [rng.random() < 0.7]])
        ring.write(torch.full((2, 1), position), values, valid)
        for row in range(2):
            if valid[row]:
                kept[row, position % 5] = values[row, 0]
        for back in range(min(position + 1, 5)):
            read = ring.read(torch.full((2, 1), position - back))
            for row in range(2):
                want = kept.get((row, (position - back) % 5), torch.full((3,), -1.0))
                assert torch.equal(read[row, 0], want)


def test_ring_read_is_a_copy_and_move_takes_a_row():
    ring = Ring(2, 3, 2, "cpu")
    ring.write(torch.tensor([[1], [1]]), torch.tensor([[[1.0, 2.0]], [[3.0, 4.0]]]), torch.ones(2, 1, dtype=torch.bool))
    view = ring.read(torch.tensor([[1], [1]]))
    view[:] = 9
    assert ring.read(torch.tensor([[1], [1]]))[1, 0].tolist() == [3, 4]
    ring.move(1, 0)
    assert ring.read(torch.tensor([[1]]))[0, 0].tolist() == [3, 4]


def random_fixed(rng, length, share):
    fixed = np.array([5 if rng.random() < share else -1 for _ in range(length)])
    fixed[rng.randrange(length)] = -1
    return fixed


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("window", [1, 2, 5, 100])
def test_frontier_walks_over_given_tokens(window, share):
    """Whatever is committed when: the window holds at most `window` free positions, ends at one, fits into the span."""
    rng = random.Random(window)
    for _ in range(60):
        fixed = random_fixed(rng, rng.randint(1, 30), share)
        f = Frontier(0, fixed)
        f.begin(int(f.free[0]) if rng.random() < 0.5 else 0)
        span, passes, widest = f.span(window), 0, 0
        while not f.done:
            end = f.window_end(window)
            inside = fixed[f.start : end]
            assert inside[-1] < 0 and 1 <= (inside < 0).sum() <= window
            assert (inside < 0).sum() == min(window, (fixed[f.start :] < 0).sum())
            assert end - f.start <= span
            widest = max(widest, end - f.start)
            ends = [i + 1 for i, token in enumerate(inside) if token < 0]  # a commit stops at a free position
            f.advance(rng.choice(ends))
            passes += 1
        assert sum(f.per_pass) == len(f.free) == (fixed < 0).sum()
        assert min(f.per_pass) >= 1 and len(f.per_pass) == passes


def test_span_is_no_larger_than_needed():
    """The rings are as long as the widest window and no longer: [N, V] is never allocated."""
    fixed = np.full(1000, -1)
    assert Frontier(0, fixed).span(32) == 32
    fixed[10::11] = 3  # a row end after ten cells
    assert Frontier(0, fixed).span(32) == 36
    fixed[:] = 3
    fixed[[0, 999]] = -1
    assert Frontier(0, fixed).span(32) == 1000


def make(method, memory=True, batch=2, span=4, reach=0, vocab=6):
    plan = TokenPlan(1, 4, 5, vocab, base=2)
    fixed = torch.full((batch, 20), -1)
    fixed[0, 3] = 7
    return WindowState(plan, METHODS[method], fixed, Noise(1, range(batch)), span, reach, "cpu", memory)


def test_only_what_the_method_needs():
    for name, method in METHODS.items():
        state = make(name)
        assert (state.laws is not None) == method.needs_q
        assert (state.gumbels is not None) == method.needs_gumbel
        assert (state.memory is not None) == method.memory
        assert make(name, memory=False).memory is None
    assert make("scd-gumbel", span=4, reach=5).laws.store.shape == (2, 4 + 5 + 1, 6)
    assert make("scd-gumbel", span=4, reach=5).gumbels.store.shape == (2, 4 + 1, 6)


def test_enter_gives_noise_draft_and_law_and_respects_given_tokens():
    state = make("scd-gumbel")
    positions = torch.tensor([[2, 3], [2, 3]])
    valid = torch.tensor([[True, True], [True, False]])
    law = torch.rand(2, 2, 6)
    state.enter(positions, valid, lambda s, where: (torch.full_like(where, 4), law))
    assert state.tokens[0, 2:4].tolist() == [6, 7]  # column 4 is token 6; position 3 is given
    assert state.tokens[1, 2:4].tolist() == [6, 0]  # the lane without a position writes nothing
    assert torch.equal(state.laws.read(positions)[0], law[0])
    assert torch.equal(state.gumbels.read(positions)[0], state.noise.gumbel(positions, 6)[0])
    assert torch.equal(state.columns_at(torch.tensor([[2], [2]])), torch.tensor([[4], [4]]))


def test_noise_is_there_before_the_draft_is_drawn():
    state = make("scd-gumbel")
    positions, valid, seen = torch.tensor([[0, 1], [0, 1]]), torch.ones(2, 2, dtype=torch.bool), []

    def draft(s, where):
        seen.append(s.gumbels.read(where))
        return torch.zeros_like(where), torch.ones(2, 2, 6) / 6

    state.enter(positions, valid, draft)
    assert torch.equal(seen[0], state.noise.gumbel(positions, 6))


@pytest.mark.parametrize("method", METHODS)
def test_move_takes_everything_along(method):
    state = make(method)
    positions = torch.tensor([[0, 1], [0, 1]])
    laws = torch.rand(2, 2, 6)
    state.enter(positions, torch.ones(2, 2, dtype=torch.bool), lambda s, w: (torch.tensor([[1, 2], [3, 4]]), laws))
    if state.memory is not None:
        state.memory.answers[1] = 3
    want = state.noise.gumbel(positions, 6)[1]
    state.move(1, 0)
    assert state.tokens[0, :2].tolist() == [5, 6] and int(state.fixed[0, 3]) == -1
    assert torch.equal(state.noise.gumbel(positions, 6)[0], want)
    if state.laws is not None:
        assert torch.equal(state.laws.read(positions)[0], laws[1])
    if state.gumbels is not None:
        assert torch.equal(state.gumbels.read(positions)[0], want)
    if state.memory is not None:
        assert (state.memory.answers[0] == 3).all()
