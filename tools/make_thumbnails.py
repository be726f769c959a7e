"""Make the square pictures of the template browser from results of the shipped workflows.

    python tools/make_thumbnails.py [RESULTS]

RESULTS holds pictures and clips (png, jpg, webp, gif, mp4, webm) whose names start with a workflow's name, e.g.
"SCD text to image 1.png"; several are laid out as a sheet, of a clip its frames are. Writes
workflows/<name>.jpg for every workflow that has results. One whose model has to be downloaded gets a plain card with
its title when there are none: a picture that the model did not draw would promise too much. Names the rest.
"""

import argparse
import json
import math
import pathlib
import sys

import torch
from PIL import Image, ImageDraw, ImageFont

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scd_core.video import read_video  # noqa: E402

SIDE = 512
CLIPS = (".mp4", ".webm", ".gif", ".webp")
PICTURES = (".png", ".jpg", ".jpeg")
BUNDLED = "bundled"  # how the name of the model that ships with the pack begins
PAPER, INK, FAINT = (24, 24, 27), (228, 228, 231), (161, 161, 170)
# a card's bar and cells, cold to hot
COLOURS = ((38, 52, 130), (40, 128, 196), (104, 196, 164), (250, 204, 72), (226, 66, 40))
MARGIN, CELL = 44, 28


def pictures_of(path, frames):
    """PIL pictures of one result; of a clip `frames` of them, evenly spread."""
    if path.suffix.lower() in PICTURES:
        return [Image.open(path).convert("RGB")]
    clip, _ = read_video(path)
    chosen = torch.linspace(0, len(clip) - 1, min(frames, len(clip))).round().long()
    return [Image.fromarray(frame.mul(255).round().byte().numpy()) for frame in clip[chosen]]


def square(picture):
    """The middle of a picture."""
    side = min(picture.size)
    left, top = (picture.width - side) // 2, (picture.height - side) // 2
    return picture.crop((left, top, left + side, top + side))


def sheet(pictures):
    """A square of SIDE pixels with as many pictures as fill whole rows."""
    columns = max(1, math.isqrt(len(pictures)))
    tile = SIDE // columns
    out = Image.new("RGB", (SIDE, SIDE), (24, 24, 27))
    for i, picture in enumerate(pictures[: columns * columns]):
        small = square(picture).resize((tile, tile), Image.Resampling.LANCZOS)
        out.paste(small, (i % columns * tile, i // columns * tile))
    return out


def models_of(workflow):
    """Names of the models that the loaders of a workflow file choose."""
    nodes = json.loads(workflow.read_text(encoding="utf-8"))["nodes"]
    return [node["widgets_values"][0] for node in nodes if node["type"] == "SCD_LoadARModel"]


def wrapped(draw, text, font, width):
    """Lines of a text that are no wider than `width` pixels."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and draw.textlength(longer, font=font) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines


def card(title, model):
    """A square with a title, a model's name and a row of cells for tokens; nothing that looks like a result."""
    out = Image.new("RGB", (SIDE, SIDE), PAPER)
    draw = ImageDraw.Draw(out)
    for i, colour in enumerate(COLOURS):
        left = MARGIN + i * (CELL + 8)
        draw.rounded_rectangle((left, MARGIN, left + CELL, MARGIN + CELL), 5, fill=colour)
    large, small = ImageFont.load_default(58), ImageFont.load_default(27)
    top = MARGIN + CELL + 50
    for line in wrapped(draw, title, large, SIDE - 2 * MARGIN):
        draw.text((MARGIN, top), line, fill=INK, font=large)
        top += 70
    lines = wrapped(draw, model, small, SIDE - 2 * MARGIN)
    for i, line in enumerate(reversed(lines)):
        draw.text((MARGIN, SIDE - MARGIN - 32 * (i + 1)), line, fill=FAINT, font=small)
    return out


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=pathlib.Path, nargs="?", help="folder of results; default: cards alone")
    args = parser.parse_args()
    missing = []
    for workflow in sorted((ROOT / "workflows").glob("*.json")):
        files = sorted(args.results.rglob(f"{workflow.stem}*")) if args.results else []
        found = [path for path in files if path.suffix.lower() in CLIPS + PICTURES]
        pictures = [picture for path in found for picture in pictures_of(path, frames=9)]
        foreign = [name for name in models_of(workflow) if not name.startswith(BUNDLED)]
        target = workflow.with_suffix(".jpg")
        if pictures:
            sheet(pictures).save(target, quality=88, optimize=True)
        elif foreign:
            card(workflow.stem.removeprefix("SCD "), ", ".join(foreign)).save(target, quality=88, optimize=True)
        else:
            missing.append(workflow.stem)
            continue
        print(target.relative_to(ROOT))
    if missing and args.results:
        print(f"no result for: {', '.join(missing)}", file=sys.stderr)
    return 1 if missing and args.results else 0


if __name__ == "__main__":
    sys.exit(main())
