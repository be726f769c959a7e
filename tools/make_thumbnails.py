"""Make the square pictures of the template browser from results of the shipped workflows.

    python tools/make_thumbnails.py RESULTS

RESULTS holds pictures and clips (png, jpg, webp, gif, mp4, webm) whose names start with a workflow's name, e.g.
"SCD text to image 1.png"; several are laid out as a sheet, of a clip its frames are. Writes
workflows/<name>.jpg for every workflow that has results, and names those that have none.
"""

import argparse
import math
import pathlib
import sys

import torch
from PIL import Image

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scd_core.video import read_video  # noqa: E402

SIDE = 512
CLIPS = (".mp4", ".webm", ".gif", ".webp")
PICTURES = (".png", ".jpg", ".jpeg")


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


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=pathlib.Path)
    args = parser.parse_args()
    missing = []
    for workflow in sorted((ROOT / "workflows").glob("*.json")):
        found = sorted(p for p in args.results.rglob(f"{workflow.stem}*") if p.suffix.lower() in CLIPS + PICTURES)
        pictures = [picture for path in found for picture in pictures_of(path, frames=9)]
        if not pictures:
            missing.append(workflow.stem)
            continue
        target = workflow.with_suffix(".jpg")
        sheet(pictures).save(target, quality=88, optimize=True)
        print(target.relative_to(ROOT))
    if missing:
        print(f"no result for: {', '.join(missing)}", file=sys.stderr)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
