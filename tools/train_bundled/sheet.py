"""Step 5: the contact sheet of the README: 32 prompts and 8 clips drawn by the shipped model.

    python tools/train_bundled/sheet.py --out docs/bundled_sheet.png

Pictures whose composition was never in the training data are marked with a star.
"""

import argparse
from pathlib import Path

import torch
from common import ROOT
from PIL import Image, ImageDraw, ImageFont
from subjects import HELD_OUT

from scd_core.generate import Request, generate
from scd_core.models.load import load_model

PICTURES = (
    "fox on snow",
    "rocket on night",
    "burger on wood",
    "strawberry on plain",
    "penguin on snow",
    "elephant on grass",
    "pizza slice on wood",
    "lion on sand",
    "sailboat on water",
    "tiger on grass",
    "rainbow on sky",
    "apple on wood",
    "bus on sand",
    "frog on water",
    "donut on plain",
    "tree on night",
    "balloon on sky",
    "robot on plain",
    "train on grass",
    "bear on snow",
    "birthday cake on wood",
    "tractor on grass",
    "earth on night",
    "parrot on sky",
    "fox on night",
    "panda on water",
    "rocket on sand",
    "car on snow",
    "dog on grass",
    "duck on water",
    "moon on night",
    "cow on grass",
)
CLIPS = (
    "panda growing on grass",
    "car moving left on sand",
    "rocket moving up on night",
    "fox bouncing on snow",
    "apple spinning on wood",
    "duck moving right on water",
    "balloon moving up on sky",
    "lion growing on grass",
)
EDGE, LABEL, WIDE = 128, 16, 8


def held_out(prompt):
    return any(prompt.startswith(s + " ") and prompt.endswith(" " + b) for s, b in HELD_OUT)


def frames_of(model, prompt, frames, seed):
    encoded = model.family.text.encode(prompt)
    drawn = generate(model.decoder, model.family, encoded, request=Request(frames=frames, seed=seed))
    pixels = (model.codec.decode(drawn.codes[0]) * 255).round().to(torch.uint8).numpy()
    return [Image.fromarray(p) for p in pixels]


@torch.inference_mode()
def main(args):
    model, font = load_model(args.model, dtype="fp32"), ImageFont.load_default(11)
    rows = len(PICTURES) // WIDE + len(CLIPS)
    sheet = Image.new("RGB", (WIDE * (EDGE + 4), rows * (EDGE + LABEL)), "white")
    pen = ImageDraw.Draw(sheet)

    def put(picture, words, column, row):
        x, y = column * (EDGE + 4), row * (EDGE + LABEL)
        sheet.paste(picture.resize((EDGE, EDGE), Image.Resampling.BICUBIC), (x, y))
        pen.text((x + 1, y + EDGE), words + (" *" if words and held_out(words) else ""), fill="black", font=font)

    for i, prompt in enumerate(PICTURES):
        put(frames_of(model, prompt, 1, args.seed)[0], prompt, i % WIDE, i // WIDE)
    for i, prompt in enumerate(CLIPS):
        for column, frame in enumerate(frames_of(model, prompt, 8, args.seed)):
            put(frame, "" if column else prompt, column, len(PICTURES) // WIDE + i)
    Path(args.out).parent.mkdir(parents=True, exist_ok=True)
    sheet.save(args.out, optimize=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(ROOT / "scd_core" / "bundled" / "model.safetensors"))
    parser.add_argument("--out", default=str(ROOT / "docs" / "bundled_sheet.png"))
    parser.add_argument("--seed", type=int, default=1)
    main(parser.parse_args())
