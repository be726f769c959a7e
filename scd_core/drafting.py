"""How a position that enters the window gets its first draft and that draft's law (decoding spec 5).

Any start is exact as long as the recorded law is the one the draft was drawn from: a copied token has a one-hot
law. Seed-exact needs no law at all, so there a start is only a guess.
"""

from dataclasses import dataclass

import torch

from . import noise as streams
from .coupling import gumbel_argmax, inverse_cdf


@dataclass(frozen=True)
class Start:
    """source: None, "left", "above" or "previous_frame"; from_law: draw from the law there instead of copying."""

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


def automatic_start(method, plan):
    """The start that needs the fewest passes by measurement (spec/beyond 1.4): the previous frame for clips;
    for stills a uniform law where laws are kept, else any token."""
    if plan.frames > 1:
        return "previous_frame_law" if method.needs_q else "previous_frame"
    return "uniform" if method.needs_q else "random"


def stride_of(start, plan):
    """Distance in the sequence to the source of `start`; 0 when it has none."""
    strides = {None: 0, "left": 1, "above": plan.row_stride, "previous_frame": plan.frame_stride}
    return strides[start.source]


def source_positions(positions, known, stride):
    """Nearest position `stride` steps back (or 2, 3 .. times that) that has been looked at already.

    Args:
        positions: int64 [B, M] entering positions. known: int64 [B], positions below it have drafts.

    Returns:
        int64 [B, M]; negative where there is none.
    """
    if stride == 0:
        return torch.full_like(positions, -1)
    back = torch.div(positions - known[:, None], stride, rounding_mode="floor") + 1
    return positions - stride * back.clamp_(min=1)


def first_drafts(start, state, positions, known, stride):
    """First drafts of entering positions.

    Args:
        start: `Start`. state: `WindowState` (tokens, laws, noise).
        positions: int64 [B, M]. known: int64 [B]. stride: see `stride_of`.

    Returns:
        (columns int64 [B, M], law fp32 [B, M, V] or None when the method keeps no laws).
    """
    vocab, source = state.vocab, source_positions(positions, known, stride)
    u = state.noise.uniform(streams.START, positions)
    random = (u * vocab).long().clamp_(max=vocab - 1)
    if start.from_law and state.laws is not None:
        law = torch.full((*positions.shape, vocab), 1.0 / vocab, device=positions.device)
        if stride:
            law = torch.where((source >= 0)[..., None], state.laws.read(source), law)
        if state.gumbels is not None:  # share the position's own noise, so the start is coupled too
            return gumbel_argmax(law.log(), state.gumbels.read(positions)), law
        return inverse_cdf(law, u), law
    columns = state.columns_at(source.clamp(min=0))
    usable = (source >= 0) & (columns >= 0) & (columns < vocab)
    columns = torch.where(usable, columns, random)
    if state.laws is None:
        return columns, None
    return columns, torch.nn.functional.one_hot(columns, vocab).float()
