"""Accepting drafted vectors: exact where it is said to be, and the published shortcuts are seen to be none."""

import numpy as np
import pytest
import torch
from scd_pack.scd_core.continuous import coupling
from scd_pack.scd_core.continuous.coupling import couple, log_ratio, residual
from scd_pack.scd_core.continuous.diffusion import Step
from scd_pack.scd_core.continuous.noise import PATH, RESIDUAL, THIN, NormalNoise
from scipy import stats

N = 100_000
CRITICAL = 1.63  # of KS * sqrt(n), 1 %
P, Q, WIDE = (0.0, 1.0), (0.8, 1.0), (0.8, 1.4)


def law(mean, sigma, n=N, channels=1):
    """A `Step` of n equal rows."""
    shape = (n, channels)
    return Step(torch.full(shape, mean), torch.full(shape, float(np.log(sigma))))


def generator_draws(generator, channels=1):
    def draws(rows, first, count):
        shape = (len(rows), count)
        noise = torch.randn(*shape, channels, generator=generator, dtype=torch.float64)
        return noise, torch.rand(shape, generator=generator, dtype=torch.float64)

    return draws


def ks(values, mean, sigma):
    """KS * sqrt(n) of values against a Gaussian."""
    x = np.asarray(values, dtype=np.float64).ravel()
    return stats.kstest(x, "norm", (mean, sigma)).statistic * len(x) ** 0.5


def published(p, q, generator, tau=1.0, sign=1):
    """The one-step criterion of CSpD: accepted, or drawn from the residual. sign -1: the reciprocal factor S."""
    p, q = law(*p), law(*q)
    x = q.draw(torch.randn(N, 1, generator=generator)).double()
    scale = sign * (q.log_sigma - p.log_sigma).double().sum(-1)
    uniform = torch.rand(N, generator=generator, dtype=torch.float64)
    taken = uniform.log() < log_ratio(x, p, q, scale, tau)
    rows = (~taken).nonzero()[:, 0]
    part = [Step(each.mean[rows], each.log_sigma[rows]) for each in (p, q)]
    again, found = residual(*part, scale[rows], generator_draws(generator))
    x[rows] = torch.where(found[:, None], again, p.mean[rows].double())
    return x, taken


@pytest.mark.parametrize("q", [Q, WIDE], ids=["equal spread", "other spread"])
def test_published_criterion_is_exact_for_one_step(generator, q):
    assert ks(published(P, q, generator)[0], *P) < CRITICAL


def test_tau_of_the_released_code_is_seen(generator):
    x, taken = published(P, WIDE, generator, tau=42.0)
    assert taken.double().mean() > 0.99 and ks(x, *P) > 10 * CRITICAL


@pytest.mark.parametrize("q", [WIDE, (0.8, 0.7)])
def test_reciprocal_factor_is_seen(generator, q):
    assert ks(published(P, q, generator, sign=-1)[0], *P) > 5 * CRITICAL


def test_factor_is_that_of_the_published_formula():
    """log S = sum over t >= 2 of log sigma_q - log sigma_p; the last step's share is that of its normalisers."""
    p, q = law(0.3, 0.5, n=4, channels=3), law(-0.2, 0.9, n=4, channels=3)
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    earlier_p, earlier_q = torch.tensor([-3.0, 0.0, 1.0, 2.0]), torch.tensor([1.0, 1.0, -2.0, 0.5])
    scale = earlier_q + q.log_sigma.sum(-1) - earlier_p - p.log_sigma.sum(-1)
    direct = [torch.from_numpy(stats.norm.logpdf(x, s.mean, s.log_sigma.double().exp())).sum(-1) for s in (p, q)]
    torch.testing.assert_close(log_ratio(x, p, q, scale.double()), earlier_q - earlier_p + direct[0] - direct[1])


@pytest.mark.parametrize("q", [Q, WIDE, (0.0, 0.5), (3.0, 1.0), P], ids=str)
def test_coupling_is_exact_and_maximal(generator, q):
    p_law, q_law = law(*P), law(*q)
    x = q_law.draw(torch.randn(N, 1, generator=generator)).double()
    uniform = torch.rand(N, generator=generator, dtype=torch.float64)
    y, kept = couple(x, p_law, q_law, uniform, generator_draws(generator))
    assert ks(y, *P) < CRITICAL
    assert (y[kept] == x[kept]).all() and (y[~kept] != x[~kept]).all()
    grid = np.linspace(-12, 12, 200_001)
    overlap = min(1.0, np.minimum(*(stats.norm.pdf(grid, *g) for g in (P, q))).sum() * (grid[1] - grid[0]))
    assert abs(float(kept.double().mean()) - overlap) < 4 * (overlap * (1 - overlap) / N) ** 0.5 + 1e-5


def test_coupling_of_vectors_keeps_all_channels_or_none(generator):
    n, channels = 50_000, 3
    p = Step(torch.zeros(n, channels), torch.tensor([0.0, 0.2, -0.3]).expand(n, -1))
    q = Step(torch.tensor([0.4, -0.3, 0.1]).expand(n, -1), torch.tensor([0.1, 0.2, -0.1]).expand(n, -1))
    x = q.draw(torch.randn(n, channels, generator=generator)).double()
    y, kept = couple(x, p, q, torch.rand(n, generator=generator, dtype=torch.float64),
                     generator_draws(generator, channels))  # fmt: skip
    assert 0.2 < float(kept.double().mean()) < 0.95
    for channel in range(channels):
        assert ks(y[:, channel], 0.0, float(p.log_sigma[0, channel].exp())) < CRITICAL
    correlation = np.corrcoef(y.numpy().T) - np.eye(channels)
    assert np.abs(correlation).max() < 4 / n**0.5


def test_residual_that_is_empty_says_so_and_leaves_no_zeros():
    """The released code leaves zero vectors where no proposal was taken."""
    p, q = law(5.0, 0.5, n=6, channels=2), law(5.0, 0.5, n=6, channels=2)
    x, found = residual(p, q, torch.full((6,), -50.0).double(), generator_draws(torch.Generator().manual_seed(0), 2))
    assert not found.any() and (x == p.mean).all()


def test_residual_asks_for_fresh_proposals_of_the_rows_that_are_left():
    asked = []

    def draws(rows, first, count):
        asked.append((rows.tolist(), first, count))
        noise = torch.zeros(len(rows), count, 1, dtype=torch.float64)
        uniform = torch.full((len(rows), count), 1 - 1e-12, dtype=torch.float64)
        if first == 1:  # the proposal of row 2 is taken in the second call
            uniform[rows == 2] = 1e-12
        return noise, uniform

    p, q = law(0.0, 1.0, n=3), law(4.0, 1.0, n=3)
    _, found = residual(p, q, torch.zeros(3).double(), draws, limit=7)
    assert found.tolist() == [False, False, True]
    assert asked == [([0, 1, 2], 0, 1), ([0, 1, 2], 1, 2), ([0, 1], 3, 4)]


def test_proposals_do_not_depend_on_how_many_are_made_at_once(monkeypatch):
    source = NormalNoise(5, range(20))

    def draws(rows, first, count):
        where = rows.numpy()[:, None], 0, np.arange(first, first + count)
        return source.normal(RESIDUAL, *where, 2), torch.from_numpy(source.uniform(THIN, *where))

    p, q = law(0.0, 1.0, n=20, channels=2), law(0.2, 1.1, n=20, channels=2)
    scale = (q.log_sigma - p.log_sigma).double().sum(-1)
    first, found = residual(p, q, scale, draws, limit=1000)
    assert found.all() and len(first.unique(dim=0)) == 20
    monkeypatch.setattr(coupling, "LARGEST", 1)
    assert torch.equal(residual(p, q, scale, draws, limit=1000)[0], first)


def test_shared_noise_brings_paths_together():
    """E|x_q - x_p|^2 falls by twice the sum of sigma_q sigma_p, against noise of their own."""
    n = 40_000
    source = NormalNoise(7, [0])
    shared, other = (source.normal(PATH, 0, np.arange(n), step, 2).float() for step in (0, 1))
    sigmas = torch.tensor([[0.5, 1.5], [0.8, 0.7]])
    p, q = (Step(torch.full((n, 2), mean), s.log().expand(n, -1)) for mean, s in zip((0.2, -0.4), sigmas))
    far = (q.draw(other) - p.draw(shared)).square().sum(-1)
    near = (q.draw(shared) - p.draw(shared)).square().sum(-1)
    gain, error = (far - near).mean(), (far - near).std() / n**0.5
    assert abs(float(gain - 2 * (sigmas[0] * sigmas[1]).sum())) < 3 * float(error)
