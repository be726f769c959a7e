"""Shared by the training scripts: the repository on the import path, seeds, checkpoints, a step log."""

import os
import pathlib
import sys
import time

import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))


def init_weights(module, std=None, seed=0):
    """The pack's layers come without initialisation: give them the usual one (fan-in normal, norms 1, bias 0)."""
    gen = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in module.named_parameters():
            if p.dim() >= 2:
                fan_in = p[0].numel()
                p.normal_(0.0, std if std else fan_in**-0.5, generator=gen)
            elif name.endswith("bias"):
                p.zero_()
            else:
                p.fill_(1.0)
            p.requires_grad_(True)


def save(state, path):
    """Write a checkpoint whole or not at all."""
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    torch.save(state, part)
    os.replace(part, path)


class Clock:
    """Seconds of training so far, carried across restarts; answers whether the budget is spent."""

    def __init__(self, budget, used=0.0):
        self.budget, self.start = budget, time.time() - used

    @property
    def used(self):
        return time.time() - self.start

    @property
    def progress(self):
        return min(1.0, self.used / self.budget)


def load_codec(path):
    """The trained codec of step 1, ready to encode."""
    from scd_core.codecs.conv2d import ConvCodec, ConvCodecConfig

    saved = torch.load(path, weights_only=True)
    net = ConvCodec(ConvCodecConfig(**saved["config"]), dtype=torch.float32)
    net.load_state_dict(saved["state"])
    return net.eval().to(memory_format=torch.channels_last)
