"""Where tokens come from: all that somebody needs to draw them again, and to see why they would differ."""

import hashlib

import torch

from . import __version__

PARAMETERS, VALUES = 16, 32  # weights that are looked at, and numbers of each


def fingerprint(net):
    """16 hex digits that tell networks apart: names and shapes of all weights, and some numbers of some.

    The numbers are rounded to bf16, so that a network read in fp32 and in bf16 has one fingerprint.
    """
    digest, weights = hashlib.sha256(), sorted(net.named_parameters())
    for name, weight in weights:
        digest.update(f"{name} {list(weight.shape)}\n".encode())
    for _, weight in weights[:: max(1, len(weights) // PARAMETERS)]:
        flat = weight.detach().flatten()
        some = flat[:: max(1, len(flat) // VALUES)].to(torch.bfloat16).cpu()
        digest.update(some.view(torch.int16).numpy().astype("<i2").tobytes())
    return digest.hexdigest()[:16]


def machine(device):
    """A device with the name of its kind: numbers differ between kinds in their last digits."""
    device = torch.device(device)
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return f"cpu ({torch.backends.cpu.get_cpu_capability()})" if device.type == "cpu" else str(device)


def origin(net, family, device, prompt, negative=None, kept=None):
    """Plain data for a report: pack, torch, machine, model and texts of a run; `kept` tokens by their hash."""
    given = None if kept is None else hashlib.sha256(kept.cpu().numpy().astype("<i4").tobytes()).hexdigest()
    return {
        "pack": __version__,
        "torch": str(torch.__version__),
        "device": machine(device),
        "model": family.file or family.title or family.name,
        "family": family.title or family.name,
        "fingerprint": fingerprint(net),
        "prompt": prompt.text,
        "negative": None if negative is None else negative.text,
        "text_features": prompt.features is not None,
        "sha256_kept": given,
    }


def in_words(origin):
    """The line of a report that names model, pack, torch and device."""
    return (
        f"{origin['model']} (fingerprint {origin['fingerprint']}), pack {origin['pack']}, torch {origin['torch']}, "
        f"{origin['device']}"
    )
