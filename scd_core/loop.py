"""The decode loop: one pass, one kernel, one frontier step a sample. Every method is a row of `METHODS`.

    prefill; while some sample is unfinished:
        give the positions that enter the window their first drafts          (drafting)
        logits = backbone(last committed token + drafts)                      (session)
        p = law(logits)                                                       (law)
        token, kept = accept(p, q, draft, noise)                              (acceptance)
        commit the kept prefix and the first changed token
        drafts behind it = couple(token, p, noise); their law q is p          (coupling)

Source: SJD (arXiv 2410.01699) and SCD (arXiv 2510.24211); the seed-exact rule is in the decoding spec, 4.5.
"""

import time
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch

from .acceptance import DEFAULT_METHOD, METHODS, Verdict
from .drafting import STARTS, automatic_start, first_drafts, stride_of
from .errors import UserError
from .law import LawSettings, token_law
from .models.session import Session
from .noise import Noise
from .report import DecodeReport, token_hash
from .state import Frontier, WindowState


@dataclass(frozen=True)
class Settings:
    """What to do; the family's own values are already filled in (see `generate.resolve`).

    Attributes:
        method: a key of `METHODS`. window: free positions a pass looks at. start: a key of `STARTS` or "auto".
        seed: 0 .. 2**64-1. batch: samples; sample numbers are first_sample, first_sample + 1, ...
        memory: trajectory memory (seed-exact and jacobi).
    """

    method: str = DEFAULT_METHOD
    window: int = 32
    seed: int = 0
    batch: int = 1
    first_sample: int = 0
    start: str = "auto"
    memory: bool = True
    law: LawSettings = LawSettings()


@dataclass
class Progress:
    """Handed to the callback after every pass. `tokens` int64 [B, N] holds decided tokens and present drafts."""

    passes: int
    done: int
    total: int
    frontier: list
    tokens: torch.Tensor


class Clock:
    """Host seconds by part."""

    def __init__(self):
        self.seconds = {"backbone": 0.0, "kernel": 0.0, "rest": 0.0}
        self.last = time.perf_counter()

    def lap(self, part):
        now = time.perf_counter()
        self.seconds[part] += now - self.last
        self.last = now


class Run:
    """One decode call."""

    def __init__(self, decoder, family, plan, streams, settings, kept, device, method):
        self.plan, self.family, self.settings, self.device = plan, family, settings, device
        self.method = method
        self.clock = Clock()
        self.window = 1 if method.sequential else max(1, min(settings.window, plan.length))
        self.law = replace(settings.law, temperature=0.0) if method.greedy else settings.law
        self.start_name = automatic_start(method, plan) if settings.start == "auto" else settings.start
        self.start = STARTS[self.start_name]
        self.stride = stride_of(self.start, plan)
        fixed = plan.fixed(settings.batch, kept)
        self.samples = [Frontier(b, row) for b, row in enumerate(fixed.numpy())]
        self.active = [s for s in self.samples if not s.done]
        self.result = fixed.clone()
        self.allowed = None if plan.allowed is None else plan.allowed.to(device)
        self.passes = 0
        if not self.active:
            return
        order = [s.sample for s in self.active]
        streams = streams[:1] if settings.law.cfg == 1 else list(streams)
        prefix = min(int(s.free[0]) for s in self.active)
        for s in self.active:
            s.begin(prefix)
        self.session = Session(decoder, family, plan, streams, fixed[order], prefix, device)
        noise = Noise(settings.seed, [settings.first_sample + b for b in order], device)
        span = max(s.span(self.window) for s in self.active)
        self.state = WindowState(plan, method, fixed[order], noise, span, self.stride, device, settings.memory)
        self.clock.lap("rest")

    def tensor(self, values):
        return torch.tensor(values, device=self.device)

    def enter(self, ends):
        """First drafts for positions between each sample's old and new window end."""
        known = self.tensor([s.end for s in self.active])
        count = max(end - s.end for s, end in zip(self.active, ends))
        if count <= 0:
            return
        new = known[:, None] + torch.arange(count, device=self.device)
        valid = new < self.tensor(ends)[:, None]
        positions = new.clamp(max=self.plan.length - 1)
        self.state.enter(
            positions,
            valid,
            lambda state, where: first_drafts(self.start, state, where, known, self.stride),
        )
        for s, end in zip(self.active, ends):
            s.end = max(s.end, end)

    def step(self):
        """One pass: returns (positions committed by each active sample, whether each sample's law was finite)."""
        state, fronts = self.state, [s.start for s in self.active]
        ends = [s.window_end(self.window) for s in self.active]
        self.enter(ends)
        front, sizes = self.tensor(fronts)[:, None], self.tensor([e - f for e, f in zip(ends, fronts)])[:, None]
        lane = torch.arange(max(e - f for e, f in zip(ends, fronts)), device=self.device)
        valid = lane < sizes
        positions = (front + lane).clamp(max=self.plan.length - 1)
        tokens = state.tokens.gather(1, (positions - 1).clamp(min=0))
        self.clock.lap("rest")
        logits = self.session.window(tokens, positions - 1, valid, max(ends) - 1, min(fronts) == 0)
        self.clock.lap("backbone")
        log_p = token_law(logits, self.law, self.family.guidance, self.allowed)
        n, finite = self.decide(log_p, positions, valid, lane, sizes)
        packed = torch.stack([n, finite]).tolist()  # the pass's one host synchronisation
        self.clock.lap("kernel")
        return packed

    def decide(self, log_p, positions, valid, lane, sizes):
        """Accept, commit and re-draft the whole window at once; returns tensors (committed [A], finite [A])."""
        state, method = self.state, self.method
        drafts, fixed = state.tokens.gather(1, positions), state.fixed.gather(1, positions)
        free = fixed < 0
        view = Verdict(
            log_p=log_p,
            draft=torch.where(free, drafts - state.base, 0),
            q=state.laws.read(positions) if method.needs_q else None,
            gumbel=state.gumbels.read(positions) if method.needs_gumbel else None,
            positions=positions,
            passes=torch.full((len(drafts),), self.passes, device=self.device),
            noise=state.noise,
        )
        token, kept = method.accept(view)
        # the last looked-at position always decides: kept or not, its token has the right law
        prefix = ((kept | ~free) & (lane < sizes - 1)).cumprod(1)
        n = prefix.sum(1) + 1
        behind = lane >= n[:, None]
        columns = torch.where(behind, method.couple(view, token), token)
        new = torch.where(free, columns + state.base, fixed)
        inside = torch.where(valid, positions, self.plan.length)
        if state.memory is not None:
            context = state.memory.context(state.tokens, positions)
        state.tokens.scatter_(1, inside, new)
        if state.laws is not None:
            state.laws.write(positions, method.remember(view, token, kept), valid)
        if state.memory is not None:
            state.memory.record(context, new, positions, valid)
            state.memory.recall(state.tokens, positions, valid & behind & free)
        finite = ~(log_p[..., 0].isnan() & valid).any(1)
        return n, finite.long()

    def finish(self, counts):
        """Move the frontiers; let finished samples leave the batch."""
        for s, n in zip(self.active, counts):
            width = s.window_end(self.window)
            s.visits[s.start : width] += 1
            s.advance(n)
        for row in reversed(range(len(self.active))):
            sample = self.active[row]
            if sample.done:
                self.result[sample.sample] = self.state.tokens[row, : self.plan.length].cpu()
                last = len(self.active) - 1
                if row != last:
                    self.state.move(last, row)
                    self.session.move(last, row)
                    self.active[row] = self.active[last]
                self.active.pop()

    def progress(self):
        tokens = self.result.clone().to(self.device)
        for row, s in enumerate(self.active):
            tokens[s.sample] = self.state.tokens[row, : self.plan.length]
        total = sum(len(s.free) for s in self.samples)
        done = sum(s.decided for s in self.samples)
        fronts = [self.plan.length if s.done else s.start for s in self.samples]
        return Progress(self.passes, done, total, fronts, tokens)

    def loop(self, callback):
        limit = max((len(s.free) for s in self.samples), default=0)
        while self.active:
            self.passes += 1
            if self.passes > limit:
                raise RuntimeError(f"no progress: {self.passes} passes for {limit} tokens")
            counts, finite = self.step()
            if not all(finite):
                raise UserError(self.not_finite(finite.index(0)))
            self.finish(counts)
            self.clock.lap("rest")
            if callback is not None:
                callback(self.progress())
                self.clock.last = time.perf_counter()  # the callback's time is not the decoder's

    def not_finite(self, row):
        sample = self.active[row]
        dtype = str(self.session.dtype).removeprefix("torch.")
        return (
            f"the model gave numbers that are not finite in pass {self.passes}, near token {sample.start} of picture "
            f"{sample.sample + 1}, computing in {dtype}: load the model with weight dtype bf16 or fp32"
        )

    def report(self):
        settings = {**asdict(self.settings), **asdict(self.law), "window": self.window, "start": self.start_name}
        settings.pop("law")
        settings["memory"] = bool(self.settings.memory and self.method.memory and not self.method.sequential)
        cells = self.plan.cells.numpy() >= 0
        visits = np.stack([s.visits[cells] for s in self.samples])
        return DecodeReport(
            method=self.settings.method,
            settings=settings,
            tokens=sum(len(s.free) for s in self.samples),
            passes=self.passes,
            per_sample=[len(s.per_pass) for s in self.samples],
            accepted=[list(s.per_pass) for s in self.samples],
            visits=visits.reshape(len(visits), self.plan.frames, self.plan.rows, self.plan.cols),
            seconds=self.clock.seconds,
            lossless=self.method.lossless,
            dtype=str(self.session.dtype).removeprefix("torch.") if self.passes else "none",
            sha256_tokens=token_hash(self.result),
        )


@torch.inference_mode()
def decode(decoder, family, plan, streams, settings, kept=None, device="cpu", callback=None, method=None):
    """Draw the tokens of a plan.

    Args:
        decoder: `Decoder`. family: its `Family`. plan: `TokenPlan`.
        streams: (conditional, unconditional) `Stream`s; the second is not run when cfg is 1.
        settings: `Settings`.
        kept: codes int64 [1 or B, frames, rows, cols], -1 where a cell is to be drawn; given cells cost no pass.
        callback: called with `Progress` after every pass; what it raises ends the run within that pass.
        method: a `Method` to use instead of the table's (experiments and power controls).

    Returns:
        (token ids int64 [B, N] on the CPU, `DecodeReport`).

    Raises:
        UserError: unknown method or start, kept tokens that do not fit, logits that are not finite.
    """
    if settings.method not in METHODS and method is None:
        raise UserError(f"unknown method {settings.method!r}: choose one of {', '.join(METHODS)}")
    if settings.start != "auto" and settings.start not in STARTS:
        raise UserError(f"unknown draft start {settings.start!r}: choose auto or one of {', '.join(STARTS)}")
    run = Run(decoder, family, plan, streams, settings, kept, device, method or METHODS[settings.method])
    run.loop(callback)
    return run.result, run.report()
