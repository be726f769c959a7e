"""The drawn sequences have exactly the model's law: the real loop on chains whose joint law can be written down.

Every sample of a batch is a chain of its own (noise is keyed by sample), so one ragged batch is one experiment.
The same test must reject every rule of `biased`.
"""

import pytest
import torch
from scd_pack.scd_core.acceptance import METHODS
from scd_pack.scd_core.drafting import STARTS
from scd_pack.scd_core.law import LawSettings
from scd_tests.biased import BIASED
from scd_tests.statistics import independent, law_test
from scd_tests.toys import pairwise, prefix_tables, run

CHAINS = 20_000
CUT = LawSettings(top_k=2)
LOSSLESS = ("autoregressive", "sjd", "scd-maximal", "scd-gumbel", "seed-exact")
WITH_LAWS = ("sjd", "scd-maximal", "scd-gumbel")


@pytest.fixture(scope="module")
def cut():
    """Seven tokens of three, the least likely one cut off: 128 sequences of positive law among 2187."""
    return prefix_tables(3, 7, seed=11, scale=2.0)


@pytest.fixture(scope="module")
def pairs():
    """Five tokens of four, logits summed over pairs, nothing cut off."""
    return pairwise()


def check(toy, law=None, chains=CHAINS, seed=1, **settings):
    codes, report = run(toy, batch=chains, law=law, seed=seed, **settings)
    result = law_test(toy.index(codes), toy.joint(law))
    assert result.exact, result
    return codes, report


CASES = [("autoregressive", 1), *((method, window) for method in LOSSLESS[1:] for window in (2, 4, 20))]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "window"), CASES)
def test_cut_law(cut, method, window):
    _, report = check(cut, CUT, method=method, window=window, start="random")
    assert report.lossless
    assert max(report.per_sample) <= cut.plan.length
    if method != "autoregressive":
        assert report.tokens_per_pass > 1.2


@pytest.mark.slow
@pytest.mark.parametrize("method", LOSSLESS)
def test_full_law(pairs, method):
    check(pairs, method=method, window=20)


@pytest.mark.slow
@pytest.mark.parametrize("law", [LawSettings(temperature=0.6), LawSettings(temperature=1.7, top_k=3)], ids=str)
def test_tempered_law(pairs, law):
    check(pairs, law, method="scd-maximal", window=4)


@pytest.mark.slow
@pytest.mark.parametrize("start", [s for s in STARTS if s != "random"])
@pytest.mark.parametrize("method", ["scd-maximal", "scd-gumbel"])
def test_every_start(method, start):
    shape = (3, 1, 2) if "frame" in start else (1, 3, 2)
    check(prefix_tables(3, 6, seed=5, shape=shape), chains=CHAINS // 2, method=method, window=3, start=start)


@pytest.mark.slow
@pytest.mark.parametrize("name", BIASED)
def test_biased_rule_is_seen(cut, name):
    """Power: whatever this batch cannot tell from exact, `test_cut_law` would let pass."""
    codes, _ = run(cut, variant=BIASED[name], batch=CHAINS, law=CUT, seed=1, window=20, start="random")
    result = law_test(cut.index(codes), cut.joint(CUT))
    assert not result.exact
    assert result.clearly_biased, result


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stale law on acceptance", "law itself after a rejection"])
def test_mean_likelihood_sees_the_bias(pairs, name):
    """The mean NLL alone is enough for some rules, which is what makes it usable on real models."""
    codes, _ = run(pairs, variant=BIASED[name], batch=CHAINS, seed=1, window=20, start="uniform")
    assert abs(law_test(pairs.index(codes), pairs.joint()).z) > 6


@pytest.mark.slow
@pytest.mark.parametrize("method", [*WITH_LAWS, "seed-exact"])
def test_kept_tokens_leave_the_law_of_the_rest(method):
    """Given tokens act as context and never as draws, first, in the middle and last."""
    toy = prefix_tables(3, 6, seed=5, shape=(1, 3, 2))
    given = {0: 2, 3: 1, 5: 0}
    kept = torch.tensor([given.get(j, -1) for j in range(6)]).view(1, 1, 3, 2)
    codes, report = run(toy, method=method, batch=CHAINS, window=2, kept=kept, start="left_law", seed=2)
    result = law_test(toy.index(codes), toy.joint(given=given))
    assert result.exact, result
    assert report.tokens == 3 * CHAINS
    assert report.passes <= 3


@pytest.mark.slow
@pytest.mark.parametrize("method", ["scd-maximal", "scd-gumbel"])
def test_unequal_kept_tokens(method):
    """Samples of one batch may have different given tokens; each group has its own law."""
    toy, half = prefix_tables(3, 6, seed=5, shape=(1, 3, 2)), CHAINS // 2
    kept = torch.full((2 * half, 1, 3, 2), -1)
    given = ({0: 1, 1: 2, 2: 0}, {4: 1})
    for group, tokens in enumerate(given):
        for j, token in tokens.items():
            kept.view(2 * half, -1)[group * half : (group + 1) * half, j] = token
    codes, _ = run(toy, method=method, batch=2 * half, window=4, kept=kept, start="left_law", seed=4)
    for group, tokens in enumerate(given):
        result = law_test(toy.index(codes[group * half : (group + 1) * half]), toy.joint(given=tokens))
        assert result.exact, (group, result)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["scd-maximal", "scd-gumbel", "seed-exact"])
def test_samples_and_seeds_are_independent(pairs, method):
    """Neighbouring samples of a batch, and the same sample under neighbouring seeds, share nothing."""
    one, _ = run(pairs, method=method, batch=CHAINS // 2, window=20, seed=6)
    two, _ = run(pairs, method=method, batch=CHAINS // 2, window=20, seed=7)
    for j in range(pairs.plan.length):
        assert independent(one[0::2, j], one[1::2, j], pairs.vocab) > 1e-4
        assert independent(one[:, j], two[:, j], pairs.vocab) > 1e-4
    assert independent(one[:-2, 0], one[2:, 1], pairs.vocab) > 1e-4
    assert independent(one[:, 2], one[:, 2], pairs.vocab) < 1e-12  # the test sees a dependence when there is one


@pytest.mark.slow
def test_seed_exact_chains_are_the_autoregressive_ones(cut):
    """Not only the law: every one of the sequences is the same, for any window, start and memory."""
    want, _ = run(cut, method="autoregressive", batch=CHAINS // 2, law=CUT, seed=9)
    for settings in ({"window": 3, "start": "left"}, {"window": 20, "memory": False}):
        codes, report = run(cut, method="seed-exact", batch=CHAINS // 2, law=CUT, seed=9, **settings)
        assert torch.equal(codes, want), settings
        assert report.passes <= cut.plan.length


def test_jacobi_is_greedy(cut):
    """Temperature 0 whatever the settings say: every sample is the chain of best tokens."""
    codes, report = run(cut, method="jacobi", batch=3, law=LawSettings(temperature=3.0), window=20)
    prefix = 0
    for j, table in enumerate(cut.tables):
        best = int(table[prefix].argmax())
        assert (codes[:, j] == best).all()
        prefix = prefix * cut.vocab + best
    assert report.settings["temperature"] == 0


def test_every_lossless_method_is_tested():
    assert {name for name, method in METHODS.items() if method.lossless} == {*LOSSLESS, "jacobi"}
