"""Accepting a drafted vector, or drawing another one: ratios of Gaussian densities, all in log space and fp64.

`log_ratio` and `residual` are the criterion of continuous speculative decoding (CSpD, arXiv 2411.11925). `couple` is
the maximal coupling of two Gaussians, which is exact: equal variances by reflection (De Bortoli et al. 2025,
arXiv 2501.05370), others by thinning.
"""

import torch

from .diffusion import Step

TRIES = 100  # proposals of the residual, as published
THINNINGS = 1 << 20  # of `couple`; what is cut off weighs less than 1 / (e THINNINGS)
LARGEST = 1 << 14  # proposals made at once, one a row at least


def energy(x, law):
    """Half the squared distance of x [..., C] from the mean of a `Step`, in its sigmas: fp64 [...]."""
    return 0.5 * ((x - law.mean.double()) / law.log_sigma.double().exp()).square().sum(-1)


def log_ratio(x, p, q, scale, tau=1.0):
    """log of S p(x) / q(x), the chance that a draft from q is taken for the target p.

    Args:
        x: fp64 [..., C]. p, q: `Step`s of the last denoising step, [..., C] or broadcast to it.
        scale: log S = sum over all steps and channels of log sigma_q - log sigma_p, fp64 [...]. The last step's
            share of it is the ratio of the two densities' normalisers, those of the steps before come from the change
            of variables between the two paths that share their noise: the narrower path is the denser one.
        tau: flattens both densities of the last step. 1 is the published formula; the released code has 42, which it
            does not mention.

    With one step the rule is exact. With more, both paths are functions of the same noise, given which the ratio of
    the last densities alone would be exact: the factor of the earlier steps is a part of the published approximation.
    """
    return scale + (energy(x, q) - energy(x, p)) / tau**2


def residual(p, q, scale, draws, limit=TRIES):
    """A draw from max(0, S p - q), normalised, by proposing from p.

    Args:
        p, q, scale: as in `log_ratio`, rows [R, C] and [R].
        draws: (rows int64 [r], first, count) -> (noise fp64 [r, count, C], uniforms fp64 [r, count]) of the proposals
            first .. first + count - 1.
        limit: proposals a row; the residual may be empty, or nearly.

    Returns:
        (x fp64 [R, C], found bool [R]); x is p's mean where no proposal was taken.
    """
    x = p.mean.double().clone()
    found = torch.zeros(len(x), dtype=torch.bool)
    first, count = 0, 1
    while first < limit and len(rows := (~found).nonzero()[:, 0]):
        count = min(count, limit - first, max(1, LARGEST // len(rows)))
        noise, uniform = draws(rows, first, count)
        mine, other = (Step(law.mean[rows, None].double(), law.log_sigma[rows, None].double()) for law in (p, q))
        y = mine.draw(noise)
        # taken with chance 1 - q / (S p)
        taken = torch.log1p(-uniform) > -log_ratio(y, mine, other, scale[rows, None])
        hit = taken.any(1)
        x[rows[hit]] = y[hit, taken.int().argmax(1)[hit]]
        found[rows[hit]] = True
        first, count = first + count, 2 * count
    return x, found


def keep_chance(x, p, q):
    """log of p(x) / q(x) of two `Step`s [..., C] in all their channels together: fp64 [...]."""
    scale = (q.log_sigma.double() - p.log_sigma.double()).sum(-1)
    return log_ratio(x.double(), p, q, scale)


def couple(x, p, q, uniform, draws):
    """Turn draws x from q into draws from p that differ from x as seldom as any coupling can make them.

    Args:
        x: fp64 [R, C]. p, q: `Step`s [R, C]. uniform: fp64 [R]. draws: as in `residual`.

    Returns:
        (y fp64 [R, C], kept bool [R]): y is x where kept.
    """
    kept = torch.log(uniform) < keep_chance(x, p, q)
    y, rows = x.clone(), (~kept).nonzero()[:, 0]
    if len(rows):
        y[rows] = replaced(x[rows], pick(p, rows), pick(q, rows), lambda at, *which: draws(rows[at], *which))
    return y, kept


def replaced(x, p, q, draws):
    """What becomes of draws x from q that were not kept: fp64 [R, C]; arguments as in `couple`."""
    y, alike = reflected(x, p, q), (p.log_sigma == q.log_sigma).all(-1)
    thin = (~alike).nonzero()[:, 0]
    if len(thin):
        mine, other = pick(p, thin), pick(q, thin)
        scale = (other.log_sigma.double() - mine.log_sigma.double()).sum(-1)
        y[thin] = residual(mine, other, scale, lambda at, *which: draws(thin[at], *which), THINNINGS)[0]
    return y


def reflected(x, p, q):
    """The noise of x under q, mirrored at the plane halfway between the means, under p; for equal variances."""
    sigma = p.log_sigma.double().exp()
    shift = (q.mean.double() - p.mean.double()) / sigma
    noise = (x - q.mean.double()) / sigma
    unit = shift / shift.norm(dim=-1, keepdim=True)
    return p.mean.double() + sigma * (noise - 2 * (unit * noise).sum(-1, keepdim=True) * unit)


def pick(law, rows):
    """Some rows of a `Step`."""
    return Step(law.mean[rows], law.log_sigma[rows])
