"""The reverse diffusion that draws one continuous token: a respaced cosine schedule with learned variances.

Improved DDPM (Nichol and Dhariwal 2021, arXiv 2102.09672) as MAR (arXiv 2406.11838) uses it: 1000 training steps,
epsilon prediction, the log variance interpolated between the posterior's and beta, nothing clipped unless a model asks
for it: at the noisy end an error of epsilon is multiplied by thousands on its way to x_0, which small networks cannot
afford.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch

from ..errors import UserError

TRAINED = 1000  # steps of the training schedule
LARGEST_BETA = 0.999


def cosine_betas(steps=TRAINED):
    """Betas of the cosine schedule, float64 [steps]."""

    def kept(t):
        return math.cos((t + 0.008) / 1.008 * math.pi / 2) ** 2

    return np.array([min(1 - kept((i + 1) / steps) / kept(i / steps), LARGEST_BETA) for i in range(steps)])


def respaced(count, steps=TRAINED):
    """Training times that `count` sampling steps stand for: evenly spread, first and last included; int64 [count].

    Raises:
        UserError: a number of steps that no schedule has.
    """
    if not 2 <= count <= steps:
        raise UserError(f"diffusion steps {count}: a token is drawn in 2 to {steps} steps, 100 is usual")
    stride = (steps - 1) / (count - 1)
    return np.array([round(stride * i) for i in range(count)])  # Python's rounding: half to even, as in training


@dataclass(frozen=True)
class Step:
    """Law of one reverse step, N(mean, sigma^2): fp32 [R, C] each.

    The last step of a chain has a variance but adds no noise: its draw is the mean.
    """

    mean: torch.Tensor
    log_sigma: torch.Tensor

    def draw(self, noise):
        """noise fp32 [R, C], or None in the last step -> the next state."""
        return self.mean if noise is None else self.mean + self.log_sigma.exp() * noise


class Diffusion:
    """Tables of a reverse process of `count` steps; step indices run from count - 1 down to 0.

    Args:
        clip: what x_0 may not exceed in size where a step guesses it, None: anything.

    Attributes:
        count: sampling steps. times: int64 [count] training time of each. Tables (fp32 [count], computed in fp64):
        betas, log_betas, log_variance (the posterior's, its first entry replaced by the second), recip and
        recip_minus (x_0 from x_t and epsilon), coef1 and coef2 (posterior mean from x_0 and x_t).
    """

    def __init__(self, count, device="cpu", clip=None):
        self.count, self.clip, times = count, clip, respaced(count)
        kept = np.cumprod(1 - cosine_betas())[times]  # products of the alphas of all training steps up to each
        before = np.concatenate([[1.0], kept[:-1]])
        betas = 1 - kept / before
        variance = betas * (1 - before) / (1 - kept)
        tables = {
            "betas": betas,
            "log_betas": np.log(betas),
            "log_variance": np.log(np.concatenate([variance[1:2], variance[1:]])),
            "recip": np.sqrt(1 / kept),
            "recip_minus": np.sqrt(1 / kept - 1),
            "coef1": betas * np.sqrt(before) / (1 - kept),
            "coef2": (1 - before) * np.sqrt(1 - betas) / (1 - kept),
        }
        for name, values in tables.items():
            setattr(self, name, torch.from_numpy(values).float().to(device))
        self.times = torch.from_numpy(times).to(device)

    def step(self, x, index, eps, spread, temperature=1.0):
        """One reverse step.

        Args:
            x: states fp32 [R, C]. index: step of each row, int64 [R], or one int for all.
            eps, spread: the network's two halves fp32 [R, C]; spread in -1..1 interpolates the log variance.
            temperature: above 0; multiplies sigma, not the noise that the chain starts from.
        """

        def at(table):
            return table[index][:, None] if isinstance(index, torch.Tensor) else table[index]

        share = (spread + 1) / 2
        log_variance = share * at(self.log_betas) + (1 - share) * at(self.log_variance)
        start = at(self.recip) * x - at(self.recip_minus) * eps
        if self.clip is not None:
            start = start.clamp(-self.clip, self.clip)
        return Step(at(self.coef1) * start + at(self.coef2) * x, 0.5 * log_variance + math.log(temperature))
