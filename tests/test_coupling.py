"""Single-step laws of the couplings, against the formulas, on a million draws."""

import numpy as np
import pytest
import torch
from scd_pack.scd_core.coupling import gumbel_argmax, inverse_cdf, maximal, residual
from scd_pack.scd_core.noise import Noise

DRAWS = 1_000_000
P = torch.tensor([0.30, 0.02, 0.0, 0.25, 0.08, 0.15, 0.0, 0.20])
Q = torch.tensor([0.10, 0.22, 0.05, 0.25, 0.0, 0.03, 0.05, 0.30])
TV = 0.5 * float((P - Q).abs().sum())


def within(counts, law, sigmas=5.0):
    """Every bin of the draws within 5 sigma of its expectation; impossible bins empty."""
    n, law = counts.sum().double(), law.double()
    assert (counts[law == 0] == 0).all()
    spread = (n * law * (1 - law)).sqrt()
    assert ((counts - n * law).abs() <= sigmas * spread + 1e-9).all(), (counts / n, law)


def uniforms(generator, n=DRAWS):
    return torch.rand(1, n, generator=generator)


def step(p, q, draft, generator):
    n = draft.shape[1]
    return maximal(p.expand(1, n, -1), q.expand(1, n, -1), draft, uniforms(generator, n), uniforms(generator, n))


@pytest.mark.slow
def test_maximal_law_and_rate(generator):
    draft = torch.multinomial(Q, DRAWS, replacement=True, generator=generator)[None]
    token, kept = step(P, Q, draft, generator)
    within(torch.bincount(token[0], minlength=8), P)
    rate = float(kept.float().mean())
    assert abs(rate - (1 - TV)) < 5 * (TV * (1 - TV) / DRAWS) ** 0.5
    assert torch.equal(kept, token == draft)  # the residual has no mass at the draft: a rejection changes the token


@pytest.mark.slow
def test_maximal_given_the_draft(generator):
    """Each draft by itself: kept with probability min(1, p/q), else a draw from the residual."""
    residual = (P - Q).clamp(min=0) / (P - Q).clamp(min=0).sum()
    for x in (0, 1, 2, 3, 7):
        stay = min(1.0, float(P[x] / Q[x]))
        token, kept = step(P, Q, torch.full((1, 200_000), x), generator)
        want = (1 - stay) * residual
        want[x] += stay
        within(torch.bincount(token[0], minlength=8), want)
        assert bool(kept.all()) if stay == 1 else not bool(kept.all())


def test_copied_draft_has_a_one_hot_law(generator):
    """Kept with p(x), else p without x."""
    q = torch.nn.functional.one_hot(torch.tensor(3), 8).float()
    token, kept = step(P, q, torch.full((1, 200_000), 3), generator)
    within(torch.bincount(token[0], minlength=8), P)
    within(torch.stack([kept.sum(), (~kept).sum()]), torch.stack([P[3], 1 - P[3]]))


def test_equal_laws_keep_everything(generator):
    draft = torch.multinomial(P, 1000, replacement=True, generator=generator)[None]
    token, kept = step(P, P, draft, generator)
    assert kept.all() and torch.equal(token, draft)


def test_empty_residual_draws_from_p():
    """p below q everywhere by rounding, and a rejection all the same: a lawful token, no NaN, no id outside."""
    q = P * (1 + 1e-6)
    u, v = torch.full((1, 1), 1 - 2.0**-24), torch.tensor([[0.999]])
    token, kept = maximal(P.view(1, 1, -1), q.view(1, 1, -1), torch.tensor([[7]]), u, v)
    assert not kept.any() and int(token) == 7
    token, kept = maximal(P.view(1, 1, -1), q.view(1, 1, -1), torch.tensor([[7]]), u, torch.tensor([[0.31]]))
    assert int(token) == 1


@pytest.mark.parametrize("difference", [1e-12, 1e-6, 0.1])
def test_no_uniform_reaches_a_token_without_residual(difference):
    """The weight that stands in for an empty residual is out of reach beside one, however small that is."""
    p = torch.tensor([0.3, 0.4, difference, 0.3 - difference, 0.0])
    q = torch.tensor([0.3, 0.4, 0.0, 0.3, 0.0])
    u = torch.tensor([2.0**-24, 2.0**-23, 0.5, 1 - 2.0**-24])
    assert inverse_cdf(residual(p, q).expand(4, -1), u).tolist() == [2] * 4
    assert float(residual(p, p)[4]) == 0 and (residual(p, p)[:4] > 0).all()


def test_impossible_draft_is_rejected_for_sure(generator):
    for x in (2, 6):
        token, kept = step(P, Q, torch.full((1, 10_000), x), generator)
        assert not kept.any() and not (token == x).any()
        assert (P[token] > Q[token]).all()


@pytest.mark.slow
def test_inverse_cdf_law(generator):
    index = inverse_cdf((7.0 * P).expand(DRAWS, -1), torch.rand(DRAWS, generator=generator))
    within(torch.bincount(index, minlength=8), P)


@pytest.mark.parametrize("u", [2.0**-24, 1e-7, 0.3, 0.5, 0.999, 1 - 2.0**-24])
@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1.0, 1e6])
def test_inverse_cdf_never_draws_weight_zero(u, scale):
    cases = [[0, 0, 1, 0, 0], [0, 1, 0, 1, 0], [1, 0, 0, 0, 0], [0, 0, 0, 0, 1], [1, 1e-7, 0, 1, 0], [0, 1e-7, 1, 0, 0]]
    for weights in cases:
        w = scale * torch.tensor(weights)
        index = int(inverse_cdf(w, torch.tensor(u)))
        assert w[index] > 0, (weights, u, index)


def test_inverse_cdf_against_plain_search(generator):
    """Large sparse weights, as after top-k over a big vocabulary: the same index as a float64 search."""
    w = torch.rand(64, 5000, generator=generator) * (torch.rand(64, 5000, generator=generator) < 0.05)
    u = torch.rand(64, generator=generator)
    index = inverse_cdf(w, u)
    cdf = w.double().cumsum(1)
    for row in range(64):
        assert w[row, index[row]] > 0
        low = float(cdf[row, index[row]] - w[row, index[row]].double())
        point, slack = float(u[row].double() * cdf[row, -1]), 1e-5 * float(cdf[row, -1])
        assert low - slack <= point <= float(cdf[row, index[row]]) + slack


def test_inverse_cdf_is_monotone():
    u = torch.linspace(1e-6, 1 - 1e-6, 1001)
    index = inverse_cdf(P.expand(1001, -1), u)
    assert (index.diff() >= 0).all() and int(index[0]) == 0 and int(index[-1]) == 7


def shared_draws(p, q, n, seed=0):
    """Tokens of two laws under the same noise of n positions."""
    gumbel = Noise(seed, [0]).gumbel(np.arange(n)[None], len(p))
    return gumbel_argmax(p.log(), gumbel)[0], gumbel_argmax(q.log(), gumbel)[0]


@pytest.mark.slow
def test_shared_gumbel_law_and_collision():
    """Each token has its law; they agree with the exact probability sum_i 1 / sum_j max(p_j/p_i, q_j/q_i)."""
    x, y = shared_draws(P, Q, DRAWS)
    within(torch.bincount(x, minlength=8), P)
    within(torch.bincount(y, minlength=8), Q)
    both = [i for i in range(8) if P[i] > 0 and Q[i] > 0]
    agree = sum(1 / float(torch.maximum(P / P[i], Q / Q[i]).sum()) for i in both)
    assert agree >= (1 - TV) / (1 + TV)
    rate = float((x == y).float().mean())
    assert abs(rate - agree) < 5 * (agree * (1 - agree) / DRAWS) ** 0.5


def test_gumbel_argmax_ties_to_the_lowest_id():
    assert int(gumbel_argmax(torch.tensor([[[0.0, 1.0, 1.0, 1.0]]]), torch.zeros(1, 1, 4))) == 1


def test_maximal_keeps_more_than_shared_gumbel_keeps_more_than_chance():
    """The order of the couplings: 1 - TV, then (1-TV)/(1+TV) and up, then independence."""
    x, y = shared_draws(P, Q, 100_000)
    chance = float((P * Q).sum())
    assert 1 - TV > float((x == y).float().mean()) > chance + 0.1
