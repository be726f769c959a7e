"""The road from a request to tokens: fill in the family's defaults, build plan and streams, decode."""

import math
from dataclasses import asdict, dataclass, replace

import torch

from .acceptance import DEFAULT_METHOD, METHODS
from .budget import advice, free_bytes, heads_bytes, sampler_bytes
from .errors import UserError, or_what_fits
from .law import LawSettings
from .layout import inputs_of_pass
from .loop import Settings, decode
from .origin import origin
from .window import AUTO, LENGTHS, choose_shape

MOST_NODES = 512
MOST_ROUNDS = 8
MOST_ROWS = 4  # drafted together
OWN = -1  # "the model's own value" in a request


@dataclass(frozen=True)
class Request:
    """What a user asks for. -1 (sizes and window: 0) stands for the model's own value.

    Attributes:
        seed: 0 .. 2**64-1. window: free positions looked at in a pass. width, height: pixels. frames: 1 is a still.
        nodes: rows a pass spends on a draft tree; -1: automatic. relax: strength of a lossy method, 0 to 1.
        relax_budget: tokens of a picture that may be taken by relaxation alone; -1: any number.
        row_context: columns that a row has before the next one opens (pjd, pjd-c, zipar); -1: a quarter of them.
        rounds: corrections of a row at most (row-block, ssd), 1 to 8; 0: as many as it takes to be exact.
        block_rows: rows drafted together (row-block, ssd).
        batch: pictures or clips. first_sample: number of the first one, to draw one of a batch again.
    """

    method: str = DEFAULT_METHOD
    seed: int = 0
    window: int = 0
    temperature: float = OWN
    top_k: int = OWN
    top_p: float = OWN
    cfg: float = OWN
    width: int = 0
    height: int = 0
    frames: int = 1
    batch: int = 1
    first_sample: int = 0
    start: str = "auto"
    memory: bool = True
    nodes: int = AUTO
    relax: float = OWN
    relax_budget: int = -1
    row_context: int = OWN
    rounds: int = 2
    block_rows: int = 1


@dataclass
class Drawn:
    """Result of a run: codes int64 [B, frames, rows, cols] on the CPU, the plan, the report."""

    codes: torch.Tensor
    plan: object
    report: object


def law_settings(request, family):
    """The request's sampling settings with -1 replaced by the family's own, as `LawSettings`.

    Raises:
        UserError: a value that no law can have.
    """
    own = family.defaults
    values = {
        name: getattr(own if getattr(request, name) == OWN else request, name)
        for name in ("temperature", "top_k", "top_p", "cfg")
    }
    if not 0 <= values["temperature"] <= 1e4:
        raise UserError(f"temperature {values['temperature']} makes no law: use 0 (greedy) to about 2, or -1")
    if values["top_k"] < 0:
        raise UserError(f"top_k {values['top_k']} makes no law: use 0 (off), a number of tokens, or -1")
    if not 0 <= values["top_p"] <= 1:
        raise UserError(f"top_p {values['top_p']} is no share: use a number from 0 to 1, or -1")
    if not math.isfinite(values["cfg"]):
        raise UserError(f"cfg {values['cfg']} is no guidance: use 1 (off) to about 10, or -1")
    return LawSettings(**values)


def check_request(request):
    """Refuse what cannot be meant, before anything is loaded or computed.

    Raises:
        UserError.
    """
    if request.method not in METHODS:
        raise UserError(f"unknown method {request.method!r}: choose one of {', '.join(METHODS)}")
    if not 0 <= request.seed < 1 << 64:
        raise UserError(f"seed {request.seed} is outside of 0 .. {(1 << 64) - 1}")
    if request.batch < 1:
        raise UserError(f"batch size {request.batch}: at least 1 picture must be drawn")
    if request.window < 0:
        raise UserError(f"window {request.window}: use 0 (automatic) or at least 1")
    if not AUTO <= request.nodes <= MOST_NODES:
        raise UserError(f"tree nodes {request.nodes}: use -1 (automatic), 0 (no tree) or up to {MOST_NODES}")
    if request.relax != OWN and not 0 <= request.relax <= 1:
        raise UserError(f"relaxation {request.relax}: use 0 (exact) to 1 (as published), or -1 (the method's own)")
    if request.relax_budget < -1:
        raise UserError(f"relaxation budget {request.relax_budget}: use -1 (any number of tokens) or at least 0")
    if request.row_context != OWN and request.row_context < 1:
        raise UserError(f"row context {request.row_context}: use -1 (a quarter of the columns) or at least 1 column")
    if not 0 <= request.rounds <= MOST_ROUNDS:
        raise UserError(f"rounds {request.rounds}: use 0 (until a row is exact) or 1 to {MOST_ROUNDS}")
    if not 1 <= request.block_rows <= MOST_ROWS:
        raise UserError(f"rows at once {request.block_rows}: use 1 to {MOST_ROWS}")


def generate(decoder, family, prompt, negative=None, request=None, kept=None, device="cpu", callback=None,
             keep_on=()):
    """Draw pictures or a clip.

    Args:
        decoder, family: a loaded model. prompt, negative: `Prompt`s (negative None: the family's own).
        request: `Request`. kept: codes [1 or B, frames, rows, cols], -1 where a cell is to be drawn.
        callback, keep_on: see `loop.decode`. A clip that is stopped early ends with its last whole frame.

    Returns:
        `Drawn`.

    Raises:
        UserError: sizes, settings or kept tokens that this model cannot use.
        OutOfMemory: torch's own class, with what would fit.
    """
    request = request or Request()
    check_request(request)
    law = law_settings(request, family)
    size = family.size(request.width, request.height, request.frames)
    plan = family.plan(size)
    streams = family.streams(prompt, negative, plan)
    notes = list(prompt.notes) + (list(negative.notes) if negative is not None else [])
    window, nodes = min(request.window or LENGTHS[-1], plan.length), request.nodes

    def draw():
        nonlocal window, nodes
        window, nodes = choose_shape(
            decoder, family, plan, streams, request.method, request.batch, law, device, request.window,
            METHODS[request.method].nodes(request.nodes, request.memory),
        )
        settings = _settings(request, law, window, nodes)
        return decode(decoder, family, plan, streams, settings, kept, device, callback, keep_on=keep_on)

    def advised():
        tried = replace(request, window=window, nodes=nodes)
        return _what_fits(decoder, family, plan, streams, tried, law, device)

    tokens, report = or_what_fits(draw, advised)
    codes = plan.codes(tokens)
    if report.stopped is not None and plan.frames > 1:
        codes = codes[:, : max(1, report.whole_frames)]
        notes.append(f"the clip ends after {codes.shape[1]} of {plan.frames} frames of tokens")
    report.notes = notes
    used = asdict(_as_used(request, size, report.settings))
    report.origin = {**origin(decoder, family, device, prompt, negative, kept), "request": used}
    return Drawn(codes, plan, report)


def _as_used(request, size, settings):
    """The request with everything spelled out that the run filled in: it draws the same tokens anywhere."""
    names = ("window", "nodes", "start", "memory", "relax", "temperature", "top_k", "top_p", "cfg")
    return replace(
        request, width=size.width, height=size.height, row_context=settings["row_context"] or OWN,
        **{name: settings[name] for name in names},
    )  # fmt: skip


def _settings(request, law, window, nodes):
    """The loop's `Settings` for a request whose law and passes are known."""
    return Settings(
        method=request.method,
        window=window,
        nodes=nodes,
        seed=request.seed,
        batch=request.batch,
        first_sample=request.first_sample,
        start=request.start,
        memory=request.memory,
        relax=request.relax,
        relax_budget=request.relax_budget,
        row_context=request.row_context,
        rounds=request.rounds,
        block_rows=request.block_rows,
        law=law,
    )


def needed_bytes(decoder, family, plan, streams, request, law):
    """Estimate of what a run needs beside the decoder's weights (see `budget.sampler_bytes`)."""
    rule = METHODS[request.method]
    window = 1 if rule.sequential else request.window
    if rule.layout != "window":
        window = inputs_of_pass(rule, plan, window, request.row_context, request.block_rows)
    used = streams[: 1 if law.cfg == 1 else 2]
    item_size = torch.empty(0, dtype=decoder.dtype).element_size()
    nodes = rule.nodes(request.nodes, request.memory)
    longest = max(stream.length for stream in used)
    needed = sampler_bytes(decoder.cfg, item_size, plan, longest, len(used), request.batch, window, nodes)
    if rule.heads:
        span = request.block_rows * -(-plan.length // (plan.frames * plan.rows))
        heads = family.heads.sizes(decoder)
        needed += heads_bytes(decoder.cfg, item_size, heads, len(used), request.batch, span)
    return needed


def _what_fits(decoder, family, plan, streams, request, law, device):
    """`budget.advice` for a request that did not fit."""

    def need(batch, window):
        return needed_bytes(decoder, family, plan, streams, replace(request, batch=batch, window=window), law)

    return advice(need, request.batch, request.window, free_bytes(device))
