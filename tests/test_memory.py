"""Trajectory memory against a plain re-implementation, and that it earns its keep without touching a token."""

import random

import numpy as np
import pytest
import torch
from scd_pack.scd_core.memory import RECORDS, ROUNDS, TrajectoryMemory
from scd_tests.toys import grid, run

LENGTH = 12


class PlainMemory:
    """One sample, Python lists: records of (context, answer) a position, newest last."""

    def __init__(self, offsets):
        self.offsets, self.records = offsets, {}

    def context(self, tokens, j):
        return [tokens[j - d] if j >= d else -1 for d, _ in self.offsets]

    def record(self, tokens, answers):
        for j, answer in answers.items():
            self.records.setdefault(j, []).append((self.context(tokens, j), answer))
            self.records[j] = self.records[j][-RECORDS[0]:]

    def recall(self, tokens, positions):
        for _ in range(ROUNDS):
            fresh = {}
            for j in positions:
                now = self.context(tokens, j)
                scores = [
                    (sum(w for (_, w), a, b in zip(self.offsets, context, now) if a == b), age)
                    for age, (context, _) in enumerate(self.records[j])
                ]
                fresh[j] = self.records[j][max(range(len(scores)), key=scores.__getitem__)][1]
            for j, token in fresh.items():
                tokens[j] = token


@pytest.mark.parametrize("strides", [(0, 0), (4, 0), (4, 8)])
@pytest.mark.parametrize("seed", range(3))
def test_against_the_plain_one(strides, seed):
    """Many passes over random tokens of a small vocabulary, more passes than records."""
    rng = random.Random(seed)
    offsets = TrajectoryMemory.neighbours(*strides)
    memory, plain = TrajectoryMemory(1, LENGTH, offsets), PlainMemory(offsets)
    positions, valid = np.arange(LENGTH)[None], np.ones((1, LENGTH), dtype=bool)
    memory.enter(positions, valid)
    tokens = np.zeros((1, LENGTH + 1), dtype=np.int64)
    changed = 0
    for _ in range(RECORDS[0] + 6):
        fed = [rng.randrange(3) for _ in range(LENGTH)]
        answers = [rng.randrange(3) for _ in range(LENGTH)]
        behind = rng.randrange(LENGTH)
        tokens[0, :LENGTH] = fed
        context = memory.context(tokens, positions)
        tokens[0, :LENGTH] = answers
        memory.record(context, np.array([answers]), positions, valid)
        memory.recall(tokens, positions, positions >= behind)
        plain.record(fed, dict(enumerate(answers)))
        want = list(answers)
        plain.recall(want, range(behind, LENGTH))
        assert tokens[0, :LENGTH].tolist() == want
        changed += want != answers
    assert changed > 5


def two_answers(positions, valid, behind):
    """Position 1 answers 7 after a 5 and then 8 after a 6, while the left token is a 5 again: tokens after recall."""
    memory = TrajectoryMemory(1, 4, TrajectoryMemory.neighbours(0, 0))
    positions, valid, behind = (np.array([x]) for x in (positions, valid, behind))
    memory.enter(positions, valid)
    for left, answer in ((5, 7), (6, 8)):
        context = memory.context(np.array([[left, 0, 0]]), positions)
        new = np.where(positions == 0, 5, np.where(valid, answer, 9))
        memory.record(context, new, positions, valid)
        tokens = np.array([[5, answer, 0]])
        memory.recall(tokens, positions, behind)
    return tokens[0, :2].tolist()


def test_older_answer_under_the_present_neighbour_wins():
    assert two_answers([0, 1], [True, True], [False, True]) == [5, 7]
    assert two_answers([0, 1], [True, True], [False, False]) == [5, 8]  # only where it is allowed to


def test_lanes_past_the_end_do_not_undo_the_last_position():
    """In a ragged batch surplus lanes are clamped to the last position; its own lane must win."""
    assert two_answers([0, 1, 1, 1], [True, True, False, False], [False, True, False, False]) == [5, 7]


def test_a_new_tenant_of_a_ring_place_inherits_nothing():
    memory = TrajectoryMemory(1, 2, TrajectoryMemory.neighbours(0, 0))
    lane, tokens = np.array([[True]]), np.zeros((1, 8), dtype=np.int64)
    for position, answer in ((1, 4), (3, 9)):  # both live in place 1 of 2
        where = np.array([[position]])
        memory.enter(where, lane)
        memory.record(memory.context(tokens, where), np.array([[answer]]), where, lane)
        memory.recall(tokens, where, lane)
        assert tokens[0, position] == answer
    memory.enter(np.array([[5]]), lane)
    assert (memory.contexts[0, 1] == -2).all()


def test_contexts_stop_at_the_left_edge():
    memory = TrajectoryMemory(1, 4, TrajectoryMemory.neighbours(5, 0))
    got = memory.context(np.arange(10, 20)[None], np.array([[0, 2, 7]]))
    want = [[j - d + 10 if j >= d else -1 for d in (1, 2, 3, 5, 6, 4)] for j in (0, 2, 7)]
    assert got[0].tolist() == want


def test_neighbours_of_narrow_and_wide_pictures():
    """A row stride of up to three would name a distance twice."""
    for rows, frames in ((0, 0), (2, 0), (3, 12), (5, 0), (16, 256)):
        distances = [d for d, _ in TrajectoryMemory.neighbours(rows, frames)]
        assert len(set(distances)) == len(distances) and min(distances) == 1


def test_move_carries_the_records():
    memory = TrajectoryMemory(3, 4, TrajectoryMemory.neighbours(0, 0))
    memory.answers[2], memory.contexts[2] = 5, 6
    memory.move(2, 0)
    assert (memory.answers[0] == 5).all() and (memory.contexts[0] == 6).all() and (memory.answers[1] == 0).all()


@pytest.mark.slow
def test_memory_saves_passes_and_keeps_the_tokens():
    toy = grid(kappa=0.55)
    on, with_memory = run(toy, batch=24, window=32, seed=1)
    off, without = run(toy, batch=24, window=32, seed=1, memory=False)
    assert torch.equal(on, off)
    mean = [sum(r.per_sample) / 24 for r in (with_memory, without)]
    assert mean[0] < 0.97 * mean[1], mean
