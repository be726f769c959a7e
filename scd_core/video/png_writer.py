"""PNG pictures of 8 bits (through Pillow) and 16 bits (Pillow knows no 16-bit colour): single, or a folder of them.

Source: PNG specification, third edition (W3C, 2025), sections 9 (filters), 10 (deflate) and 11 (chunks).
"""

import struct
import zlib

import numpy as np
from PIL import Image, PngImagePlugin

LEVEL = 4  # of zlib: half the time of 6 for a few percent of size


def _paeth(rows, step):
    """Filter type 4 over bytes [H,N] of pixels of `step` bytes: each byte minus the best of its three neighbours."""
    rows = rows.astype(np.int16)
    left, above, corner = np.zeros_like(rows), np.zeros_like(rows), np.zeros_like(rows)
    left[:, step:], above[1:] = rows[:, :-step], rows[:-1]
    corner[1:, step:] = rows[:-1, :-step]
    to_left, to_above = np.abs(above - corner), np.abs(left - corner)
    to_corner = np.abs(left + above - 2 * corner)
    best = np.where((to_left <= to_above) & (to_left <= to_corner), left,
                    np.where(to_above <= to_corner, above, corner))
    return (rows - best).astype(np.uint8)


def _chunk(name, data):
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(data, zlib.crc32(name)))


def _deep_png(picture, metadata):
    """Return the bytes of a 16-bit PNG of a uint16 picture [H,W,3|4]; metadata: {key: ASCII text}."""
    height, width, channels = picture.shape
    rows = picture.astype(">u2").view(np.uint8).reshape(height, -1)
    filtered = np.full((height, rows.shape[1] + 1), 4, np.uint8)
    filtered[:, 1:] = _paeth(rows, 2 * channels)
    header = struct.pack(">IIBBBBB", width, height, 16, {3: 2, 4: 6}[channels], 0, 0, 0)
    texts = (_chunk(b"tEXt", f"{key}\0{value}".encode("ascii")) for key, value in metadata.items())
    data = _chunk(b"IDAT", zlib.compress(filtered, LEVEL))
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + b"".join(texts) + data + _chunk(b"IEND", b"")


def write_png(path, picture, metadata):
    """Write one uint8 or uint16 picture [H,W,3|4] with `metadata` {key: ASCII text} as text chunks."""
    if picture.dtype == np.uint16:
        path.write_bytes(_deep_png(picture, metadata))
        return
    info = PngImagePlugin.PngInfo()
    for key, value in metadata.items():
        info.add_text(key, value)
    Image.fromarray(picture).save(path, "PNG", pnginfo=info, compress_level=LEVEL)


class PngWriter:
    """A folder of numbered PNG pictures; the first one carries the metadata as text chunks."""

    def __init__(self, target, job):
        target.mkdir()
        self.folder, self.job, self.count = target, job, 0

    def __enter__(self):
        return self

    def __exit__(self, exc_type, exc, trace):
        return None

    def add(self, picture):
        """Write one uint8 or uint16 picture [H,W,3] or [H,W,4]."""
        self.count += 1
        # Only the first: a graph may be hundreds of kilobytes, times thousands of pictures.
        metadata = self.job.metadata if self.count == 1 else {}
        write_png(self.folder / f"{self.job.path.name}_{self.count:05}.png", picture, metadata)
