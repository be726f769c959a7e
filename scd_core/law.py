"""The token law: from the backbone's logits to the distribution that is sampled, in fp32.

The same law serves drafts, tests, residuals and bonus tokens; a ratio of raw probabilities would be wrong as
soon as guidance, temperature, top-k or top-p is active.
"""

from dataclasses import dataclass

import torch

NEVER = float("-inf")
GREEDY = 1e-30  # below this temperature the division would overflow, and the best token has all mass anyway


@dataclass(frozen=True)
class LawSettings:
    """Sampling settings of one run.

    temperature 0 is argmax (ties to the lowest id); top_k 0 or >= V is off; top_p <= 0 keeps the best token;
    cfg 1 needs no unconditional stream.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    cfg: float = 1.0


def guide(logits, cfg, form="logits"):
    """Classifier-free guidance u + cfg * (c - u).

    Args:
        logits: [B, S, W, V], stream 0 conditional, stream 1 unconditional (S = 1: returned as they are).
        form: "logits", or "logprobs" to mix log-softmax values (SimpleAR).

    Returns:
        fp32 [B, W, V].
    """
    scores = logits.float()
    if scores.shape[1] == 1:
        return scores[:, 0]
    if form == "logprobs":
        scores = scores.log_softmax(-1)
    cond, uncond = scores.unbind(1)
    return uncond + cfg * (cond - uncond)


def keep_top_k(scores, k):
    """Scores below the k-th largest become -inf. `k` 0 or >= V leaves all."""
    if not 0 < k < scores.shape[-1]:
        return scores
    least = scores.topk(k, dim=-1).values[..., -1:]
    return scores.masked_fill(scores < least, NEVER)


def keep_top_p(scores, top_p):
    """Keep the smallest set of best tokens whose mass reaches top_p; always at least the best one."""
    if top_p >= 1:
        return scores
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    p = ordered.softmax(-1)
    before = p.cumsum(-1) - p  # mass of strictly better tokens
    drop = before >= max(top_p, 0.0)
    drop[..., 0] = False
    return scores.masked_fill(torch.zeros_like(drop).scatter_(-1, order, drop), NEVER)


def token_scores(logits, settings, form="logits", allowed=None):
    """Backbone logits -> scores whose softmax is the law.

    Args:
        logits: [B, S, W, V] in any float dtype.
        settings: `LawSettings`.
        form: see `guide`.
        allowed: bool [V] of ids that may be drawn at all, or None.

    Returns:
        fp32 [B, W, V]; -inf outside the support. What is not finite in the logits of a row stays in its scores.
    """
    scores = guide(logits, settings.cfg, form)
    if allowed is not None:
        scores = scores.masked_fill(~allowed, NEVER)
    if settings.temperature < GREEDY:
        best = scores.argmax(-1, keepdim=True)
        finite = scores.gather(-1, best) * 0  # NaN where the best score is not finite
        return torch.full_like(scores, NEVER).scatter_(-1, best, 0.0) + finite
    if settings.temperature != 1:
        scores = scores / settings.temperature
    return keep_top_p(keep_top_k(scores, settings.top_k), settings.top_p)


def token_law(logits, settings, form="logits", allowed=None):
    """Backbone logits -> log of the law, fp32 [B, W, V]; arguments as for `token_scores`.

    -inf outside the support. A row is NaN if a logit was not finite.
    """
    return token_scores(logits, settings, form, allowed).log_softmax(-1)
