"""Writers that need Pillow alone: animated GIF, animated WebP, a folder of PNG pictures.

Pillow's own animation savers keep every frame in memory until the end. Here Pillow compresses one picture
at a time and the picture's data goes straight into our container, so memory does not grow with the clip,
and delays are taken from the running clock (29.97 does not drift). Sources: GIF89a specification (CompuServe
1990); WebP container specification (RFC 9649, section 2.7).
"""

import io
import struct

from PIL import Image, PngImagePlugin

from ..errors import UserError

EXIF_MODEL = 0x0110
RIFF_LIMIT = 2**32 - 10


class _Clock:
    """Whole ticks between frames whose running sum is never more than half a tick off."""

    def __init__(self, rate, ticks_per_second):
        self.step = ticks_per_second / rate
        self.frames = self.spent = 0

    def next_delay(self):
        self.frames += 1
        delay = round(self.frames * self.step) - self.spent
        self.spent += delay
        return delay


class _FileWriter:
    """A binary file that is opened on creation and closed on exit; `finish` runs only without an error."""

    def __init__(self, target, job):
        self.job = job
        self.file = open(target, "wb")  # noqa: SIM115 - closed in __exit__

    def __enter__(self):
        return self

    def __exit__(self, exc_type, exc, trace):
        with self.file:
            if exc_type is None:
                self.finish()


def _sub_blocks(data):
    """Cut bytes into the length-prefixed blocks (at most 255 bytes each) of GIF extensions."""
    blocks = [data[i : i + 255] for i in range(0, len(data), 255)]
    return b"".join(bytes([len(block)]) + block for block in blocks) + b"\0"


def _gif_parts(data):
    """Split a one-picture GIF into (palette bytes, compressed picture with its code size and terminator)."""

    def palette_size(flags):
        return 3 * 2 ** ((flags & 7) + 1) if flags & 0x80 else 0

    at = 13 + palette_size(data[10])
    palette = data[13:at]
    while data[at] == 0x21:
        at += 2
        while data[at]:
            at += 1 + data[at]
        at += 1
    own_palette = palette_size(data[at + 9])
    at += 10
    if own_palette:
        palette = data[at : at + own_palette]
    return palette, data[at + own_palette : -1]


class GifWriter(_FileWriter):
    """Animated GIF: a palette per picture, error-diffused; comments hold "key:value" of the metadata."""

    def __init__(self, target, job):
        super().__init__(target, job)
        self.clock = _Clock(job.rate, 100)
        out = self.file
        out.write(b"GIF89a" + struct.pack("<HHBBB", job.width, job.height, 0x70, 0, 0))
        out.write(b"\x21\xff\x0bNETSCAPE2.0\x03\x01" + struct.pack("<H", job.loop_count) + b"\0")
        for key, value in job.metadata.items():
            out.write(b"\x21\xfe" + _sub_blocks(f"{key}:{value}".encode("ascii")))

    def add(self, picture):
        """Append one uint8 picture [H,W,3]."""
        image = Image.fromarray(picture)
        palette = image.quantize(self.job.level, method=Image.Quantize.MEDIANCUT)
        buffer = io.BytesIO()
        image.quantize(palette=palette, dither=Image.Dither.FLOYDSTEINBERG).save(
            buffer, "GIF", interlace=0, optimize=False
        )
        colours, data = _gif_parts(buffer.getvalue())
        height, width, _ = picture.shape
        own_palette = 0x80 | ((len(colours) // 3).bit_length() - 2)
        self.file.write(b"\x21\xf9\x04" + struct.pack("<BHBB", 1 << 2, self.clock.next_delay(), 0, 0))
        self.file.write(b"\x2c" + struct.pack("<HHHHB", 0, 0, width, height, own_palette))
        self.file.write(colours + data)

    def finish(self):
        self.file.write(b"\x3b")


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


class WebpWriter(_FileWriter):
    """Animated WebP with alpha; quality 100 is lossless. The header's size field is filled in at the end."""

    def __init__(self, target, job):
        super().__init__(target, job)
        self.clock = _Clock(job.rate, 1000)
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
        if self.job.metadata:
            self.file.write(_chunk(b"EXIF", _exif(self.job.metadata)))
        size = self.file.tell() - 8
        if size > RIFF_LIMIT:
            raise UserError(f"The WebP clip grew to {size} bytes, the format ends at 4 GB; choose mp4.")
        self.file.seek(4)
        self.file.write(struct.pack("<I", size))


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
        """Write one uint8 picture [H,W,3] or [H,W,4]."""
        self.count += 1
        info = PngImagePlugin.PngInfo()
        if self.count == 1:
            # Only here: a graph may be hundreds of kilobytes, times thousands of pictures.
            for key, value in self.job.metadata.items():
                info.add_text(key, value)
        name = f"{self.job.path.name}_{self.count:05}.png"
        Image.fromarray(picture).save(self.folder / name, pnginfo=info, compress_level=4)


PILLOW_WRITERS = {"gif": GifWriter, "webp": WebpWriter, "png": PngWriter}
