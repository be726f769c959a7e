"""Animated GIF through Pillow: one palette for the whole clip, error diffusion, still parts stay still.

How it was chosen (RMS error of 255 after a blur of 1.2 pixels, which is what the eye sees; 12 frames of 240x240
of a photograph that pans / stands still under a moving disc, and of a sky gradient under a moving light):

    palette, dither                             pan          still        sky
    a frame, median cut, diffusion              2.1, 593 kB  1.7, 584 kB  0.6, 324 kB
    the clip, median cut, ordered 8x8           3.0, 596 kB  2.9,  57 kB  1.9, 131 kB
    the clip, median cut, diffusion             2.1, 580 kB  1.6, 568 kB  0.7, 316 kB
    the clip, k-means, none                     2.3, 566 kB  2.4,  53 kB  1.8,  67 kB
    the clip, k-means, diffusion                1.3, 582 kB  1.3, 564 kB  0.6, 320 kB
    the same, but unchanged places kept (HOLD)  1.4, 580 kB  1.3,  57 kB  0.8,  93 kB

Diffusion alone flickers where the picture stands still; keeping those places removes the flicker and most of
the bytes. A palette a frame flickers too. Source: GIF89a specification (CompuServe 1990).
"""

import io
import struct

import numpy as np
from PIL import Image

from .pillow_writer import Clock, FileWriter

# A place is kept while its colour stays within HOLD of 255 of the colour it was drawn for: at 3 the noise of a
# decoder does not show, and nothing drifts, because the colour it was drawn for is what is compared.
HOLD = 3
TRANSPARENT = 255
SAMPLE_FRAMES, SAMPLE_PIXELS = 64, 2**14  # a palette of 2**17 pixels is no better and takes ten times as long


def sample_frames(count):
    """Indices of the frames, spread over the clip, that the palette is made of."""
    return np.linspace(0, count - 1, min(count, SAMPLE_FRAMES)).round().astype(int).tolist()


def make_palette(pictures, count, colours):
    """Return the Pillow palette image of `count` sampled uint8 pictures, with at most `colours` (<= 255) entries."""
    share = max(1, SAMPLE_PIXELS // count)
    pixels = []
    for picture in pictures:
        flat = picture.reshape(-1, picture.shape[2])
        if picture.shape[2] == 4:
            flat = flat[flat[:, 3] >= 128]  # what is not shown needs no colours
        # An irrational step: a regular one would see the same columns again and again.
        step = np.modf(np.arange(min(share, len(flat))) * 0.6180339887)[0] * len(flat)
        pixels.append(flat[step.astype(int), :3])
    seen = np.concatenate(pixels)
    if not len(seen):
        seen = np.zeros((1, 3), np.uint8)
    image = Image.fromarray(np.ascontiguousarray(seen[None]))
    palette = image.quantize(colours, method=Image.Quantize.MEDIANCUT, kmeans=1)
    found = palette.getpalette()[: 3 * colours]
    # Filled up with its first colour: what lies behind a short palette would be taken for colours too.
    palette.putpalette(found + found[:3] * (256 - len(found) // 3))
    return palette


def _sub_blocks(data):
    """Cut bytes into the length-prefixed blocks (at most 255 bytes each) of GIF extensions."""
    blocks = [data[i : i + 255] for i in range(0, len(data), 255)]
    return b"".join(bytes([len(block)]) + block for block in blocks) + b"\0"


def _picture_data(data):
    """Return the compressed picture (code size to terminator) of a one-picture GIF."""

    def palette_size(flags):
        return 3 * 2 ** ((flags & 7) + 1) if flags & 0x80 else 0

    at = 13 + palette_size(data[10])
    while data[at] == 0x21:
        at += 2
        while data[at]:
            at += 1 + data[at]
        at += 1
    return data[at + 10 + palette_size(data[at + 9]) : -1]


class GifWriter(FileWriter):
    """Animated GIF; alpha is on or off at one half. Comments hold "key:value" of the metadata."""

    def __init__(self, target, job):
        super().__init__(target, job)
        self.clock = Clock(job.rate, 100)
        self.held = self.drawn = None
        self.colours = bytes(job.palette.getpalette())
        out = self.file
        out.write(b"GIF89a" + struct.pack("<HHBBB", job.width, job.height, 0xF7, TRANSPARENT, 0) + self.colours)
        out.write(b"\x21\xff\x0bNETSCAPE2.0\x03\x01" + struct.pack("<H", job.loop_count) + b"\0")
        for key, value in job.metadata.items():
            out.write(b"\x21\xfe" + _sub_blocks(f"{key}:{value}".encode("ascii")))

    def add(self, picture):
        """Append one uint8 picture [H,W,3] or [H,W,4]."""
        rgb = np.ascontiguousarray(picture[..., :3])
        image = Image.fromarray(rgb).quantize(palette=self.job.palette, dither=Image.Dither.FLOYDSTEINBERG)
        indices = np.array(image)
        indices[indices == TRANSPARENT] = 0  # the same colour, see make_palette
        if self.job.alpha:
            indices[picture[..., 3] < 128] = TRANSPARENT
        else:
            indices = self._changed(rgb, indices)
        self._write(indices)

    def _changed(self, rgb, indices):
        """Let the picture before show through at places that keep their colour; remember what is on the screen."""
        if self.held is None:
            self.held, self.drawn = indices, rgb
            return indices
        # The larger minus the smaller: the difference of unsigned bytes wraps around.
        away = np.maximum(rgb, self.drawn) - np.minimum(rgb, self.drawn)
        kept = away.max(axis=-1) <= HOLD
        through = np.where(kept | (indices == self.held), np.uint8(TRANSPARENT), indices)
        self.drawn = np.where(kept[..., None], self.drawn, rgb)
        self.held = np.where(kept, self.held, indices)
        return through

    def _write(self, indices):
        # 1: the next picture is drawn over this one; 2: it starts from an empty (transparent) screen.
        disposal = 2 if self.job.alpha else 1
        height, width = indices.shape
        head = struct.pack("<BHBB", disposal << 2 | 1, self.clock.next_delay(), TRANSPARENT, 0)
        self.file.write(b"\x21\xf9\x04" + head + b"\x2c" + struct.pack("<HHHHB", 0, 0, width, height, 0))
        self.file.write(self._compress(indices))

    def _compress(self, indices):
        image = Image.fromarray(indices)
        image.putpalette(self.colours)
        buffer = io.BytesIO()
        image.save(buffer, "GIF", interlace=0, optimize=False)
        return _picture_data(buffer.getvalue())

    def finish(self):
        """Write the end of the file."""
        self.file.write(b"\x3b")
