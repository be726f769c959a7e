"""Normal noise keyed by (seed, sample, cell, step): draft and target share it, and a row of a batch equals its own run.

Made on the host in fp64 from the same counter-based bits as the discrete noise, so every device draws the same numbers.
"""

import numpy as np
import torch

from ..noise import GOLDEN, MASK, Noise, mix

STEP = 0xD1342543DE82EF95
# one constant a use; a stream is never used for two decisions
ORDER, PATH, ACCEPT, RESIDUAL, THIN = (0xA24BAED4963EE407 * k & MASK for k in range(101, 106))


class NormalNoise:
    """Noise of a batch.

    Args:
        seed: 0 .. 2**64-1. samples: sample numbers of the rows.
    """

    def __init__(self, seed, samples):
        self.keys = Noise(seed, samples).keys

    def _key(self, stream, rows, cells, step):
        """uint64 keys of the broadcast shape of rows, cells and step."""
        cells, step = (np.asarray(x).astype(np.uint64) + np.uint64(1) for x in (cells, step))
        with np.errstate(over="ignore"):  # wrapping is the point; numpy complains where an operand is no array
            key = mix(self.keys[rows] ^ np.uint64(stream))
            return mix(mix(key + cells * np.uint64(GOLDEN)) + step * np.uint64(STEP))

    def uniform(self, stream, rows, cells, step=0):
        """One uniform a row, float64 strictly inside (0, 1).

        Args:
            rows: rows of the batch. cells, step: non-negative integers; all three broadcast.
        """
        return _unit(mix(self._key(stream, rows, cells, step) + np.uint64(GOLDEN)))

    def normal(self, stream, rows, cells, step, channels):
        """Standard normal vectors, float64 tensor [..., channels] on the host; arguments as in `uniform`."""
        pairs = (channels + 1) // 2
        counter = np.arange(1, 2 * pairs + 1, dtype=np.uint64) * np.uint64(GOLDEN)
        u = _unit(mix(self._key(stream, rows, cells, step)[..., None] + counter))
        radius, angle = np.sqrt(-2 * np.log(u[..., :pairs])), 2 * np.pi * u[..., pairs:]
        both = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)], -1)  # Box and Muller 1958
        return torch.from_numpy(both[..., :channels])

    def orders(self, count):
        """A random order of `count` cells for every row, int64 [B, count]."""
        rows = np.arange(len(self.keys))[:, None]
        return np.argsort(self.uniform(ORDER, rows, np.arange(count)[None]), axis=1, kind="stable")


def _unit(bits):
    return ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
