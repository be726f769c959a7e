"""Laws of the lossless methods on image models: two statistics of many pictures against the exact law of each token.

Miniatures of Janus-Pro (two streams of equal length) and LlamaGen (a class in front, 2-D rotary); their own settings
with guidance, then the plain law, where a bias is easiest to see.
"""

import shutil

import pytest
import torch
from scd_pack.scd_core.acceptance import METHODS
from scd_pack.scd_core.law import LawSettings
from scd_pack.scd_core.models.load import load_model
from scd_tests.biased import rule, stale
from scd_tests.janus_models import GOLDEN
from scd_tests.statistics import combined_z, entropy_z, randomised_pit, uniform_p
from scd_tests.toys import draw, teacher_log_law

pytestmark = pytest.mark.slow
PICTURES = 400  # of 16 tokens each
LOSSLESS = ("autoregressive", "sjd", "scd-maximal", "scd-gumbel", "seed-exact")
GUIDED = LawSettings(temperature=1.0, top_k=40, cfg=3.0)
PLAIN = LawSettings()
PROMPTS = {"janus": "a red fox in the snow", "llamagen": "3"}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """{name: (model, plan, streams)} in fp32."""
    place = tmp_path_factory.mktemp("models") / "deep" / "llamagen"
    place.mkdir(parents=True)
    shutil.copy(GOLDEN / "llamagen-c2i" / "model" / "c2i_B_64.pt", place)
    shutil.copy(GOLDEN / "llamagen-vq-ds16" / "model" / "vq_ds16_c2i.pt", place)
    found = {}
    for name, path in (("janus", GOLDEN / "janus-pro-hf" / "model"), ("llamagen", place)):
        model = load_model(path, "fp32")
        plan = model.family.plan(model.family.size())
        streams = model.family.streams(model.family.text.encode(PROMPTS[name]), None, plan)
        found[name] = (model, plan, streams)
    return found


def statistics(situation, law, batch=PICTURES, window=6, **settings):
    """(z of the entropy martingale over all pictures, p-value of the PIT, report)."""
    model, plan, streams = situation
    streams = streams[: 1 if law.cfg == 1 else 2]
    tokens, report = draw(
        model.decoder, plan, streams, family=model.family, law=law, batch=batch, window=window, seed=17, **settings
    )
    log_p = teacher_log_law(model.decoder, model.family, plan, streams, tokens, law)
    u = randomised_pit(log_p, tokens - plan.base, torch.Generator().manual_seed(1))
    return combined_z(entropy_z(log_p, tokens - plan.base)), uniform_p(u), report


@pytest.mark.parametrize("law", [PLAIN, GUIDED], ids=["plain", "guided"])
@pytest.mark.parametrize("method", LOSSLESS)
@pytest.mark.parametrize("name", PROMPTS)
def test_law(models, name, method, law):
    """6400 tokens are neither too likely nor too unlikely, and as often at each place of their law as they should."""
    z, p, report = statistics(models[name], law, method=method)
    assert abs(z) < 4 and p > 1e-4, (name, method, z, p)
    if method != "autoregressive":
        assert max(report.per_sample) <= 16 and report.tokens_per_pass > 1


@pytest.mark.parametrize("name", PROMPTS)
def test_stale_laws_are_seen(models, name):
    """Power: bookkeeping that keeps the old law of an accepted draft fails the same test."""
    z, p, _ = statistics(models[name], PLAIN, variant=rule(METHODS["scd-maximal"], remember=stale))
    assert abs(z) > 4 or p < 1e-4, (z, p)
