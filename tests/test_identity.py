"""Seed-exact draws the tokens of autoregressive sampling, and a sample is the same in any company (fp32)."""

import pytest
import torch
from scd_pack.scd_core.acceptance import METHODS
from scd_pack.scd_core.drafting import STARTS
from scd_pack.scd_core.law import LawSettings
from scd_pack.scd_core.plan import TokenPlan
from scd_tests.toys import draw, row_end_plan, tiny_decoder

PICTURE = TokenPlan(1, 5, 6, 12)
CLIP = TokenPlan(3, 3, 4, 12)
ROW_ENDS = row_end_plan()
SHIFTED = row_end_plan(base=3, end=1)  # picture ids do not start at 0; a row end outside them
PLANS = {"picture": PICTURE, "clip": CLIP, "row ends": ROW_ENDS, "shifted ids": SHIFTED}
GUIDED = LawSettings(temperature=0.9, top_k=7, top_p=0.95, cfg=2.0)
SEED = (1 << 63) + 12345


@pytest.fixture(scope="module")
def decoder():
    return tiny_decoder()


def kept_cells(plan, batch=1):
    kept = torch.full((batch, plan.frames, plan.rows, plan.cols), -1)
    kept[:, 0, 0, :2] = torch.tensor([1, 2])
    kept[:, -1, 1] = 3
    kept[:, -1, -1, -1] = 7
    return kept


def same(decoder, plan, law=None, kept=None, batch=3, **settings):
    want, slow = draw(decoder, plan, kept=kept, law=law, method="autoregressive", seed=SEED, batch=batch)
    got, fast = draw(decoder, plan, kept=kept, law=law, method="seed-exact", seed=SEED, batch=batch, **settings)
    assert torch.equal(got, want), settings
    assert fast.sha256_tokens == slow.sha256_tokens
    assert slow.passes == max(map(sum, slow.accepted)) and fast.passes <= slow.passes
    return fast


@pytest.mark.parametrize("window", [1, 2, 7, 16, 64])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_every_window(decoder, plan, window):
    report = same(decoder, plan, window=window)
    assert report.passes == report.tokens // 3 if window == 1 else report.passes < report.tokens // 3


@pytest.mark.parametrize("start", [*STARTS, "auto"])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_every_start(decoder, plan, start):
    same(decoder, plan, window=7, start=start)


@pytest.mark.parametrize("window", [2, 16])
@pytest.mark.parametrize("memory", [True, False])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_guided_with_kept_tokens(decoder, plan, memory, window):
    """Streams of three and one prompt tokens, all processors on, given cells before, in and behind the window."""
    same(decoder, plan, law=GUIDED, kept=kept_cells(plan), memory=memory, window=window)


def test_unequal_kept_tokens(decoder):
    kept = torch.cat([kept_cells(PICTURE), torch.full((1, 1, 5, 6), -1), torch.full((1, 1, 5, 6), 4)])
    kept[2, 0, 2, 3] = -1
    report = same(decoder, PICTURE, kept=kept, window=7, law=GUIDED)
    assert report.per_sample[2] == 1 and report.per_sample[1] == report.passes


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("plan", [PICTURE, ROW_ENDS], ids=["picture", "row ends"])
def test_row_of_a_batch_is_the_single_run(decoder, plan, method):
    batch, whole = draw(decoder, plan, method=method, seed=SEED, batch=4, window=7, first_sample=1, law=GUIDED)
    for k in (0, 3):
        alone, report = draw(decoder, plan, method=method, seed=SEED, window=7, first_sample=1 + k, law=GUIDED)
        assert torch.equal(alone[0], batch[k])
        assert report.sha256_tokens != whole.sha256_tokens
    assert method == "jacobi" or len(set(map(tuple, batch.tolist()))) == 4


@pytest.mark.parametrize("method", [m for m in METHODS if not METHODS[m].sequential])
def test_passes_of_a_row_are_those_of_the_single_run(decoder, method):
    """Not the tokens alone: company must not cost a sample passes either."""
    _, whole = draw(decoder, PICTURE, method=method, seed=5, batch=4, window=9)
    for k in range(4):
        _, report = draw(decoder, PICTURE, method=method, seed=5, window=9, first_sample=k)
        assert report.accepted[0] == whole.accepted[k]
        assert (report.visits[0] == whole.visits[k]).all()


@pytest.mark.parametrize("window", [2, 7])
@pytest.mark.parametrize("start", ["uniform", "left", "above", "left_law", "above_law"])
@pytest.mark.parametrize("method", ["sjd", "scd-gumbel", "seed-exact"])
def test_unequal_kept_tokens_in_company(decoder, method, start, window):
    """A sample with many given tokens beside one with none draws what it draws alone."""
    kept = torch.full((3, 1, 5, 6), -1)
    kept[1, 0, :2] = torch.arange(6)
    kept[2, 0, :2, 3:] = 5
    batch, _ = draw(decoder, PICTURE, method=method, seed=8, batch=3, window=window, kept=kept, start=start)
    for k in range(3):
        alone, _ = draw(decoder, PICTURE, method=method, seed=8, window=window, kept=kept[k : k + 1], start=start,
                        first_sample=k)
        assert torch.equal(alone[0], batch[k]), k


@pytest.mark.parametrize("method", METHODS)
def test_same_seed_same_tokens(decoder, method):
    first, _ = draw(decoder, PICTURE, method=method, seed=3, batch=2, window=7)
    torch.manual_seed(99)  # the global generator plays no part
    state = torch.get_rng_state()
    again, _ = draw(decoder, PICTURE, method=method, seed=3, batch=2, window=7)
    assert torch.equal(first, again)
    assert torch.equal(state, torch.get_rng_state())
    other, _ = draw(decoder, PICTURE, method=method, seed=3 + (1 << 32), batch=2, window=7)
    assert method == "jacobi" or not torch.equal(first, other)


def test_window_changes_the_tokens_of_the_other_methods(decoder):
    """Which is why only seed-exact may choose its window by measurement."""
    for method in ("sjd", "scd-maximal", "scd-gumbel"):
        two, _ = draw(decoder, PICTURE, method=method, seed=3, batch=2, window=2)
        nine, _ = draw(decoder, PICTURE, method=method, seed=3, batch=2, window=9)
        assert not torch.equal(two, nine)


def test_guidance_is_no_idle_number(decoder):
    """The unconditional stream takes part for cfg other than 1, and only then."""
    plain, _ = draw(decoder, PICTURE, seed=3, window=7)
    guided, _ = draw(decoder, PICTURE, seed=3, window=7, law=LawSettings(cfg=3.0))
    assert not torch.equal(plain, guided)
