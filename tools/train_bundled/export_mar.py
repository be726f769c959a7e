"""MAR, step 3: put target and draft into the files that ship with the pack (bf16, configuration inside).

    python tools/train_bundled/export_mar.py
"""

import argparse
import json
from pathlib import Path

import torch
from common import ROOT
from export import CREDIT
from mar_data import NAMES

from scd_core.checkpoint import save_safetensors

FILES = {"target": "mar.safetensors", "draft": "mar_draft.safetensors"}
DEFAULTS = {"temperature": 1.0, "cfg": 2.0}
DIFFUSION_STEPS = 50
CLIP = 5.0  # deviations; of what a denoising step takes the token for


def main(args):
    data, total = torch.load(args.data, weights_only=True), 0
    for role, name in FILES.items():
        saved = torch.load(getattr(args, role), weights_only=True)
        state = saved["state"] | {f"codec.{part}": data[part] for part in ("mean", "basis")}
        tensors = {key: t.to(torch.bfloat16).contiguous() for key, t in state.items()}
        config = {
            "family": "bundled-mar", "role": role, "num_attention_heads": saved["config"]["heads"],
            "class_names": NAMES, "defaults": DEFAULTS, "diffusion_steps": DIFFUSION_STEPS, "clip": CLIP,
        }  # fmt: skip
        metadata = {"config": json.dumps(config), "credit": CREDIT, "format": "pt"}
        save_safetensors(tensors, Path(args.out) / name, metadata, overwrite=True)
        total += (Path(args.out) / name).stat().st_size
        print(f"{name}: {len(tensors)} tensors, step {saved['step']}")
    print(f"{total / 1e6:.2f} MB")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default=".data/mar_latents.pt")
    parser.add_argument("--target", default=".data/mar.pt")
    parser.add_argument("--draft", default=".data/draft.pt")
    parser.add_argument("--out", default=str(ROOT / "scd_core" / "bundled"), help="folder of the bundled model")
    main(parser.parse_args())
