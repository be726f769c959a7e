"""Step 4: put codec and language model into the one file that ships with the pack (bf16, configuration inside).

    python tools/train_bundled/export.py --vq .data/vq.pt --lm .data/lm.pt --out scd_core/bundled/model.safetensors
"""

import argparse
import json

import torch
from common import ROOT
from train_lm import CONFIG

from scd_core.checkpoint import save_safetensors

CREDIT = (
    "Trained on compositions of Microsoft Fluent Emoji 3D pictures (MIT licence, Copyright (c) Microsoft Corporation), "
    "packaged by LobeHub (MIT licence), on procedural backgrounds."
)


def main(args):
    tensors = {}
    for part, path in (("codec", args.vq), ("decoder", args.lm)):
        state = torch.load(path, weights_only=True)["state"]
        tensors |= {f"{part}.{name}": t.to(torch.bfloat16).contiguous() for name, t in state.items()}
    metadata = {"config": json.dumps(CONFIG), "credit": CREDIT, "format": "pt"}
    save_safetensors(tensors, args.out, metadata, overwrite=True)
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    print(f"{args.out}: {len(tensors)} tensors, {size / 1e6:.2f} MB")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vq", default=".data/vq.pt")
    parser.add_argument("--lm", default=".data/lm.pt")
    parser.add_argument("--out", default=str(ROOT / "scd_core" / "bundled" / "model.safetensors"))
    main(parser.parse_args())
