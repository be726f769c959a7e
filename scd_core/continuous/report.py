"""ContinuousReport: what a run of a continuous model did."""

import hashlib
from dataclasses import dataclass, field

from ..origin import in_words


@dataclass
class ContinuousReport:
    """Figures of one run.

    Attributes:
        method: "mar" (the target alone) or "cspd-" and the mode. settings: all defaults filled in.
        tokens: tokens drawn, all pictures together.
        passes: passes of the target over its canvas; a batch shares them. draft_passes: the draft's.
        accepted: per sample, tokens committed after each pass of the target.
        tested, taken: drafted tokens that were put to the test, and those that were taken as drafted.
        seconds: {"target", "draft", "head", "rest"}: host time; "head" are the diffusion chains of both. On an
            asynchronous device waiting counts where the host waits.
        lossless: the tokens follow the law of the target alone.
        notes: sentences for the user.
        stopped: tokens that were drawn when the callback ended the run, None: all.
        origin: see `origin.origin`, with name and fingerprint of the "draft"; `settings` are a `Settings`.
    """

    method: str
    settings: dict
    tokens: int
    passes: int
    draft_passes: int
    accepted: list
    tested: int
    taken: int
    seconds: dict
    lossless: bool
    dtype: str
    sha256_tokens: str
    notes: list = field(default_factory=list)
    stopped: int | None = None
    origin: dict = field(default_factory=dict)

    @property
    def total_seconds(self):
        return sum(self.seconds.values())

    @property
    def accepted_share(self):
        """Share of the tested drafts that were taken, None without a draft."""
        return self.taken / self.tested if self.tested else None

    @property
    def tokens_per_pass(self):
        """Mean tokens that a sample commits in one of its passes of the target."""
        decided = self.tokens if self.stopped is None else self.stopped
        return decided / max(sum(len(counts) for counts in self.accepted), 1)

    def to_dict(self):
        """Plain data for JSON."""
        share = self.accepted_share
        return {
            "method": self.method,
            "settings": self.settings,
            "tokens": self.tokens,
            "passes": self.passes,
            "draft_passes": self.draft_passes,
            "passes_per_sample": [len(counts) for counts in self.accepted],
            "tokens_per_pass": round(self.tokens_per_pass, 4),
            "accepted_per_pass": self.accepted,
            "accepted_share": None if share is None else round(share, 4),
            "seconds": round(self.total_seconds, 4),
            "seconds_by_part": {k: round(v, 4) for k, v in self.seconds.items()},
            "lossless": self.lossless,
            "stopped": self.stopped,
            "dtype": self.dtype,
            "sha256_tokens": self.sha256_tokens,
            "notes": list(self.notes),
            "origin": self.origin,
        }

    def text(self):
        """A few lines an artist can read."""
        s, share = self.settings, self.accepted_share
        drafts = f" and {self.draft_passes} of the draft" if self.draft_passes else ""
        kind = "stopped early" if self.stopped is not None else "lossless" if self.lossless else "lossy"
        lines = [
            f"method {self.method} ({kind}), {len(self.accepted)} x "
            f"{self.tokens // max(len(self.accepted), 1)} tokens in {s['steps']} steps",
            f"{self.passes} passes of the target{drafts}, {self.tokens_per_pass:.2f} tokens a pass of the target",
        ]
        if share is not None:
            flat = f", tau {s['tau']:g}" if s["mode"] != "exact" else ""
            lines.append(f"{100 * share:.1f} % of {self.tested} tested drafts taken (gamma {s['gamma']}{flat})")
        parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in self.seconds.items())
        lines += [
            f"{self.total_seconds:.2f} s ({parts}), {self.dtype}",
            f"seed {s['seed']}, temperature {s['temperature']:g}, cfg {s['cfg']:g}, {s['diffusion_steps']} diffusion "
            "steps a token",
            f"tokens sha256 {self.sha256_tokens[:16]}",
        ]
        if self.stopped is not None:
            lines.append(f"stopped at {self.stopped} of {self.tokens} tokens: the others are copies of these")
        if self.origin:
            lines.append(in_words(self.origin))
        return "\n".join(lines + list(self.notes))


def latents_hash(latents):
    """SHA-256 of the latents as little-endian fp32: equal tokens, equal hash."""
    return hashlib.sha256(latents.cpu().float().numpy().astype("<f4").tobytes()).hexdigest()
