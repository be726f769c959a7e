"""The same seed and settings give the same tokens, whatever ran before, and the report holds all that it takes."""

import contextlib
import json

import pytest
import torch
from scd_pack.scd_core import __version__
from scd_pack.scd_core.acceptance import METHODS
from scd_pack.scd_core.errors import UserError
from scd_pack.scd_core.generate import Request, generate
from scd_pack.scd_core.models.family import Defaults, Size
from scd_pack.scd_core.models.load import load_model
from scd_pack.scd_core.origin import fingerprint
from scd_pack.scd_core.plan import TokenPlan
from scd_pack.scd_core.prompt import Prompt, Stream
from scd_tests.toys import ToyFamily, tiny_decoder

# Fingerprint of the bundled model's decoder, and SHA-256 of the tokens that it draws in fp32. Of 40 pictures and 32
# clips these are the ones whose closest decision (best against second of log p + G) is the widest: 0.0197 and 0.0377.
# Weights that are all changed by 1e-5 of themselves still give these tokens; the order of fp32 sums makes less.
BUNDLED = "ece70d024edd6dda"
PINS = {
    "picture": (
        {"first_sample": 2}, "fox on snow", "be971953a8607afe3ec90c6abea5a9068261584b3fbdfc603ca90454d46f7d3a",
    ),
    "clip": (
        {"first_sample": 28, "frames": 3}, "fox hopping on snow",
        "ddcec71cf49b9cfeaf785480c1914b386c7712dcef9bf2dee3f77eca12321a14",
    ),
}
MOVED = (
    "the bundled model draws other tokens for this seed. If {file} was replaced on purpose, take new pins. If not, and "
    "a change of this pack moved them, every picture that people saved a seed for has changed. If this machine is of a "
    "new kind ({device}, torch {torch}), its sums may differ by more than any before: compare "
    "autoregressive with seed-exact here before you take new pins."
)


class Shop(ToyFamily):
    title, defaults = "the toy shop", Defaults(temperature=0.9, top_k=9, top_p=0.95, cfg=2.0)
    sizes = (Size(20, 16), Size(12, 12, 3))

    def plan(self, size):
        return TokenPlan(size.frames, size.height // 4, size.width // 4, 12, width=size.width, height=size.height)

    def streams(self, prompt, negative, plan):
        texts = (prompt.text, negative.text if negative is not None else "15")
        return tuple(Stream(ids=torch.tensor([int(word) for word in text.split()])) for text in texts)


@pytest.fixture(scope="module")
def decoder():
    return tiny_decoder()


@pytest.fixture(scope="module")
def bundled():
    return load_model(dtype="fp32")


def ask(decoder, request, prompt="12 13", negative=None, **rest):
    return generate(decoder, Shop(), Prompt(prompt), negative and Prompt(negative), request, **rest)


def test_fingerprint_of_the_bundled_model(bundled):
    assert fingerprint(bundled.decoder) == BUNDLED, "the bundled model was replaced: take new pins for what it draws"


@pytest.mark.parametrize("name", PINS)
def test_bundled_tokens_are_those_of_every_release(bundled, name):
    settings, words, want = PINS[name]
    request = Request(window=32, nodes=0, **settings)
    drawn = generate(bundled.decoder, bundled.family, bundled.family.text.encode(words), request=request)
    assert drawn.report.sha256_tokens == want, MOVED.format(file=bundled.name, **drawn.report.origin)


@pytest.mark.parametrize("frames", [1, 3])
@pytest.mark.parametrize("method", METHODS)
def test_a_report_holds_all_that_a_repetition_needs(decoder, method, frames):
    """What is automatic was filled in, so that the repetition does not depend on what another machine would choose."""
    request = Request(method=method, seed=(1 << 63) + 5, batch=2, first_sample=3, frames=frames, relax=-1)
    drawn = ask(decoder, request, negative="14 15")
    data = json.loads(json.dumps(drawn.report.to_dict(), allow_nan=False))
    origin, again = data["origin"], Request(**data["origin"]["request"])
    # -1 and 0 stand for something automatic; these three are numbers of their own
    plain = {"relax_budget", "cfg", "nodes"}
    values = {name: v for name, v in origin["request"].items() if name not in plain}
    assert -1 not in [v for name, v in values.items() if name != "row_context"] and again.window and again.width
    repeated = ask(decoder, again, origin["prompt"], origin["negative"])
    assert torch.equal(repeated.codes, drawn.codes)
    assert repeated.report.origin == drawn.report.origin, "a repetition of a repetition is the same"
    assert (origin["pack"], origin["torch"]) == (__version__, torch.__version__) and "cpu" in origin["device"]
    assert data["dtype"] == "float32" and origin["fingerprint"] == fingerprint(decoder)


def test_report_names_model_and_given_tokens(bundled, decoder):
    prompt = bundled.family.text.encode("fox")
    origin = generate(bundled.decoder, bundled.family, prompt, request=Request(frames=2, window=64)).report
    assert origin.origin["model"] == "the bundled model" and origin.origin["prompt"] == "fox"
    for word in ("the bundled model", origin.origin["fingerprint"], __version__, torch.__version__, "cpu ("):
        assert word in origin.text()
    kept = torch.full((1, 1, 4, 5), -1)
    kept[..., 0] = 3
    hashes = [ask(decoder, Request(window=4), kept=k).report.origin["sha256_kept"] for k in (None, kept, kept + 1)]
    assert hashes[0] is None and hashes[1] != hashes[2] and len(hashes[1]) == 64


def test_fingerprints_tell_models_apart(decoder):
    assert fingerprint(tiny_decoder()) == fingerprint(decoder) != fingerprint(tiny_decoder(seed=2))
    assert fingerprint(tiny_decoder().bfloat16()) == fingerprint(decoder), "the dtype is told beside it"
    other = tiny_decoder()
    other.lm_head.weight.mul_(1.1)
    assert fingerprint(other) != fingerprint(decoder)


@pytest.mark.parametrize("method", ["seed-exact", "sjd", "scd-gumbel", "row-block"])
def test_what_ran_before_does_not_matter(decoder, method):
    request = Request(method=method, seed=9, batch=2, window=6)
    want = ask(decoder, request).codes
    before = {
        "other settings": lambda: ask(decoder, Request(method="jacobi", frames=3, batch=3, cfg=1)),
        "a global seed": lambda: torch.manual_seed(1).get_state() is None,
        "a stopped run": lambda: ask(decoder, request, callback=lambda progress: True),
        "a cancelled run": lambda: ask(decoder, request, callback=cancel),
        "a refused run": lambda: ask(decoder, request, kept=torch.zeros(1, 1, 1, 1, dtype=torch.int64)),
    }
    for name, run in before.items():
        with contextlib.suppress(KeyboardInterrupt, UserError):
            run()
        assert torch.equal(ask(decoder, request).codes, want), name


def cancel(progress):
    raise KeyboardInterrupt
