"""DecodeReport: what a run did, as numbers, as a dictionary and as a few lines for people."""

import hashlib
from dataclasses import asdict, dataclass, field

import numpy as np

from .layout import context_columns, keeps_law
from .origin import in_words


@dataclass
class DecodeReport:
    """Figures of one run.

    Attributes:
        method, settings: what was asked for, with all defaults filled in.
        tokens: free tokens drawn, all samples together (given and format tokens do not count).
        passes: forward passes after the prefill; a batch shares its passes, so this is the largest of `per_sample`.
        per_sample: passes each sample took part in.
        accepted: per sample, free tokens committed in each pass.
        visits: int32 [B, frames, rows, cols] passes that looked at a cell.
        seconds: {"backbone", "kernel", "rest"}: host time; on an asynchronous device waiting counts as kernel.
        relaxed: per sample, tokens that only a relaxed rule committed.
        lossless: the tokens follow the model's law exactly.
        dtype: the backbone's; token identity between methods is promised in fp32.
        notes: sentences for the user.
        stopped: tokens that were decided when the callback ended the run, None: all. whole_frames: first frames that
            were decided in every sample then.
        origin: see `origin.origin`, with the run's settings as keywords of a `Request`; {} where nobody filled it in.
    """

    method: str
    settings: dict
    tokens: int
    passes: int
    per_sample: list
    accepted: list
    visits: np.ndarray
    seconds: dict
    lossless: bool
    dtype: str
    sha256_tokens: str
    relaxed: list = field(default_factory=list)
    notes: list = field(default_factory=list)
    stopped: int | None = None
    whole_frames: int | None = None
    origin: dict = field(default_factory=dict)

    @property
    def tokens_per_pass(self):
        """Mean free tokens that a sample commits in one of its passes."""
        return self.decided / max(sum(self.per_sample), 1)

    @property
    def decided(self):
        """Free tokens that the method decided; the others of a stopped run are drafts and copies."""
        return self.tokens if self.stopped is None else self.stopped

    @property
    def total_seconds(self):
        return sum(self.seconds.values())

    def to_dict(self):
        """Plain data for JSON; acceptance per pass included, the map of visits as nested lists."""
        return {
            "method": self.method,
            "settings": self.settings,
            "tokens": self.tokens,
            "passes": self.passes,
            "passes_per_sample": self.per_sample,
            "tokens_per_pass": round(self.tokens_per_pass, 4),
            "accepted_per_pass": self.accepted,
            "visits": self.visits.tolist(),
            "seconds": round(self.total_seconds, 4),
            "seconds_by_part": {k: round(v, 4) for k, v in self.seconds.items()},
            "relaxed_tokens": sum(self.relaxed),
            "lossless": self.lossless,
            "stopped": self.stopped,
            "dtype": self.dtype,
            "sha256_tokens": self.sha256_tokens,
            "notes": list(self.notes),
            "origin": self.origin,
        }

    def text(self):
        """A few lines an artist can read."""
        s, shape = self.settings, self.visits.shape
        what = f"{shape[0]} x " + (f"{shape[1]} frames of " if shape[1] > 1 else "") + f"{shape[2]}x{shape[3]} tokens"
        lines = [
            f"method {self.method} ({self.kind}), {window_of(s)}, {what}",
            f"{self.decided} tokens in {self.passes} passes: {self.tokens_per_pass:.2f} tokens a pass, "
            f"{self.decided / max(self.passes * shape[0], 1):.1f}x fewer passes than one token at a time",
            f"{self.total_seconds:.2f} s (backbone {self.seconds['backbone']:.2f}, kernel "
            f"{self.seconds['kernel']:.2f}, rest {self.seconds['rest']:.2f}), {self.dtype}",
            f"seed {s['seed']}, temperature {s['temperature']}, top-k {s['top_k']}, top-p {s['top_p']}, "
            f"cfg {s['cfg']}, draft start {s['start']}, memory {'on' if s['memory'] else 'off'}",
            f"tokens sha256 {self.sha256_tokens[:16]}",
        ]
        if self.stopped is not None:
            lines.append(f"stopped at {self.stopped} of {self.tokens} tokens: the others are drafts and copies")
        elif self.method == "seed-exact" and self.dtype == "float32":
            lines.append("same tokens as one-at-a-time sampling with this seed (fp32)")
        elif self.method == "seed-exact":
            lines.append(f"same tokens as one-at-a-time sampling up to rounding ties ({self.dtype}; exact in fp32)")
        if self.kind == "lossy":
            lines.append(f"lossy: {self.why_lossy()}")
        slow = self.method != "autoregressive" and self.passes > 1 and self.tokens_per_pass < 1.3
        if slow:
            lines.append("drafts rarely survive here: a larger window or lower temperature may help")
        if self.origin:
            lines.append(in_words(self.origin))
        return "\n".join(lines + list(self.notes))

    @property
    def kind(self):
        return "stopped early" if self.stopped is not None else "lossless" if self.lossless else "lossy"

    def why_lossy(self):
        """What the tokens lack to follow the law, in words."""
        s, columns = self.settings, self.visits.shape[3]
        if s.get("layout") == "row-block":
            after = plural(s["rounds"], "round")
            more = f" and each further row of a block after {s['rounds'] - 1} more" if s["block_rows"] > 1 else ""
            return f"a row was committed after {after} at the latest{more}"
        if s.get("layout") == "rows" and s["row_context"] < columns:
            return f"a row began when the row above had {s['row_context']} of {columns} columns"
        if s.get("layout") == "rows":
            return "drafts keep outdated laws, as published"
        return f"{sum(self.relaxed)} of {self.tokens} tokens were taken by relaxation alone (strength {s['relax']})"


def report_of(run):
    """The `DecodeReport` of a `loop.Run` that has ended."""
    settings, method, plan, samples = run.settings, run.method, run.plan, run.samples
    told = {**asdict(settings), **asdict(run.law), "window": run.window, "start": run.start_name, "nodes": run.nodes}
    told.pop("law")
    told["memory"] = bool(settings.memory and method.memory and not method.sequential)
    told["relax"] = run.strength if method.relax is not None else 0.0
    told["layout"] = method.layout
    told["row_context"] = context_columns(method, plan, settings.row_context) if method.layout == "rows" else None
    for name in ("rounds", "block_rows"):
        told[name] = getattr(settings, name) if method.layout == "row-block" else None
    cells = plan.cells.numpy() >= 0
    visits = np.stack([s.visits[cells] for s in samples])
    return DecodeReport(
        method=settings.method,
        settings=told,
        tokens=sum(len(s.free) for s in samples),
        passes=run.passes,
        per_sample=[len(s.per_pass) for s in samples],
        accepted=[list(s.per_pass) for s in samples],
        visits=visits.reshape(len(visits), plan.frames, plan.rows, plan.cols),
        seconds=run.clock.seconds,
        lossless=_keeps_law(run),
        relaxed=[s.relaxed for s in samples],
        dtype=str(run.session.dtype).removeprefix("torch.") if run.passes else "none",
        sha256_tokens=token_hash(run.result),
        stopped=run.stopped,
        whole_frames=run.whole_frames,
    )


def _keeps_law(run):
    """Do the tokens of a `loop.Run` follow the model's law exactly?"""
    method, settings = run.method, run.settings
    if run.stopped is not None:
        return False
    if method.layout != "window":
        return keeps_law(method, run.plan, settings.row_context, settings.rounds, settings.block_rows)
    return method.lossless or (method.relax is not None and run.strength == 0)


def plural(count, noun):
    return f"{count} {noun}" + ("" if count == 1 else "s")


def window_of(settings):
    """What a pass looked at, in words."""
    if settings.get("layout") == "rows":
        return f"rows after {plural(settings['row_context'], 'column')}, window {settings['window']} in each"
    if settings.get("layout") == "row-block":
        rounds = plural(settings["rounds"], "round") if settings["rounds"] else "exact rounds"
        together = f"{settings['block_rows']} at once " if settings["block_rows"] > 1 else ""
        return f"first row by window {settings['window']}, the others {together}in {rounds}"
    nodes = settings.get("nodes", 0)
    return f"window {settings['window']}" + (f" + {nodes} tree nodes" if nodes else "")


def token_hash(tokens):
    """SHA-256 of the token ids as little-endian int32, row by row: equal tokens, equal hash."""
    return hashlib.sha256(tokens.cpu().numpy().astype("<i4").tobytes()).hexdigest()
