"""What may be committed at the frontier, and the methods as rows of one table."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch

from . import noise as streams
from .coupling import inverse_cdf, maximal
from .relax import annealed, entropy_bonus, grouped

REUSED = 0.5  # least p/q of a draft that published PJD leaves alone


class Verdict:
    """What one pass knows about its window; the rules below read from it. All tensors are on the device.

    Attributes:
        scores: fp32 [B, W, V], their softmax is the newest law. p, log_p: that law, made on first use.
        best: scores + gumbel, made on first use: their argmax (`top`) draws from the law.
        draft: int64 [B, W] columns of the law.
        q: fp32 [B, W, V] law of the draft (None for rules that need none).
        gumbel: fp32 [B, W, V] noise of the positions (None for rules that need none).
        noise: `Noise`. positions: integer array [B, W]. passes: number of the pass.
        heads: bool array [B, W] lanes that begin a row's window, where a pass has windows in several rows.
    """

    def __init__(self, scores, draft, q, gumbel, noise, positions, passes, heads=None):
        self.scores, self.draft, self.q, self.gumbel = scores, draft, q, gumbel
        self.noise, self.positions, self.passes, self.heads = noise, positions, passes, heads
        self.reused = None  # see `reusable`

    @cached_property
    def p(self):
        return self.scores.softmax(-1)

    @cached_property
    def log_p(self):
        return self.scores.log_softmax(-1)

    @cached_property
    def best(self):
        return self.scores + self.gumbel

    @cached_property
    def top(self):
        """(value fp32 [B, W], column int64 [B, W]) of the best; the first of equals. Faster than argmax on a CPU."""
        return self.best.max(-1)

    def broken(self):
        """bool [B, W]: rows whose logits were not finite (then every probability is NaN)."""
        if self.gumbel is None:
            return self.p[..., 0].isnan()
        return self.top.values * 0 != 0

    def ratio(self, capped=True):
        """p/q of the drafts, fp32 [B, W]; capped at 1."""
        x = self.draft.unsqueeze(-1)
        ratio = (self.p.gather(-1, x) / self.q.gather(-1, x).clamp(min=1e-30)).squeeze(-1)
        return ratio.clamp(max=1.0) if capped else ratio

    def uniform(self, *streams):
        """Fresh uniforms fp32 [B, W] of this pass, one tensor a stream."""
        u = torch.from_numpy(self.noise.uniform(streams, self.positions, self.passes)).to(self.scores.device)
        return u[0] if len(streams) == 1 else u.unbind(0)


def exact(view):
    """Modified rejection sampling: the committed token has law p (speculative Jacobi, arXiv 2410.01699)."""
    return maximal(view.p, view.q, view.draft, *view.uniform(streams.ACCEPT, streams.RESIDUAL))


def match(view):
    """Seed-exact: the token is a fixed function of the prefix; the draft stands when it equals it."""
    token = view.top.indices
    return token, token == view.draft


def redraw(view, token):
    """Drafts behind the frontier are drawn anew (SJD)."""
    return inverse_cdf(view.p, view.uniform(streams.REDRAW))


def keep(view, token):
    """Drafts behind the frontier are what the acceptance kernel made of them (SCD, maximal coupling)."""
    return token


def reshare(view, token):
    """Drafts behind the frontier are drawn again with their position's own Gumbel noise (SCD, Gumbel sharing)."""
    return view.top.indices


def reusable(view, token):
    """bool [B, W]: drafts that PJD as published leaves alone, law and all (arXiv 2606.05703 and its code).

    Those with p/q above 1/2, but for the first rejected one of each row.
    """
    if view.reused is None:  # the drafts and their laws both ask
        rejected = token != view.draft  # a rejection always changes the token
        seen = rejected.cumsum(1) - rejected.long()
        start = torch.where(torch.from_numpy(view.heads).to(seen.device), seen, 0).cummax(1).values
        view.reused = (view.ratio() > REUSED) & ~(rejected & (seen == start))
    return view.reused


def reuse(view, token):
    """Drafts behind the frontier of a row stay where p/q is above 1/2 and are drawn anew elsewhere (PJD)."""
    return torch.where(reusable(view, token), view.draft, redraw(view, token))


def stale(view, token, kept):
    """The law of a draft that stays is the old one (PJD as published; biased)."""
    return torch.where(reusable(view, token).unsqueeze(-1), view.q, view.p)


def newest(view, token, kept):
    """The law of every draft after a pass is the newest p, accepted or not (the rule that
    released code breaks)."""
    return view.p


@dataclass(frozen=True)
class Method:
    """A decoding method: values for the one loop.

    Attributes:
        accept: view -> (token [B, W], kept [B, W]).
        couple: (view, token) -> drafts [B, W] for the positions behind the frontier.
        needs_q: the drafts' law is kept from pass to pass.
        needs_gumbel: positions own a Gumbel vector.
        sequential: window 1.
        greedy: temperature 0 whatever the settings say.
        memory: drafts may be any token, so trajectory memory applies (seed-exact).
        relax: None, or (view, strength) -> chance [B, W] that a draft is committed at the front (lossy).
        strength: of the relaxation, where the settings leave it to the method.
        remember: (view, token, kept) -> law recorded for the drafts.
        layout: which positions a pass looks at: "window" (the next ones), "rows" or "row-block" (see `layout`).
        every_row: rows below the uppermost unfinished one commit a changed token too.
        heads: first drafts come from the model's trained heads (see `spatial`).
        window, start: those taken where the user leaves them to us; 0 and "": as for all methods.
    """

    accept: Callable
    couple: Callable
    lossless: bool = True
    needs_q: bool = False
    needs_gumbel: bool = False
    sequential: bool = False
    greedy: bool = False
    memory: bool = False
    relax: Callable | None = None
    strength: float = 0.0
    remember: Callable = newest
    layout: str = "window"
    every_row: bool = True
    heads: bool = False
    window: int = 0
    start: str = ""

    @property
    def proactive(self):
        """Further candidates for the next token may be drawn from the law of its draft (see `proactive`)."""
        return self.needs_q and self.relax is None and self.layout == "window"

    def nodes(self, asked, memory):
        """Rows beside the window that a run makes use of, of `asked` (below 0: to be chosen); memory: is it on?"""
        if self.memory:
            return asked if memory else 0
        return max(asked, 0) if self.proactive else 0

    def relaxed(self, view, strength):
        """bool [B, W]: drafts that the relaxation would commit, by the exact test's uniforms. None: no such rule."""
        if self.relax is None or strength == 0:
            return None
        return view.uniform(streams.ACCEPT) < self.relax(view, strength)


METHODS = {
    "autoregressive": Method(match, keep, needs_gumbel=True, sequential=True),
    "jacobi": Method(match, keep, needs_gumbel=True, greedy=True, memory=True),
    "sjd": Method(exact, redraw, needs_q=True),
    "scd-maximal": Method(exact, keep, needs_q=True),
    "scd-gumbel": Method(exact, reshare, needs_q=True, needs_gumbel=True),
    "seed-exact": Method(match, keep, needs_gumbel=True, memory=True),
    "csd": Method(exact, keep, lossless=False, needs_q=True, relax=entropy_bonus, strength=0.1),
    "gsd": Method(exact, keep, lossless=False, needs_q=True, relax=grouped, strength=1.0),
    "cool-sd": Method(exact, keep, lossless=False, needs_q=True, relax=annealed, strength=0.1),
    "pjd": Method(
        exact, reuse, lossless=False, needs_q=True, remember=stale, layout="rows", every_row=False, window=8,
        start="random",
    ),
    "pjd-c": Method(exact, keep, lossless=False, needs_q=True, layout="rows", window=8),
    "zipar": Method(match, keep, lossless=False, needs_gumbel=True, sequential=True, layout="rows"),
    "row-block": Method(exact, keep, lossless=False, needs_q=True, layout="row-block", start="above_law"),
    "ssd": Method(exact, keep, lossless=False, needs_q=True, layout="row-block", start="uniform", heads=True),
}
DEFAULT_METHOD = "seed-exact"
