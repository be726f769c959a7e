"""Counter-based noise keyed by (seed, sample, position, stream, pass): no generator state, no global seed.

A 64-bit mixer (SplitMix64, Steele, Lea and Flood 2014) turns a key and a counter into random bits with integer
arithmetic alone, so every device draws the same bits and a sample's noise does not depend on the batch around it.
Keys and single uniforms are made on the host, which knows the positions anyway; only Gumbel vectors are expanded on
the device.
"""

import numpy as np
import torch

GOLDEN = 0x9E3779B97F4A7C15
MASK = (1 << 64) - 1
_M1, _M2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
# arrays, because making them of numbers would take longer than using them
_S30, _S27, _S31, _S41, _U1, _U2, _STEP = (np.array(x, dtype=np.uint64) for x in (30, 27, 31, 41, _M1, _M2, GOLDEN))
_HALF, _GRID = np.array(0.5, dtype=np.float32), np.array(2.0**-23, dtype=np.float32)

# one constant a use; a stream is never used for two decisions
GUMBEL, ACCEPT, RESIDUAL, REDRAW, START, LAST = (0xA24BAED4963EE407 * k & MASK for k in range(1, 7))


def further(use, count):
    """Constants of `count` more streams for the use 0 or 1 (candidates beside a draft: their drawing, their test)."""
    return [0xA24BAED4963EE407 * (7 + 2 * k + use) & MASK for k in range(count)]


def _signed(x):
    x &= MASK
    return x - (1 << 64) if x >> 63 else x


def mix(x):
    """SplitMix64 finaliser on a uint64 array (arithmetic wraps)."""
    x = x ^ (x >> _S30)
    x *= _U1
    x ^= x >> _S27
    x *= _U2
    x ^= x >> _S31
    return x


def mix_tensor(x):
    """The same on an int64 tensor, in place. The right shift of a signed number drags its sign along."""
    shifted = torch.empty_like(x)

    def fold(bits):
        torch.bitwise_right_shift(x, bits, out=shifted)
        return x.bitwise_xor_(shifted.bitwise_and_((1 << (64 - bits)) - 1))

    fold(30).mul_(_signed(_M1))
    fold(27).mul_(_signed(_M2))
    return fold(31)


class Noise:
    """Noise of a batch.

    Args:
        seed: 0 .. 2**64-1.
        samples: sample numbers of the rows (row k of a batch equals the single run with sample number k).
        length: the keys of positions below it are made once for all passes.
    """

    def __init__(self, seed, samples, length=0):
        keys = np.array([s * GOLDEN & MASK for s in samples], dtype=np.uint64)
        self.keys = mix(mix(keys + np.uint64(seed ^ 0x6A09E667F3BCC909)) + np.uint64(GOLDEN))
        self.length, self._kept = length, {}

    def move(self, source, target):
        self.keys[target] = self.keys[source]
        for key in self._kept.values():
            key[..., target, :] = key[..., source, :]

    def _key(self, stream, positions):
        """uint64 keys [B, M] for positions [B, M]; [S, B, M] for a sequence of S streams."""
        positions = np.asarray(positions).astype(np.uint64)
        stream = np.array(stream, dtype=np.uint64)
        if stream.ndim:
            stream = stream[:, None, None]
        key = mix(self.keys[: len(positions), None] ^ stream)
        return mix(key + (positions + np.uint64(1)) * np.uint64(GOLDEN))

    def _pass_key(self, stream, positions, passes):
        """The same, another one in every pass."""
        if self.length:
            stream = stream if isinstance(stream, int) else tuple(stream)
            if stream not in self._kept:
                everywhere = np.broadcast_to(np.arange(self.length), (len(self.keys), self.length))
                self._kept[stream] = self._key(stream, everywhere)
            key = self._kept[stream][..., np.arange(len(positions))[:, None], positions]
        else:
            key = self._key(stream, positions)
        return mix(key + np.uint64((passes + 1) * 0xD1342543DE82EF95 & MASK))

    def uniform(self, stream, positions, passes=None):
        """One uniform a position.

        Args:
            stream: a stream's constant, or a sequence of S of them (then the result is [S, B, M]).
            positions: integers [B, M], absolute.
            passes: the run's pass number: makes the draw fresh in every pass.

        Returns:
            float32 array [B, M], strictly inside (0, 1).
        """
        key = self._key(stream, positions) if passes is None else self._pass_key(stream, positions, passes)
        u = (mix(key + _STEP) >> _S41).astype(np.float32)
        u += _HALF
        u *= _GRID
        return u

    def gumbel(self, positions, vocab, device="cpu"):
        """Gumbel(0,1) vectors, fixed for a position.

        Computed from an exponential variable with full relative precision near 0, where the winners are.

        Args:
            positions: integers [B, M], absolute.

        Returns:
            fp32 tensor [B, M, vocab] on `device`.
        """
        keys = torch.from_numpy(self._key(GUMBEL, positions).view(np.int64)).to(device)
        counter = torch.arange(1, vocab + 1, device=device) * _signed(GOLDEN)
        bits = mix_tensor(keys[..., None] + counter)
        high = (bits >> 40).bitwise_and_(0xFFFFFF).to(torch.float32)
        low = bits.bitwise_and_(0xFFFFFF).to(torch.float32)
        v = low.add_(0.5).mul_(2.0**-24).add_(high).mul_(2.0**-24).clamp_(max=1 - 2.0**-24)
        return v.neg_().log1p_().neg_().log_().neg_()
