"""How a position that enters the window gets its first draft and that draft's law.

Any start is exact as long as the recorded law is the one the draft was drawn from: a copied token has a one-hot
law. Seed-exact needs no law at all, so there a start is only a guess.
"""

from dataclasses import dataclass

import numpy as np
import torch

from .coupling import gumbel_argmax, inverse_cdf


@dataclass(frozen=True)
class Start:
    """source: None, "left", "above" or "previous_frame"; from_law: draw from the law there, not copy the token."""

    source: str | None = None
    from_law: bool = False


STARTS = {
    "random": Start(),
    "uniform": Start(from_law=True),
    "left": Start("left"),
    "above": Start("above"),
    "previous_frame": Start("previous_frame"),
    "left_law": Start("left", from_law=True),
    "above_law": Start("above", from_law=True),
    "previous_frame_law": Start("previous_frame", from_law=True),
}


FRAME_LAWS = 1 << 26  # entries: 256 MB


def keeps_frame_laws(plan):
    """May the laws of the previous frame be kept for every sample of `plan`?"""
    return plan.frame_stride * plan.vocab <= FRAME_LAWS


def automatic_start(method, plan):
    """The start that needs the fewest passes by measurement: the previous frame for clips;
    for stills a uniform law where laws are kept, else any token.

    The laws of a whole frame are kept only where they are not too many; its tokens serve nearly as well."""
    if plan.frames > 1 and not method.heads:
        return "previous_frame_law" if method.needs_q and keeps_frame_laws(plan) else "previous_frame"
    if method.start:
        return method.start
    return "uniform" if method.needs_q else "random"


def stride_of(start, plan):
    """Distance in the sequence to the source of `start`; 0 when it has none."""
    strides = {None: 0, "left": 1, "above": plan.row_stride, "previous_frame": plan.frame_stride}
    return strides[start.source]


def source_positions(positions, known, stride):
    """Nearest position `stride` steps back (or 2, 3 .. times that) that has been looked at already.

    Args:
        positions: integers [B, M] entering positions. known: integers [B], positions below it have drafts.

    Returns:
        integers [B, M]; negative where there is none.
    """
    if stride == 0:
        return np.full_like(positions, -1)
    back = (positions - known[:, None]) // stride + 1
    return positions - stride * np.maximum(back, 1)


def chances(state, positions):
    """The uniforms of first drafts at `positions` [B, M]: fp32 [B, M]."""
    return state.chance[np.arange(len(positions))[:, None], positions]


def any_token(state, positions):
    """Columns [B, M] drawn from the uniform law."""
    return np.minimum((chances(state, positions) * state.vocab).astype(np.int64), state.vocab - 1)


def draft_tokens(state, positions, source):
    """First drafts as copies of the tokens at `source`, or any token where there is none: columns [B, M]."""
    if not (source >= 0).any():
        return any_token(state, positions)
    columns = state.columns_at(np.maximum(source, 0))
    usable = (source >= 0) & (columns >= 0) & (columns < state.vocab)
    return np.where(usable, columns, any_token(state, positions))


def draft_laws(state, positions, source, read=None):
    """First drafts drawn from the laws at `source`, or from the uniform law where there is none.

    Args:
        read: (positions, source) -> laws fp32 [B, M, V] of the drafts; None: the recorded ones of the sources.

    Returns:
        (columns int64 [B, M], law fp32 [B, M, V]) on the device.
    """
    vocab, device = state.vocab, state.device
    law = torch.full((*positions.shape, vocab), 1.0 / vocab, device=device)
    known = source >= 0
    if known.any():
        have = torch.from_numpy(known).to(device)
        at = np.maximum(source, 0)
        law = torch.where(have[..., None], state.laws.read(at) if read is None else read(positions, at), law)
    if state.gumbels is not None:  # share the position's own noise, so the start is coupled too
        return gumbel_argmax(law.log(), state.gumbels.read(positions)), law
    if not known.any():
        return torch.from_numpy(any_token(state, positions)).to(device), law
    return inverse_cdf(law, torch.from_numpy(chances(state, positions)).to(device)), law
