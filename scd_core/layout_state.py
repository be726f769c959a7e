"""What decoding by rows keeps of every sample: how far each row is, what the cache holds, laws by row.

A row ("line" in the code) is the stretch of the sequence from the first cell of a picture row to the first cell of
the next one, format tokens at its end included. The rows of all frames count in sequence.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch

from .models.kv_cache import Visible
from .ring import Ring
from .state import Frontier, WindowState


class Lines:
    """Geometry of a `TokenPlan` by rows. Host arrays; L rows, N positions.

    Args:
        block: rows that are drafted together; they count as one, and each frame's first row is one by itself.

    Attributes:
        rows: those of a frame. start, size: int [L] first position and number of positions of each row.
        line, offset: int [N] row of a position and place in it (negative before the first cell).
        down: int [N] how far below the row above the block a position lies; 0 in the first row of a frame.
        above, frame: int [N] position of the cell so far up, of the same cell in the previous frame; -1: there is none.
    """

    def __init__(self, plan, block=1):
        cells, n = plan.cells.numpy(), plan.length
        where = np.full(plan.frames * plan.rows * plan.cols, -1)  # position of a cell
        where[cells[cells >= 0]] = np.flatnonzero(cells >= 0)
        starts = where[:: plan.cols]
        row = np.arange(len(starts)) % plan.rows
        down = np.where(row > 0, (row - 1) % block + 1, 0)
        self.start = starts[down < 2].copy()
        self.rows = len(self.start) // plan.frames
        self.size = np.diff(np.append(self.start, n))
        self.line = np.maximum(np.searchsorted(self.start, np.arange(n), "right") - 1, 0)
        self.offset = np.arange(n) - self.start[self.line]
        self.down = down[np.maximum(np.searchsorted(starts, np.arange(n), "right") - 1, 0)]
        above = where[np.maximum(cells - self.down * plan.cols, 0)]
        self.above = np.where((cells >= 0) & (self.down > 0), above, -1)
        area = plan.rows * plan.cols
        self.frame = np.where(cells >= area, where[np.maximum(cells - area, 0)], -1)

    def __len__(self):
        return len(self.start)


class LineRing(Ring):
    """Per-position vectors for some rows at a time, addressed by row and place in it; grows when more are under way.

    Args:
        count: rows that have a place. span: positions of a row that are alive at a time.
    """

    def __init__(self, batch, lines, count, span, width, device):
        super().__init__(batch, count * span, width, device, 1.0 / width)
        self.lines, self.span = lines, span
        self._number(count)

    def _number(self, count):
        self._resize(count * self.span)
        self.count = count
        self.fold = self.lines.line % count * self.span + self.lines.offset % self.span

    def _fold(self, positions):
        return self.fold[positions]

    def fit(self, count, newest):
        """Make room for `count` rows at a time.

        Args:
            newest: int [B] last row of each sample that has vectors.
        """
        if count <= self.count:
            return
        old, before = self.store, self.count
        count = min(max(count, 2 * before), len(self.lines))
        self.store = old.new_full((len(old), count * self.span + 1, old.shape[2]), 1.0 / old.shape[2])
        rows, alive = np.arange(len(old))[:, None], newest[:, None] - np.arange(before)
        places = (ring[:, :-1].unflatten(1, (-1, self.span)) for ring in (self.store, old))
        new, old = places
        new[rows, alive % count] = old[rows, alive % before]
        self._number(count)


class KeyedNoise:
    """Gumbel noise made when it is asked for: with a window of one position nobody asks twice."""

    def __init__(self, noise, vocab, device):
        self.noise, self.vocab, self.device = noise, vocab, device

    def read(self, positions):
        return self.noise.gumbel(positions, self.vocab, self.device)

    def move(self, source, target):
        pass  # the keys move with the noise


class LineFrontier(Frontier):
    """Report figures of one sample; `start` is its first position that is not committed."""

    def advance(self, step, window):
        """step: (free positions looked at, how many of them were committed, first position not committed)."""
        looked, count, self.start = step
        self.visits[looked] += 1
        self.per_pass.append(count)
        self.decided += count


@dataclass
class Look:
    """One pass: lanes [A, I] in the order of positions; a lane feeds the token before its position.

    Attributes:
        positions: what the lane answers. asked: it is to be decided.
        before: position of the input, N: padding. line: row of the position.
        head: it is the first one of its row that is looked at.
        token: input where the host knows it. drafted: the input is a draft. settled: the input is decided.
        floor: first position of the input's own row that it sees whether decided or not.
    """

    positions: np.ndarray
    asked: np.ndarray
    before: np.ndarray
    line: np.ndarray
    head: np.ndarray
    token: np.ndarray
    drafted: np.ndarray
    settled: np.ndarray
    floor: np.ndarray

    def visible(self, settled, to_device):
        """`Visible` of the pass; settled: bool [A, N]."""
        return Visible(top=to_device(self.before), floor=to_device(self.floor), settled=to_device(settled))


class LineState(WindowState):
    """State of the active samples; a row of each array is a sample. Column p of [B, N+1] belongs to the token before
    position p, which is the input that answers p; column 0 to the last token of the prompt.

    Attributes:
        settled: bool [B, N+1] the token is decided and others may see it.
        fed: bool [B, N+1] its keys and values are in the cache.
        count: int [B, L] decided positions of each row, from its start.
        entered: int [B, L] those that had a draft.
        turns: int [B, L] passes that looked at a row.
        forecast: `spatial.Forecast` that makes the first drafts, or None.
    """

    def __init__(self, plan, method, fixed, noise, prefix, lines, device):
        super().__init__(plan, replace(method, needs_q=False, needs_gumbel=False), fixed, noise, 1, 0, device, False)
        batch, n = fixed.shape
        self.lines = lines
        self.settled, self.fed = np.zeros((2, batch, n + 1), dtype=bool)
        self.settled[:, : prefix + 1] = True
        self.fed[:, :prefix] = True  # the last given token starts the first window
        self.count, self.entered, self.turns = np.zeros((3, batch, len(lines)), dtype=np.int64)
        free = self.fixed[:, :n] < 0
        self.rank = np.zeros((batch, n + 1), dtype=np.int64)  # free positions below a position
        np.cumsum(free, 1, out=self.rank[:, 1:])
        self.place = np.full((batch, int(self.rank[:, -1].max()) + 1), n)  # position of the k-th free one
        rows, positions = np.nonzero(free)
        self.place[rows, self.rank[rows, positions]] = positions
        self.gumbels = KeyedNoise(noise, plan.vocab, device) if method.needs_gumbel else None
        self.forecast = None

    def keep_laws(self, count, span):
        """The method needs the drafts' laws: of `count` rows and `span` positions in each, at first."""
        self.laws = LineRing(len(self.fixed), self.lines, count, span, self.vocab, self.device)

    def settle_given(self, active, limits):
        """Count given tokens as decided where the decided part of their row reaches them.

        Args:
            limits: int [B, L] counts -> int [B, L] decided positions that a row may have at most.
        """
        rows, start, changed = np.arange(active)[:, None], self.lines.start, False
        while True:
            count = self.count[:active]
            after = self.place[rows, self.rank[rows, start + count]] - start
            reached = np.maximum(np.minimum(after, limits(count)), count)
            if (reached == count).all():
                break
            self.count[:active], changed = reached, True
        if changed:
            self.settled[:active, 1:] |= self.lines.offset < self.count[:active, self.lines.line]

    def decided(self, samples, batch):
        """bool [batch, N] on the CPU; `samples`: numbers of the active ones, all others are finished."""
        out = torch.ones(batch, self.settled.shape[1] - 1, dtype=torch.bool)
        out[samples] = torch.from_numpy(self.settled[: len(samples), 1:])
        return out

    def move(self, source, target):
        super().move(source, target)
        for store in (self.settled, self.fed, self.count, self.entered, self.turns, self.rank, self.place):
            store[target] = store[source]
        if self.forecast is not None:
            self.forecast.move(source, target)
