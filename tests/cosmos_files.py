"""Cosmos fixtures as people have the models on disk."""

import shutil
from pathlib import Path

from scd_pack.scd_core.checkpoint import Source

GOLDEN = Path(__file__).parent / "data" / "golden"


def lay_out(name, place, codec=True):
    """A fixture's model in a folder of its own, the codec in a folder beside it as the release has them."""
    shutil.copytree(GOLDEN / name / "model", place / name)
    if codec:
        shutil.copytree(GOLDEN / "cosmos-dv8x16x16" / "model", place / "Cosmos-1.0-Tokenizer-DV8x16x16")
    return place / name


def tensors_of(path):
    source = Source.open(path)
    return {key: source.read(key).clone() for key in source.keys()}
