"""Scaled fp8 weights: a matrix stored in 8 bits and one number that it is multiplied by.

Two spellings are in use: `X.scale_weight`, and `X.weight_scale` in newer files. Scales of activations and the marker
tensor of such files say nothing about the weights.
"""

import torch

SPELLINGS = ("scale_weight", "weight_scale")
ACTIVATIONS = ("scale_input", "input_scale")
MARKER = "scaled_fp8"
LARGEST = 448.0  # of float8_e4m3fn


def find_scales(keys, dtype_of):
    """{weight's name: its scale's name} of all fp8 weights among tensor names."""
    found = {}
    for key in keys:
        stem, dot, tail = key.rpartition(".")
        weight = f"{stem}{dot}weight"
        if tail in SPELLINGS and weight in keys and dtype_of(weight).itemsize == 1:
            found[weight] = key
    return found


def is_scale(key, scales):
    """Is this tensor part of the fp8 scheme instead of a weight of its own?"""
    stem, dot, tail = key.rpartition(".")
    beside = f"{stem}{dot}weight" in scales and tail in SPELLINGS + ACTIVATIONS
    return beside or (bool(scales) and tail == MARKER)


def unscaled(weight, scale, dtype):
    """fp8 weight [rows, ..] and scale (one number, or one a row) -> weight in `dtype`, multiplied in fp32."""
    if scale.numel() > 1:
        scale = scale.reshape(-1, *(1,) * (weight.dim() - 1))
    return (weight.float() * scale).to(dtype)


def scale_down(weight):
    """Matrix -> (float8_e4m3fn of the same shape, fp32 scale): the largest entry lands on fp8's largest number."""
    weight = weight.float()
    scale = (weight.abs().amax() / LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
    return (weight / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scale
