"""The road from a class to latents: MAR alone, or with a draft that runs ahead (see cspd)."""

import time
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch

from ..budget import free_bytes
from ..errors import UserError, or_what_fits
from ..origin import fingerprint, origin
from .cspd import MODES
from .diffusion import TRAINED, Diffusion
from .noise import PATH, NormalNoise
from .report import ContinuousReport, latents_hash
from .room import advice, working_bytes
from .schedule import cosine_schedule
from .side import Cells, Side

OWN = -1  # "the model's own value" of temperature and guidance
STEPS = 64  # of the schedule, where the model has as many tokens
FINE = "MAR draws several tokens a step: fewer steps are the first thing to try for speed, before any draft"


@dataclass(frozen=True)
class Settings:
    """What a user asks for.

    Attributes:
        mode: a key of `cspd.MODES`; only with a draft. gamma: steps that the draft runs ahead.
        prefill: share of the steps that the target draws alone at the start. tau: see `coupling.log_ratio`.
        steps: of the schedule, 0: 64, or one a token where there are fewer. diffusion_steps: of a token, 0: 100.
        temperature, cfg: -1 stands for the model's own. seed: 0 .. 2**64-1. batch: pictures.
        first_sample: number of the first one, to draw one of a batch again.
    """

    mode: str = "block"
    gamma: int = 8
    prefill: float = 0.05
    tau: float = 1.0
    steps: int = 0
    diffusion_steps: int = 0
    temperature: float = OWN
    cfg: float = OWN
    seed: int = 0
    batch: int = 1
    first_sample: int = 0


@dataclass
class Progress:
    """Handed to the callback after every round: passes of the target, tokens done and in all, the canvas [B, n, C] and
    which of it are drawn, bool [B, n] on the host."""

    passes: int
    done: int
    total: int
    canvas: torch.Tensor
    known: torch.Tensor


@dataclass
class Drawn:
    """Result of a run: scaled latents fp32 [B, C, side, side] on the CPU, and the report."""

    latents: torch.Tensor
    report: ContinuousReport


def resolve(settings, family):
    """The settings with the model's own values filled in.

    Raises:
        UserError: a value that no run can have.
    """
    own, tokens = family.defaults, family.decoder_config.tokens
    s = replace(
        settings,
        steps=settings.steps or min(STEPS, tokens),
        diffusion_steps=settings.diffusion_steps or family.diffusion_steps,
        temperature=own.temperature if settings.temperature == OWN else settings.temperature,
        cfg=own.cfg if settings.cfg == OWN else settings.cfg,
    )
    wrong = {
        f"unknown mode {s.mode!r}: choose one of {', '.join(MODES)}": s.mode not in MODES,
        f"gamma {s.gamma}: the draft runs at least 1 step ahead": s.gamma < 1,
        f"prefill {s.prefill} is no share: use a number from 0 to 1": not 0 <= s.prefill <= 1,
        f"tau {s.tau}: use 1 (the published formula), or more to flatten it": not 1e-3 <= s.tau <= 1e6,
        f"temperature {s.temperature}: use a number above 0, about 1, or -1": not 0 < s.temperature <= 100,
        f"cfg {s.cfg} is no guidance: use 1 (off) to about 10, or -1": not abs(s.cfg) <= 1e4,
        f"seed {s.seed} is outside of 0 .. {(1 << 64) - 1}": not 0 <= s.seed < 1 << 64,
        f"batch size {s.batch}: at least 1 picture must be drawn": s.batch < 1,
        f"diffusion steps {s.diffusion_steps}: a token is drawn in 2 to {TRAINED} steps, 100 is usual":
            not 2 <= s.diffusion_steps <= TRAINED,
    }  # fmt: skip
    for sentence, is_wrong in wrong.items():
        if is_wrong:
            raise UserError(sentence)
    cosine_schedule(tokens, s.steps)
    return s


def check_pair(family, draft):
    """Refuse a draft whose tokens are not the target's.

    Args:
        family, draft: `Family` of target and draft, the latter None without one.

    Raises:
        UserError.
    """
    for each, name in ((family, "the model"), (draft, "the draft model")):
        if each is not None and not each.continuous:
            raise UserError(
                f"{name} is {each.name}, which draws discrete tokens: this sampler is for continuous ones (MAR), use "
                "the Speculative Coupled Sampler"
            )
    if draft is None:
        return
    words = {"tokens": "tokens a picture", "channels": "channels a token", "classes": "classes"}
    for name, words_ in words.items():
        mine, other = (getattr(f.decoder_config, name) for f in (family, draft))
        if mine != other:
            raise UserError(
                f"the draft model has {other} {words_}, the model has {mine}: a draft must be a smaller model of the "
                "same release"
            )


def as_latents(canvas):
    """Tokens [B, n, C] -> what the codec takes, [B, C, side, side]."""
    side = round(canvas.shape[1] ** 0.5)
    return canvas.transpose(1, 2).unflatten(2, (side, side))


class Run:
    """One call: the canvas, what is decided of it, and both sides.

    Args:
        nets: (target, draft or None). settings: resolved. source: stands in for `NormalNoise` (given noise).
        Others: see `sample`.

    Attributes:
        canvas: fp32 [B, n, C] on the device. frontier: int64 [B], next step of each row. orders: int64 [B, n].
    """

    def __init__(self, nets, family, prompt, settings, device, callback=None, poll=None, source=None):
        cfg, self.settings, self.stopped = family.decoder_config, settings, None
        self.device, self.callback = device, callback
        self.schedule = cosine_schedule(cfg.tokens, settings.steps)
        samples = range(settings.first_sample, settings.first_sample + settings.batch)
        self.source, poll = source or NormalNoise(settings.seed, samples), poll or (lambda: None)
        self.orders = self.source.orders(cfg.tokens)
        self.frontier = np.zeros(settings.batch, dtype=np.int64)
        self.canvas = torch.zeros(settings.batch, cfg.tokens, cfg.channels, device=device)
        self.seconds, self.last = {"target": 0.0, "draft": 0.0, "head": 0.0, "rest": 0.0}, time.perf_counter()
        self.accepted = [[] for _ in samples]
        self.tested = self.taken = 0
        number = family.text.number(prompt.text)
        classes = torch.full((settings.batch,), -1 if number is None else number)
        guided = settings.cfg != 1 and number is not None
        steps = range(self.schedule.steps)
        guidance = torch.tensor([self.schedule.guidance(settings.cfg, step) for step in steps])
        diffusion = Diffusion(settings.diffusion_steps, device, family.clip)
        self.target, self.draft = (
            net and Side(net, classes, guided, diffusion, guidance, settings.temperature, self.lap, poll, device)
            for net in nets
        )

    def lap(self, part):
        """Time since the last call goes to a part."""
        now = time.perf_counter()
        self.seconds[part] += now - self.last
        self.last = now

    # --- what the rounds ask for ------------------------------------------------------------------------------------

    def depth(self, rows):
        """Steps that the draft runs ahead in each row, int64 [A]."""
        return np.minimum(self.settings.gamma, self.schedule.steps - self.frontier[rows])

    def cells(self, rows, steps):
        """The cells that rows [A] draw in steps [A]; their contexts count the rows."""
        drawn = [self.schedule.cells(self.orders[row], step) for row, step in zip(rows, steps)]
        sizes = [len(cells) for cells in drawn]
        return Cells(
            np.repeat(rows, sizes), np.concatenate(drawn), np.repeat(np.arange(len(rows)), sizes),
            np.repeat(steps, sizes),
        )  # fmt: skip

    def known(self, rows, steps):
        """Cells drawn before steps [A] in rows [A], bool [A, n]."""
        return torch.from_numpy(np.stack([self.schedule.known(self.orders[r], s) for r, s in zip(rows, steps)]))

    def noise(self, cells):
        """Noise of all denoising steps of some cells, then their start: fp32 [count + 1, R, C]."""
        count = np.arange(self.settings.diffusion_steps + 1)[:, None]
        return self.source.normal(PATH, cells.rows, cells.cells, count, self.canvas.shape[-1]).float()

    def put(self, canvas, cells, x):
        """Write tokens [R, C] into a canvas.

        Raises:
            UserError: numbers that are not finite.
        """
        if not bool(x.isfinite().all()):
            dtype = str(self.target.net.dtype).removeprefix("torch.")
            raise UserError(
                f"the model gave numbers that are not finite after {self.target.passes} passes, computing in {dtype}: "
                "load the model with weight dtype fp32"
            )
        rows, places = (torch.from_numpy(a).to(canvas.device) for a in (cells.rows, cells.cells))
        canvas[rows, places] = x

    def count(self, tested, taken):
        self.tested += tested
        self.taken += taken

    # --- the loop ---------------------------------------------------------------------------------------------------

    def alone(self, rows):
        """One step of the target itself; returns steps committed by each row."""
        steps = self.frontier[rows]
        z = self.target.look(self.canvas[rows], self.known(rows, steps), rows, "target")
        cells = self.cells(rows, steps)
        self.put(self.canvas, cells, self.target.chain(self.target.gather(z, cells), cells, self.noise(cells)).x)
        return np.ones(len(rows), dtype=np.int64)

    def loop(self, keep_on=()):
        steps, masked = self.schedule.steps, np.array(self.schedule.masked)
        prefill = int(np.ceil(self.settings.prefill * steps - 1e-9)) if self.draft else steps
        round_ = MODES[self.settings.mode].round
        while (self.frontier < steps).any():
            rows = np.flatnonzero(self.frontier < steps)
            before = self.frontier[rows]
            try:
                # rows only part ways behind the prefill
                done = self.alone(rows) if before.min() < prefill else round_(self, rows)
                self.frontier[rows] += done
                for row, start in zip(rows, before):
                    self.accepted[row].append(int(masked[start] - masked[self.frontier[row]]))
                self.lap("rest")
                ends = self.callback is not None and self.callback(self.progress())
            except keep_on:
                if not self.frontier.any():
                    raise
                ends = True
            self.last = time.perf_counter()  # the callback's time is not the sampler's
            if ends and (self.frontier < steps).any():
                return self.fill()

    def progress(self):
        total = self.canvas.shape[0] * self.canvas.shape[1]
        left = int(np.array(self.schedule.masked)[self.frontier].sum())
        known = self.known(np.arange(len(self.canvas)), self.frontier)
        return Progress(self.target.passes, total - left, total, self.canvas, known)

    def fill(self):
        """Cells that nobody drew take the nearest one that was drawn."""
        now, side = self.progress(), round(self.schedule.tokens**0.5)
        self.stopped, known = now.done, now.known.to(self.device)
        places = torch.cartesian_prod(*[torch.arange(side, device=self.device)] * 2).float()
        far = torch.cdist(places, places).masked_fill(~known[:, None], torch.inf)
        self.canvas = self.canvas.gather(1, far.argmin(-1)[..., None].expand_as(self.canvas))

    def latents(self):
        """The canvas as the codec takes it: fp32 [B, C, side, side] on the CPU."""
        return as_latents(self.canvas).contiguous().cpu()

    def report(self, latents):
        mode = MODES[self.settings.mode] if self.draft else None
        notes = [FINE, mode.note] if mode else []
        return ContinuousReport(
            method=f"cspd-{self.settings.mode}" if mode else "mar",
            settings=asdict(self.settings),
            tokens=self.canvas.shape[0] * self.canvas.shape[1],
            passes=self.target.passes,
            draft_passes=self.draft.passes if self.draft else 0,
            accepted=self.accepted,
            tested=self.tested,
            taken=self.taken,
            seconds=self.seconds,
            lossless=self.stopped is None and (mode is None or mode.lossless),
            dtype=str(self.target.net.dtype).removeprefix("torch."),
            sha256_tokens=latents_hash(latents),
            notes=notes,
            stopped=self.stopped,
        )


@torch.inference_mode()
def sample(net, family, prompt, settings=None, draft=None, device="cpu", callback=None, poll=None,
           keep_on=()):
    """Draw pictures with a continuous model.

    Args:
        net, family: a loaded MAR. prompt: `Prompt` with a class; an empty text draws without one.
        settings: `Settings`. draft: None, or a smaller (net, family) whose tokens the target judges.
        callback: called with `Progress` after every round; when it returns True the run ends with what is drawn, and
            copies of it elsewhere. poll: called before every network evaluation. What either raises ends the run.
        keep_on: classes of exceptions that end it in the same way as True, once something is drawn.

    Returns:
        `Drawn`.

    Raises:
        UserError: settings or a pair of models that do not fit, numbers that are not finite.
        OutOfMemory: torch's own class, with what would fit.
    """
    check_pair(family, draft and draft[1])
    settings = resolve(settings or Settings(), family)
    nets = (net, draft and draft[0])

    def drawn():
        run = Run(nets, family, prompt, settings, device, callback, poll)
        run.loop(keep_on)
        return run, run.latents()

    run, latents = or_what_fits(drawn, lambda: _what_fits(nets, settings, device))
    report = run.report(latents)
    report.origin = origin(net, family, device, prompt)
    if draft is not None:
        report.origin["draft"] = {"model": draft[1].file, "fingerprint": fingerprint(draft[0])}
    return Drawn(latents, report)


def _what_fits(nets, settings, device):
    """`room.advice` for a run that did not fit."""
    net, draft = nets

    def need(settings, drafted):
        return working_bytes(net.cfg, settings, net.dtype.itemsize, drafted)

    weights = 0 if draft is None else sum(weight.nbytes for weight in draft.parameters())
    return advice(need, settings, draft is not None, weights, free_bytes(device))
