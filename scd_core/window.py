"""How many positions and tree nodes a pass should look at when the user leaves it to us.

Seed-exact draws the same tokens whatever the window, so there it may be measured: time a pass at several lengths
and take the shape that commits most tokens a second. The other methods draw different (equally lawful) tokens for
different windows, so they use a fixed table and seeds stay reproducible.
"""

import time

import torch

from .acceptance import METHODS
from .errors import ran_out
from .models.session import Session

AUTO = -1  # nodes: chosen here
LENGTHS = (8, 16, 32, 64, 128, 256)  # a shorter window has little to win, and a busy machine may not talk us into it
NODES = (0, 32)  # a tree as long as the window at most; smaller ones than 32 gain little
# tokens a pass commits at these lengths, measured on the bundled model (benchmark preset, seed-exact with memory);
# only the ratios matter
COMMITS = {False: (2.2, 3.2, 4.2, 4.6, 4.6, 4.6), True: (3.9, 6.2, 9.6, 14.4, 19.4, 20.9)}
GAIN = {False: (1.0, 1.24), True: (1.0, 1.07)}  # how many times more with so many nodes
TREE = 1.6e-3, 1.0e-3  # seconds that a tree's choice adds to a pass on the host: once, and for every sample (measured)
ROUNDS = 4
TABLE = {False: 32, True: 64}  # still, clip: without measurement
ON_ACCELERATOR = {False: 64, True: 128}

_measured = {}  # (which model, situation) -> (window, nodes)


def _which(decoder):
    """Tells a model from others, but not from itself after a reload: in bf16 another shape may draw another picture."""
    return repr(decoder.cfg), float(decoder.norm.weight.float().sum())


def choose_shape(decoder, family, plan, streams, method, batch, law, device, window=0, nodes=AUTO):
    """(window, tree nodes) for a run; what the user gave (window above 0, nodes not `AUTO`) stays.

    Measured for seed-exact and jacobi, from a table for the others (no nodes of their own accord), (1, 0) for
    autoregressive.
    """
    rule, clip = METHODS[method], plan.frames > 1
    if rule.sequential:
        return 1, 0
    if not rule.memory:
        table = TABLE if torch.device(device).type == "cpu" else ON_ACCELERATOR
        return window or min(rule.window or table[clip], plan.length), rule.nodes(nodes, False)
    if window and nodes != AUTO:
        return window, nodes
    commits = dict(zip(LENGTHS, COMMITS[clip]))
    windows = {window: 1.0} if window else {w: c for w, c in commits.items() if w <= max(plan.length, LENGTHS[0])}
    counts = dict(zip(NODES, GAIN[clip])) if nodes == AUTO else {nodes: 1.0}
    shapes = {(w, m): c * g for w, c in windows.items() for m, g in counts.items() if m <= w or m == nodes}
    if len(shapes) == 1:
        return next(iter(shapes))
    streams = streams[:1] if law.cfg == 1 else streams
    place = (str(device), decoder.dtype, batch, len(streams), plan.frames, plan.rows, plan.cols)
    situation = (*_which(decoder), *place, tuple(shapes))
    if situation not in _measured:
        _measured[situation] = measure_shape(decoder, family, plan, streams, batch, device, shapes)
    return _measured[situation]


@torch.inference_mode()
def measure_shape(decoder, family, plan, streams, batch, device, shapes, clock=time.perf_counter):
    """Time passes at half the sequence and return the shape with most commits a second.

    The first round goes upwards and ends when more rows have clearly lost; further rounds repeat those lengths in
    turn and the fastest pass of each counts, so that a moment of other work does not decide.

    Args:
        shapes: {(window, nodes): commits a pass}; a pass has window + nodes rows.
    """
    fixed = torch.full((batch, plan.length), -1)
    session = Session(decoder, family, plan, streams, fixed, 0, device)
    best = {}  # rows -> most commits
    for (window, nodes), commits in shapes.items():
        best[window + nodes] = max(commits, best.get(window + nodes, 0.0))
    fastest = {}
    for turn in range(ROUNDS):
        for rows in sorted(best) if turn == 0 else tuple(fastest):
            try:
                seconds = _pass_seconds(session, plan, batch, min(rows, plan.length), device, clock)
            except RuntimeError as error:
                if not ran_out(error) or not fastest:
                    raise
                break  # what does not fit is no choice; shorter windows do
            fastest[rows] = min(seconds, fastest.get(rows, seconds))
            rates = {n: best[n] / s for n, s in fastest.items()}
            if turn == 0 and rates[rows] < 0.5 * max(rates.values()):
                break
    growing = TREE[0] + TREE[1] * batch
    timed = {
        (window, nodes): commits / (fastest[window + nodes] + growing * (nodes > 0))
        for (window, nodes), commits in shapes.items()
        if window + nodes in fastest
    }
    return max(timed, key=timed.get)


def _pass_seconds(session, plan, batch, length, device, clock):
    """Seconds of one pass of `length` rows in the middle of the sequence."""
    start = min(plan.length // 2, plan.length - length)
    before = (torch.arange(length, device=device) + start - 1).repeat(batch, 1)
    tokens = torch.full_like(before, plan.base)
    begin = clock()
    logits = session.window(tokens, before, start + length - 1, start == 0)
    float(logits[0, 0, 0, 0])  # wait for the device
    return clock() - begin
