"""Watching runs by rows: what every pass fed and saw, and how far each row was; the same by brute force."""

from dataclasses import dataclass

import torch
from scd_pack.scd_core import loop
from scd_pack.scd_core.models.session import Session
from scd_tests.naive import Naive
from scd_tests.toys import ToyFamily, draw, word_streams


@dataclass
class Pass:
    """One pass: tokens, before [A, I]; slots [R, I]; blocked [R, I, slots]; logits [A, S, I, V]."""

    tokens: torch.Tensor
    before: torch.Tensor
    slots: torch.Tensor
    blocked: torch.Tensor
    logits: torch.Tensor


class Spy(Session):
    """A session that notes its passes in `passes`, a list of the class."""

    passes = []

    def _forward(self, x, slots, length, blocked=None, nodes=None):
        self.slots, self.blocked = slots, blocked
        return super()._forward(x, slots, length, blocked, nodes)

    def window(self, tokens, before, length, opening, visible=None):
        logits = super().window(tokens, before, length, opening, visible)
        self.passes.append(Pass(tokens, before, self.slots, self.blocked, logits))
        return logits


def watch(decoder, plan, **settings):
    """(tokens, report, passes, settled): settled[t] bool [B, N] of the positions decided before pass t."""
    settled, real = [torch.zeros(settings.get("batch", 1), plan.length, dtype=torch.bool)], loop.Session
    Spy.passes, loop.Session = [], Spy
    try:
        tokens, report = draw(decoder, plan, callback=lambda p: settled.append(p.settled), **settings)
    finally:
        loop.Session = real
    return tokens, report, Spy.passes, settled


def row_counts(plan, settled):
    """Decided cells of each row, by counting: int [B, frames * rows]."""
    cells = settled[:, plan.cells >= 0].view(len(settled), -1, plan.cols)
    return cells.long().cumprod(2).sum(2)


def sees(plan, counts, context, query, key):
    """May the input at position `query` see the token at `key`? By the rule of the paper, position by position.

    Args:
        counts: decided cells of each row. context: cells that open the next row.
    """
    if key > query:
        return False
    stride = plan.row_stride
    row, column = divmod(key, stride)
    if key == query:
        return True
    if column >= plan.cols:  # a row's end: known as soon as somebody stands behind it
        return counts[row] >= context
    # no draft in the last column is ever fed: an input there is decided or a stand-in, and sees decided ones only
    return column < counts[row] or (row == query // stride and query % stride < plan.cols - 1)


def from_scratch(decoder, plan, passes, sample):
    """Largest difference between a run's logits and those of masked forwards without a cache.

    A slot keeps what was fed last, and saw what that input saw; every pass is compared, its inputs in their places.
    """
    naive, worst, streams = Naive(decoder), 0.0, word_streams(plan.vocab)
    lengths = [stream.length for stream in streams]
    tokens = torch.zeros(plan.length, dtype=torch.int64)
    seen = [torch.eye(n + plan.length, dtype=torch.bool) for n in lengths]
    for visible, n in zip(seen, lengths):
        visible[:, :n] = torch.ones(n + plan.length, n, dtype=torch.bool).tril()
        visible[n:, :n] = True
    for one in passes:
        before = one.before[sample]
        real = (before < plan.length).nonzero()[:, 0]
        for lane in real.tolist():
            at = int(before[lane])
            if at >= 0:
                tokens[at] = one.tokens[sample, lane]
                for s, n in enumerate(lengths):
                    open_ = ~one.blocked[2 * sample + s, lane]
                    width = min(len(open_), n + plan.length)
                    seen[s][n + at] = False
                    seen[s][n + at, :width] = open_[:width]
        for s, stream in enumerate(streams):
            x = torch.cat([decoder.embed.prompt(stream, torch.float32), decoder.embed.image(tokens, torch.float32)])
            table = ToyFamily().positions(decoder, plan, lengths[s], "cpu")
            want = naive.logits(x, table.cos[: len(x)], table.sin[: len(x)], visible=seen[s])
            got = one.logits[sample, s, real].double()
            worst = max(worst, float((got - want[lengths[s] + before[real]]).abs().max()))
    return worst
