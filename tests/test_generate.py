"""From a request to codes: defaults, refusals, and the same result as the loop by itself."""

import dataclasses

import pytest
import torch
from scd_pack.scd_core.acceptance import DEFAULT_METHOD, METHODS
from scd_pack.scd_core.errors import UserError
from scd_pack.scd_core.generate import OWN, Request, generate, law_settings
from scd_pack.scd_core.law import LawSettings
from scd_pack.scd_core.models.family import Defaults, Size
from scd_pack.scd_core.plan import TokenPlan
from scd_pack.scd_core.prompt import Prompt, Stream
from scd_tests.toys import ToyFamily, draw, tiny_decoder


class Shop(ToyFamily):
    """A family with sizes, defaults and prompts whose words are token ids."""

    defaults = Defaults(temperature=0.9, top_k=9, top_p=0.95, cfg=2.0)
    sizes = (Size(24, 20), Size(16, 16), Size(16, 16, 3))

    def plan(self, size):
        return TokenPlan(size.frames, size.height // 4, size.width // 4, 12, width=size.width, height=size.height)

    def streams(self, prompt, negative, plan):
        texts = (prompt.text, negative.text if negative is not None else "15")
        return tuple(Stream(ids=torch.tensor([int(word) for word in text.split()])) for text in texts)


PROMPT = Prompt("12 13 14", notes=("a note on the prompt",))
OWN_LAW = LawSettings(0.9, 9, 0.95, 2.0)


@pytest.fixture(scope="module")
def decoder():
    return tiny_decoder()


def ask(decoder, prompt=PROMPT, negative=None, kept=None, callback=None, **values):
    return generate(decoder, Shop(), prompt, negative, Request(**{"window": 7, **values}), kept, callback=callback)


def test_own_values_are_filled_in():
    assert law_settings(Request(), Shop()) == OWN_LAW
    assert law_settings(Request(temperature=0, top_k=0, top_p=0, cfg=1), Shop()) == LawSettings(0, 0, 0, 1)
    for name, value in (("temperature", 0.3), ("top_k", 5), ("top_p", 0.5), ("cfg", 0.0)):
        got = law_settings(Request(**{name: value}), Shop())
        assert got == dataclasses.replace(OWN_LAW, **{name: value})
    assert OWN == -1


def test_same_as_the_loop(decoder):
    drawn = ask(decoder, seed=5, batch=2)
    want, report = draw(decoder, TokenPlan(1, 5, 6, 12), family=Shop(), law=OWN_LAW, seed=5, batch=2, window=7)
    assert torch.equal(drawn.codes, want.view(2, 1, 5, 6))
    assert drawn.report.sha256_tokens == report.sha256_tokens and drawn.report.notes == ["a note on the prompt"]
    assert (drawn.plan.width, drawn.plan.height) == (24, 20)
    assert drawn.report.method == DEFAULT_METHOD == "seed-exact"


def test_sizes(decoder):
    assert ask(decoder, width=16).codes.shape == (1, 1, 4, 4)
    assert ask(decoder, frames=3).codes.shape == (1, 3, 4, 4)
    with pytest.raises(UserError, match=r"the toy cannot draw 20x20: choose one of 24x20; 16x16; 16x16, 3 frames"):
        ask(decoder, width=20, height=20)
    with pytest.raises(UserError, match="cannot draw anyxany with 4 frames"):
        ask(decoder, frames=4)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"method": "warp"}, "unknown method 'warp'"),
        ({"start": "warp"}, "unknown draft start 'warp'"),
        ({"seed": -1}, "seed -1 is outside"),
        ({"seed": 1 << 64}, "seed 18446744073709551616 is outside"),
        ({"batch": 0}, "batch size 0"),
        ({"window": -1}, "window -1"),
        ({"temperature": -0.5}, "temperature -0.5"),
        ({"temperature": float("nan")}, "temperature nan"),
        ({"temperature": float("inf")}, "temperature inf"),
        ({"top_k": -2}, "top_k -2"),
        ({"top_p": 1.5}, "top_p 1.5"),
        ({"top_p": float("nan")}, "top_p nan"),
        ({"cfg": float("nan")}, "cfg nan"),
        ({"cfg": float("inf")}, "cfg inf"),
    ],
    ids=lambda v: str(v) if isinstance(v, dict) else "",
)
def test_refused_in_one_sentence(decoder, values, sentence):
    with pytest.raises(UserError, match=sentence) as caught:
        ask(decoder, **values)
    assert "\n" not in str(caught.value)


def test_kept_tokens_that_do_not_fit(decoder):
    with pytest.raises(UserError, match=r"this run needs \(1, 1, 5, 6\)"):
        ask(decoder, kept=torch.zeros(1, 1, 4, 4, dtype=torch.int64))
    with pytest.raises(UserError, match="another codec"):
        ask(decoder, kept=torch.full((1, 1, 5, 6), 12))


def test_kept_top_half(decoder):
    first = ask(decoder, seed=1)
    kept = first.codes.clone()
    kept[:, :, 2:] = -1
    again = ask(decoder, seed=2, kept=kept)
    assert torch.equal(again.codes[:, :, :2], first.codes[:, :, :2])
    assert not torch.equal(again.codes, first.codes)
    assert again.report.tokens == 18
    assert torch.equal(ask(decoder, seed=1, kept=kept).codes, first.codes)  # the same seed completes it the same way


def test_every_setting_changes_the_picture(decoder):
    base = ask(decoder, seed=1).codes
    changes = ({"seed": 2}, {"temperature": 0.0}, {"temperature": 1.5}, {"top_k": 2}, {"top_p": 0.2}, {"cfg": 1.0},
               {"cfg": 6.0}, {"first_sample": 1}, {"method": "scd-maximal"}, {"method": "sjd"})
    for values in changes:
        assert not torch.equal(ask(decoder, **{"seed": 1, **values}).codes, base), values
    for prompt in ("14 13 12", "12"):
        assert not torch.equal(ask(decoder, Prompt(prompt), seed=1).codes, base)
    negative = Prompt("14 14", notes=("a note on the negative",))
    other = ask(decoder, negative=negative, seed=1)
    assert not torch.equal(other.codes, base) and other.report.notes[-1] == "a note on the negative"
    unguided = [ask(decoder, negative=n, seed=1, cfg=1).codes for n in (None, negative)]
    assert torch.equal(*unguided)  # cfg 1 never looks at the negative


def test_every_setting_that_must_not_change_the_picture_does_not(decoder):
    base = ask(decoder, seed=1).codes
    for values in ({"window": 3}, {"window": 0}, {"memory": False}, {"start": "above"}, {"method": "autoregressive"},
                   {"batch": 2}):
        assert torch.equal(ask(decoder, **{"seed": 1, **values}).codes[:1], base), values
    assert torch.equal(ask(decoder, seed=1, first_sample=1).codes, ask(decoder, seed=1, batch=2).codes[1:])


@pytest.mark.parametrize("method", METHODS)
def test_automatic_window_is_named_in_the_report(decoder, method):
    window = ask(decoder, method=method, window=0).report.settings["window"]
    assert 1 <= window <= 30 and (window == 1) >= METHODS[method].sequential
    if not METHODS[method].memory and not METHODS[method].sequential:
        assert window == (METHODS[method].window or 30)  # 32 of the table, cut to the sequence


@pytest.mark.parametrize("error", [ValueError, KeyError, KeyboardInterrupt])
def test_what_the_callback_raises_comes_out_as_it_is(decoder, error):
    """A host interrupts by an exception of its own; it must know it again."""

    def stop(progress):
        raise error("host says stop")

    with pytest.raises(error, match="host says stop") as caught:
        ask(decoder, callback=stop)
    assert caught.type is error
