"""How many positions a pass should look at when the user leaves it to us.

Seed-exact draws the same tokens whatever the window, so there it may be measured: time a pass at several lengths
and take the one that commits most tokens a second. The other methods draw different (equally lawful) tokens for
different windows, so they use a fixed table and seeds stay reproducible.
"""

import time
import weakref

import torch

from .acceptance import METHODS
from .models.session import Session

LENGTHS = (8, 16, 32, 64, 128, 256)  # a shorter window has little to win, and a busy machine may not talk us into it
# tokens a pass commits at these lengths, measured on the bundled model (benchmark preset, seed-exact with memory);
# only the ratios matter
COMMITS = {False: (2.4, 3.4, 4.5, 5.0, 5.1, 5.1), True: (4.5, 7.0, 9.5, 15.0, 20.0, 22.5)}
ROUNDS = 4
TABLE = {False: 32, True: 64}  # still, clip: without measurement
ON_ACCELERATOR = {False: 64, True: 128}

_measured = weakref.WeakKeyDictionary()  # decoder -> {situation: window}


def choose_window(decoder, family, plan, streams, method, batch, law, device):
    """Window for a run: measured for seed-exact and jacobi, from a table for the others; 1 for autoregressive."""
    rule, clip = METHODS[method], plan.frames > 1
    if rule.sequential:
        return 1
    if not rule.memory:
        table = TABLE if torch.device(device).type == "cpu" else ON_ACCELERATOR
        return min(table[clip], plan.length)
    streams = streams[:1] if law.cfg == 1 else streams
    situation = (str(device), decoder.dtype, batch, len(streams), plan.frames, plan.rows, plan.cols)
    known = _measured.setdefault(decoder, {})
    if situation not in known:
        known[situation] = measure_window(decoder, family, plan, streams, batch, device, COMMITS[clip])
    return known[situation]


@torch.inference_mode()
def measure_window(decoder, family, plan, streams, batch, device, commits, clock=time.perf_counter):
    """Time passes of each length at half the sequence and return the length with most commits a second.

    The first round goes upwards and ends when a longer window has clearly lost; further rounds repeat those lengths
    in turn and the fastest pass of each counts, so that a moment of other work does not decide.
    """
    fixed = torch.full((batch, plan.length), -1)
    session = Session(decoder, family, plan, streams, fixed, 0, device)
    fastest, gains = {}, dict(zip(LENGTHS, commits))
    for turn in range(ROUNDS):
        for length in LENGTHS if turn == 0 else tuple(fastest):
            if length > max(plan.length, LENGTHS[0]):
                break
            seconds = _pass_seconds(session, plan, batch, min(length, plan.length), device, clock)
            fastest[length] = min(seconds, fastest.get(length, seconds))
            rates = {n: gains[n] / s for n, s in fastest.items()}
            if turn == 0 and rates[length] < 0.5 * max(rates.values()):
                break
    return max(rates, key=rates.get)


def _pass_seconds(session, plan, batch, length, device, clock):
    """Seconds of one pass of `length` rows in the middle of the sequence."""
    start = min(plan.length // 2, plan.length - length)
    before = (torch.arange(length, device=device) + start - 1).repeat(batch, 1)
    tokens = torch.full_like(before, plan.base)
    begin = clock()
    logits = session.window(tokens, before, start + length - 1, start == 0)
    float(logits[0, 0, 0, 0])  # wait for the device
    return clock() - begin
