"""What a decode call is told, what it tells while it runs, and its clock."""

import time
from dataclasses import dataclass

import torch

from .acceptance import DEFAULT_METHOD
from .law import LawSettings


@dataclass(frozen=True)
class Settings:
    """What to do; the family's own values are already filled in (see `generate.resolve`).

    Attributes:
        method: a key of `METHODS`. window: free positions a pass looks at. start: a key of `STARTS` or "auto".
        seed: 0 .. 2**64-1. batch: samples; sample numbers are first_sample, first_sample + 1, ...
        memory: trajectory memory (seed-exact and jacobi).
        nodes: rows a pass spends beside its window: on a draft tree (seed-exact and jacobi; needs the memory), or on
            further candidates for the next token (sjd, scd-maximal, scd-gumbel).
        relax: strength of a relaxed method, 0 (exact) to 1 (published constants); -1: the method's own.
        relax_budget: drafts of one sample that may be committed by relaxation alone; -1: any number.
        row_context: columns that a row has before the next one opens (layout "rows"); -1: a quarter of them.
        rounds: passes after which a row is committed as it is (layout "row-block"); 0: when it is exact.
        block_rows: rows that are drafted together (layout "row-block").
    """

    method: str = DEFAULT_METHOD
    window: int = 32
    seed: int = 0
    batch: int = 1
    first_sample: int = 0
    start: str = "auto"
    memory: bool = True
    nodes: int = 0
    relax: float = -1.0
    relax_budget: int = -1
    row_context: int = -1
    rounds: int = 2
    block_rows: int = 1
    law: LawSettings = LawSettings()


@dataclass
class Progress:
    """Handed to the callback after every pass. `tokens` int64 [B, N] holds decided tokens and present drafts.

    Decided are those left of `frontier`, or those in `settled` bool [B, N] where rows run side by side.
    """

    passes: int
    done: int
    total: int
    frontier: list
    tokens: torch.Tensor
    settled: torch.Tensor | None = None


class Clock:
    """Host seconds by part."""

    def __init__(self):
        self.seconds = {"backbone": 0.0, "kernel": 0.0, "rest": 0.0}
        self.last = time.perf_counter()

    def lap(self, part):
        now = time.perf_counter()
        self.seconds[part] += now - self.last
        self.last = now
