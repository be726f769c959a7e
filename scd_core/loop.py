"""The decode loop: one pass, one kernel, one frontier step a sample. Every method is a row of `METHODS`.

    prefill; while some sample is unfinished:
        give the positions that enter the window their first drafts          (drafting)
        logits = backbone(last committed token + drafts)                      (session)
        p = law(logits)                                                       (law)
        token, kept = accept(p, q, draft, noise)                              (acceptance)
        commit the kept prefix and the first changed token
        drafts behind it = couple(token, p, noise); their law q is p          (coupling)

Source: SJD (arXiv 2410.01699) and SCD (arXiv 2510.24211); seed-exact is described at `acceptance.match`.
"""

import time
from dataclasses import replace

import numpy as np
import torch

from .acceptance import METHODS, Verdict
from .drafting import STARTS, automatic_start, stride_of
from .errors import UserError
from .law import token_scores
from .layout import Rows
from .layout_state import LineFrontier
from .models.session import Session, fixed_shapes
from .noise import Noise
from .partial import complete
from .proactive import Guesses
from .relax import loosened
from .report import report_of
from .settings import Clock, Progress, Settings
from .spatial import Forecast, check_spatial
from .state import Frontier, WindowState
from .tree import RUNNERS, DraftTree, runners_of


class Run:
    """One decode call."""

    def __init__(self, decoder, family, plan, streams, settings, kept, device, method):
        self.plan, self.family, self.settings, self.device = plan, family, settings, device
        self.method = method
        self.clock = Clock()
        self.window = 1 if method.sequential else max(1, min(settings.window, plan.length))
        self.law = replace(settings.law, temperature=0.0) if method.greedy else settings.law
        self.start_name = automatic_start(method, plan) if settings.start == "auto" or method.heads else settings.start
        self.start = STARTS[self.start_name]
        self.stride = stride_of(self.start, plan)
        check_spatial(method, settings.block_rows, family, decoder)
        fixed = plan.fixed(settings.batch, kept)
        self.rows = None  # `Rows`, where a pass does not look at the raster window
        frontier = Frontier if method.layout == "window" else LineFrontier
        self.samples = [frontier(b, row) for b, row in enumerate(fixed.numpy())]
        self.active = [s for s in self.samples if not s.done]
        self.result = fixed.clone()
        self.allowed = None if plan.allowed is None else plan.allowed.to(device)
        self.passes = 0
        self.stopped = self.whole_frames = None  # see `stop`
        self.strength = method.strength if settings.relax < 0 else settings.relax
        self.nodes = method.nodes(settings.nodes, settings.memory) if self.window > 1 else 0
        if method.proactive:
            self.nodes = min(self.nodes, plan.vocab - 1)
        if self.active:
            self.prefill(decoder, streams[:1] if settings.law.cfg == 1 else list(streams), fixed)

    def prefill(self, decoder, streams, fixed):
        """Run the prompt and the given tokens in front of the first free one; then make room for the windows."""
        plan, settings, method, device = self.plan, self.settings, self.method, self.device
        order = [s.sample for s in self.active]
        given = fixed[order]
        prefix = min(int(s.free[0]) for s in self.active)
        for s in self.active:
            s.begin(prefix)
        # a given prefix is prefilled when a sample runs alone: in company its laws stay unknown all the same
        self.longer_prefix = any(s.free[0] > prefix for s in self.active)
        self.clock.lap("rest")
        self.session = Session(decoder, self.family, plan, streams, given, prefix, device, self.nodes)
        self.clock.lap("backbone")
        given, noise = given.numpy(), Noise(settings.seed, [settings.first_sample + b for b in order], plan.length)
        if method.layout == "window":
            span = max(s.span(self.window) for s in self.active)
            self.lanes = span if fixed_shapes(device) else 0  # 0: as many as a pass has
            runners = RUNNERS if self.nodes and method.memory else 0
            self.state = WindowState(plan, method, given, noise, span, self.stride, device, settings.memory, runners)
            memory, bank = self.state.memory, self.state.bank
            self.tree = DraftTree(self.nodes, memory, bank, bool(self.lanes)) if runners else None
        else:
            forecast = None
            if method.heads:
                heads = self.family.heads.load(decoder, device)
                forecast = Forecast(heads, self.law, self.family.guidance, self.allowed)
            self.rows = Rows(plan, method, settings, self.window, self.start, given, noise, prefix, device, forecast)
            self.state, self.tree = self.rows.state, None
        self.clock.lap("rest")

    def step(self):
        """One pass over every active sample's window; returns the positions that each committed."""
        if self.rows is not None:
            return self.rows.step(self)
        state, fronts = self.state, np.array([s.start for s in self.active])
        ends = np.array([s.window_end(self.window) for s in self.active])
        sizes = (ends - fronts)[:, None]
        batch, lane = len(fronts), np.arange(self.lanes or sizes.max())
        valid, positions = lane < sizes, np.minimum(fronts[:, None] + lane, self.plan.length - 1)
        drawn = state.enter(self.start, self.stride, np.array([s.end for s in self.active]), ends)
        for s, end in zip(self.active, ends):
            s.end = max(s.end, int(end))
        ids = self.draft_ids(positions, fronts, drawn)
        before = np.where(valid, positions - 1, self.plan.length)
        nodes = self.tree and self.tree.grow(state.tokens[:batch], state.fixed[:batch], fronts, ends, len(lane))
        if self.nodes and self.method.proactive:
            nodes = Guesses.draw(self.nodes, state, ids, positions, sizes, self.passes)
        inputs, visible = ids[:, :-1], None
        if nodes is not None:
            visible = nodes.visible(before, self.plan.length, self.device)
            inputs = torch.cat([inputs, nodes.fed(self.device)], 1)
            before = np.concatenate([before, np.where(nodes.live, nodes.position, self.plan.length)], 1)
        self.clock.lap("rest")
        logits = self.session.window(
            inputs, self.to_device(before), int(ends.max()) - 1, fronts.min() == 0, visible
        )
        self.clock.lap("backbone")
        n = self.decide(logits, ids[:, 1:], positions, valid, lane, sizes, nodes)
        self.clock.lap("kernel")
        return n

    def to_device(self, array):
        return torch.from_numpy(array).to(self.device, non_blocking=True)

    def draft_ids(self, positions, fronts, drawn):
        """Token ids int64 [A, W+1] on the device: the last committed token, then the drafts of the window.

        Drafts that were drawn on the device a moment ago are put in there; the host has not seen them.
        """
        state, rows = self.state, np.arange(len(positions))[:, None]
        last = np.maximum(positions[:, :1] - 1, 0)
        ids = self.to_device(state.tokens[rows, np.concatenate([last, positions], 1)])
        if drawn is not None:
            entered, valid, columns = drawn
            valid = valid & (state.fixed[rows, entered] < 0)
            lanes = np.where(valid, entered - fronts[:, None] + 1, 0)
            keep = ids[:, :1].clone()
            ids.scatter_(1, self.to_device(lanes), columns + state.base)
            ids[:, :1] = keep
        return ids

    def decide(self, logits, ids, positions, valid, lane, sizes, nodes=None):
        """The kernel of a pass: law, acceptance and coupling for the whole window at once, then the commit.

        Args:
            logits: [A, S, W + M, V]. ids: int64 [A, W] drafts, both on the device.
            positions, valid: arrays [A, W]. lane: [W]. sizes: [A, 1]. nodes: M `Nodes` or `Guesses`, or None.

        Returns:
            positions committed by each sample, list of int.
        """
        state, method = self.state, self.method
        looked = positions
        if nodes is not None:
            looked = np.concatenate([positions, np.minimum(nodes.position + 1, self.plan.length - 1)], 1)
            ids = torch.cat([ids, nodes.behind(ids, state.base)], 1)
        view = Verdict(
            scores=token_scores(logits, self.law, self.family.guidance, self.allowed),
            # the drafts of given positions may lie outside of the vocabulary; what becomes of them does not matter
            draft=(ids - state.base).clamp_(0, state.vocab - 1),
            q=state.laws.read(looked) if method.needs_q else None,
            gumbel=state.gumbels.read(looked) if method.needs_gumbel else None,
            noise=state.noise,
            positions=looked,
            passes=self.passes,
            heads=self.rows and self.rows.now.head,
        )
        token, kept = method.accept(view)
        redraft = method.couple(view, token)
        relaxed = method.relaxed(view, self.strength)
        if relaxed is not None and self.allowed is not None:
            relaxed &= self.allowed[view.draft]  # a first draft may be any token, and a relaxation may like it
        hit = None if nodes is None else nodes.judge(view, token, kept)
        packed = [token, redraft, kept, view.broken()]
        if relaxed is not None:
            packed += [view.draft, relaxed]
        if self.tree is not None:
            packed += runners_of(view.best)
            state.deposit(view.scores, looked, valid, nodes)
        if hit is not None:
            packed.append(hit[:, None].expand_as(token))
        packed = to_host(packed)
        if state.laws is not None:
            own = valid
            if self.longer_prefix:
                own = own & (positions >= np.array([s.free[0] for s in self.active])[:, None])
            state.laws.write(positions, method.remember(view, token, kept)[:, : positions.shape[1]], own)
        return self.commit(packed, positions, valid, lane, sizes, nodes)

    def commit(self, packed, positions, valid, lane, sizes, nodes):
        """Write what the kernel decided: the committed prefix of every sample and its new drafts."""
        state, rows, w = self.state, np.arange(len(positions))[:, None], positions.shape[1]
        token, redraft, kept, wrong = packed[:4, :, :w]
        if wrong.any() and (wrong.astype(bool) & valid).any():
            raise UserError(self.not_finite(int((wrong.astype(bool) & valid).any(1).argmax())))
        if self.rows is not None:
            return self.rows.commit(token, redraft, kept)
        fixed = state.fixed[rows, positions]
        free = fixed < 0
        # the last looked-at position always decides: kept or not, its token has the right law
        stands, before_last = kept.astype(bool) | ~free, lane < sizes - 1
        if self.method.relax is not None and len(packed) > 4:
            draft, relaxed = packed[4:6, :, :w]
            extra = loosened(stands, before_last, relaxed.astype(bool), self.active, self.settings.relax_budget)
            stands, token = stands | extra, np.where(extra, draft, token)
        n = np.logical_and.accumulate(stands & before_last, 1).sum(1) + 1
        new = np.where(free, np.where(lane >= n[:, None], redraft, token) + state.base, fixed)
        if state.memory is not None:
            state.remember(packed, new, positions, valid, nodes)
        if nodes is not None:
            told = packed[0, :, w:] + state.base if self.tree is not None else packed[-1, :, 0]
            n, taken = nodes.follow(n, positions[:, 0], new, told, state.fixed)
            if taken is not None:
                self.session.settle(*map(self.to_device, taken))
        behind = lane >= n[:, None]
        state.tokens[rows, np.where(valid, positions, self.plan.length)] = new
        if state.memory is not None:
            state.memory.recall(state.tokens, positions, valid & behind & free)
        return n.tolist()

    def finish(self, counts):
        """Move the frontiers; let finished samples leave the batch."""
        for s, n in zip(self.active, counts):
            s.advance(n, self.window)
        for row in reversed(range(len(self.active))):
            sample = self.active[row]
            if sample.done:
                self.result[sample.sample] = torch.from_numpy(self.state.tokens[row, : self.plan.length])
                last = len(self.active) - 1
                if row != last:
                    self.state.move(last, row)
                    self.session.move(last, row)
                    self.active[row] = self.active[last]
                self.active.pop()

    def progress(self):
        tokens = self.result.clone()
        for row, s in enumerate(self.active):
            tokens[s.sample] = torch.from_numpy(self.state.tokens[row, : self.plan.length])
        total = sum(len(s.free) for s in self.samples)
        done = sum(s.decided for s in self.samples)
        fronts = [self.plan.length if s.done else s.start for s in self.samples]
        settled = self.rows and self.state.decided([s.sample for s in self.active], len(self.samples))
        return Progress(self.passes, done, total, fronts, tokens, settled)

    def loop(self, callback, keep_on):
        limit = max((len(s.free) for s in self.samples), default=0)
        while self.active:
            self.passes += 1
            if self.passes > limit:
                raise RuntimeError(f"no progress: {self.passes} passes for {limit} tokens")
            try:
                self.finish(self.step())
                self.clock.lap("rest")
                ends = callback is not None and callback(self.progress())
            except keep_on:
                if not any(s.decided for s in self.samples):
                    raise
                ends = True
            self.clock.last = time.perf_counter()  # the callback's time is not the decoder's
            if ends and self.active:
                self.stop()

    def stop(self):
        """End the run here and keep what there is (see `partial`)."""
        self.passes = max(len(s.per_pass) for s in self.samples)  # one that broke off decided nothing
        now = self.progress()
        ahead = torch.arange(self.plan.length) < torch.tensor(now.frontier)[:, None]
        decided = (self.result >= 0) | (ahead if now.settled is None else now.settled)
        seen = torch.from_numpy(np.stack([s.visits for s in self.samples]) > 0)
        self.result, self.whole_frames = complete(self.plan, now.tokens, decided, seen)
        self.stopped, self.active = now.done, []

    def not_finite(self, row):
        sample = self.active[row]
        dtype = str(self.session.dtype).removeprefix("torch.")
        return (
            f"the model gave numbers that are not finite in pass {self.passes}, near token {sample.start} of picture "
            f"{sample.sample + 1}, computing in {dtype}: load the model with weight dtype bf16 or fp32"
        )


def to_host(tensors):
    """Whole numbers and bools of one shape -> int64 array [len(tensors), ...]: the pass's one host synchronisation."""
    if tensors[0].device.type == "cpu":
        return np.stack([t.numpy() for t in tensors])
    return torch.stack([t.long() for t in tensors]).cpu().numpy()


@torch.inference_mode()
def decode(decoder, family, plan, streams, settings: Settings, kept=None, device="cpu", callback=None, method=None,
           keep_on=()):
    """Draw the tokens of a plan.

    Args:
        decoder: `Decoder`. family: its `Family`. plan: `TokenPlan`.
        streams: (conditional, unconditional) `Stream`s; the second is not run when cfg is 1.
        settings: `Settings`.
        kept: codes int64 [1 or B, frames, rows, cols], -1 where a cell is to be drawn; given cells cost no pass.
        callback: called with `Progress` after every pass; what it raises ends the run within that pass. When it
            returns True the run ends too, with drafts and copies where nothing is decided (`DecodeReport.stopped`).
        method: a `Method` to use instead of the table's (experiments and power controls).
        keep_on: classes of exceptions that end a run in the same way, once something is decided.

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
    run.loop(callback, keep_on)
    return run.result, report_of(run)
