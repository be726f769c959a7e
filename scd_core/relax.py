"""Relaxed acceptance at the commit front: more drafts are committed than the law allows. All of it is lossy.

A relaxation gives the chance f that a draft is committed. It only ever adds to the exact rule: a draft is committed
when the exact rule keeps it or when the same uniform lies below f, so f >= min(1, p/q) holds in effect and the plain
residual max(p - q, 0) stays the law that distorts least after a rejection (COOL-SD's theorem, arXiv 2601.09212).
Drafts behind the front never see it: they stay exactly coupled.

Strength 0 is the exact rule, bit for bit; 1 stands for the constants of the published code or paper.
"""

import numpy as np
import torch

BONUS, ALIGNED = 0.5, 0.65  # CSD: weight of the entropy in nats, largest total variation of aligned laws
HALF_WIDTH, NEAR = 7, 0.15  # GSD: ranks to each side, largest difference of probabilities
MULTIPLIER, DECAY = 1.0, 0.7  # COOL-SD: delta - 1, nu


def entropy_bonus(view, strength):
    """CSD (arXiv 2606.27829): min(1, p/q) + lambda * H(p) where TV(p, q) < tau; lambda = 0.5 * strength, tau = 0.65.

    The bonus grows with the law's entropy: flat regions of a picture have flat laws.

    Returns:
        f fp32 [B, W].
    """
    p, q = view.p, view.q
    entropy = -(p * view.log_p.clamp(min=-100.0)).sum(-1)
    aligned = 0.5 * (p - q).abs().sum(-1) < ALIGNED
    return view.ratio() + BONUS * strength * entropy * aligned


def grouped(view, strength):
    """GSD (arXiv 2508.07747): p(C)/q(C) over the group C of tokens near the draft in rank and probability.

    C holds the tokens at most 7 * strength ranks away when sorted by p whose p differs by less than 0.15.

    Returns:
        f fp32 [B, W].
    """
    half = round(HALF_WIDTH * strength)
    draft = view.draft.unsqueeze(-1)
    order = view.p.sort(dim=-1, descending=True, stable=True).indices
    rank = (order == draft).long().argmax(-1, keepdim=True)
    ranks = rank + torch.arange(-half, half + 1, device=rank.device)
    group = order.gather(-1, ranks.clamp(0, order.shape[-1] - 1))
    p, q = view.p.gather(-1, group), view.q.gather(-1, group)
    near = (p - view.p.gather(-1, draft)).abs() < NEAR
    inside = (ranks >= 0) & (ranks < order.shape[-1]) & near
    return (p * inside).sum(-1) / (q * inside).sum(-1).clamp(min=1e-30)


def annealed(view, strength):
    """COOL-SD (arXiv 2601.09212): w_i * p/q with w_i = max(1, delta * exp(-0.7 i)) at place i of the window.

    delta = 1 + strength; the paper's tables use 1.1 and 2. Its constant mu is not published and taken as 0.

    Returns:
        f fp32 [B, W].
    """
    place = torch.arange(view.draft.shape[1], device=view.p.device, dtype=torch.float32)
    weight = ((1 + MULTIPLIER * strength) * torch.exp(-DECAY * place)).clamp(min=1.0)
    return weight * view.ratio(capped=False)


def loosened(stands, before_last, relaxed, samples, budget):
    """Drafts that a relaxation commits although the exact rule rejects them, within each sample's budget.

    Args:
        stands, relaxed: bool [A, W] drafts that the exact rule keeps, that the relaxation would commit.
        before_last: bool [A, W] lanes whose draft can be committed; those behind a sample's first failure are not.
        samples: the A `Frontier`s, which count what was committed so. budget: of each, below 0: any number.

    Returns:
        bool [A, W]; lanes behind the first failure may be among them.
    """
    extra = relaxed & ~stands & before_last
    if budget >= 0:
        used = np.array([s.relaxed for s in samples])[:, None]
        extra &= used + np.cumsum(extra, 1) <= budget
    n = np.logical_and.accumulate((stands | extra) & before_last, 1).sum(1, keepdims=True)
    for s, count in zip(samples, (extra & (np.arange(extra.shape[1]) < n)).sum(1)):
        s.relaxed += int(count)
    return extra
