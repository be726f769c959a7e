"""Continuous models whose laws are known: random little MARs, and an AR(1) chain that stands in for one."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import torch
from scd_pack.scd_core.continuous.diffusion import Step, cosine_betas
from scd_pack.scd_core.continuous.mar import Mar, MarConfig
from scd_pack.scd_core.continuous.sampler import Run, Settings
from scd_pack.scd_core.continuous.side import Side
from scd_pack.scd_core.models.family import Defaults
from scd_pack.scd_core.models.imagenet import ClassEncoder
from scd_pack.scd_core.prompt import Prompt

TINY = MarConfig(
    dim=64, decoder_dim=64, encoder_layers=2, decoder_layers=2, heads=4, decoder_heads=4, ffn=256, decoder_ffn=256,
    tokens=16, channels=4, buffer=6, classes=5, head_layers=2, head_width=48,
)  # fmt: skip
PROMPT = Prompt(text="3")


class Tame(Mar):
    """A MAR whose untrained head does not blow its chain up: its output is read as a velocity, the rest is x itself."""

    kept = torch.from_numpy(np.cumprod(1 - cosine_betas())).float()

    def noise(self, x, times, cond, scale=None):
        velocity, spread = super().noise(x, times, cond, scale)
        kept = self.kept[times][:, None]
        return (1 - kept).sqrt() * x + kept.sqrt() * velocity, spread


def random_mar(seed=0, near=None, apart=0.0, **changes):
    """A little MAR with weights wide enough to matter; with `near`, that one's weights moved by a share `apart`."""
    net = Tame(replace(TINY, **changes)).requires_grad_(False).eval()
    generator = torch.Generator().manual_seed(seed)
    others = dict(near.named_parameters()) if near is not None else {}
    for name, weight in net.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        base = 1.0 if name.endswith(("norm1.weight", "norm2.weight", "_norm.weight", "_ln.weight")) else 0.0
        fan = weight.shape[-1] if weight.ndim > 1 else 16
        own = base + noise * 0.4 * fan**-0.5
        weight.copy_(others[name] + apart * (own - base) if others else own)
    return net


def family_of(net):
    """What a run asks of a family."""
    return SimpleNamespace(
        name="a toy", title="a toy", file="", continuous=True, decoder_config=net.cfg, defaults=Defaults(cfg=2.0),
        diffusion_steps=8, clip=None, text=ClassEncoder(net.cfg.classes),
    )  # fmt: skip


class Chain(Side):
    """AR(1) cells drawn from left to right: x_j given x_(j-1) is N(rho x_(j-1), sigma^2), and so on over gaps.

    A cell is drawn in two denoising steps. With `last_noise` the first one is the same for all chains and the second
    one is the law; without, the first one is the law and the second one leaves it as it is, as in a MAR.
    """

    def __init__(self, rho, sigma, last_noise):
        self.rho, self.sigma, self.last_noise, self.passes = rho, sigma, last_noise, 0
        self.diffusion = SimpleNamespace(count=2)
        self.device, self.lap = "cpu", lambda part: None

    def look(self, tokens, known, rows, part):
        """Mean and standard deviation of every cell, [1, M, n, 2]."""
        self.passes += 1
        count = known.sum(1)
        gap = torch.arange(known.shape[1])[None] - count[:, None] + 1
        gap = gap.clamp(min=1)
        last = tokens[torch.arange(len(tokens)), (count - 1).clamp(min=0), 0]
        free = count == 0  # the first cell has the stationary law
        spread = self.sigma / (1 - self.rho**2) ** 0.5
        mean = torch.where(free[:, None], 0.0, last[:, None] * self.rho**gap)
        sd = torch.where(free[:, None], 1.0, 1 - self.rho ** (2.0 * gap)) ** 0.5 * spread
        return torch.stack([mean.float(), sd.float().expand_as(mean)], -1)[None]

    def law(self, x, index, cond, steps):
        mean, sd = cond[:, :1], cond[:, 1:]
        index = torch.as_tensor(index).expand(len(x))[:, None]
        works = index == (0 if self.last_noise else 1)
        passed = torch.zeros_like(x) if self.last_noise else x
        return Step(torch.where(works, mean, passed), torch.where(works, sd.log(), torch.zeros_like(x)))


def chain_run(mode, samples, target, draft, last_noise, length=8, seed=0, **settings):
    """A finished run over AR(1) chains.

    Args:
        target, draft: (rho, sigma).

    Returns:
        (cells fp32 [samples, length], `Run`).
    """
    cfg = SimpleNamespace(tokens=length, channels=1)
    family = SimpleNamespace(decoder_config=cfg, text=ClassEncoder(1), continuous=True, clip=None)
    told = Settings(
        mode=mode, steps=length, diffusion_steps=2, temperature=1.0, cfg=1.0, batch=samples, seed=seed, prefill=0.0,
        **{"gamma": 4, **settings},
    )  # fmt: skip
    run = Run((None, None), family, Prompt(text=""), told, "cpu")
    run.target, run.draft = Chain(*target, last_noise), Chain(*draft, last_noise)
    run.orders = np.tile(np.arange(length)[::-1], (samples, 1))  # cells leave the mask from the back
    run.loop()
    return run.canvas[..., 0], run
