"""From logits to the law, against the long way in float64."""

import itertools
import math

import pytest
import torch
from scd_pack.scd_core.law import LawSettings, guide, keep_top_k, keep_top_p, token_law

VOCAB = 9


@pytest.fixture
def logits(generator):
    return 2 * torch.randn(3, 1, 4, VOCAB, generator=generator)


def plain(scores, temperature=1.0, top_k=0, top_p=1.0, allowed=None):
    """One row of scores (list of float) -> list of probabilities."""
    n = len(scores)
    scores = [s if allowed is None or allowed[i] else -math.inf for i, s in enumerate(scores)]
    order = sorted(range(n), key=lambda i: -scores[i])
    if temperature <= 0:
        return [float(i == order[0]) for i in range(n)]
    scores = [s / temperature for s in scores]
    alive = set(order[:top_k]) if 0 < top_k < n else set(range(n))
    weight = [math.exp(s - scores[order[0]]) if i in alive else 0.0 for i, s in enumerate(scores)]
    total, mass, kept = sum(weight), 0.0, []
    for i in order:
        if top_p < 1 and kept and mass >= max(top_p, 0.0):
            break
        kept.append(i)
        mass += weight[i] / total
    total = sum(weight[i] for i in kept)
    return [weight[i] / total if i in kept else 0.0 for i in range(n)]


@pytest.mark.parametrize("temperature", [0, 1e-7, 0.3, 1, 5])
@pytest.mark.parametrize("top_p", [0, 1e-9, 0.5, 0.9, 1])
def test_every_corner_of_the_settings(logits, temperature, top_p):
    for top_k in (0, 1, 2, VOCAB - 1, VOCAB, VOCAB + 1, 100_000):
        p = token_law(logits, LawSettings(temperature, top_k, top_p)).exp()
        assert p.dtype == torch.float32
        for row, scores in zip(p.flatten(0, 1), logits.flatten(0, 2)):
            want = torch.tensor(plain(scores.tolist(), temperature, top_k, top_p))
            assert torch.allclose(row, want, atol=2e-5), (temperature, top_k, top_p, row, want)
            assert torch.equal(row > 0, want > 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_logits_are_lifted_before_anything_else(dtype, generator):
    """The law of bf16 logits is the fp32 law of those very numbers, summing to 1 far below bf16 rounding."""
    logits = (3 * torch.randn(1, 2, 1, 4000, generator=generator)).to(dtype)
    settings = LawSettings(0.8, 500, 0.9, 3.0)
    low, high = token_law(logits, settings), token_law(logits.float(), settings)
    assert torch.equal(low, high)
    assert abs(float(low.exp().sum()) - 1) < 1e-5


def test_temperature_zero_takes_the_lowest_of_equals():
    logits = torch.tensor([1.0, 3.0, 3.0, 2.0, 3.0]).view(1, 1, 1, -1)
    p = token_law(logits, LawSettings(0.0)).exp()
    assert p.flatten().tolist() == [0, 1, 0, 0, 0]


def test_top_k_keeps_all_tied_at_the_edge():
    kept = keep_top_k(torch.tensor([3.0, 1.0, 2.0, 2.0]), 2)
    assert torch.isfinite(kept).tolist() == [True, False, True, True]


def test_top_p_keeps_the_token_that_crosses_the_line():
    scores = torch.tensor([0.5, 0.3, 0.2]).log()
    for top_p, count in ((0.0, 1), (0.49, 1), (0.51, 2), (0.79, 2), (0.81, 3), (1.0, 3)):
        assert int(torch.isfinite(keep_top_p(scores, top_p)).sum()) == count, top_p
    assert torch.isfinite(keep_top_p(scores.flip(0), 0.51)).tolist() == [False, True, True]


def test_top_p_is_taken_after_top_k():
    """Mass is counted among the survivors: the same order for drafts and targets."""
    scores = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().view(1, 1, 1, -1)
    p = token_law(scores, LawSettings(top_k=2, top_p=0.55)).exp().flatten()
    assert (p > 0).tolist() == [True, False, False, False]  # 0.4 / 0.7 reaches 0.55 alone


def test_mass_outside_of_the_allowed_ids_is_nothing(logits):
    allowed = torch.tensor([True, False, True, True, False, True, False, True, True])
    for settings in (LawSettings(), LawSettings(0.7, 3), LawSettings(top_p=0.5), LawSettings(0.0)):
        p = token_law(logits, settings, allowed=allowed).exp()
        assert (p[..., ~allowed] == 0).all()
        for row, scores in zip(p.flatten(0, 1), logits.flatten(0, 2)):
            want = plain(scores.tolist(), settings.temperature, settings.top_k, settings.top_p, allowed.tolist())
            assert torch.allclose(row, torch.tensor(want), atol=2e-5)


def test_guidance_formula(generator):
    logits = torch.randn(2, 2, 3, VOCAB, generator=generator)
    c, u = logits[:, 0].double(), logits[:, 1].double()
    for cfg in (0.0, 1.0, 2.5, 7.5, -1.0):
        assert torch.allclose(guide(logits, cfg).double(), u + cfg * (c - u), atol=1e-5)
        c_log, u_log = c.log_softmax(-1), u.log_softmax(-1)
        got = guide(logits, cfg, "logprobs").double()
        assert torch.allclose(got, u_log + cfg * (c_log - u_log), atol=1e-5)
    assert torch.allclose(guide(logits, 1.0), logits[:, 0], atol=1e-6)
    assert torch.equal(guide(logits[:, :1], 7.5), logits[:, 0])  # one stream: nothing to guide with


def test_both_forms_of_guidance_give_one_law_without_filters(generator):
    """They differ by a constant a row, so only the scale of temperature could tell them apart - and it cannot."""
    logits = torch.randn(1, 2, 3, VOCAB, generator=generator)
    for settings in (LawSettings(cfg=3.0), LawSettings(0.7, 4, 0.9, 3.0)):
        plain, logs = token_law(logits, settings).exp(), token_law(logits, settings, "logprobs").exp()
        assert torch.allclose(plain, logs, atol=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("stream", [0, 1])
def test_a_row_that_is_not_finite_is_nan_and_no_other(bad, stream, generator):
    """The loop looks at one column of log p: it must be NaN there wherever the bad number was."""
    filters = ((0.0, 0, 1.0), (1.0, 0, 1.0), (0.8, 3, 1.0), (0.8, 0, 0.5), (0.8, 3, 0.5))
    for (temperature, k, top_p), column in itertools.product(filters, (0, 4, VOCAB - 1)):
        logits = torch.randn(2, 2, 3, VOCAB, generator=generator)
        logits[1, stream, 2, column] = bad
        log_p = token_law(logits, LawSettings(temperature, k, top_p, cfg=2.0))
        spoiled = log_p[..., 0].isnan()
        assert spoiled.tolist() == [[False] * 3, [False, False, True]], (temperature, k, top_p, column)


@pytest.mark.parametrize("size", [1e4, 1e-4])
def test_extreme_logits_give_laws(size, generator):
    logits = size * torch.randn(2, 1, 2, VOCAB, generator=generator)
    for settings in (LawSettings(), LawSettings(0.01, 3, 0.9), LawSettings(1e4)):
        p = token_law(logits, settings).exp()
        assert torch.allclose(p.sum(-1), torch.ones(2, 2), atol=1e-5)


def test_tiniest_temperature_is_greedy_and_no_error(logits):
    """A temperature so small that the division overflows still has a law: the best token."""
    p = token_law(logits, LawSettings(1e-40)).exp()
    assert torch.equal(p.argmax(-1), logits[:, 0].argmax(-1))
    assert not p.isnan().any()
