"""Continuous speculative decoding: a small draft runs ahead, the target judges its vectors (CSpD, arXiv 2411.11925).

Both networks denoise a cell from the same noise, so their tokens lie close together. One round:

    the draft draws the next `gamma` steps of the schedule, each seeing those before
    the target looks once: at what is verified (`block`), or at every prefix of the drafts (`prefix`, `exact`)
    drafted tokens are taken, or drawn again; what of them stays is the mode's affair

`block` is what the released code does: all drafted cells stay, judged without sight of one another, which loses their
dependence. `prefix` is the paper's text: nothing behind the first refused token stays. Both use the published
criterion, which is no exact one (see `coupling.log_ratio`). `exact` couples every denoising step of a drafted token
with the target's at the same state, so that its tokens follow the target's law whatever the draft does.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch

from .coupling import keep_chance, log_ratio, pick, replaced, residual
from .diffusion import Step
from .noise import ACCEPT, RESIDUAL, THIN
from .side import Cells, Path

ROUNDING = 1e-4  # relative; means of a last step closer than this differ by the order of sums alone


def draft(run, rows, keep=False):
    """Let the draft run ahead.

    Args:
        run: `sampler.Run`. rows: int64 [A], unfinished rows of the batch. keep: note states and laws of all chains.

    Returns:
        (canvas fp32 [B, n, C] with the drafts in it, list over steps ahead of (`Cells`, `Path`)).
    """
    canvas, depth, rounds = run.canvas.clone(), run.depth(rows), []
    for ahead in range(int(depth.max())):
        live = rows[depth > ahead]
        steps = run.frontier[live] + ahead
        cells = run.cells(live, steps)
        z = run.draft.look(canvas[live], run.known(live, steps), live, "draft")
        path = run.draft.chain(run.draft.gather(z, cells), cells, run.noise(cells), keep)
        run.put(canvas, cells, path.x)
        rounds.append((cells, path))
    return canvas, rounds


def joined(rounds):
    """All rounds of drafts as one (`Cells`, `Path` without states)."""
    cells, paths = zip(*rounds)
    fields = ("rows", "cells", "contexts", "steps")
    cells = Cells(*(np.concatenate([getattr(c, name) for c in cells]) for name in fields))
    last = Step(*(torch.cat([getattr(p.last, name) for p in paths]) for name in ("mean", "log_sigma")))
    return cells, Path(torch.cat([p.x for p in paths]), last, torch.cat([p.log_sigma for p in paths]), [], [])


def on_host(law):
    """A `Step` in fp64 on the host."""
    return Step(law.mean.cpu().double(), law.log_sigma.cpu().double())


def proposals(run, cells, index=None):
    """Numbers for `coupling.residual`: normal vectors and uniforms keyed by cell and proposal.

    index: int64 [R], the denoising step that is drawn again (default 0 for all).
    """
    index, stride = np.zeros(len(cells), np.int64) if index is None else index, run.target.diffusion.count

    def draws(rows, first, count):
        rows = rows.numpy()
        where = cells.rows[rows][:, None], cells.cells[rows][:, None]
        step = np.arange(first, first + count) * stride + index[rows][:, None]
        noise = run.source.normal(RESIDUAL, *where, step, run.canvas.shape[-1])
        return noise, torch.from_numpy(run.source.uniform(THIN, *where, step))

    return draws


def judge(run, cells, p, q):
    """The published criterion and its residual, cell by cell.

    Args:
        p, q: `Path`s of target and draft for the same `cells`.

    Returns:
        (tokens fp32 [R, C], taken bool array [R]).
    """
    mine, other = on_host(p.last), on_host(q.last)
    scale = q.log_sigma - p.log_sigma
    ratio = log_ratio(q.x.cpu().double(), mine, other, scale, run.settings.tau)
    taken = torch.from_numpy(np.log(run.source.uniform(ACCEPT, cells.rows, cells.cells))) < ratio
    x, rows = q.x.clone(), (~taken).nonzero()[:, 0]
    if len(rows):
        again, found = residual(
            pick(mine, rows), pick(other, rows), scale[rows], proposals(run, cells.pick(rows.numpy()))
        )
        place = rows.to(x.device)
        # an empty residual leaves the target's own token, drawn from the same noise
        x[place] = torch.where(found[:, None].to(x.device), again.to(x), p.x[place])
    return x, taken.numpy()


def block(run, rows):
    """One round that keeps everything; returns steps committed by each row."""
    cells, q = joined(draft(run, rows)[1])
    z = run.target.look(run.canvas[rows], run.known(rows, run.frontier[rows]), rows, "target")
    cells = replace(cells, contexts=np.searchsorted(rows, cells.rows))
    p = run.target.chain(run.target.gather(z, cells), cells, run.noise(cells))
    x, taken = judge(run, cells, p, q)
    run.put(run.canvas, cells, x)
    run.count(len(cells), int(taken.sum()))
    return run.depth(rows)


@dataclass
class Prefixes:
    """The target's view of every prefix of the drafts.

    Attributes:
        z: conditions [streams, M, n, D]. first: int64 [A], the sequence of each row's own frontier; those of the steps
            ahead follow it. depth: int64 [A], steps drafted.
    """

    z: torch.Tensor
    first: np.ndarray
    depth: np.ndarray


def look_ahead(run, rows, canvas):
    """One target pass over all prefixes of the drafts, the full one included where a step is left behind it."""
    depth = run.depth(rows)
    sizes = depth + (run.frontier[rows] + depth < run.schedule.steps)
    first = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    which = np.repeat(np.arange(len(rows)), sizes)
    ahead = np.arange(len(which)) - first[which]
    owners = rows[which]
    z = run.target.look(canvas[owners], run.known(owners, run.frontier[owners] + ahead), owners, "target")
    return Prefixes(z, first, depth)


def bonus(run, rows, seen, complete):
    """A step of the target itself behind drafts that were all taken, for the rows (bool [A]) that are `complete`."""
    complete = complete & (run.frontier[rows] + seen.depth < run.schedule.steps)
    live = rows[complete]
    if len(live):
        cells = run.cells(live, run.frontier[live] + seen.depth[complete])
        cells = replace(cells, contexts=(seen.first + seen.depth)[complete][cells.contexts])
        run.put(
            run.canvas, cells, run.target.chain(run.target.gather(seen.z, cells), cells, run.noise(cells)).x
        )
    return complete


def prefix(run, rows):
    """One round that stops behind the first refused token; returns steps committed by each row."""
    canvas, rounds = draft(run, rows)
    seen = look_ahead(run, rows, canvas)
    cells, q = joined(rounds)
    row = np.searchsorted(rows, cells.rows)
    ahead = cells.steps - run.frontier[cells.rows]
    cells = replace(cells, contexts=seen.first[row] + ahead)
    p = run.target.chain(run.target.gather(seen.z, cells), cells, run.noise(cells))
    x, taken = judge(run, cells, p, q)
    refused = seen.depth.copy()  # the first step with a refused token
    np.minimum.at(refused, row[~taken], ahead[~taken])
    stays = ahead <= refused[row]
    run.put(run.canvas, cells.pick(stays), x[torch.from_numpy(stays).to(x.device)])
    run.count(int(stays.sum()), int(taken[stays].sum()))
    complete = refused == seen.depth
    return np.where(complete, seen.depth + bonus(run, rows, seen, complete), refused + 1)


def exact(run, rows):
    """One round that couples every denoising step; returns steps committed by each row."""
    canvas, rounds = draft(run, rows, keep=True)
    seen = look_ahead(run, rows, canvas)
    broken, committed = np.zeros(len(rows), dtype=bool), np.zeros(len(rows), dtype=np.int64)
    for ahead, (cells, q) in enumerate(rounds):
        row = np.searchsorted(rows, cells.rows)
        open_ = np.flatnonzero(~broken[row])
        if not len(open_):
            break
        row, cells, q = row[open_], cells.pick(open_), part_of(q, open_)
        cells = replace(cells, contexts=seen.first[row] + ahead)
        x, taken = coupled(run, cells, run.target.gather(seen.z, cells), q)
        run.put(run.canvas, cells, x)
        run.count(len(cells), int(taken.sum()))
        committed[np.unique(row)] += 1
        broken[row[~taken]] = True
    return committed + bonus(run, rows, seen, ~broken)


def coupled(run, cells, cond, q):
    """Draws from the target that equal the drafts as often as their denoising steps can be coupled.

    Along the draft's own states every step's law is compared with the target's. The first one that is not kept is
    drawn again from what the target has left, and the target goes on alone from there. The noise of the steps behind
    it has decided nothing yet, so it is used again.

    Args:
        cond: the target's conditions of `cells`. q: the draft's `Path` with states.

    Returns:
        (tokens fp32 [R, C], taken bool array [R]).
    """
    target, count = run.target, run.target.diffusion.count
    mine = [on_host(law) for law in target.laws_along(cond, cells, q.states)]
    other = [on_host(law) for law in q.laws]
    reached = [x.cpu().double() for x in (*q.states[1:], q.x)]  # what each step led to
    index = np.arange(count)[::-1]  # of each step, first to last
    uniform = np.log(run.source.uniform(ACCEPT, cells.rows, cells.cells, index[:, None]))
    kept = torch.stack([
        torch.from_numpy(u) < keep_chance(x, p, d) for u, x, p, d in zip(uniform, reached, mine, other)
    ]).numpy()  # fmt: skip
    if not target.last_noise:
        kept[-1] = alike(mine[-1].mean, other[-1].mean)
    taken = kept.all(0)
    lost = np.flatnonzero(~taken)
    if not len(lost):
        return q.x, taken
    left = kept[:, lost].argmin(0)  # place of the first step that was not kept
    p, d = (Step(*(torch.stack([getattr(laws[at], name)[row] for at, row in zip(left, lost)])
                   for name in ("mean", "log_sigma"))) for laws in (mine, other))  # fmt: skip
    old = torch.stack([reached[at][row] for at, row in zip(left, lost)])
    again = replaced(old, p, d, proposals(run, cells.pick(lost), index[left]))
    if not target.last_noise:
        again = torch.where(torch.from_numpy(index[left] == 0)[:, None], p.mean, again)
    x, streams, place = q.x.clone(), len(cond) // len(cells), torch.from_numpy(lost).to(q.x.device)
    picked = torch.cat([place + stream * len(cells) for stream in range(streams)])
    noise = run.noise(cells.pick(lost))
    x[place] = target.finish(again.to(x), cond[picked], cells.pick(lost), noise, index[left])
    return x, taken


def alike(a, b):
    """Whether rows [R, C] differ by rounding alone, bool array [R]."""
    return ((a - b).abs() <= ROUNDING * (1 + a.abs())).all(-1).numpy()


def part_of(path, rows):
    """Some rows of a `Path` with its states."""
    total, rows = path.log_sigma[rows], torch.from_numpy(rows).to(path.x.device)
    laws = [pick(law, rows) for law in path.laws]
    return Path(path.x[rows], pick(path.last, rows), total, [x[rows] for x in path.states], laws)


@dataclass(frozen=True)
class Mode:
    """One way to speculate: its round, whether its tokens follow the target's law, and a note for the user."""

    round: object
    lossless: bool
    note: str


MODES = {
    "block": Mode(
        block, False,
        "block keeps all drafted places, judged without sight of one another, as the published code does: lossy",
    ),
    "prefix": Mode(
        prefix, False,
        "prefix stops behind the first refused token, as the paper says; its criterion is an approximation: lossy",
    ),
    "exact": Mode(
        exact, True,
        "exact follows the target's law whatever the draft does; the last denoising step of a MAR adds no noise, so "
        "only drafts that equal the target's token stay: expect no gain in speed",
    ),
}  # fmt: skip
