"""How many bytes a run needs beside the weights: what the host is told before it makes room."""

from ..scd_core.memory import RECORDS
from ..scd_core.window import LENGTHS

FLOAT = 4


def sampler_bytes(cfg, item_size, plan, prompt, streams, batch, window):
    """Estimate for one decode call.

    Args:
        cfg: `DecoderConfig`. item_size: bytes of one number in the compute dtype.
        plan: `TokenPlan`. prompt: tokens of the longest stream. streams: 1, or 2 with guidance.
        window: positions a pass, 0: automatic.
    """
    window = min(window or LENGTHS[-1], plan.length)
    rows = batch * streams
    cache = 2 * cfg.layers * cfg.kv_heads * cfg.head_dim * (prompt + plan.length + 1) * rows * item_size
    # logits of all streams in the compute dtype, then law, its exponential, drafts' laws and noise in fp32
    laws = rows * window * plan.vocab * item_size + 5 * batch * window * plan.vocab * FLOAT
    records = batch * window * RECORDS * 8 * FLOAT
    hidden = rows * window * (4 * cfg.dim + 2 * cfg.ffn) * item_size
    return cache + laws + records + hidden


def codec_bytes(cfg, width, height, frames):
    """Estimate for decoding `frames` pictures at once: a few feature maps at full resolution."""
    return frames * width * height * cfg.ch * cfg.ch_mult[0] * FLOAT * 6
