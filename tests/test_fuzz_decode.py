"""Random parameter sets through the whole road from a request to tokens, on toys.

Case i is a function of i alone, so a failure is repeated with `check(i)`. SCD_FUZZ=10000 asks for as many cases as
that; without it a short form runs.
"""

import json
import math
import os
import random
from dataclasses import replace
from functools import cache

import pytest
import torch
from scd_pack.scd_core.acceptance import METHODS
from scd_pack.scd_core.drafting import STARTS
from scd_pack.scd_core.errors import UserError
from scd_pack.scd_core.generate import MOST_NODES, MOST_ROUNDS, MOST_ROWS, Request, generate
from scd_pack.scd_core.models.family import Defaults, Size
from scd_pack.scd_core.models.transformer import Decoder
from scd_pack.scd_core.plan import TokenPlan
from scd_pack.scd_core.prompt import Prompt
from scd_pack.scd_core.report import token_hash
from scd_tests.sentences import is_one_sentence
from scd_tests.toys import ToyFamily, initialise, tiny_config, word_streams

CASES = int(os.environ.get("SCD_FUZZ", "240"))
PARTS = 8  # tests that share the cases, so that they run side by side
VOCABULARIES = (2, 8, 12)
LAST = (1 << 64) - 1
REFUSED = {
    "seed": (-1, 1 << 64), "window": (-1,), "batch": (0, -3), "temperature": (-0.5, math.nan, math.inf, 1e5),
    "top_k": (-2,), "top_p": (1.5, math.nan, -0.1), "cfg": (math.nan, math.inf), "nodes": (-2, MOST_NODES + 1),
    "relax": (1.5, math.nan), "relax_budget": (-2,), "row_context": (0, -2), "rounds": (-1, MOST_ROUNDS + 1),
    "block_rows": (0, MOST_ROWS + 1), "method": ("", "sdj"), "start": ("", "up"), "width": (17,), "frames": (99,),
}  # fmt: skip


class FuzzFamily(ToyFamily):
    """A toy with one size, which stands for one plan."""

    name = "the toy of the fuzz"

    def __init__(self, plan, defaults):
        self._plan, self.defaults, self.sizes = plan, defaults, (Size(plan.cols, plan.rows, plan.frames),)

    def plan(self, size):
        return self._plan

    def streams(self, prompt, negative, plan):
        return word_streams(plan.vocab)


@cache
def decoder_of(vocab):
    """A small decoder in float64: its logits do not depend on the shape of a pass, so tokens may be compared."""
    config = tiny_config(vocab, layers=1, dim=16, ffn=16, heads=2, kv_heads=1)
    decoder = initialise(Decoder(config, dtype=torch.float64))
    decoder.lm_head.weight.mul_(3)
    return decoder


def some_plan(r):
    """A plan: still, clip or still with line ends; some tokens may be ruled out; some models need the first one."""
    vocab, lines = r.choice(VOCABULARIES), r.random() < 0.3
    frames, rows, cols = 1 if lines else r.choice((1, 1, 2, 3)), *r.choice(SHAPES)
    while frames * rows * cols > 36:
        frames, rows = max(1, frames - 1), max(1, rows - 1)
    allowed = None
    if r.random() < 0.3:
        allowed = torch.tensor([r.random() < 0.6 for _ in range(vocab)])
        allowed[r.randrange(vocab)] = True
    base = r.choice((0, 0, 3))
    rest = {"vocab": vocab, "base": base, "allowed": allowed, "given": int(r.random() < 0.05)}
    if lines:
        return TokenPlan.by_lines(rows, cols, 1 if base else vocab + 1, **rest)
    return TokenPlan(frames, rows, cols, **rest)


SHAPES = [(1, 1), (1, 2), (2, 1), (1, 6), (6, 1), (2, 3), (3, 2), (3, 4), (4, 4), (5, 3), (6, 6), (1, 9), (9, 1)]


def some_kept(r, plan, batch):
    """Codes to keep, [1 or batch, frames, rows, cols] with -1 where none is, or None."""
    kind = r.choice(("none", "none", "none", "few", "half", "most", "all", "rows"))
    if kind == "none" and not plan.given:
        return None
    g = torch.Generator().manual_seed(r.randrange(1 << 30))
    shape = (r.choice((1, batch)), plan.frames, plan.rows, plan.cols)
    codes = torch.randint(0, plan.vocab, shape, generator=g)
    share = {"none": 0.0, "few": 0.1, "half": 0.5, "most": 0.9, "all": 1.1, "rows": 0.0}[kind]
    keep = torch.rand(shape, generator=g) < share
    if kind == "rows":
        keep[:, :, r.randrange(plan.rows)] = True
    keep[:, 0, 0, 0] |= bool(plan.given)
    return torch.where(keep, codes, -1)


def some_request(r, plan):
    """A `Request` of values that all mean something."""
    return Request(
        method=r.choice((*METHODS, "seed-exact", "seed-exact")),
        seed=r.choice((0, 1, LAST, LAST - 1, 1 << 63, r.randrange(1 << 64))),
        window=r.choice((0, 1, 2, 3, 5, 8, 16, 36, 64, 10**6)),
        temperature=r.choice((-1, 0, 1e-38, 1e-30, 1e-5, 0.3, 0.8, 1, 1.0, 2.5, 1e4)),
        top_k=r.choice((-1, 0, 1, 2, 5, plan.vocab, plan.vocab + 1, 10**9)),
        top_p=r.choice((-1, 0, 1e-9, 0.3, 0.9, 0.999999, 1)),
        cfg=r.choice((-1, 1, 1, 0, 0.5, 2, 7.5, -3, 1e3)),
        frames=plan.frames,
        batch=r.choice((1, 1, 2, 3)),
        first_sample=r.choice((0, 0, 1, 7, 1 << 40)),
        start=r.choice(("auto", *STARTS)),
        memory=r.random() < 0.8,
        nodes=r.choice((-1, 0, 0, 1, 5, 32, MOST_NODES)),
        relax=r.choice((-1, 0, 0.1, 0.5, 1)),
        relax_budget=r.choice((-1, -1, 0, 1, 5, 10**9)),
        row_context=r.choice((-1, 1, 2, 3, plan.cols, 100)),
        rounds=r.randint(0, MOST_ROUNDS),
        block_rows=r.choice((1, 1, 2, 3, MOST_ROWS)),
    )


def spoiled(r, request, plan, kept):
    """The request or the kept codes with one thing in it that must be refused."""
    if r.random() < 0.2:
        shape = (request.batch, plan.frames, plan.rows, plan.cols)
        wrong = (
            torch.zeros(shape[0] + 3, *shape[1:], dtype=torch.int64), torch.zeros(*shape[:3], shape[3] + 1).long(),
            torch.full(shape, plan.vocab), torch.full(shape, -2),
        )  # fmt: skip
        return request, r.choice(wrong)
    name = r.choice(tuple(REFUSED))
    return replace(request, **{name: r.choice(REFUSED[name])}), kept


class Watch:
    """Callback that holds a run's progress to what it promises."""

    def __init__(self, tokens):
        self.tokens, self.done, self.passes = tokens, 0, 0

    def __call__(self, progress):
        assert progress.passes == self.passes + 1 and self.done < progress.done <= progress.total
        assert progress.tokens.shape == self.tokens
        self.passes, self.done = progress.passes, progress.done


def drawn_of(plan, family, request, kept, callback=None, keep_on=()):
    words = Prompt("", None)
    return generate(decoder_of(plan.vocab), family, words, None, request, kept, callback=callback, keep_on=keep_on)


def check_tokens(plan, drawn, request, kept):
    """Shape, vocabulary, kept cells, what is ruled out. Returns bool [B, frames, rows, cols] of drawn cells."""
    codes, shape = drawn.codes, (request.batch, plan.frames, plan.rows, plan.cols)
    assert codes.shape == shape and codes.dtype == torch.int64
    assert int(codes.min()) >= 0 and int(codes.max()) < plan.vocab
    free = torch.ones(shape, dtype=torch.bool) if kept is None else (kept < 0).expand(shape)
    if kept is not None:
        assert torch.equal(codes[~free], kept.expand(shape)[~free])
    if plan.allowed is not None:
        assert plan.allowed[codes[free]].all()
    return free


def check_report(report, request, free):
    """Figures that belong together."""
    count = free.flatten(1).sum(1).tolist()
    assert report.tokens == sum(count) and list(map(sum, report.accepted)) == count
    assert report.per_sample == list(map(len, report.accepted))
    assert report.passes == max(report.per_sample) <= max(count)
    assert all(min(accepted, default=1) >= 1 for accepted in report.accepted)
    visits = torch.from_numpy(report.visits)
    assert visits.shape == free.shape and (visits[free] >= 1).all() and (visits[~free] == 0).all()
    assert (visits.flatten(1).max(1).values <= torch.tensor(report.per_sample)).all()
    assert all(0 <= n <= c for n, c in zip(report.relaxed, count))
    assert request.relax_budget < 0 or max(report.relaxed) <= request.relax_budget
    assert not (report.lossless and sum(report.relaxed))
    json.dumps(report.to_dict(), allow_nan=False)
    assert "nan" not in report.text()


def check_identity(plan, family, drawn, request, kept):
    """A lossless run of a rule that matches draws the tokens of one-at-a-time sampling."""
    rule = METHODS[request.method]
    assert drawn.report.lossless or not rule.lossless
    if not (drawn.report.lossless and rule.accept is METHODS["autoregressive"].accept):
        return
    slowly = replace(request, method="autoregressive", temperature=0 if rule.greedy else request.temperature)
    slow = drawn_of(plan, family, slowly, kept)
    assert torch.equal(slow.codes, drawn.codes), "not the tokens of one-at-a-time sampling"
    assert slow.report.sha256_tokens == drawn.report.sha256_tokens


def check_alone(plan, family, drawn, request, kept, sample):
    """A sample of a batch is what it is alone."""
    own = None if kept is None else kept.expand(request.batch, -1, -1, -1)[sample : sample + 1]
    alone = drawn_of(plan, family, replace(request, batch=1, first_sample=request.first_sample + sample), own)
    assert torch.equal(alone.codes[0], drawn.codes[sample]), f"sample {sample} is another one alone"
    assert token_hash(alone.codes) == token_hash(drawn.codes[sample : sample + 1])


class Cancel(Exception):
    """What a host raises when the button is pressed."""


def check_cancelled(plan, family, drawn, request, kept, at, raises):
    """A run that ends with pass `at` hands on what was decided until then, a clip its whole frames."""
    seen = []

    def press(progress):
        seen.append(progress)
        if progress.passes == at and raises:
            raise Cancel
        return progress.passes == at

    part = drawn_of(plan, family, request, kept, press, (Cancel,))
    last, count, inside = seen[-1], part.codes.shape[1], plan.cells >= 0
    assert part.codes.min() >= 0 and part.codes.max() < plan.vocab
    if last.done == last.total:
        assert part.report.stopped is None and torch.equal(part.codes, drawn.codes)
        return
    assert part.report.stopped == last.done == sum(map(sum, part.report.accepted)) and part.report.passes == at
    assert not part.report.lossless and count == (max(1, part.report.whole_frames) if plan.frames > 1 else 1)
    decided = last.settled
    if decided is None:
        decided = torch.arange(plan.length) < torch.tensor(last.frontier)[:, None]
    cells = torch.zeros(request.batch, drawn.codes[0].numel(), dtype=torch.bool)
    cells[:, plan.cells[inside]] = decided[:, inside]
    cells = cells.view_as(drawn.codes)[:, :count]
    assert torch.equal(part.codes[cells], drawn.codes[:, :count][cells]), "decided tokens have changed"


def run_case(r):
    plan = some_plan(r)
    family = FuzzFamily(plan, Defaults(temperature=0.9, top_k=5, top_p=0.95, cfg=2.0))
    request = some_request(r, plan)
    kept = some_kept(r, plan, request.batch)
    told = [plan, request, None if kept is None else kept.tolist()]
    try:
        if r.random() < 0.15:
            request, kept = spoiled(r, request, plan, kept)
            told = [plan, request, None if kept is None else tuple(kept.shape)]
            with pytest.raises(UserError) as caught:
                drawn_of(plan, family, request, kept)
            assert is_one_sentence(str(caught.value)), str(caught.value)
            return
        drawn = drawn_of(plan, family, request, kept, Watch((request.batch, plan.length)))
        free = check_tokens(plan, drawn, request, kept)
        check_report(drawn.report, request, free)
        check_identity(plan, family, drawn, request, kept)
        if r.random() < 0.15:
            check_alone(plan, family, drawn, request, kept, r.randrange(request.batch))
        if drawn.report.passes and r.random() < 0.15:
            check_cancelled(plan, family, drawn, request, kept, r.randint(1, drawn.report.passes), r.random() < 0.5)
    except BaseException as error:
        error.add_note(f"{told}") if hasattr(error, "add_note") else None
        raise


def check(number):
    """Run one case by its number."""
    run_case(random.Random(number))


@pytest.mark.parametrize("name, value", [(name, value) for name, values in REFUSED.items() for value in values])
def test_what_no_widget_can_mean_is_refused(name, value):
    plan = TokenPlan(1, 2, 3, 8)
    family = FuzzFamily(plan, Defaults())
    with pytest.raises(UserError) as caught:
        drawn_of(plan, family, replace(Request(), **{name: value}), None)
    assert is_one_sentence(str(caught.value)) and (str(value) in str(caught.value) or value == "")


ENDS = {
    "seed": (0, LAST), "window": (0, 10**6), "temperature": (-1, 0, 1e4), "top_k": (-1, 0, 10**9), "top_p": (-1, 0, 1),
    "cfg": (-1, -1e6, 1e6), "batch": (1, 9), "nodes": (-1, 0, MOST_NODES), "relax": (-1, 0, 1),
    "relax_budget": (-1, 10**9), "row_context": (-1, 1, 10**9), "rounds": (0, MOST_ROUNDS),
    "first_sample": (0, (1 << 63) - 1), "block_rows": (1, MOST_ROWS),
}  # fmt: skip


@pytest.mark.parametrize("name, value", [(name, value) for name, values in ENDS.items() for value in values])
def test_the_ends_of_all_widgets_draw(name, value):
    plan = TokenPlan(1, 2, 3, 8)
    for method in ("seed-exact", "csd", "pjd", "row-block"):
        request = replace(Request(method=method), **{name: value})
        drawn = drawn_of(plan, FuzzFamily(plan, Defaults()), request, None)
        check_report(drawn.report, request, check_tokens(plan, drawn, request, None))


@pytest.mark.parametrize("part", range(PARTS))
def test_any_request_is_drawn_or_refused(part):
    for number in range(part, CASES, PARTS):
        try:
            check(number)
        except Exception as error:
            raise AssertionError(f"case {number}: {type(error).__name__}: {error}") from error


@pytest.mark.parametrize("method", [name for name, method in METHODS.items() if method.relax is not None])
def test_a_relaxation_never_takes_what_is_ruled_out(method):
    """First drafts are any tokens; where the law is flat, a relaxation likes all of them."""
    plan = TokenPlan(1, 1, 6, 8, allowed=torch.arange(8) < 4)
    request = Request(method=method, window=6, temperature=1e4, relax=1, batch=64, top_k=0, cfg=1)
    drawn = drawn_of(plan, FuzzFamily(plan, Defaults()), request, None)
    check_tokens(plan, drawn, request, None)
