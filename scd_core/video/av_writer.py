"""MP4 and WebM through PyAV: encoder, muxer, and the decoder for reading clips back."""

import logging
from contextlib import contextmanager, suppress
from fractions import Fraction

import av
import numpy as np

from ..errors import UserError
from .sound import SoundTrack

log = logging.getLogger(__name__)

# Code points of ITU-T H.273, and the red and blue luma weights of each matrix (BT.709, BT.2020).
BT709, VIDEO_RANGE, FULL_RANGE = 1, 1, 2
LUMA_WEIGHTS = {BT709: (0.2126, 0.0722), 9: (0.2627, 0.0593)}
BT601_WEIGHTS = (0.299, 0.114)


@contextmanager
def _told_plainly(job):
    """Turn an error of the library into one sentence that keeps the library's own words."""
    try:
        yield
    except av.FFmpegError as error:
        logged = getattr(error, "log", None)
        words = f"{error}; {logged[2].strip()}" if logged else str(error)
        raise UserError(
            f"{job.name}: the encoder {job.spec.codec} gave up on {job.width}x{job.height} at "
            f"{float(job.rate):g} frames per second ({words}); try another size or format."
        ) from error


class AvWriter:
    """Encodes uint8 pictures as they come, BT.709 in video range, with the sound kept in step."""

    def __init__(self, target, job):
        self.job, self.count = job, 0
        spec = job.spec
        for codec in (spec.codec, spec.audio_codec if job.sound else spec.codec):
            if codec not in av.codecs_available:
                raise UserError(
                    f"{job.name} needs the encoder {codec}, which this build of av lacks; update av "
                    f"or choose another format."
                )
        self.pixel_format = spec.alpha_pixel_format if job.alpha else spec.pixel_format
        chroma = av.VideoFormat(self.pixel_format, 4, 4)
        rows = -job.height % (4 // chroma.chroma_height(4))
        columns = -job.width % (4 // chroma.chroma_width(4))
        self.padding = ((0, rows), (0, columns), (0, 0))
        if rows or columns:
            log.info("%s: padded %dx%d by the last row or column", job.name, job.width, job.height)
        # The index goes first, so that a browser can start before it has the whole file.
        options = {"movflags": "use_metadata_tags+faststart"} if spec.container == "mp4" else {}
        with _told_plainly(job):
            self.container = av.open(str(target), "w", format=spec.container, options=options)
            self.container.metadata.update(job.metadata)
            self._add_video()
            self.sound = SoundTrack(av, self.container, spec, job.sound) if job.sound else None

    def _add_video(self):
        job = self.job
        self.stream = self.container.add_stream(
            job.spec.codec, rate=job.rate, options={"crf": str(job.level), **job.spec.codec_options}
        )
        self.stream.width = job.width + self.padding[1][1]
        self.stream.height = job.height + self.padding[0][1]
        self.stream.pix_fmt = self.pixel_format
        context = self.stream.codec_context
        context.color_primaries = context.color_trc = context.colorspace = BT709
        context.color_range = VIDEO_RANGE

    def __enter__(self):
        return self

    def __exit__(self, exc_type, exc, trace):
        if exc_type is None:
            with _told_plainly(self.job):
                self.container.mux(self.stream.encode(None))
                if self.sound:
                    self.sound.finish()
                self.container.close()
        else:
            # Closing flushes a file that is about to be removed; its complaints would hide the first error.
            with suppress(Exception):
                self.container.close()

    def add(self, picture):
        """Encode one uint8 picture [H,W,3] or [H,W,4]."""
        picture = np.pad(picture, self.padding, mode="edge")
        frame = av.VideoFrame.from_ndarray(picture, format="rgba" if self.job.alpha else "rgb24")
        with _told_plainly(self.job):
            frame = frame.reformat(
                format=self.pixel_format,
                dst_colorspace="ITU709",
                src_color_range="JPEG",
                dst_color_range="MPEG",
            )
            frame.pts, frame.time_base = self.count, 1 / self.job.rate
            self.count += 1
            self.container.mux(self.stream.encode(frame))
            if self.sound:
                self.sound.advance(self.count / self.job.rate)


def _to_rgb(frame):
    """Return a decoded frame as uint8 [H,W,3], by its own matrix and range tags.

    The library's conversion to RGB cuts instead of rounding (about -1 of 255 on average), so a clip would
    grow darker with each save and load; here it only brings chroma up to full size.
    """
    if frame.format.is_rgb:
        return frame.to_ndarray(format="rgb24")
    full = frame.color_range == FULL_RANGE or frame.format.name.startswith("yuvj")
    black, luma, chroma = (0, 255, 255) if full else (16, 219, 224)
    y, cb, cr = np.asarray(frame.reformat(format="yuv444p").to_ndarray(), np.float32)
    red, blue = LUMA_WEIGHTS.get(frame.colorspace, BT601_WEIGHTS)
    y, cb, cr = (y - black) / luma, (cb - 128) / chroma, (cr - 128) / chroma
    r, b = y + 2 * (1 - red) * cr, y + 2 * (1 - blue) * cb
    g = (y - red * r - blue * b) / (1 - red - blue)
    return (np.stack([r, g, b], axis=-1) * 255).round().clip(0, 255).astype(np.uint8)


def read_av(path):
    """Return (list of uint8 arrays [H,W,3], rate Fraction) of the first video stream of a file."""
    try:
        with av.open(str(path)) as container:
            if not container.streams.video:
                return [], Fraction(1)
            stream = container.streams.video[0]
            pictures = [_to_rgb(frame) for frame in container.decode(stream)]
            return pictures, Fraction(stream.average_rate or 1).limit_denominator(100_000)
    except av.FFmpegError as error:
        raise UserError(
            f"Clip {str(path)!r} cannot be read ({error}); it may be damaged or half copied."
        ) from error
