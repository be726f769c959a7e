"""Everything that lives during one decode call and dies with it: tokens, drafts' laws, noise, memory."""

import numpy as np
import torch

from .memory import TrajectoryMemory


class Ring:
    """Per-position vectors [B, capacity+1, V] addressed by position modulo capacity; one spare place for none."""

    def __init__(self, batch, capacity, width, device, fill=0.0):
        self.store = torch.full((batch, capacity + 1, width), fill, device=device)
        self.capacity = capacity

    def _place(self, positions, valid=None):
        rows = torch.arange(len(positions), device=positions.device)[:, None]
        place = positions % self.capacity
        return rows, place if valid is None else torch.where(valid, place, self.capacity)

    def read(self, positions):
        """[B, M] positions -> [B, M, V] (a copy)."""
        return self.store[self._place(positions)]

    def write(self, positions, values, valid):
        self.store[self._place(positions, valid)] = values

    def move(self, source, target):
        self.store[target] = self.store[source]


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
        self.per_pass = []  # free tokens committed in each pass
        self.visits = np.zeros(len(fixed), dtype=np.int32)  # passes that looked at a position

    @property
    def done(self):
        return self.decided == len(self.free)

    def begin(self, prefix):
        """Positions below `prefix` are given and prefilled."""
        self.start = self.end = prefix

    def window_end(self, window):
        """One past the last position of a window of `window` free positions; that position is free."""
        return int(self.free[min(self.decided + window, len(self.free)) - 1]) + 1

    def span(self, window):
        """Longest run of positions that one window can cover, whatever is committed when."""
        first = np.concatenate([[self.start], self.free[:-1] + 1])
        last = self.free[np.minimum(np.arange(len(self.free)) + window, len(self.free)) - 1]
        return int((last - first).max()) + 1

    def advance(self, positions):
        """Commit `positions` from `start` on."""
        self.start += positions
        after = int(np.searchsorted(self.free, self.start))
        self.per_pass.append(after - self.decided)
        self.decided = after


class WindowState:
    """Tensors of the active samples. Row order is the order of `active`; a finished row is moved out.

    Args:
        fixed: int64 [B, N] token ids that are given, -1 elsewhere.
    """

    def __init__(self, plan, method, fixed, noise, span, reach, device, memory):
        batch, n = fixed.shape
        self.plan, self.noise, self.vocab, self.base = plan, noise, plan.vocab, plan.base
        self.tokens = torch.zeros(batch, n + 1, dtype=torch.int64, device=device)  # last column: no position
        self.tokens[:, :n] = fixed.clamp(min=0).to(device)
        self.fixed = torch.full_like(self.tokens, -1)
        self.fixed[:, :n] = fixed.to(device)
        uniform = 1.0 / plan.vocab  # a law that was never computed (a kept cell) reads as uniform
        self.laws = Ring(batch, span + reach, plan.vocab, device, uniform) if method.needs_q else None
        self.gumbels = Ring(batch, span, plan.vocab, device) if method.needs_gumbel else None
        self.memory = None
        if memory and method.memory:
            offsets = TrajectoryMemory.neighbours(plan.row_stride, plan.frame_stride)
            self.memory = TrajectoryMemory(batch, span, offsets, device)

    def columns_at(self, positions):
        """Law columns of the tokens at `positions` [B, M] (out of range for format tokens)."""
        return self.tokens.gather(1, positions) - self.base

    def enter(self, positions, valid, draft):
        """Give newly entered positions their noise and first drafts.

        Args:
            positions: int64 [B, M]; valid: bool [B, M].
            draft: (state, positions) -> (columns, law or None).
        """
        if self.gumbels is not None:
            self.gumbels.write(positions, self.noise.gumbel(positions, self.vocab), valid)
        if self.memory is not None:
            self.memory.enter(positions, valid)
        columns, law = draft(self, positions)
        fixed = self.fixed.gather(1, positions)
        tokens = torch.where(fixed >= 0, fixed, columns + self.base)
        self.tokens.scatter_(1, torch.where(valid, positions, self.tokens.shape[1] - 1), tokens)
        if self.laws is not None:
            self.laws.write(positions, law, valid)

    def move(self, source, target):
        """Copy row `source` over row `target`."""
        for store in (self.tokens, self.fixed):
            store[target] = store[source]
        for part in (self.laws, self.gumbels, self.memory, self.noise):
            if part is not None:
                part.move(source, target)
