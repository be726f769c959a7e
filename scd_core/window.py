"""How many positions a pass should look at when the user leaves it to us (decoding spec 9).

Seed-exact draws the same tokens whatever the window, so there it may be measured: time a pass at several lengths
and take the one that commits most tokens a second. The other methods draw different (equally lawful) tokens for
different windows, so they use a fixed table and seeds stay reproducible.
"""

import time
import weakref

import torch

from .acceptance import METHODS
from .models.session import Session

LENGTHS = (1, 8, 16, 32, 64, 128, 256)
# tokens a pass commits at these lengths, measured on the bundled model (benchmark preset, seed-exact with memory);
# only the ratios matter
COMMITS = {False: (1.0, 2.4, 3.4, 4.5, 5.0, 5.1, 5.1), True: (1.0, 4.5, 7.0, 9.5, 15.0, 20.0, 22.5)}
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

    Lengths are tried upwards and the search ends when a longer window has lost by a quarter.
    """
    fixed = torch.full((batch, plan.length), -1)
    session = Session(decoder, family, plan, streams, fixed, 0, device)
    best, best_rate = 1, 0.0
    for length, gain in zip(LENGTHS, commits):
        if length > plan.length:
            break
        rate = gain / _pass_seconds(session, plan, batch, length, device, clock)
        if rate > best_rate:
            best, best_rate = length, rate
        elif rate < 0.75 * best_rate:
            break
    return best


def _pass_seconds(session, plan, batch, length, device, clock):
    """Fastest of a few passes of `length` rows in the middle of the sequence."""
    start = min(plan.length // 2, plan.length - length)
    before = (torch.arange(length, device=device) + start - 1).repeat(batch, 1)
    tokens = torch.full_like(before, plan.base)
    valid = torch.ones_like(before, dtype=torch.bool)
    fastest = float("inf")
    for _ in range(4):
        begin = clock()
        logits = session.window(tokens, before, valid, start + length - 1, start == 0)
        float(logits[0, 0, 0, 0])  # wait for the device
        fastest = min(fastest, clock() - begin)
    return fastest
