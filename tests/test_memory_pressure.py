"""Out of memory in any pass: the same class of error with advice that fits, nothing kept, and the next run as ever."""

import gc
import math
import pathlib
import re

import pytest
import torch
from scd_pack.scd_core import budget
from scd_pack.scd_core import generate as road
from scd_pack.scd_core.acceptance import METHODS
from scd_pack.scd_core.budget import advice
from scd_pack.scd_core.errors import OutOfMemory
from scd_pack.scd_core.generate import Request, needed_bytes
from scd_pack.scd_core.law import LawSettings
from scd_pack.scd_core.models.family import Size
from scd_pack.scd_core.plan import TokenPlan
from scd_pack.scd_core.prompt import Prompt, Stream
from scd_tests.toys import ToyFamily, tiny_decoder, word_streams

PLAN = TokenPlan(1, 5, 6, 12)
STATM = "/proc/self/statm"


class Shop(ToyFamily):
    title, sizes = "the toy shop", (Size(24, 20),)

    def plan(self, size):
        return PLAN

    def streams(self, prompt, negative, plan):
        return Stream(ids=torch.tensor([12, 13])), Stream(ids=torch.tensor([15]))


@pytest.fixture
def decoder():
    return tiny_decoder()


def ask(decoder, **values):
    return road.generate(decoder, Shop(), Prompt("x"), request=Request(**{"window": 16, "cfg": 2.0, **values}))


def tensors():
    """(number, bytes) of all tensors that are alive."""
    gc.collect()
    found = [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor)]
    return len(found), sum(t.nbytes for t in found)


def failing(decoder, part, call, error):
    """Let a method of the decoder raise `error` in its `call`-th call."""
    real, calls = getattr(type(decoder), part), []

    def fail(*args, **kwargs):
        calls.append(1)
        if len(calls) == call:
            ballast = torch.zeros(1000)  # a local of the frame that the error holds
            raise type(error)(*error.args, *ballast[:0].tolist())
        return real(decoder, *args, **kwargs)

    setattr(decoder, part, fail)


@pytest.mark.parametrize("method", ["seed-exact", "scd-gumbel", "autoregressive", "pjd-c", "row-block"])
@pytest.mark.parametrize(("part", "call"), [("states", 1), ("logits", 1), ("logits", 4)], ids=["prefill", "1", "4"])
def test_a_run_without_room_leaves_nothing(decoder, method, part, call):
    want = ask(decoder, method=method, batch=3).codes
    before = tensors()
    failing(decoder, part, call, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore words."))
    with pytest.raises(torch.OutOfMemoryError) as caught:
        ask(decoder, method=method, batch=3)
    delattr(decoder, part)
    text = str(caught.value)
    assert "not enough memory for batch 3 with window" in text and "try " in text
    assert text.endswith("(CUDA out of memory. Tried to allocate 2.00 GiB.)") and "\n" not in text
    assert caught.value.__cause__ is None and caught.value.__context__ is None, "the old error would hold its frames"
    assert tensors()[1] - before[1] < 100, "the error itself holds the prompt at most"
    del caught
    assert tensors() == before
    assert torch.equal(ask(decoder, method=method, batch=3).codes, want)


def test_other_devices_say_it_in_other_words_and_other_errors_pass(decoder):
    for words in ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes.",
                  "[enforce fail at alloc_cpu.cpp:114] data. DefaultCPUAllocator: not enough memory: you tried",
                  "MPS backend out of memory (MPS allocated: 8 GB)"):
        failing(decoder, "logits", 2, RuntimeError(words))
        with pytest.raises(OutOfMemory, match="not enough memory for batch 1 with window 16"):
            ask(decoder)
        del decoder.logits
    failing(decoder, "logits", 2, RuntimeError("shapes cannot be multiplied"))
    with pytest.raises(RuntimeError, match=r"^shapes cannot be multiplied$"):
        ask(decoder)


def offers(text):
    """[(batch, window)] that an advice names."""
    return [tuple(map(int, pair)) for pair in re.findall(r"batch (\d+) with window (\d+) \(", text)]


@pytest.mark.parametrize("free", [math.inf, 9e5, 4e5])
@pytest.mark.parametrize("method", METHODS)
def test_what_is_offered_fits(decoder, method, free):
    """Every offer is smaller than what failed, and its estimate is within the room that there is."""
    law, cost = LawSettings(cfg=2.0), {}

    def need(batch, window):
        request = Request(method=method, batch=batch, window=window)
        cost[batch, window] = needed_bytes(decoder, Shop(), PLAN, word_streams(), request, law)
        return cost[batch, window]

    text = advice(need, 6, 24, free)
    found, needed = offers(text), cost[6, 24]
    assert found or free < need(1, 4)
    for batch, window in found:
        assert (batch, window) < (6, 24) and cost[batch, window] <= min(free, budget.SPARE * needed)
    assert "batch 6 with window 24, which needs" in text


def test_the_last_resort_is_another_size():
    text = advice(lambda batch, window: 1 << 33, 1, 1, math.inf)
    assert text.endswith("about 8 GB beside the weights: try a smaller size, cfg 1, or a smaller model")


def test_many_runs_take_no_more_memory_than_one(decoder):
    """Runs of all kinds: no tensor stays, and the process grows by less than 50 MB in 200 (by nothing, as a rule)."""
    methods = list(METHODS)

    def run(number):
        ask(decoder, method=methods[number % len(methods)], seed=number, batch=1 + number % 3, window=4 + number % 9)

    def resident():
        return int(pathlib.Path(STATM).read_text().split()[1]) * 4096

    for number in range(len(methods)):
        run(number)
    before, linux = tensors(), pathlib.Path(STATM).exists()
    start = linux and resident()
    for number in range(40):
        run(number)
    assert tensors() == before
    assert not linux or resident() - start < 10e6
