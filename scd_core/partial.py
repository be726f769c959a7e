"""Stop early and keep: a whole grid out of a run that ended before its last token."""

import numpy as np
import torch


def complete(plan, tokens, decided, drafted):
    """Stand-ins for the cells that a stopped run never looked at.

    Such a cell takes what was last decided for it in an earlier frame, in the first frame the nearest decided token
    above it, in the first row the nearest one to the left.

    Args:
        plan: `TokenPlan`. tokens: int64 [B, N] decided tokens and present drafts.
        decided, drafted: bool [B, N] positions that are committed or given, and those that a pass looked at.

    Returns:
        (tokens int64 [B, N], number of first frames that are decided in every sample).
    """
    order = (plan.cells >= 0).nonzero()[:, 0]
    sure, area = decided[:, order].numpy(), plan.rows * plan.cols
    source = np.where(sure, np.arange(len(order)), -1)
    for cell in np.flatnonzero((source < 0).any(0)):
        back = area if cell >= area else plan.cols if cell >= plan.cols else 1
        missing = source[:, cell] < 0
        source[missing, cell] = source[missing, cell - back]
    copied = tokens[:, order].gather(1, torch.from_numpy(np.maximum(source, 0)))
    out = tokens.clone()
    out[:, order] = torch.where((decided | drafted)[:, order], tokens[:, order], copied)
    frames = sure.reshape(len(sure), plan.frames, area).all((0, 2))
    return out, int(np.logical_and.accumulate(frames).sum())
