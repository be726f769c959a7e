"""Janus-Pro fixtures for its tests: loaded, with their numbers, or as copies on disk that a test may spoil."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from scd_pack.scd_core.generate import Request, generate
from scd_pack.scd_core.models.load import load_model
from scd_pack.scd_core.models.session import Session

GOLDEN = Path(__file__).parent / "data" / "golden"
MODELS = ("janus-pro-original", "janus-pro-hf")
LOGITS, PIXELS = 2e-4, 1e-4  # the fixtures' own limits in fp32


class Fixture:
    """A loaded fixture and its numbers."""

    def __init__(self, name, dtype="fp32"):
        self.want = load_file(GOLDEN / name / "expected.safetensors")
        self.meta = json.loads((GOLDEN / name / "meta.json").read_text(encoding="utf-8"))
        self.model = load_model(GOLDEN / name / "model", dtype)
        self.decoder, self.family, self.codec = self.model.decoder, self.model.family, self.model.codec
        self.prompt = self.family.text.encode(self.meta["prompt"])
        self.plan = self.family.plan(self.family.size())
        self.streams = list(self.family.streams(self.prompt, None, self.plan))

    def session(self):
        fixed = torch.full((1, self.plan.length), -1)
        return Session(self.decoder, self.family, self.plan, self.streams, fixed, 0, "cpu")

    def inputs(self):
        """Input ids [1, N] and positions before them for teacher forcing."""
        codes = self.want["codes"]
        return torch.cat([torch.zeros(1, dtype=torch.long), codes[:-1]])[None], torch.arange(len(codes))[None] - 1

    @torch.inference_mode()
    def logits(self):
        """Teacher-forced logits [streams, N, V] in one pass."""
        tokens, before = self.inputs()
        return self.session().window(tokens, before, self.plan.length - 1, True)[0].float()

    def draw(self, method, negative=None, **changes):
        negative = None if negative is None else self.family.text.encode(negative)
        return generate(self.decoder, self.family, self.prompt, negative, Request(method=method, **changes)).codes


def copy_model(name, place):
    """A copy of a fixture's model, too deep below `place` to see what other tests left around."""
    folder = place / "host" / "models" / "ar_models" / "a model"
    shutil.copytree(GOLDEN / name / "model", folder)
    return folder


def edit(path, change):
    """Rewrite a JSON file."""
    values = json.loads(path.read_text(encoding="utf-8"))
    change(values)
    path.write_text(json.dumps(values), encoding="utf-8")


def tensors(folder):
    """All tensors of a model folder; its weight files are removed."""
    state = {}
    for file in sorted(folder.iterdir()):
        if file.suffix == ".bin":
            state |= torch.load(file, weights_only=True)
        elif file.suffix == ".safetensors":
            state |= load_file(file)
        if file.suffix in (".bin", ".safetensors") or file.name.endswith(".index.json"):
            file.unlink()
    return state


def rewrite(folder, change):
    """Pass a folder's tensors through `change` (dict -> dict) into one file."""
    save_file({k: v.contiguous() for k, v in change(tensors(folder)).items()}, folder / "model.safetensors")


def without(*starts):
    return lambda state: {key: value for key, value in state.items() if not key.startswith(starts)}
