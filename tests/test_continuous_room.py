"""Out of memory in a continuous run: advice that fits its own options, nothing kept; the estimate is what it takes."""

import json
import os
import pathlib
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from scd_pack.scd_core import __main__ as shell
from scd_pack.scd_core import budget
from scd_pack.scd_core.continuous.mar import Mar
from scd_pack.scd_core.continuous.room import advice, working_bytes
from scd_pack.scd_core.continuous.sampler import Settings, resolve, sample
from scd_pack.scd_core.errors import OutOfMemory
from scd_pack.scd_core.models.transformer import Decoder
from scd_tests.continuous_toys import PROMPT, family_of, random_mar
from scd_tests.test_memory_pressure import tensors

QUICK = {"steps": 6, "diffusion_steps": 3, "seed": 3, "gamma": 2, "prefill": 0.25}


@pytest.fixture(scope="module")
def pair():
    net = random_mar(0)
    return net, random_mar(1, near=net, apart=0.1)


def short_at(net, part, call, error):
    """Let a method of a network raise `error` in its `call`-th call."""
    real, calls = getattr(type(net), part), []

    def fail(*args, **kwargs):
        calls.append(1)
        if len(calls) == call:
            raise error
        return real(net, *args, **kwargs)

    setattr(net, part, fail)


@pytest.mark.parametrize(("mode", "side", "part", "call"), [
    (mode, *moment) for mode in ("alone", "block", "prefix", "exact")
    for moment in ((0, "encode", 1), (0, "noise", 9), (1, "noise", 5)) if mode != "alone" or not moment[0]
])  # fmt: skip
def test_a_run_without_room_leaves_nothing(pair, mode, side, part, call):
    net, draft = pair
    ahead = None if mode == "alone" else (draft, family_of(draft))
    asked = Settings(mode="block" if mode == "alone" else mode, batch=3, **QUICK)

    def run():
        return sample(net, family_of(net), PROMPT, asked, ahead).latents

    want = run()
    before = tensors()
    words = "CUDA out of memory. Tried to allocate 2.00 GiB.\nMore words."
    short_at(pair[side], part, call, torch.OutOfMemoryError(words))
    with pytest.raises(torch.OutOfMemoryError) as caught:
        run()
    delattr(pair[side], part)
    text = str(caught.value)
    assert "not enough memory for batch size 3, cfg 2" in text and "try batch size 2 (about" in text
    assert ("mode " in text) == ("no draft model" in text) == (ahead is not None) and "window" not in text
    assert text.endswith("(CUDA out of memory. Tried to allocate 2.00 GiB.)") and "\n" not in text
    assert caught.value.__cause__ is None and caught.value.__context__ is None, "the old error would hold its frames"
    del caught
    assert tensors() == before
    assert torch.equal(run(), want)


def test_other_devices_say_it_in_other_words_and_other_errors_pass(pair):
    net = pair[0]
    for words, kind in (("MPS backend out of memory (MPS allocated: 8 GB)", OutOfMemory),
                        ("shapes cannot be multiplied", RuntimeError)):
        short_at(net, "noise", 2, RuntimeError(words))
        with pytest.raises(kind, match=re.escape(words)) as caught:
            sample(net, family_of(net), PROMPT, Settings(**QUICK))
        del net.noise
        assert ("not enough memory" in str(caught.value)) == (kind is OutOfMemory)


OFFER = re.compile(r"(?:try|or) (batch size \d+|gamma \d+|no draft model|cfg 1|batch size 1[^(]*) \(about")


@pytest.mark.parametrize("share", [9.0, 0.6, 0.2, 0.02, 1e-4])
@pytest.mark.parametrize("mode", ["alone", "block", "prefix", "exact"])
def test_what_is_offered_fits(pair, mode, share):
    """Every offer is within the room that there is; where no change is enough alone, all of them together are named."""
    net, drafted = pair[0], mode != "alone"
    asked = resolve(Settings(mode=mode if drafted else "block", batch=6, **QUICK | {"gamma": 8}), family_of(net))
    cost, weights = {}, 100

    def need(settings, ahead):
        key = settings.batch, settings.cfg, settings.gamma, ahead
        cost[key] = working_bytes(net.cfg, settings, 4, ahead)
        return cost[key]

    needed = working_bytes(net.cfg, asked, 4, drafted)
    room = min(share, budget.SPARE) * needed
    found = OFFER.findall(advice(need, asked, drafted, weights, share * needed))
    least = working_bytes(net.cfg, replace(asked, batch=1, cfg=1), 4, False)
    assert found or room < least - (weights if drafted else 0)
    for offer in found:
        batch = re.search(r"batch size (\d+)", offer)
        gamma, ahead = re.search(r"gamma (\d+)", offer), drafted and "no draft" not in offer
        key = (int(batch[1]) if batch else 6, 1 if "cfg 1" in offer else 2.0, int(gamma[1]) if gamma else 8, ahead)
        assert cost[key] - (weights if drafted and not ahead else 0) <= room, offer
    if share == 9.0:
        assert len(found) >= (3 if mode in ("prefix", "exact") else 2), found


def test_the_last_resort_is_another_model():
    asked = Settings(steps=4, cfg=1.0)
    text = advice(lambda *_: 1 << 33, asked, False, 0, 1e9)
    assert text.endswith("needs about 8 GB beside the weights: try a smaller model")


@pytest.mark.parametrize(("words", "network", "told"), [
    (["3", "--model", "mar", "--steps", "4"], Mar, "not enough memory for batch size 2, cfg"),
    (["fox on snow", "--window", "16"], Decoder, "not enough memory for batch 2 with window 16"),
], ids=["continuous", "tokens"])  # fmt: skip
def test_the_shell_says_it_in_one_line(capsys, tmp_path, monkeypatch, words, network, told):
    def short(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    words[0] = "fox" if network is Mar else words[0]
    monkeypatch.setattr(network, "noise" if network is Mar else "logits", short)
    assert shell.main(["generate", *words, "--batch", "2", "--out", str(tmp_path / "out")]) == 1
    text = capsys.readouterr().err.strip()
    assert text.startswith(told) and "try batch" in text and "\n" not in text and not (tmp_path / "out").exists()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.slow
def test_the_estimate_is_the_peak_of_a_run_within_a_fifth():
    script = pathlib.Path(__file__).with_name("memory_run.py")
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run([sys.executable, str(script), "mar"], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["grown"] == pytest.approx(found["run"], rel=0.2), found
