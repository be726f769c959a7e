"""Chameleon models of the golden fixtures, laid out as users have them."""

import json
import shutil
from pathlib import Path

import pytest
from scd_pack.scd_core.checkpoint import Source, save_safetensors

GOLDEN = Path(__file__).parent / "data" / "golden"
LUMINA, ANOLE = ("lumina-mgpt-hf", "lumina-mgpt-34b-like", "lumina-mgpt-mp2"), ("anole-hf", "anole-meta")
VQ = GOLDEN / "chameleon-tokenizer"


def lay_out(name, folder, vq=True, text=True, **config):
    """A fixture's language model in `folder`, three levels away from other tests' files.

    Args:
        vq, text: with the image tokenizer, with the text tokenizer, in the same folder.
        config: settings to change; None removes one.
    """
    folder.mkdir(parents=True)
    for file in (GOLDEN / name / "model").iterdir():
        if text or "token" not in file.name:
            shutil.copy(file, folder)
    if vq:
        for file in ("vqgan.ckpt", "vqgan.yaml"):
            shutil.copy(VQ / "model" / file, folder)
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8")) | config
    settings = {key: value for key, value in settings.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


@pytest.fixture
def models(tmp_path):
    """A models folder so deep that a search around a model stays inside of it."""
    return tmp_path / "a" / "b" / "models"


def tensors_of(folder):
    source = Source.open(folder)
    return {key: source.read(key).clone() for key in source.keys()}


def save_weights(folder, tensors):
    """Replace a folder's weights by one file."""
    for file in folder.glob("model*"):
        file.unlink()
    save_safetensors(tensors, folder / "model.safetensors")
