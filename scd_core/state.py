"""Everything that lives during one decode call and dies with it: tokens, drafts' laws, noise, memory.

Whole numbers (tokens, positions, records) live on the host, where they cost next to nothing; vectors over the
vocabulary live on the device, in rings as long as the window (longer where that costs little).
"""

from functools import partial

import numpy as np
import torch

from .bank import LawBank
from .drafting import draft_laws, draft_tokens, source_positions
from .memory import TrajectoryMemory
from .noise import START
from .ring import Ring
from .tree import runners_in

AHEAD = 16  # positions at least whose Gumbel noise is made at a time
NUMBERS = 1 << 16  # numbers of it: about so many cost a CPU little more than one does


def ahead(vocab):
    """Positions whose Gumbel noise is made at a time."""
    return max(AHEAD, NUMBERS // vocab)


class Frontier:
    """Host-side bookkeeping of one sample: where its window starts, which positions in it are free.

    A kept or forced position needs no decision: it rides along in a window and never counts.
    """

    def __init__(self, sample, fixed):
        self.sample = sample
        self.free = np.flatnonzero(fixed < 0)
        self.decided = 0  # free positions committed
        self.start = 0  # first position not committed
        self.end = 0  # positions below it have had a first draft
        self.relaxed = 0  # drafts committed by relaxation alone
        self.per_pass = []  # free tokens committed in each pass
        self.visits = np.zeros(len(fixed), dtype=np.int32)  # passes that looked at a free position

    @property
    def done(self):
        return self.decided == len(self.free)

    def begin(self, prefix):
        """Positions below `prefix` are given and prefilled; those up to the first free one need no draft."""
        self.start, self.end = prefix, int(self.free[0])

    def window_end(self, window):
        """One past the last position of a window of `window` free positions; that position is free."""
        return int(self.free[min(self.decided + window, len(self.free)) - 1]) + 1

    def span(self, window):
        """Longest run of positions that one window can cover, whatever is committed when."""
        first = np.concatenate([[self.start], self.free[:-1] + 1])
        last = self.free[np.minimum(np.arange(len(self.free)) + window, len(self.free)) - 1]
        return int((last - first).max()) + 1

    def advance(self, positions, window):
        """Commit `positions` from `start` on, after a pass with a window of `window` free positions."""
        self.visits[self.free[self.decided : self.decided + window]] += 1
        self.start += positions
        after = int(np.searchsorted(self.free, self.start))
        self.per_pass.append(after - self.decided)
        self.decided = after


class WindowState:
    """State of the active samples. Row order is the order of `active`; a finished row is moved out.

    Attributes:
        tokens: int64 array [B, N+1] decided tokens and present drafts; the last column belongs to no position.
        fixed: int64 array [B, N+1] token ids that are given, -1 elsewhere.
        chance: fp32 array [B, N+1] uniforms that first drafts are drawn with.
    """

    def __init__(self, plan, method, fixed, noise, span, reach, device, memory, runners=0):
        batch, n = fixed.shape
        self.noise, self.vocab, self.base, self.device = noise, plan.vocab, plan.base, device
        self.fixed = np.full((batch, n + 1), -1)
        self.fixed[:, :n] = fixed
        self.tokens = np.maximum(self.fixed, 0)
        everywhere = np.broadcast_to(np.arange(n + 1), self.fixed.shape)
        self.chance = noise.uniform(START, everywhere)  # of first drafts
        uniform = 1.0 / plan.vocab  # a law that was never computed (a kept cell) reads as uniform
        places, self.laws, self.gumbels = partial(Ring.roomy, length=n, width=plan.vocab), None, None
        if method.needs_q:
            self.laws = Ring(batch, places(span + reach), plan.vocab, device, uniform)
        if method.needs_gumbel:
            self.gumbels = Ring(batch, places(span + ahead(plan.vocab)), plan.vocab, device)
        self.noisy = None  # [B] positions below it have their noise
        self.memory = None
        if memory and method.memory:
            offsets = TrajectoryMemory.neighbours(plan.row_stride, plan.frame_stride)
            self.memory = TrajectoryMemory(batch, span, offsets, runners)
        self.bank = LawBank(batch, plan.vocab, plan.base, span, self.gumbels, device) if runners else None

    def columns_at(self, positions):
        """Law columns of the tokens at `positions` [B, M] (out of range for format tokens)."""
        return self.tokens[np.arange(len(positions))[:, None], positions] - self.base

    def make_noise(self, known, ends):
        """Give positions below `ends` [B] their Gumbel noise, some in advance."""
        if self.noisy is None:
            self.noisy = known.copy()
        done = self.noisy[: len(ends)]
        if (done >= ends).all():
            return
        more = ahead(self.vocab)
        stops = np.minimum(ends + more, self.tokens.shape[1] - 1)
        count = min(max(int((ends - done).max()), more), int((stops - done).max()))
        positions = done[:, None] + np.arange(count)
        self.gumbels.write(
            positions, self.noise.gumbel(positions, self.vocab, self.device), positions < stops[:, None]
        )
        self.noisy[: len(ends)] = np.maximum(done, np.minimum(positions[:, -1] + 1, stops))

    def enter(self, start, stride, known, ends):
        """First drafts for the positions from `known` [B] to `ends` [B] (see `drafting`).

        Returns:
            None, or (positions [B, M], valid [B, M], columns on the device) when the drafts were drawn there.
        """
        if self.gumbels is not None:
            self.make_noise(known, ends)
        count = int((ends - known).max())
        if count <= 0:
            return None
        new = known[:, None] + np.arange(count)
        valid, positions = new < ends[:, None], np.minimum(new, self.tokens.shape[1] - 2)
        if self.memory is not None:
            self.memory.enter(positions, valid)
        return self.draft(start, positions, valid, source_positions(positions, known, stride))

    def draft(self, start, positions, valid, source):
        """First drafts for `positions` [B, M] where `valid`, after those at `source`; returns as `enter`."""
        if start.from_law and self.laws is not None:
            columns, law = draft_laws(self, positions, source)
            self.laws.write(positions, law, valid)
            return positions, valid, columns
        columns = draft_tokens(self, positions, source)
        if self.laws is not None:
            hot = torch.nn.functional.one_hot(torch.from_numpy(columns).to(self.device), self.vocab)
            self.laws.write(positions, hot.float(), valid)
        rows = np.arange(len(positions))[:, None]
        fixed = self.fixed[rows, positions]
        place = np.where(valid, positions, self.tokens.shape[1] - 1)
        self.tokens[rows, place] = np.where(fixed >= 0, fixed, columns + self.base)
        return None

    def move(self, source, target):
        """Copy row `source` over row `target`."""
        for store in (self.tokens, self.fixed, self.chance, self.noisy):
            if store is not None:
                store[target] = store[source]
        for part in (self.laws, self.gumbels, self.memory, self.bank, self.noise):
            if part is not None:
                part.move(source, target)

    def remember(self, packed, answers, positions, valid, nodes):
        """What every row of a pass answered goes into the memory, with its runners-up where a tree will ask for them.

        Args:
            packed: int64 [K, A, W + M] as `loop.Run.decide` packs it. answers: ids int64 [A, W] of the window.
            positions, valid: [A, W]. nodes: M `Nodes` or None.
        """
        w, ids, gaps = positions.shape[1], None, None
        if self.bank is not None:
            columns, gaps = runners_in(packed[4:])
            ids = columns + self.base
        context = self.memory.context(self.tokens, positions)
        if nodes is not None:
            context = np.concatenate([context, nodes.context], 1)
            answers = np.concatenate([answers, packed[0, :, w:] + self.base], 1)
            positions = np.concatenate([positions, nodes.position + 1], 1)
            valid = np.concatenate([valid, nodes.live], 1)
        self.memory.record(context, answers, positions, valid, ids, gaps)

    def deposit(self, scores, positions, valid, nodes):
        """The laws of a pass, scores [A, W + M, V], go into the bank, with the tokens left of their positions."""
        w = valid.shape[1]
        left = self.tokens[np.arange(len(valid))[:, None], np.maximum(positions[:, :w] - 1, 0)]
        left[positions[:, :w] == 0] = -1  # the prompt
        if nodes is not None:
            left, valid = np.concatenate([left, nodes.token], 1), np.concatenate([valid, nodes.live], 1)
        self.bank.record(scores, positions, left, valid, w)
