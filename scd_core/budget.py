"""How many bytes a model and a run need: what a host is told before it makes room."""

import math

import torch

from .bank import token_places
from .drafting import keeps_frame_laws
from .memory import RECORDS
from .ring import Ring
from .window import LENGTHS, NODES

FLOAT = 4
GB = 1 << 30
SPARE = 0.75  # of what did not fit: an estimate that was wrong once is not trusted again
LAWS = 7  # fp32 numbers an entry of the law: itself, sorting; with the rings measured 5 to 10 by method
RINGS = 2  # the drafts' laws and the noise


def weight_bytes(refs, dtype=None, keep_fp8=False):
    """Bytes of a network's weights once they are loaded.

    Args:
        refs: {name: `Ref`}. dtype: that they are read in, None: as stored. keep_fp8: see `ModelFiles.build`.
    """
    sizes = ((ref, math.prod(ref.shape)) for ref in refs.values())
    return sum(n * (1 if keep_fp8 and ref.scaled else (dtype or ref.dtype).itemsize) for ref, n in sizes)


def cache_bytes(cfg, slots, rows, item_size):
    """Keys and values of `rows` sequences of `slots` tokens in all layers; one slot more takes what nothing reads."""
    return 2 * cfg.layers * cfg.kv_heads * cfg.head_dim * (slots + 1) * rows * item_size


def sampler_bytes(cfg, item_size, plan, prompt, streams, batch, window, nodes=0):
    """Estimate for one decode call, beside the weights.

    Args:
        cfg: `DecoderConfig`. item_size: bytes of one number in the compute dtype.
        plan: `TokenPlan`. prompt: tokens of the longest stream. streams: 1, or 2 with guidance.
        window: positions a pass, 0: automatic. nodes: of a draft tree beside it, -1: automatic.
    """
    nodes = NODES[-1] if nodes < 0 else nodes
    window = min(window or LENGTHS[-1], plan.length) + nodes
    rows = batch * streams
    cache = cache_bytes(cfg, nodes + prompt + plan.length, rows, item_size)
    if plan.frames > 1 and keeps_frame_laws(plan):
        cache += batch * plan.frame_stride * plan.vocab * FLOAT  # the previous frame's laws, as drafts start from them
    entries = LAWS * window + RINGS * Ring.roomy(window, plan.length, plan.vocab)
    laws = rows * window * plan.vocab * item_size + entries * batch * plan.vocab * FLOAT
    if nodes:
        laws += batch * (token_places(plan.vocab) + window) * plan.vocab * FLOAT
    records = batch * window * RECORDS[-1] * 8 * FLOAT
    hidden = rows * window * (4 * cfg.dim + 2 * cfg.ffn) * item_size
    return cache + laws + records + hidden


def heads_bytes(cfg, item_size, heads, streams, batch, span):
    """Estimate of what trained heads need (see `models.spatial_heads`): weights, noted states, the draft of a row.

    Args:
        cfg, item_size, streams, batch: as in `sampler_bytes`. heads: (width, number of heads).
        span: positions drafted at a time.
    """
    width, count = heads
    weights = count * (2 * cfg.dim + 1 + 3 * width) * cfg.dim
    noted = (2 * span + 1) * cfg.dim  # of two rows
    draft = span * (9 * cfg.dim + 3 * width)
    return weights * item_size + batch * streams * (noted * FLOAT + draft * item_size)


def codec_bytes(cfg, width, height, frames, clip=False):
    """Estimate for decoding or encoding `frames` pictures at once: a few feature maps at full resolution.

    A codec that works on a `clip` in steps tells by itself how many numbers a pixel that takes.
    """
    own = getattr(cfg, "numbers", None)
    numbers = 6 * frames * cfg.ch * cfg.ch_mult[0] if own is None else own(width, height, frames, clip)
    return int(width * height * numbers * FLOAT)


def free_bytes(device):
    """Bytes that a device has left, infinite where it does not tell."""
    if torch.device(device).type != "cuda":
        return math.inf
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def advice(need, batch, window, free):
    """A sentence on what would fit, after a run that did not.

    Args:
        need: (batch, window) -> bytes beside the weights. batch, window: of the run. free: bytes that are left.
    """
    needed = need(batch, window)
    room = min(free, SPARE * needed)
    windows = [1 << k for k in range(2, window.bit_length()) if 1 << k < window]
    pairs = [
        max(((batch, w) for w in windows if need(batch, w) <= room), default=None),
        max(((b, window) for b in range(1, batch) if need(b, window) <= room), default=None),
    ]
    if not any(pairs):
        pairs = [max(((1, w) for w in windows if need(1, w) <= room), default=None)]
    fits = [f"batch {b} with window {w} (about {need(b, w) / GB:.2g} GB)" for b, w in filter(None, pairs)]
    return (
        f"not enough memory for batch {batch} with window {window}, which needs about {needed / GB:.2g} GB beside the "
        f"weights: try {' or '.join(fits) or 'a smaller size, cfg 1, or a smaller model'}"
    )
