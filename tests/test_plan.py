"""The plan: geometry, forced and kept tokens."""

import pytest
import torch
from scd_pack.scd_core.plan import TokenPlan
from scd_tests.toys import row_end_plan


def test_plain_grid():
    plan = TokenPlan(1, 3, 4, 10, base=5)
    assert plan.length == 12 and plan.row_stride == 4 and plan.frame_stride == 0
    assert (plan.fixed(2) == -1).all() and plan.fixed(2).shape == (2, 12)
    assert torch.equal(plan.codes(torch.arange(5, 17)[None]), torch.arange(12).view(1, 1, 3, 4))


def test_clip_strides():
    plan = TokenPlan(3, 2, 4, 10)
    assert (plan.length, plan.row_stride, plan.frame_stride) == (24, 4, 8)
    assert TokenPlan(1, 1, 5, 10).row_stride == 0  # no row above anywhere


def test_row_ends():
    plan = row_end_plan(rows=3, cols=4, vocab=10, base=5, end=2)
    assert (plan.length, plan.row_stride) == (15, 5)
    fixed = plan.fixed(2)
    assert torch.equal(fixed >= 0, (torch.arange(15) % 5 == 4).expand(2, -1)) and (fixed[fixed >= 0] == 2).all()
    tokens = torch.arange(5, 20)[None]
    want = torch.tensor([[0, 1, 2, 3], [5, 6, 7, 8], [10, 11, 12, 13]])
    assert torch.equal(plan.codes(tokens)[0, 0], want)


def test_cells_in_any_order():
    """A format that draws columns first: codes come back in raster order only if cells say so."""
    order = torch.arange(6).view(2, 3).t().flatten()
    plan = TokenPlan(1, 2, 3, 50, cells=order)
    kept = torch.arange(10, 16).view(1, 1, 2, 3)
    fixed = plan.fixed(1, kept)
    assert fixed[0].tolist() == [10, 13, 11, 14, 12, 15]


def test_codes_undo_fixed():
    """Keeping a whole picture and reading it back gives the picture, format tokens or not."""
    for plan in (TokenPlan(2, 3, 4, 10, base=5), row_end_plan(rows=3, cols=4, vocab=10, base=5, end=2)):
        kept = torch.randint(0, 10, (2, plan.frames, 3, 4), generator=torch.Generator().manual_seed(0))
        assert torch.equal(plan.codes(plan.fixed(2, kept)), kept)


def test_partly_kept():
    plan = row_end_plan(rows=3, cols=4, vocab=10, base=5, end=2)
    kept = torch.full((1, 1, 3, 4), -1)
    kept[0, 0, 1, 2] = 7
    fixed = plan.fixed(3, kept)
    assert fixed.shape == (3, 15) and (fixed[:, 7] == 12).all() and int((fixed >= 0).sum()) == 3 * 4
    fixed[0] = 9  # rows are independent, and the plan is not changed by what a run does with them
    assert (plan.fixed(3, kept)[1] == fixed[1]).all() and int((plan.forced >= 0).sum()) == 3


def test_kept_of_another_grid():
    plan = TokenPlan(1, 3, 4, 10)
    for shape in ((1, 1, 4, 3), (1, 2, 3, 4), (3, 1, 3, 4)):
        with pytest.raises(ValueError, match=r"grid \(.*this run needs \(2, 1, 3, 4\)"):
            plan.fixed(2, torch.zeros(shape, dtype=torch.int64))


@pytest.mark.parametrize("code", [10, -2, 16384])
def test_kept_of_another_codec(code):
    plan = TokenPlan(1, 3, 4, 10)
    kept = torch.zeros(1, 1, 3, 4, dtype=torch.int64)
    kept[0, 0, 1, 1] = code
    with pytest.raises(ValueError, match=f"{code}.*codes 0 to 9.*another codec"):
        plan.fixed(2, kept)
