"""Rings and frontiers against the long way."""

import random

import numpy as np
import pytest
import torch
from scd_pack.scd_core import ring as ring_module
from scd_pack.scd_core import state as module
from scd_pack.scd_core.acceptance import METHODS
from scd_pack.scd_core.drafting import STARTS
from scd_pack.scd_core.noise import Noise
from scd_pack.scd_core.plan import TokenPlan
from scd_pack.scd_core.ring import Ring
from scd_pack.scd_core.state import AHEAD, Frontier, WindowState
from scd_tests.toys import grid, run


def test_ring_remembers_the_last_capacity_positions():
    ring, rng, kept = Ring(2, 5, 3, "cpu", fill=-1.0), random.Random(0), {}
    for position in range(40):
        values = torch.rand(2, 1, 3)
        valid = np.array([[True], [rng.random() < 0.7]])
        ring.write(np.full((2, 1), position), values, valid)
        for row in range(2):
            if valid[row, 0]:
                kept[row, position % 5] = values[row, 0]
        for back in range(min(position + 1, 5)):
            read = ring.read(np.full((2, 1), position - back))
            for row in range(2):
                want = kept.get((row, (position - back) % 5), torch.full((3,), -1.0))
                assert torch.equal(read[row, 0], want)


@pytest.mark.parametrize("order", ["run", "ragged", "backwards", "gaps"])
@pytest.mark.parametrize("batch", [1, 2])
def test_ring_by_runs_and_by_index(batch, order):
    """Windows that move over the ring's end, with and without surplus lanes: the same as a list of vectors."""
    rng, capacity, length, kept = random.Random(batch), 7, 40, {}
    ring = Ring(batch, capacity, 3, "cpu")
    for front in range(length - 5):
        positions = np.array([[front + k for k in range(5)] for _ in range(batch)])
        if order == "ragged":
            positions[-1] = np.minimum(positions[-1] + batch - 1, front + 3)
        if order == "backwards":
            positions = positions[:, ::-1].copy()
        if order == "gaps":
            positions[:, 2:] += 1
        values, valid = torch.rand(batch, 5, 3), np.ones((batch, 5), dtype=bool)
        if order == "ragged":
            valid[-1] = positions[-1] < front + 3
        elif rng.random() < 0.3:
            valid[0, rng.randrange(5)] = False
        ring.write(positions, values, valid)
        for b, lane in zip(*np.nonzero(valid)):
            kept[b, positions[b, lane] % capacity] = values[b, lane].clone()
        for _ in range(2):  # the second answer comes from memory
            read = ring.read(positions)
            assert read.shape == (batch, 5, 3)
            for b, lane in np.ndindex(batch, 5):
                want = kept.get((b, positions[b, lane] % capacity), torch.zeros(3))
                assert torch.equal(read[b, lane], want)


def test_ring_of_one_sample_is_read_without_a_copy():
    ring = Ring(1, 8, 2, "cpu")
    inside, over = np.arange(3, 8)[None], np.arange(5, 10)[None]
    assert ring.read(inside).data_ptr() == ring.store[0, 3].data_ptr()
    assert ring.read(over).data_ptr() != ring.store[0, 5].data_ptr()


def test_ring_moves_a_row():
    ring, one = Ring(2, 3, 2, "cpu"), np.array([[1], [1]])
    ring.write(one, torch.tensor([[[1.0, 2.0]], [[3.0, 4.0]]]))
    ring.move(1, 0)
    assert ring.read(one[:1])[0, 0].tolist() == [3, 4]


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
        f.begin(rng.randint(0, int(f.free[0])))
        assert f.end == f.free[0]
        span, passes, widest, looked = f.span(window), 0, 0, np.zeros(len(fixed), dtype=int)
        while not f.done:
            end = f.window_end(window)
            inside = fixed[f.start : end]
            assert inside[-1] < 0 and 1 <= (inside < 0).sum() <= window
            assert (inside < 0).sum() == min(window, (fixed[f.start :] < 0).sum())
            assert end - f.start <= span
            widest = max(widest, end - f.start)
            ends = [i + 1 for i, token in enumerate(inside) if token < 0]  # a commit stops at a free position
            looked[f.start : end] += inside < 0
            f.advance(rng.choice(ends), window)
            passes += 1
        assert sum(f.per_pass) == len(f.free) == (fixed < 0).sum()
        assert min(f.per_pass) >= 1 and len(f.per_pass) == passes
        assert np.array_equal(f.visits, looked)  # free positions only, once a pass


def test_span_is_no_larger_than_needed():
    """Large rings are as long as the widest window and no longer."""
    fixed = np.full(1000, -1)
    assert Frontier(0, fixed).span(32) == 32
    fixed[10::11] = 3  # a row end after ten cells
    assert Frontier(0, fixed).span(32) == 36
    fixed[:] = 3
    fixed[[0, 999]] = -1
    assert Frontier(0, fixed).span(32) == 1000


def make(method, memory=True, batch=2, span=4, reach=0, vocab=6):
    plan = TokenPlan(1, 4, 5, vocab, base=2)
    fixed = np.full((batch, 20), -1)
    fixed[0, 3] = 7
    return WindowState(plan, METHODS[method], fixed, Noise(1, range(batch)), span, reach, "cpu", memory)


BOTH = np.array([0, 0])


def test_only_what_the_method_needs():
    for name, method in METHODS.items():
        state = make(name)
        assert (state.laws is not None) == method.needs_q
        assert (state.gumbels is not None) == method.needs_gumbel
        assert (state.memory is not None) == method.memory
        assert make(name, memory=False).memory is None


def test_small_rings_have_room_and_large_ones_what_they_need(monkeypatch):
    state = make("scd-gumbel", span=4, reach=5)
    assert state.laws.capacity == state.gumbels.capacity == 20  # all there are
    monkeypatch.setattr(ring_module, "EASY", 0)
    assert make("scd-gumbel", span=4, reach=5).laws.capacity == 4 + 5
    monkeypatch.setattr(module, "NUMBERS", 0)
    assert make("scd-gumbel", span=3, reach=5).gumbels.capacity == 3 + AHEAD
    assert module.ahead(16384) == AHEAD
    monkeypatch.undo()
    assert [module.ahead(v) for v in (1024, 4096, 65536)] == [64, 16, 16]


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("method", [name for name, method in METHODS.items() if not method.heads])
def test_the_room_of_the_rings_changes_nothing(method, batch, monkeypatch):
    """Windows that wrap around in rings no longer than they must be draw what those in roomy ones draw."""
    toy, told = grid(side=5, vocab=8, kappa=0.55), []
    for easy, numbers, least in ((ring_module.EASY, module.NUMBERS, AHEAD), (0, 0, 2)):
        monkeypatch.setattr(ring_module, "EASY", easy)
        monkeypatch.setattr(module, "NUMBERS", numbers)
        monkeypatch.setattr(module, "AHEAD", least)
        out, report = run(toy, method, window=3, batch=batch, seed=4)
        told.append((out.tolist(), report.per_sample))
    assert told[0] == told[1]


@pytest.mark.parametrize("method", ["seed-exact", "scd-gumbel"])
def test_enter_gives_drafts_and_respects_given_tokens(method):
    state = make(method)
    assert state.enter(STARTS["random"], 0, BOTH + 2, np.array([4, 3])) is None
    assert 2 <= state.tokens[0, 2] < 8 and state.tokens[0, 3] == 7  # position 3 of the first row is given
    assert 2 <= state.tokens[1, 2] < 8 and state.tokens[1, 3] == 0  # the second row's window ends before it
    if state.laws is not None:
        law = state.laws.read(np.array([[2], [2]]))
        hot = torch.nn.functional.one_hot(torch.from_numpy(state.tokens[:2, 2:3] - 2), 6)
        assert torch.equal(law, hot.float())
    assert (state.columns_at(np.array([[2], [2]])) == state.tokens[:, 2:3] - 2).all()


@pytest.mark.parametrize("start", ["left", "left_law"])
def test_enter_gives_noise_draft_and_law_and_respects_given_tokens(start):
    state, positions = make("scd-gumbel", reach=1), np.array([[2, 3], [2, 3]])
    law, noise = torch.rand(2, 1, 6).softmax(-1), state.noise.gumbel(positions, 6)
    state.tokens[:, 1] = 6
    state.laws.write(BOTH[:, None] + 1, law)
    drawn = state.enter(STARTS[start], 1, BOTH + 2, np.array([4, 3]))
    if start == "left":
        assert drawn is None
        assert state.tokens[0, 2:4].tolist() == [6, 7]  # column 4 is token 6; position 3 is given
        assert state.tokens[1, 2:4].tolist() == [6, 0]  # the lane without a position writes nothing
        assert state.columns_at(positions[:, :1]).tolist() == [[4], [4]]
        law = torch.eye(6)[[4, 4]][:, None]
    else:
        where, valid, columns = drawn
        assert np.array_equal(where, positions) and valid.tolist() == [[True, True], [True, False]]
        assert torch.equal(columns[0], (law[0].log() + noise[0]).argmax(-1))
        assert state.tokens[:, 2:4].tolist() == [[0, 7], [0, 0]]
    laws = state.laws.read(positions)
    assert torch.equal(laws[0], law[0].expand(2, -1)) and torch.equal(laws[1, 0], law[1, 0])
    assert torch.equal(laws[1, 1], torch.full((6,), 1 / 6))  # never written
    assert torch.equal(state.gumbels.read(positions)[0], noise[0])


@pytest.mark.parametrize("start, drafting", [("random", "draft_tokens"), ("uniform", "draft_laws")])
def test_noise_is_there_before_the_draft_is_drawn(start, drafting, monkeypatch):
    state, seen, real = make("scd-gumbel"), [], getattr(module, drafting)

    def draft(s, where, source):
        seen.append(s.gumbels.read(where))
        return real(s, where, source)

    monkeypatch.setattr(module, drafting, draft)
    state.enter(STARTS[start], 0, BOTH, BOTH + 2)
    assert len(seen) == 1 and torch.equal(seen[0], state.noise.gumbel(np.array([[0, 1], [0, 1]]), 6))


def test_drafts_drawn_on_the_device_come_back():
    state = make("scd-maximal")
    positions, valid, columns = state.enter(STARTS["uniform"], 0, BOTH, np.array([4, 2]))
    assert positions.tolist() == [[0, 1, 2, 3]] * 2 and valid.tolist() == [[True] * 4, [True, True, False, False]]
    assert columns.shape == (2, 4) and int(columns.min()) >= 0 and int(columns.max()) < 6
    assert state.enter(STARTS["uniform"], 0, np.array([4, 2]), np.array([4, 2])) is None


@pytest.mark.parametrize("method", ["autoregressive", "seed-exact", "scd-gumbel"])
def test_every_position_of_a_window_has_its_own_noise(method, monkeypatch):
    """However frontiers run apart, and although noise is made some positions ahead in a ring."""
    for name, value in (("EASY", 0), ("NUMBERS", 0), ("AHEAD", 3)):
        monkeypatch.setattr(ring_module if name == "EASY" else module, name, value)
    rng, state, span = random.Random(1), make(method, span=4), 4
    start = np.array([0, 0])
    ends = np.minimum(start + span, 20)
    known = start.copy()
    while (start < 20).all():
        state.enter(STARTS["random"], 0, known, ends)
        for b in range(2):
            inside = np.arange(start[b], ends[b])[None].repeat(2, 0)
            assert torch.equal(state.gumbels.read(inside)[b], state.noise.gumbel(inside, 6)[b])
        known = ends
        start = start + np.array([rng.randint(1, span), rng.randint(1, span)])
        ends = np.maximum(known, np.minimum(start + span, 20))


@pytest.mark.parametrize("method", METHODS)
def test_move_takes_everything_along(method):
    state, positions = make(method), np.array([[0, 1], [0, 1]])
    state.enter(STARTS["random"], 0, BOTH, BOTH + 2)
    state.tokens[:, :2] = [[3, 4], [5, 6]]
    if state.laws is not None:
        state.laws.write(positions, torch.rand(2, 2, 6))
    if state.noisy is not None:
        state.noisy[1] = 77
    if state.memory is not None:
        state.memory.answers[1] = 3
    want, tokens = state.noise.gumbel(positions, 6)[1], state.tokens[1].tolist()
    laws = None if state.laws is None else state.laws.read(positions)[1]
    state.move(1, 0)
    assert state.tokens[0].tolist() == tokens and tokens[:2] == [5, 6] and state.fixed[0, 3] == -1
    assert state.noisy is None or state.noisy[0] == 77
    assert torch.equal(state.noise.gumbel(positions, 6)[0], want)
    if laws is not None:
        assert torch.equal(state.laws.read(positions)[0], laws)
    if state.gumbels is not None:
        assert torch.equal(state.gumbels.read(positions)[0], want)
    if state.memory is not None:
        assert (state.memory.answers[0] == 3).all()
