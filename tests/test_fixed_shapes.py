"""Passes of one shape, as an accelerator gets them: padding changes no token, and no pass reads the device inside."""

import pytest
import torch
from scd_pack.scd_core import layout, loop
from scd_pack.scd_core.law import LawSettings
from scd_pack.scd_core.models import session
from scd_pack.scd_core.plan import TokenPlan
from scd_tests.toys import draw, row_end_plan, tiny_decoder
from torch.utils._python_dispatch import TorchDispatchMode

KEPT = torch.where(torch.arange(30).view(1, 1, 5, 6) % 4 == 1, 3, -1)
CASES = {
    "seed-exact": {},
    "a draft tree": {"nodes": 6},
    "scd-maximal": {"method": "scd-maximal"},
    "two streams": {"method": "scd-gumbel", "law": LawSettings(cfg=3.0)},
    "three pictures": {"batch": 3, "nodes": 4},
    "line ends": {"plan": row_end_plan(), "nodes": 3},
    "kept tokens": {"kept": KEPT, "nodes": 3},
}
# settings, and how many sizes the passes have: row blocks take whole rows, as many as they need
ROWS = {
    "pjd": ({"method": "pjd"}, 1),
    "pjd-c": ({"method": "pjd-c"}, 1),
    "short windows": ({"method": "pjd-c", "window": 2, "row_context": 3, "batch": 3}, 1),
    "zipar": ({"method": "zipar", "row_context": 2}, 1),
    "rows in sequence": ({"method": "pjd-c", "row_context": 6, "batch": 3}, 1),
    "exact rounds": ({"method": "row-block", "rounds": 0, "law": LawSettings(cfg=3.0)}, 1),
    "two rounds": ({"method": "row-block", "rounds": 2}, 2),
    "two rows at once": ({"method": "row-block", "rounds": 2, "block_rows": 2}, 3),
    "heads": ({"method": "ssd", "rounds": 2, "block_rows": 2, "batch": 3}, 3),
    "line ends": ({"method": "pjd-c", "plan": row_end_plan()}, 1),
    "line ends in blocks": ({"method": "row-block", "plan": row_end_plan()}, 2),
    "three pictures": ({"method": "pjd", "batch": 3, "law": LawSettings(cfg=3.0)}, 1),
    "a clip": ({"method": "pjd-c", "plan": TokenPlan(2, 3, 4, 12)}, 1),
    "kept tokens": ({"method": "pjd-c", "kept": KEPT}, 2),
    "kept rows": ({"method": "zipar", "kept": torch.where(torch.arange(30).view(1, 1, 5, 6) // 6 % 4 > 1, 3, -1)}, 2),
    "kept tokens in blocks": ({"method": "row-block", "kept": KEPT}, 2),
}
PLAN = TokenPlan(1, 5, 6, 12)
READS = ("aten._local_scalar_dense", "aten.nonzero", "aten.is_nonzero")


class NoReads(TorchDispatchMode):
    """Fails where a value travels from the device to the host."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert not str(func).startswith(READS), f"{func} reads the device inside of a pass"
        return func(*args, **(kwargs or {}))


@pytest.fixture
def shapes(monkeypatch):
    """Shapes of all passes: (inputs, keys)."""
    seen, plain, step = set(), session.Session.window, session.KVCache.step

    def window(self, tokens, *args):
        with NoReads():
            logits = plain(self, tokens, *args)
        seen.add(tokens.shape[1])
        return logits

    def planned(self, slots, length, dtype, *seeing):
        seen.add(("keys", length))
        return step(self, slots, length, dtype, *seeing)

    monkeypatch.setattr(session.Session, "window", window)
    monkeypatch.setattr(session.KVCache, "step", planned)
    return seen


def run(plan=PLAN, **settings):
    return draw(tiny_decoder(), plan, seed=5, **settings)


def inputs(shapes):
    return {s for s in shapes if isinstance(s, int)}


@pytest.mark.parametrize("case", CASES)
def test_every_pass_has_the_same_shape(case, shapes, monkeypatch):
    """Also the last ones, whose windows end with the picture, and those without a candidate for a tree."""
    want, report = run(window=8, **CASES[case])
    assert len(inputs(shapes)) > 1, "without padding the last windows are shorter"
    shapes.clear()
    for module in (loop, session):
        monkeypatch.setattr(module, "fixed_shapes", lambda device: True)
    got, padded = run(window=8, **CASES[case])
    assert len(inputs(shapes)) == 1
    assert torch.equal(got, want) and padded.passes == report.passes and padded.accepted == report.accepted


@pytest.mark.parametrize("case", ROWS)
def test_passes_by_rows_have_few_shapes(case, shapes, monkeypatch):
    """One where rows run side by side, whatever they are about; multiples of it where many tokens come at once."""
    settings, sizes = ROWS[case]
    settings = {"window": 4, **settings}
    want, report = run(**settings)
    free = inputs(shapes)
    shapes.clear()
    for module in (layout, session):
        monkeypatch.setattr(module, "fixed_shapes", lambda device: True)
    got, padded = run(**settings)
    found = inputs(shapes)
    assert torch.equal(got, want) and padded.passes == report.passes and padded.accepted == report.accepted
    assert len(found) == sizes < len(free) and all(size % min(found) == 0 for size in found)
    assert max(found) < max(free) + min(found)


def test_keys_are_looked_at_in_steps(shapes, monkeypatch):
    """Few lengths in a run instead of one a pass; never more than the cache has."""
    monkeypatch.setattr(session, "KEYS", 16)
    want, _ = run(window=4)
    free = {s for s in shapes if not isinstance(s, int)}
    shapes.clear()
    monkeypatch.setattr(session, "fixed_shapes", lambda device: True)
    got, _ = run(window=4)
    stepped = {s for s in shapes if not isinstance(s, int)}
    assert torch.equal(got, want) and len(stepped) < len(free)
    prompt, last = min(stepped), max(stepped)
    assert all(keys % 16 == 0 for _, keys in stepped - {prompt, last})


@pytest.mark.parametrize("device, fixed", [("cpu", False), ("cuda", True), ("mps", True)])
def test_where_shapes_are_fixed(device, fixed):
    assert session.fixed_shapes(device) is fixed
