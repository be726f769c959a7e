"""Which cells a MAR draws in which step: a random order, masked back to front by a cosine."""

import math
from dataclasses import dataclass

import numpy as np

from ..errors import UserError


@dataclass(frozen=True)
class Schedule:
    """Cells of a run by step.

    Attributes:
        masked: masked cells before each step, and 0 at the end; int [steps + 1].
        left: masked cells by which a step is guided: those after it, but 1 after the last one. int [steps].
    """

    masked: tuple
    left: tuple

    @property
    def steps(self):
        return len(self.left)

    @property
    def tokens(self):
        return self.masked[0]

    @property
    def counts(self):
        """Cells that each step draws."""
        return [before - after for before, after in zip(self.masked, self.masked[1:])]

    def cells(self, order, step):
        """Cells that a step draws, in raster order: the masked ones lie in front of `order` (int64 [n])."""
        return np.sort(order[self.masked[step + 1] : self.masked[step]])

    def known(self, order, step):
        """bool [n] of the cells drawn before a step."""
        out = np.ones(self.tokens, dtype=bool)
        out[order[: self.masked[step]]] = False
        return out

    def guidance(self, scale, step):
        """Guidance of a step: it grows with the share of cells that are known, from near 1 to `scale`."""
        return 1 + (scale - 1) * (self.tokens - self.left[step]) / self.tokens


def cosine_schedule(tokens, steps):
    """The schedule of MAR (and MaskGIT): floor(n cos(pi/2 (s+1)/steps)) cells stay masked after step s.

    Every step draws at least one cell, so `steps` = `tokens` draws exactly one a step.

    Raises:
        UserError: fewer than 1 or more than `tokens` steps.
    """
    if not 1 <= steps <= tokens:
        raise UserError(f"steps {steps}: this model draws its {tokens} tokens in 1 to {tokens} steps")
    masked, left = [tokens], []
    for step in range(steps):
        after = math.floor(tokens * math.cos(math.pi / 2 * (step + 1) / steps))
        left.append(max(1, min(masked[-1] - 1, after)))
        masked.append(left[-1] if step < steps - 1 else 0)
    return Schedule(tuple(masked), tuple(left))
