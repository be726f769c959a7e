"""Animated WebP through Pillow. Source: WebP container specification (RFC 9649, section 2.7)."""

import io
import struct

from PIL import Image

from ..errors import UserError
from .pillow_writer import Clock, FileWriter

EXIF_MODEL = 0x0110
RIFF_LIMIT = 2**32 - 10


def _uint24(value):
    return struct.pack("<I", value)[:3]


def _chunk(name, data):
    """One RIFF chunk: name, length, data, and a pad byte after an odd length."""
    return name + struct.pack("<I", len(data)) + data + b"\0" * (len(data) % 2)


def _picture_chunks(data):
    """Return the picture chunks (ALPH, VP8, VP8L) of a still WebP file, headers included."""
    kept, at = b"", 12
    while at < len(data):
        size = struct.unpack_from("<I", data, at + 4)[0]
        end = at + 8 + size + size % 2
        if data[at : at + 4] in (b"ALPH", b"VP8 ", b"VP8L"):
            kept += data[at:end]
        at = end
    return kept


def _exif(metadata):
    """Return EXIF bytes where the host's page looks for a graph: prompt in Model, the rest in tags below."""
    exif, tag = Image.Exif(), EXIF_MODEL - 1
    for key, value in metadata.items():
        if key == "prompt":
            exif[EXIF_MODEL] = f"{key}:{value}"
        else:
            exif[tag] = f"{key}:{value}"
            tag -= 1
    return exif.tobytes().removeprefix(b"Exif\0\0")


class WebpWriter(FileWriter):
    """Animated WebP with alpha; quality 100 is lossless. The header's size field is filled in at the end."""

    def __init__(self, target, job):
        super().__init__(target, job)
        self.clock = Clock(job.rate, 1000)
        flags = 0x02 | (0x10 if job.alpha else 0) | (0x08 if job.metadata else 0)
        canvas = _uint24(job.width - 1) + _uint24(job.height - 1)
        # The file counts plays, 0 meaning forever; our loop_count counts repetitions after the first play.
        plays = job.loop_count + 1 if job.loop_count else 0
        self.file.write(b"RIFF\0\0\0\0WEBP" + _chunk(b"VP8X", bytes([flags, 0, 0, 0]) + canvas))
        self.file.write(_chunk(b"ANIM", struct.pack("<IH", 0, plays)))

    def add(self, picture):
        """Append one uint8 picture [H,W,3] or [H,W,4]."""
        buffer = io.BytesIO()
        Image.fromarray(picture).save(
            buffer, "WEBP", quality=self.job.level, lossless=self.job.level == 100, exact=True
        )
        size = _uint24(picture.shape[1] - 1) + _uint24(picture.shape[0] - 1)
        head = _uint24(0) * 2 + size + _uint24(self.clock.next_delay()) + b"\x02"  # replace, never blend
        self.file.write(_chunk(b"ANMF", head + _picture_chunks(buffer.getvalue())))

    def finish(self):
        """Write the metadata and the size of the file."""
        if self.job.metadata:
            self.file.write(_chunk(b"EXIF", _exif(self.job.metadata)))
        size = self.file.tell() - 8
        if size > RIFF_LIMIT:
            raise UserError(f"The WebP clip grew to {size} bytes, the format ends at 4 GB; choose mp4.")
        self.file.seek(4)
        self.file.write(struct.pack("<I", size))
