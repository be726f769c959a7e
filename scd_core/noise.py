"""Counter-based noise keyed by (seed, sample, position, stream, pass): no generator state, no global seed.

A 64-bit mixer (SplitMix64, Steele, Lea and Flood 2014) turns a key and a counter into random bits with integer
arithmetic alone, so every device draws the same bits and a sample's noise does not depend on the batch around it.
"""

import torch

GOLDEN = 0x9E3779B97F4A7C15
MASK = (1 << 64) - 1

# one constant a use; a stream is never used for two decisions (decoding spec 6.1 conditions a-c)
GUMBEL, ACCEPT, RESIDUAL, REDRAW, START = (0xA24BAED4963EE407 * k & MASK for k in range(1, 6))


def _signed(x):
    x &= MASK
    return x - (1 << 64) if x >> 63 else x


_M1, _M2 = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)


def _shift(x, n):
    """Logical right shift of int64."""
    return (x >> n) & ((1 << (64 - n)) - 1)


def mix(x):
    """SplitMix64 finaliser on an int64 tensor (arithmetic wraps)."""
    x = (x ^ _shift(x, 30)) * _M1
    x = (x ^ _shift(x, 27)) * _M2
    return x ^ _shift(x, 31)


def _unit(bits):
    """int64 bits -> fp32 uniforms strictly inside (0, 1)."""
    return (_shift(bits, 41).to(torch.float32) + 0.5) * 2.0**-23


class Noise:
    """Noise of a batch.

    Args:
        seed: 0 .. 2**64-1.
        samples: sample numbers of the rows (row k of a batch equals the single run with sample number k).
    """

    def __init__(self, seed, samples, device="cpu"):
        keys = torch.tensor([_signed(s * GOLDEN) for s in samples], device=device)
        self.keys = mix(mix(keys + _signed(seed ^ 0x6A09E667F3BCC909)) + _signed(GOLDEN))

    def move(self, source, target):
        self.keys[target] = self.keys[source]

    def _key(self, stream, positions, passes=None):
        """Keys [B, M] for positions [B, M]."""
        key = mix(self.keys[: len(positions), None] ^ _signed(stream))
        key = mix(key + (positions + 1) * _signed(GOLDEN))
        return key if passes is None else mix(key + (passes[:, None] + 1) * _signed(0xD1342543DE82EF95))

    def uniform(self, stream, positions, passes=None):
        """One uniform a position: fp32 [B, M] in (0, 1).

        Args:
            positions: int64 [B, M] absolute positions.
            passes: int64 [B], the sample's own pass number: makes the draw fresh in every pass.
        """
        return _unit(mix(self._key(stream, positions, passes) + _signed(GOLDEN)))

    def gumbel(self, positions, vocab):
        """Gumbel(0,1) vectors fp32 [B, M, vocab], fixed for a position (decoding spec 4.4, 7).

        Computed from an exponential variable with full relative precision near 0, where the winners are.
        """
        counter = torch.arange(1, vocab + 1, device=positions.device) * _signed(GOLDEN)
        bits = mix(self._key(GUMBEL, positions)[..., None] + counter)
        high, low = _shift(bits, 40).to(torch.float32), (bits & 0xFFFFFF).to(torch.float32)
        v = ((high + (low + 0.5) * 2.0**-24) * 2.0**-24).clamp_(max=1 - 2.0**-24)
        return -(-torch.log1p(-v)).log()
