"""One request drawn by several methods: figures beside one another, a captioned sheet of pictures, and a plot."""

from contextlib import suppress
from dataclasses import replace

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from .acceptance import METHODS
from .errors import UserError
from .generate import check_request, generate
from .spatial import check_spatial

PAPER, INK, FAINT = (24, 24, 27), (228, 228, 231), (63, 63, 70)
LOSSLESS, LOSSY = (64, 160, 200), (226, 120, 60)  # bars
TILE = 256  # pictures are enlarged to about this side, in whole steps
PLOT = (960, 540)
DEFAULT = "autoregressive, sjd, scd-maximal, scd-gumbel, seed-exact"


def method_names(text):
    """Names of methods in "a, b, c".

    Raises:
        UserError: none, or one that there is not.
    """
    names = [name.strip() for name in text.replace("\n", ",").split(",") if name.strip()]
    unknown = [name for name in names if name not in METHODS]
    if unknown or not names:
        told = f"unknown method {unknown[0]!r}" if unknown else "no method is named"
        raise UserError(f"{told}: write one or more of {', '.join(METHODS)}, with commas between")
    return list(dict.fromkeys(names))


def compare(decoder, family, prompt, negative, request, methods, device="cpu", callback=None):
    """Draw the same request with every method; a short run before each keeps allocations out of the seconds.

    Args:
        request: `Request`; its method is replaced. methods: names. callback: (number of the method, `Progress`).

    Returns:
        list of `Drawn`, in the order of `methods`.
    """
    for method in methods:
        check_request(replace(request, method=method))
        check_spatial(METHODS[method], request.block_rows, family, decoder)
    drawn = []
    for number, method in enumerate(methods):

        def tell(progress, number=number):
            if callback is not None:
                callback(number, progress)

        wanted = replace(request, method=method)
        with suppress(_Enough):
            generate(decoder, family, prompt, negative, wanted, device=device, callback=_after(WARM_UP))
        drawn.append(generate(decoder, family, prompt, negative, wanted, device=device, callback=tell))
    return drawn


WARM_UP = 3  # passes


class _Enough(Exception):
    """Ends a run that was only a warm-up."""


def _after(passes):
    def callback(progress):
        if progress.passes >= passes:
            raise _Enough

    return callback


def rows_of(reports):
    """Figures of a comparison as dictionaries; ratios and token identity are against the first report."""
    first, rows = reports[0], []
    for report in reports:
        ratio = sum(first.per_sample) / max(sum(report.per_sample), 1)
        rows.append(
            {
                "method": report.method,
                "window": report.settings["window"],
                "nodes": report.settings["nodes"],
                "passes": report.passes,
                "tokens_per_pass": round(report.tokens_per_pass, 2),
                "seconds": round(report.total_seconds, 2),
                "fewer_passes": round(ratio, 2),
                "lossless": report.lossless,
                "same_tokens": report.sha256_tokens == first.sha256_tokens,
            }
        )
    return rows


def table(rows):
    """Rows of `rows_of` as aligned text."""
    head = ("method", "window", "nodes", "passes", "tokens/pass", "seconds", "fewer passes", "lossless", "same tokens")
    lines = [head]
    for row in rows:
        yes = ["yes" if row[key] else "no" for key in ("lossless", "same_tokens")]
        cells = (row["method"], row["window"], row["nodes"], row["passes"], f"{row['tokens_per_pass']:.2f}")
        lines.append((*map(str, cells), f"{row['seconds']:.2f}", f"{row['fewer_passes']:.1f}x", *yes))
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths)).rstrip() for line in lines)


def font(size):
    """Pillow's own font."""
    try:
        return ImageFont.load_default(size)
    except (TypeError, OSError):  # Pillow before 10.1, or built without FreeType: one small size
        return ImageFont.load_default()


def caption(row):
    """Two lines below a picture."""
    kind = "lossless" if row["lossless"] else "lossy"
    same = ", same tokens" if row["same_tokens"] and row["fewer_passes"] != 1 else ""
    return row["method"], f"{row['passes']} passes, {row['fewer_passes']:.1f}x, {row['seconds']:.1f} s, {kind}{same}"


def picture_sheet(frames, rows):
    """Pictures of all methods side by side with captions.

    Args:
        frames: one float array [F, H, W, 3] in 0..1 a method (F frames each). rows: of `rows_of`.

    Returns:
        uint8 [F, height, width, 3].
    """
    count, height, width = frames[0].shape[:3]
    scale = max(1, round(TILE / max(height, width)))
    wide, tall, gap = max(width * scale, TILE), height * scale, 12
    columns = min(len(frames), 3 if len(frames) in (3, 5, 6, 9) else 4)
    lines = -(-len(frames) // columns)
    out, big, small = [], font(16), font(12)
    for f in range(count):
        sheet = Image.new("RGB", (columns * (wide + gap) + gap, lines * (tall + 52 + gap) + gap), PAPER)
        draw = ImageDraw.Draw(sheet)
        for i, (clip, row) in enumerate(zip(frames, rows)):
            x, y = gap + (i % columns) * (wide + gap), gap + (i // columns) * (tall + 52 + gap)
            tile = np.round(np.clip(clip[f], 0, 1) * 255).astype(np.uint8).repeat(scale, 0).repeat(scale, 1)
            sheet.paste(Image.fromarray(tile), (x + (wide - tile.shape[1]) // 2, y))
            title, line = caption(row)
            draw.text((x, y + tall + 6), title, fill=INK, font=big)
            draw.text((x, y + tall + 30), line, fill=INK, font=small)
        out.append(np.asarray(sheet))
    return np.stack(out)


def plot(reports, size=PLOT):
    """Passes of every method as bars; beside them, how the tokens of the first sample were reached pass by pass.

    Returns:
        uint8 [height, width, 3].
    """
    image = Image.new("RGB", size, PAPER)
    draw, rows = ImageDraw.Draw(image), rows_of(reports)
    middle = size[0] // 2
    _bars(draw, rows, (20, 20, middle - 20, size[1] - 20))
    _curves(draw, reports, (middle + 40, 20, size[0] - 20, size[1] - 20))
    return np.asarray(image)


def _bars(draw, rows, box):
    """Horizontal bars: passes of each method, lossless blue, lossy orange."""
    left, top, right, bottom = box
    draw.text((left, top), "passes", fill=INK, font=font(16))
    step = min(48, (bottom - top - 36) // len(rows))
    most = max(row["passes"] for row in rows)
    for i, row in enumerate(rows):
        y = top + 36 + i * step
        length = max(2, round((right - left - 210) * row["passes"] / most))
        color = LOSSLESS if row["lossless"] else LOSSY
        draw.text((left, y + step // 2 - 9), row["method"], fill=INK, font=font(13))
        draw.rectangle((left + 120, y + 5, left + 120 + length, y + step - 7), fill=color)
        told = f"{row['passes']} ({row['fewer_passes']:.1f}x)"
        draw.text((left + 128 + length, y + step // 2 - 9), told, fill=INK, font=font(13))


def _curves(draw, reports, box):
    """Tokens decided against passes, one line a method."""
    left, top, right, bottom = box
    draw.text((left, top), "tokens decided, pass by pass", fill=INK, font=font(16))
    top, bottom = top + 36, bottom - 30
    passes = max(len(report.accepted[0]) for report in reports)
    total = max(sum(reports[0].accepted[0]), 1)
    draw.line((left, top, left, bottom, right, bottom), fill=FAINT, width=2)
    for part in (0, 0.5, 1):
        x = left + part * (right - left)
        draw.text((x - (24 if part else 0), bottom + 8), str(round(part * passes)), fill=INK, font=font(12))
        draw.text((left + 4, bottom - part * (bottom - top) - 6), str(round(part * total)), fill=INK, font=font(12))
    for i, report in enumerate(reports):
        done = np.concatenate([[0], np.cumsum(report.accepted[0])])
        points = [(left + n / passes * (right - left), bottom - d / total * (bottom - top)) for n, d in enumerate(done)]
        shade = 0.55 + 0.45 * (i + 1) / len(reports)
        color = tuple(round(c * shade) for c in (LOSSLESS if report.lossless else LOSSY))
        draw.line(points, fill=color, width=2)
        x, y = points[-1]
        draw.text((min(x, right - 90), y - 16 + 12 * (i % 2)), report.method, fill=color, font=font(11))
