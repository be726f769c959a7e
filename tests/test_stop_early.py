"""Stop early and keep: what is decided stays as it is, the rest is filled in, and the report says so."""

import gc
import json
import os
import signal
import time
import weakref

import numpy as np
import pytest
import torch
from scd_pack.scd_core import __main__ as shell
from scd_pack.scd_core import loop
from scd_pack.scd_core.acceptance import METHODS
from scd_pack.scd_core.continuous.sampler import Settings as MarSettings
from scd_pack.scd_core.continuous.sampler import sample
from scd_pack.scd_core.generate import Request, generate
from scd_pack.scd_core.models.family import Size
from scd_pack.scd_core.partial import complete
from scd_pack.scd_core.plan import TokenPlan
from scd_pack.scd_core.prompt import Prompt, Stream
from scd_pack.scd_core.shell_stop import first_press
from scd_tests.continuous_toys import family_of, random_mar
from scd_tests.toys import ToyFamily, draw, row_end_plan, tiny_decoder

PICTURE = TokenPlan(1, 6, 6, 12)
CLIP = TokenPlan(8, 2, 3, 12)


@pytest.fixture(scope="module")
def decoder():
    return tiny_decoder()


class At:
    """A callback that ends the run in the first pass with `share` of all tokens decided."""

    def __init__(self, share):
        self.share, self.last = share, None

    def __call__(self, progress):
        assert self.last is None or not self.ended, "the run went on"
        self.last, self.ended = progress, progress.done >= self.share * progress.total
        return self.ended


def decided_of(stop, plan):
    """bool [B, N] positions that the progress calls decided."""
    if stop.last.settled is not None:
        return stop.last.settled
    return torch.arange(plan.length) < torch.tensor(stop.last.frontier)[:, None]


@pytest.mark.parametrize("plan", [PICTURE, CLIP, row_end_plan(base=3, end=1)], ids=["picture", "clip", "row ends"])
@pytest.mark.parametrize("method", METHODS)
def test_decided_tokens_stay_and_the_rest_is_there(decoder, method, plan):
    whole, _ = draw(decoder, plan, method=method, window=7, batch=2, seed=6)
    stop = At(0.4)
    tokens, report = draw(decoder, plan, method=method, window=7, batch=2, seed=6, callback=stop)
    decided = decided_of(stop, plan)
    assert torch.equal(tokens[decided], whole[decided])
    codes = plan.codes(tokens)
    assert ((codes >= 0) & (codes < 12)).all()
    assert torch.equal(tokens[:, plan.forced >= 0], whole[:, plan.forced >= 0]), "the format's tokens are there"
    assert report.stopped == stop.last.done < report.tokens == stop.last.total
    assert report.passes == stop.last.passes and not report.lossless
    assert sum(map(sum, report.accepted)) == report.stopped
    drafts = ~decided & (torch.from_numpy(report.visits).flatten(1) > 0) if plan.length == codes[0].numel() else None
    if drafts is not None and drafts.any():
        assert torch.equal(tokens[drafts], stop.last.tokens[drafts]), "present drafts are handed on"


def test_report_says_how_much(decoder):
    _, report = draw(decoder, PICTURE, window=7, callback=At(0.4))
    text, data = report.text(), json.loads(json.dumps(report.to_dict()))
    assert "(stopped early)" in text and f"stopped at {report.stopped} of 36 tokens" in text
    assert "lossy:" not in text and "same tokens as one-at-a-time" not in text
    assert data["stopped"] == report.stopped and data["lossless"] is False
    assert report.tokens_per_pass == report.stopped / report.passes
    _, done = draw(decoder, PICTURE, window=7)
    assert done.stopped is None and done.to_dict()["stopped"] is None and "stopped" not in done.text()


def test_stopping_in_the_last_pass_is_no_stop(decoder):
    want, _ = draw(decoder, PICTURE, window=7)
    tokens, report = draw(decoder, PICTURE, window=7, callback=lambda p: p.done == p.total)
    assert torch.equal(tokens, want) and report.stopped is None and report.lossless


def test_given_cells_and_finished_samples_are_untouched(decoder):
    kept = torch.full((2, 1, 6, 6), -1)
    kept[0, 0, 1:] = 5  # one row to draw: this sample ends long before the other
    kept[1, 0, 5] = 9
    whole, _ = draw(decoder, PICTURE, window=3, batch=2, kept=kept)
    tokens, report = draw(decoder, PICTURE, window=3, batch=2, kept=kept, callback=At(0.5))
    assert torch.equal(tokens[0], whole[0]) and (tokens[1, 30:] == 9).all()
    assert report.stopped < report.tokens == 36


def test_cells_without_a_draft_are_copies():
    """Above, in the first row from the left, in later frames from the frame before; drafts are never a source."""
    plan = TokenPlan(2, 3, 3, 50)
    tokens = torch.arange(10, 28)[None].clone()
    decided, drafted = torch.zeros(2, 1, 18, dtype=torch.bool)
    decided[0, :5] = True
    drafted[0, :7] = True
    got, frames = complete(plan, tokens, decided, drafted)
    first = [10, 11, 12, 13, 14, 15, 16, 14, 12]  # two drafts stay; the last two come from above them
    assert got.view(2, 9).tolist() == [first, [10, 11, 12, 13, 14, 12, 13, 14, 12]] and frames == 0
    decided[0, 1:] = False
    got, _ = complete(plan, tokens, decided, decided)
    assert (got == 10).all()
    decided[0, :13] = True
    assert complete(plan, tokens, decided, decided)[1] == 1


def test_whole_frames_are_those_of_every_sample():
    decided = torch.zeros(2, 48, dtype=torch.bool)
    decided[0, :30], decided[1, :15] = True, True
    assert complete(CLIP, torch.zeros(2, 48, dtype=torch.int64), decided, decided)[1] == 2
    decided[1, :9] = False  # a later frame alone does not count
    assert complete(CLIP, torch.zeros(2, 48, dtype=torch.int64), decided, decided)[1] == 0


class Shop(ToyFamily):
    title, sizes = "the toy shop", (Size(24, 24), Size(12, 8, 8))

    def plan(self, size):
        return TokenPlan(size.frames, size.height // 4, size.width // 4, 12, width=size.width, height=size.height)

    def streams(self, prompt, negative, plan):
        return Stream(ids=torch.tensor([12, 13])), Stream(ids=torch.tensor([15]))


@pytest.mark.parametrize(("share", "frames"), [(2.5 / 8, 2), (1 / 48, 1)])
def test_a_clip_ends_with_its_last_whole_frame(decoder, share, frames):
    ask = Request(window=7, frames=8, seed=4)
    whole = generate(decoder, Shop(), Prompt("x"), request=ask)
    drawn = generate(decoder, Shop(), Prompt("x"), request=ask, callback=At(share))
    assert drawn.codes.shape[1] in (frames, frames + 1), "a pass may end some tokens later"
    if share > 0.1:
        assert torch.equal(drawn.codes, whole.codes[:, : drawn.codes.shape[1]])
    assert f"ends after {drawn.codes.shape[1]} of 8 frames" in drawn.report.text()
    again = generate(decoder, Shop(), Prompt("x"), request=ask)
    assert torch.equal(again.codes, whole.codes), "nothing of the stopped run is left"


def test_nothing_outlives_a_stopped_run(decoder, monkeypatch):
    real, sessions = loop.Session, []
    monkeypatch.setattr(loop, "Session", lambda *a: sessions.append(weakref.ref(s := real(*a))) or s)
    draw(decoder, PICTURE, window=4, callback=At(0.3))
    gc.collect()
    assert sessions[0]() is None


def test_random_moments(decoder):
    """Whenever it is stopped: whole tokens, true figures."""
    generator = np.random.default_rng(5)
    methods = list(METHODS)
    for number in range(24):
        method, share = methods[number % len(methods)], generator.random()
        tokens, report = draw(decoder, PICTURE, method=method, window=int(generator.integers(1, 12)), batch=3,
                              seed=number, callback=At(share))
        assert ((tokens >= 0) & (tokens < 12)).all() and tokens.shape == (3, 36)
        assert report.stopped is None or share * 108 <= report.stopped < 108


class Pressed(Exception):
    """What a host raises in the middle of a pass when somebody cancels."""


@pytest.mark.parametrize("method", METHODS)
def test_an_exception_in_the_middle_of_a_pass_can_keep_too(decoder, method, monkeypatch):
    """The pass that broke off decided nothing; what the passes before it decided stays."""
    whole, seen = [], []
    want, _ = draw(decoder, PICTURE, method=method, window=5, batch=2, seed=6, callback=whole.append)

    def run(at, **rest):
        calls = []

        def logits(hidden):
            calls.append(1)
            if len(calls) == at:
                raise Pressed
            return type(decoder).logits(decoder, hidden)

        monkeypatch.setattr(decoder, "logits", logits)
        return draw(decoder, PICTURE, method=method, window=5, batch=2, seed=6, callback=seen.append, **rest)

    with pytest.raises(Pressed):
        run(3)
    with pytest.raises(Pressed):
        run(1, keep_on=(Pressed,))
    seen.clear()
    tokens, report = run(4, keep_on=(Pressed,))
    assert len(seen) == report.passes == 3 and report.stopped == whole[2].done
    decided = torch.arange(36) < torch.tensor(whole[2].frontier)[:, None]
    decided = decided if whole[2].settled is None else whole[2].settled
    assert torch.equal(tokens[decided], want[decided]) and ((tokens >= 0) & (tokens < 12)).all()


def test_a_callback_may_raise_what_keeps(decoder):
    def press(progress):
        if progress.passes == 2:
            raise Pressed

    _, report = draw(decoder, PICTURE, window=5, callback=press, keep_on=(Pressed,))
    assert report.passes == 2 and report.stopped


@pytest.mark.skipif(os.name != "posix", reason="sends itself a signal")
def test_ctrl_c_in_the_shell_writes_what_there_is(tmp_path, monkeypatch):
    """The first press ends the run in its pass; a second one, or one without the option, is as ever."""
    passes = []

    def press(bar, label, progress):
        passes.append(progress.passes)
        if progress.passes == 2:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(shell.Bar, "__call__", press)
    words = ["generate", "fox", "--window", "32", "--out", str(tmp_path), "--dtype", "fp32", "--json"]
    assert shell.main([*words, str(tmp_path / "figures"), "--keep-partial"]) == 0
    figures = json.loads((tmp_path / "figures").read_text())
    assert passes == [1, 2] and figures["passes"] == 2 and 0 < figures["stopped"] < 256 == figures["tokens"]
    assert [path.name for path in tmp_path.glob("*.png")] == ["fox_001.png"]
    with pytest.raises(KeyboardInterrupt):
        shell.main([*words, str(tmp_path / "more")])
    assert len(list(tmp_path.iterdir())) == 2 and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_second_press_is_no_longer_caught():
    with first_press(True) as pressed:
        os.kill(os.getpid(), signal.SIGINT)
        assert pressed()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)


# continuous -----------------------------------------------------------------------------------------------------------


def test_a_continuous_run_fills_up_with_the_nearest():
    net, seen = random_mar(), []
    road = net, family_of(net), Prompt("1"), MarSettings(steps=8, batch=2, seed=3)
    whole = sample(*road)

    def stop(progress):
        seen.append(progress)
        return progress.passes == 4

    drawn = sample(*road, callback=stop)
    known, side = seen[-1].known, drawn.latents.shape[-1]
    got, want = (d.latents.flatten(2).transpose(1, 2) for d in (drawn, whole))
    assert torch.equal(got[known], want[known])
    for row in range(2):
        for cell in (~known[row]).nonzero()[:, 0].tolist():
            far = [(cell // side - k // side) ** 2 + (cell % side - k % side) ** 2 for k in range(side * side)]
            least = min(d for k, d in enumerate(far) if known[row, k])
            near = [k for k, d in enumerate(far) if d == least and known[row, k]]
            assert any(torch.equal(got[row, cell], want[row, k]) for k in near)
    report, text = drawn.report, drawn.report.text()
    assert report.stopped == int(known.sum()) < report.tokens and not report.lossless and report.passes == 4
    assert f"stopped at {report.stopped} of {report.tokens} tokens" in text and "(stopped early)" in text

    def press(progress):
        raise Pressed

    again = sample(*road, callback=press, keep_on=(Pressed,))
    assert again.report.passes == 1 and again.report.stopped
    with pytest.raises(Pressed):
        sample(*road, poll=lambda: press(None), keep_on=(Pressed,))
