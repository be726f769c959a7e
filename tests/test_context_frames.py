"""The frames that a clip goes on from: which ones a family takes by itself, and their place in a run."""

from types import SimpleNamespace

import pytest
import torch
from scd_pack.scd_core.errors import UserError
from scd_pack.scd_core.given import ENDS, Reading, for_plan, prepare
from scd_pack.scd_core.models.cosmos import CosmosFamily
from scd_pack.scd_core.models.families import FAMILIES
from scd_pack.scd_core.models.family import Family, Size
from scd_pack.scd_core.plan import TokenPlan


def levels_of(family, cfg, count, end="auto"):
    """Brightness (frame number) of the frames that are kept of a clip of `count` ones."""
    image = (torch.arange(count) / 100).view(-1, 1, 1, 1).expand(-1, 8, 8, 3)
    given = prepare(image, None, family, cfg, Reading(clip=True, end=end))
    return [round(100 * float(frame.mean())) for frame in given.frames]


def painter(kind, **values):
    """A family of `kind` that draws clips of 33 frames, without any file."""
    return type("Painter", (kind,), {"__init__": lambda self: None, "name": "painter", **values})()


@pytest.mark.parametrize("count, wanted", [(40, range(31, 40)), (9, range(9)), (3, [0, 1] + [2] * 7), (1, [0])])
def test_cosmos_goes_on_from_the_last_frames_as_its_own_program_does(count, wanted):
    cosmos = painter(CosmosFamily, sizes=(Size(64, 32, 33),))
    assert levels_of(cosmos, SimpleNamespace(factor=16, compression=8), count) == list(wanted)


def test_others_go_on_from_the_first_ones_and_a_choice_counts_for_all():
    cfg, sizes = SimpleNamespace(factor=8, compression=1), (Size(64, 32, 5),)
    for kind, own in ((Family, [0, 1, 2, 3, 4]), (type("Late", (Family,), {"context_end": "end"}), [3, 4, 5, 6, 7])):
        family = painter(kind, sizes=sizes)
        assert levels_of(family, cfg, 8) == own
        assert levels_of(family, cfg, 8, "start") == [0, 1, 2, 3, 4]
        assert levels_of(family, cfg, 8, "end") == [3, 4, 5, 6, 7]


def test_every_family_names_an_end_and_cosmos_alone_the_last():
    assert ENDS[0] == "auto", "the default of VQ Encode"
    assert {family.context_end for family in FAMILIES} == {"start", "end"}
    assert [family for family in FAMILIES if family.context_end == "end"] == [CosmosFamily]


def test_first_grids_fill_the_beginning_of_a_plan():
    codes, plan = torch.arange(12).view(1, 2, 2, 3), TokenPlan(4, 2, 3, 64)
    kept = torch.ones_like(codes, dtype=torch.bool)
    kept[0, 1, 1] = False
    whole, part = for_plan(codes, None, plan), for_plan(codes, kept, plan)
    assert whole.shape == part.shape == (1, 4, 2, 3) and (whole[:, 2:] == -1).all() and torch.equal(whole[:, :2], codes)
    assert part[0, 1].tolist() == [[6, 7, 8], [-1, -1, -1]]
    assert torch.equal(for_plan(codes, None, TokenPlan(2, 2, 3, 64)), codes)
    with pytest.raises(UserError, match="hold 2 frames of tokens, this run draws 1: raise frames"):
        for_plan(codes, None, TokenPlan(1, 2, 3, 64))
