"""Rotary position tables. Every table is a pair (cos, sin) of shape [S, rope_dim/2], fp32, one angle a pair.

A model family picks a builder; the attention layer only multiplies. Pairing (`half`: first with second half,
`pair`: adjacent entries) is the layer's business, so the same table serves both.
"""

import math

import torch


def _frequencies(dim, theta, device=None):
    """Inverse wavelengths theta^(-2j/dim), j = 0 .. dim/2-1."""
    return theta ** (-torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim)


def _table(angles):
    return angles.cos(), angles.sin()


def rope_1d(length, dim, theta=10000.0, device=None, factor=1.0):
    """Positions 0 .. length-1 along the sequence, divided by `factor` (linear scaling): [length, dim/2]."""
    steps = torch.arange(length, dtype=torch.float32, device=device)
    return _table(steps[:, None] * (_frequencies(dim, theta, device) / factor))


def rope_2d_grid(rows, cols, dim, condition, theta=10000.0, device=None):
    """LlamaGen: half of the pairs turn with the row, half with the column.

    The `condition` leading tokens get cos = sin = 0 (not the identity), so their queries and keys vanish.
    """
    freqs = _frequencies(dim // 2, theta, device)
    r, c = torch.meshgrid(
        torch.arange(rows, device=device).float(), torch.arange(cols, device=device).float(), indexing="ij"
    )
    angles = torch.cat([r.reshape(-1, 1) * freqs, c.reshape(-1, 1) * freqs], dim=1)
    cos, sin = _table(angles)
    empty = cos.new_zeros(condition, cos.shape[1])
    return torch.cat([empty, cos]), torch.cat([empty, sin])


def yarn_scaled(freqs, length, scale, beta_fast, beta_slow):
    """YaRN: slow frequencies of an axis of trained `length` are divided by `scale`, fast ones kept."""
    low, high = 2 * math.pi * beta_slow / length, 2 * math.pi * beta_fast / length
    keep = ((freqs - low) / (high - low)).clamp(0, 1)
    return freqs * ((1 - keep) / scale + keep)


def angles_3d_grid(frames, rows, cols, dim, theta=5e5, yarn=None, start_token=False, device=None):
    """Angles [S, dim/2], fp32, of `rope_3d_grid`, which says what the arguments are."""
    dim_h = dim_w = dim // 6 * 2
    parts = [dim - dim_h - dim_w, dim_h, dim_w]
    sizes = (frames, rows, cols)
    axes = torch.meshgrid(*(torch.arange(n, device=device).float() for n in sizes), indexing="ij")
    angles = []
    for i, (axis, d) in enumerate(zip(axes, parts)):
        freqs = _frequencies(d, theta, device)
        if yarn:
            # both spatial axes use the trained height, as the published rope does
            trained = yarn["shape"][0 if i == 0 else 1]
            freqs = yarn_scaled(freqs, trained, yarn["scale"], yarn["beta_fast"], yarn["beta_slow"])
        angles.append(axis.reshape(-1, 1) * freqs)
    angles = torch.cat(angles, dim=1)
    if start_token:
        angles = torch.cat([angles.new_zeros(1, angles.shape[1]), angles])
    return angles


def rope_3d_grid(frames, rows, cols, dim, theta=5e5, yarn=None, start_token=False, device=None):
    """Cosmos: the pairs are shared out among time, row and column, in that order.

    Args:
        yarn: None or dict(shape=(T, H, W) seen in training, scale, beta_fast, beta_slow).
        start_token: a leading token with zero angles (the identity rotation) shifts all others by one.
    """
    return _table(angles_3d_grid(frames, rows, cols, dim, theta, yarn, start_token, device))


def rope_sections(positions, dim, sections, theta=10000.0):
    """Multimodal rope (GLM-Image): pair j follows the axis whose section it falls into.

    Args:
        positions: [axes, S] position of every token on every axis.
        sections: pairs an axis gets; they sum to dim/2.
    """
    freqs = _frequencies(dim, theta, positions.device)
    axis = torch.repeat_interleave(torch.arange(len(sections)), torch.tensor(sections)).to(positions.device)
    return _table(positions.float()[axis].t() * freqs)


def spread(cos, sin, pairing):
    """Angles of pairs -> factors of entries, so that a rotation is x * cos + swap(x) * sin (see `rotate`).

    Args:
        cos, sin: [.., rope_dim/2]. pairing: "half" or "pair".

    Returns:
        (cos, sin) [.., rope_dim]; sin carries the sign of the rotation.
    """
    if pairing == "half":
        return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
    return torch.stack([cos, cos], -1).flatten(-2), torch.stack([-sin, sin], -1).flatten(-2)


def rotate(x, cos, sin, pairing):
    """Rotate the first cos.shape[-1] entries of heads; the rest passes through.

    Args:
        x: [R, W, H, D]; cos, sin: [R or 1, W, 1, rope_dim] from `spread`, in x's dtype.
    """
    d = cos.shape[-1]
    rot, rest = (x, None) if d == x.shape[-1] else (x[..., :d], x[..., d:])
    swapped = rot.roll(d // 2, -1) if pairing == "half" else rot.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    rot = torch.addcmul(rot * cos, swapped, sin)
    return rot if rest is None else torch.cat([rot, rest], dim=-1)
