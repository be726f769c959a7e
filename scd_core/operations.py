"""Plain torch layers without weight initialisation: the default for every `operations` argument.

A host may pass its own namespace with the same names (ComfyUI's `comfy.ops`), whose layers cast,
offload and patch weights as they are used.
"""

import torch
from torch import nn


def _raw(base):
    """Subclass of a torch layer whose parameters stay uninitialised: they are read from a file anyway."""
    return type(base.__name__, (base,), {"reset_parameters": lambda self: None, "__module__": __name__})


Linear = _raw(nn.Linear)
Conv1d = _raw(nn.Conv1d)
Conv2d = _raw(nn.Conv2d)
Conv3d = _raw(nn.Conv3d)
GroupNorm = _raw(nn.GroupNorm)
LayerNorm = _raw(nn.LayerNorm)
RMSNorm = _raw(nn.RMSNorm)


class Embedding(nn.Embedding):
    """Token table whose rows can be asked for in another dtype than they are stored in."""

    def reset_parameters(self):
        pass

    def forward(self, ids, out_dtype=None):
        rows = super().forward(ids)
        return rows if out_dtype is None else rows.to(out_dtype)


def cast_to(weight, like):
    """Move a bare parameter to the device and dtype of `like` (what the host's layers do by themselves)."""
    return weight.to(device=like.device, dtype=like.dtype)


def empty_parameter(*shape, device=None, dtype=None):
    """Uninitialised parameter for weights that belong to no layer."""
    return nn.Parameter(torch.empty(*shape, device=device, dtype=dtype), requires_grad=False)
