"""The acceptance map: a heat map of how many passes looked at each token, as an artist can read it."""

import math

import numpy as np
from PIL import Image, ImageDraw

from ..scd_core.compare import INK, PAPER
from ..scd_core.compare import font as pillow_font

SIDE = 256  # a sheet is at least this wide and high
GAP = 2
GIVEN = (96, 96, 96)  # cells that no pass had to look at
# cold to hot; evenly spaced
ANCHORS = np.array([(38, 52, 130), (40, 128, 196), (104, 196, 164), (250, 204, 72), (226, 66, 40)], dtype=np.float64)


def heat(values):
    """Colours uint8 [..., 3] of values 0..1."""
    place = np.clip(values, 0, 1) * (len(ANCHORS) - 1)
    low = np.minimum(place.astype(int), len(ANCHORS) - 2)
    part = (place - low)[..., None]
    return np.round(ANCHORS[low] * (1 - part) + ANCHORS[low + 1] * part).astype(np.uint8)


def columns_for(count):
    """Columns of a sheet of `count` tiles: near square, without a gap where that is possible."""
    least = math.ceil(math.sqrt(count))
    return next((c for c in range(least, 2 * least + 1) if count % c == 0), least)


def sheet(tiles, gap=GAP, paper=PAPER):
    """Lay pictures uint8 [N, h, w, 3] out as one, row by row."""
    count, height, width, _ = tiles.shape
    columns = columns_for(count)
    rows = math.ceil(count / columns)
    out = np.empty((rows * (height + gap) - gap, columns * (width + gap) - gap, 3), np.uint8)
    out[:] = paper
    for i, tile in enumerate(tiles):
        y, x = (i // columns) * (height + gap), (i % columns) * (width + gap)
        out[y : y + height, x : x + width] = tile
    return out


def acceptance_map(visits):
    """One picture a sample: every token as a square, the colour says how many passes looked at it.

    Args:
        visits: int [B, frames, rows, cols].

    Returns:
        uint8 [B, H, W, 3], H and W at least `SIDE`; blue is 1 pass, red the most that any token took, grey was
        given. The frames of a clip lie side by side, a colour bar with both ends is below.
    """
    most = max(int(visits.max()), 1)
    colours = heat((visits - 1) / max(most - 1, 1))
    colours[visits == 0] = GIVEN
    grids = [sheet(sample, gap=1) for sample in colours]
    scale = math.ceil(SIDE / min(grids[0].shape[:2]))
    pictures = []
    for grid, counts in zip(grids, visits):
        big = grid.repeat(scale, 0).repeat(scale, 1)
        pictures.append(np.concatenate([big, legend(big.shape[1], most, counts)]))
    return np.stack(pictures)


def legend(width, most, counts):
    """Colour bar and the two ends' meaning, uint8 [h, width, 3]."""
    size = max(11, width // 22)
    image = Image.new("RGB", (width, 3 * size), PAPER)
    bar = heat(np.linspace(0, 1 if most > 1 else 0, width - 2 * size))
    image.paste(Image.fromarray(bar[None].repeat(size, 0)), (size, size // 3))
    draw, font = ImageDraw.Draw(image), pillow_font(size)
    looked = counts[counts > 0]
    mean = f"mean {looked.mean():.1f}" if looked.size else "all given"
    texts = ("1 pass", mean, f"{most} passes" if most > 1 else "")
    for text, x in zip(texts, (size, width // 2, width - size)):
        left, _, right, _ = draw.textbbox((0, 0), text, font=font)
        at = {size: x, width // 2: x - (right - left) // 2}.get(x, x - (right - left))
        draw.text((at, 1.5 * size), text, fill=INK, font=font)
    return np.asarray(image)
