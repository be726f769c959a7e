"""Statistics that tell an exact sampler from a nearly exact one."""

from dataclasses import dataclass

import numpy as np
import torch
from scipy import stats

SMALLEST_P = 1e-4
LARGEST_Z = 4.0


@dataclass
class LawTest:
    """Drawn sequences against a joint law: chi-square p, total variation and its noise, z of the mean NLL."""

    p: float
    tv: float
    tv_bound: float
    z: float
    outside: int  # samples that the law cannot give

    @property
    def exact(self):
        return self.p > SMALLEST_P and abs(self.z) < LARGEST_Z and self.tv < self.tv_bound and self.outside == 0

    @property
    def clearly_biased(self):
        return self.p < 1e-6 or abs(self.z) > 6 or self.outside > 50


def law_test(index, joint):
    """Args: index int64 [S] of the drawn cells; joint float64 [cells] their law."""
    law, size = joint.numpy(), len(index)
    counts = np.bincount(index.numpy(), minlength=len(law))
    noise = 0.5 * np.sqrt(2 / np.pi) * np.sqrt(law * (1 - law) / size).sum()
    spread = 0.5 * np.sqrt((1 - 2 / np.pi) * (law * (1 - law)).sum() / size)
    possible = law > 0
    nll = -np.log(law[possible])
    entropy = (law[possible] * nll).sum()
    variance = (law[possible] * nll**2).sum() - entropy**2
    mean = (counts[possible] * nll).sum() / max(counts[possible].sum(), 1)
    return LawTest(
        p=chi_square(counts, law * size),
        tv=0.5 * np.abs(counts / size - law).sum(),
        tv_bound=noise + 5 * spread,
        z=(mean - entropy) / np.sqrt(variance / size),
        outside=int(counts[~possible].sum()),
    )


def chi_square(counts, expected, smallest=8.0):
    """p-value with the rare cells pooled, so that every expectation is at least `smallest`."""
    order = np.argsort(expected)
    counts, expected = counts[order], expected[order]
    rare = expected < smallest
    pooled = np.append(expected[~rare], expected[rare].sum()), np.append(counts[~rare], counts[rare].sum())
    if pooled[0][-1] < smallest and len(pooled[0]) > 1:  # the pool itself is rare: give it to the next cell
        pooled = tuple(np.append(x[1:-1], x[0] + x[-1]) for x in pooled)
    e, c = pooled
    return float(stats.chi2.sf(((c - e) ** 2 / e).sum(), len(e) - 1))


def independent(a, b, values):
    """p-value that two series of symbols 0 .. values-1 are independent (empty rows and columns left out)."""
    table = np.bincount((a * values + b).numpy(), minlength=values**2).reshape(values, values)
    table = table[table.sum(1) > 0][:, table.sum(0) > 0]
    return float(stats.chi2_contingency(table).pvalue)


def entropy_z(log_p, columns):
    """H9: z of the martingale sum over positions of (-log p(x) - H), per sample: float64 [B]."""
    log_p = log_p.double()
    p = log_p.exp()
    nll = torch.where(p > 0, -log_p, 0.0)
    entropy = (p * nll).sum(-1)
    variance = (p * nll**2).sum(-1) - entropy**2
    paid = -log_p.gather(-1, columns[..., None]).squeeze(-1)
    return (paid - entropy).sum(1) / variance.sum(1).sqrt()


def combined_z(z):
    """One z of independent ones."""
    return float(z.sum() / len(z) ** 0.5)


def randomised_pit(log_p, columns, generator):
    """H10: mass of the more probable tokens plus a random share of the tied mass, iid U(0,1) if exact: [B, N]."""
    p = log_p.double().exp()
    own = p.gather(-1, columns[..., None])
    above = (p * (p > own)).sum(-1)
    tied = (p * (p == own)).sum(-1)
    return above + torch.rand(above.shape, generator=generator, dtype=torch.float64) * tied


def uniform_p(u):
    """Kolmogorov-Smirnov p-value that the values are U(0,1)."""
    return float(stats.kstest(u.flatten().numpy(), "uniform").pvalue)
