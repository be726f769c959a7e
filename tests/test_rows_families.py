"""Rows on every family: with and without forced row ends, pictures and clips, one stream and two.

A row that waits for the whole row above is nothing new to any model, so there ZipAR draws the tokens of
one-at-a-time sampling, to the bit.
"""

import pytest
import torch
from scd_pack.scd_core.law import LawSettings
from scd_pack.scd_core.models.family import Size
from scd_pack.scd_core.models.load import BUNDLED, load_model
from scd_pack.scd_core.prompt import Prompt
from scd_tests.janus_models import GOLDEN
from scd_tests.toys import draw

# miniatures with a size of some rows
SIZES = {
    "anole-hf": None,
    "cosmos-ar-v2w": Size(48, 32, 9),
    "emu3-hf": Size(12, 8),
    "janus-pro-hf": None,
    "llamagen-c2i": None,
    "lumina-mgpt-2": None,
    "lumina-mgpt-hf": Size(64, 64),
    "simplear": Size(64, 96),
}


@pytest.fixture(scope="module", params=[*SIZES, "bundled picture", "bundled clip"])
def situation(request):
    """(decoder, plan, settings) of a family."""
    if request.param.startswith("bundled"):
        model = load_model(BUNDLED, "fp32")
        plan = model.family.plan(model.family.size(frames=1 if request.param.endswith("picture") else 2))
    else:
        model = load_model(GOLDEN / request.param / "model", "fp32")
        plan = model.family.plan(SIZES[request.param] or model.family.size())
    text = "3" if "llamagen" in request.param else "a red fox"
    # Cosmos reads features that another program made of a text; without one it goes on from frames alone
    prompt = Prompt("") if "cosmos" in request.param else model.family.text.encode(text)
    streams = model.family.streams(prompt, None, plan)
    return model.decoder, plan, {"streams": streams, "family": model.family, "law": LawSettings(cfg=1.5), "seed": 3}


def test_full_context_is_one_at_a_time(situation):
    decoder, plan, settings = situation
    if plan.length > 100:
        kept = torch.full((1, plan.frames, plan.rows, plan.cols), -1)
        kept[:, :, : plan.rows - 3] = 5  # the last rows will do
        settings = {**settings, "kept": kept}
    want, _ = draw(decoder, plan, method="autoregressive", **settings)
    got, report = draw(decoder, plan, method="zipar", row_context=plan.cols, **settings)
    assert torch.equal(got, want) and report.lossless


@pytest.mark.parametrize("method", ["pjd", "pjd-c", "zipar", "row-block"])
def test_draws_and_commits(situation, method):
    decoder, plan, settings = situation
    tokens, report = draw(decoder, plan, method=method, batch=2, window=3, row_context=1, **settings)
    codes = plan.codes(tokens)
    assert ((codes >= 0) & (codes < plan.vocab)).all()
    forced = plan.forced >= 0
    assert (tokens[:, forced] == plan.forced[forced]).all()
    lines = plan.frames * plan.rows
    if method == "zipar":
        assert report.per_sample == [lines - 1 + plan.cols] * 2
    if method == "row-block":
        assert max(report.per_sample) <= plan.cols + 2 * (lines - 1)
    assert not report.lossless and all(min(a) >= 1 for a in report.accepted)
