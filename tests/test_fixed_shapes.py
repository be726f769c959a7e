"""Passes of one shape, as an accelerator gets them: padding changes no token, and no pass reads the device inside."""

import pytest
import torch
from scd_pack.scd_core import loop
from scd_pack.scd_core.law import LawSettings
from scd_pack.scd_core.models import session
from scd_pack.scd_core.plan import TokenPlan
from scd_tests.toys import draw, row_end_plan, tiny_decoder
from torch.utils._python_dispatch import TorchDispatchMode

CASES = {
    "seed-exact": {},
    "a draft tree": {"nodes": 6},
    "scd-maximal": {"method": "scd-maximal"},
    "two streams": {"method": "scd-gumbel", "law": LawSettings(cfg=3.0)},
    "three pictures": {"batch": 3, "nodes": 4},
    "line ends": {"plan": row_end_plan(), "nodes": 3},
    "kept tokens": {"kept": torch.where(torch.arange(30).view(1, 1, 5, 6) % 4 == 1, 3, -1), "nodes": 3},
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
