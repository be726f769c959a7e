"""How a draft moves from its old law to the new one.

Every function here keeps the marginal: if the old draft had law q, the new one has law p. They differ in how
often the token stays the same, which is what makes drafts survive (SCD, arXiv 2510.24211).
"""

import torch


def inverse_cdf(weights, u):
    """Draw an index from unnormalised weights by inversion.

    Args:
        weights: fp32 [..., V], non-negative, at least one positive.
        u: fp32 [...] uniforms in (0, 1).

    Returns:
        int64 [...]; never an index of weight 0.
    """
    cdf = weights.cumsum(-1)
    # the largest u could round to the whole sum, behind the last index of positive weight
    point = u.clamp(max=1 - 2.0**-23).unsqueeze(-1) * cdf[..., -1:]
    index = torch.searchsorted(cdf, point, right=True).squeeze(-1)
    return index.clamp_(max=weights.shape[-1] - 1)


NOTHING = 1e-20  # beside any real residual lost in fp32, and below what the smallest uniform can reach


def residual(p, q):
    """Weights fp32 [..., V] of what is left of p beyond q: max(p - q, 0), or p itself (scaled) where nothing is left.

    An index without residual keeps weight `NOTHING` * p, which no draw by `inverse_cdf` can meet: sums of it lie below
    2**-24 of a residual over 2e-13, and laws that differ less than that are equal.
    """
    return (p - q).clamp_(min=0).add_(p, alpha=NOTHING)


def maximal(p, q, draft, u, v):
    """The maximal coupling of q and p, given the draft (the modified rejection sampling of SJD, arXiv 2410.01699).

    The draft stays with probability min(1, p/q), else the residual max(p - q, 0) is drawn, so that
    Pr[new = old] = 1 - TV(p, q), the most any coupling can reach. An empty residual (p = q within rounding) is
    replaced by p; no epsilon is added, because it would leak mass outside the support.

    Args:
        p, q: fp32 laws [B, W, V]; q is the law the draft was really drawn from.
        draft: int64 [B, W]; u, v: fp32 uniforms [B, W].

    Returns:
        (token int64 [B, W] with law p, kept bool [B, W]).
    """
    x = draft.unsqueeze(-1)
    kept = u * q.gather(-1, x).squeeze(-1) < p.gather(-1, x).squeeze(-1)
    return torch.where(kept, draft, inverse_cdf(residual(p, q), v)), kept


def gumbel_argmax(log_p, gumbel):
    """Draw with shared noise: argmax(log p + G). Ties to the lowest id. int64 [B, W].

    Two laws that share G agree with probability at least (1-TV)/(1+TV) (Daliri et al., arXiv 2408.07978).
    """
    return (log_p + gumbel).argmax(-1)
