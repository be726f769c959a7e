"""Decoding rules that are known to be wrong: the exactness tests must be able to see them."""

import torch
from scd_pack.scd_core import noise as streams
from scd_pack.scd_core.acceptance import METHODS, Method, exact, keep, redraw, reshare
from scd_pack.scd_core.coupling import inverse_cdf

MAXIMAL, GUMBEL = METHODS["scd-maximal"], METHODS["scd-gumbel"]


def rule(base, **changes):
    """A method with some of its values replaced."""
    values = {name: getattr(base, name) for name in base.__dataclass_fields__}
    return Method(**{**values, **changes})


def residual(view):
    rest = (view.p - view.q).clamp(min=0)
    return torch.where(rest.sum(-1, keepdim=True) > 0, rest, view.p)


def stale(view, token, kept):
    """Accepted drafts keep their old law (the released rule)."""
    return torch.where(kept[..., None], view.q, view.p)


def residual_as_law(view, token, kept):
    """Rejected drafts remember the residual they were drawn from."""
    rest = residual(view)
    return torch.where(kept[..., None], view.p, rest / rest.sum(-1, keepdim=True))


def replaced(draw):
    """Accept as always, but let `draw(view)` choose the token of a rejection."""

    def accept(view):
        token, kept = exact(view)
        return torch.where(kept, token, draw(view)), kept

    return accept


def own_noise_again(view):
    """The residual draw uses the Gumbel vector that the rejected draft was drawn with."""
    return (residual(view).log() + view.gumbel).argmax(-1)


def frozen_uniform(view, stream):
    """The same uniform for a position in every pass."""
    return torch.from_numpy(view.noise.uniform(stream, view.positions))


def frozen_noise(view):
    """The residual draw of a position uses the same uniform in every pass."""
    return inverse_cdf(residual(view), frozen_uniform(view, streams.RESIDUAL))


def with_epsilon(view):
    """A little mass everywhere, against empty residuals."""
    return inverse_cdf(residual(view) + 1e-3, view.uniform(streams.RESIDUAL))


def law_itself(view):
    """A rejection draws from p instead of the residual."""
    return inverse_cdf(view.p, view.uniform(streams.RESIDUAL))


def frozen_threshold(view):
    """The accept uniform of a position is the same in every pass."""
    p, q = (t.gather(-1, view.draft[..., None]).squeeze(-1) for t in (view.p, view.q))
    kept = frozen_uniform(view, streams.ACCEPT) * q < p
    token = inverse_cdf(residual(view), view.uniform(streams.RESIDUAL))
    return torch.where(kept, view.draft, token), kept


def keep_likely(view, token):
    """Drafts stay while p is not much below q, and are drawn anew otherwise."""
    p, q = (t.gather(-1, view.draft[..., None]).squeeze(-1) for t in (view.p, view.q))
    return torch.where(p > 0.7 * q, view.draft, redraw(view, token))


BIASED = {
    "stale law on acceptance": rule(MAXIMAL, remember=stale),
    "residual recorded as the law": rule(MAXIMAL, remember=residual_as_law),
    "residual draw re-uses the draft's noise": rule(GUMBEL, accept=replaced(own_noise_again), couple=reshare),
    "threshold decides which drafts stay": rule(MAXIMAL, couple=keep_likely),
    "residual noise frozen per position": rule(MAXIMAL, accept=replaced(frozen_noise), couple=keep),
    "accept noise frozen per position": rule(MAXIMAL, accept=frozen_threshold, couple=keep),
    "epsilon in the residual": rule(MAXIMAL, accept=replaced(with_epsilon)),
    "law itself after a rejection": rule(MAXIMAL, accept=replaced(law_itself)),
}
