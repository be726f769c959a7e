"""MP4, WebM and MOV through PyAV: encoder and muxer, and the decoder for reading clips back."""

import logging
import os
from contextlib import contextmanager, suppress
from fractions import Fraction

import av
import numpy as np

from ..errors import UserError
from .sound import SoundTrack
from .yuv import BT709, VIDEO_RANGE, fill_frame, to_rgb

log = logging.getLogger(__name__)

MOST_REORDERED = 64  # frames; encoders use up to 16


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
    """Encodes pictures as they come, BT.709 in video range, with the sound kept in step."""

    def __init__(self, target, job):
        self.job, self.count = job, 0
        spec = job.spec
        self.pixel_format = spec.alpha_pixel_format if job.alpha else spec.pixel_format
        chroma = av.VideoFormat(self.pixel_format, 4, 4)
        rows = -job.height % (4 // chroma.chroma_height(4))
        columns = -job.width % (4 // chroma.chroma_width(4))
        self.padding = ((0, rows), (0, columns), (0, 0))
        self.height, self.width = job.height + rows, job.width + columns
        if rows or columns:
            log.info("%s: padded %dx%d by the last row or column", job.name, job.width, job.height)
        # The index goes first, so that a browser can start, and the page find the graph, before the whole file.
        options = {} if spec.container == "webm" else {"movflags": "use_metadata_tags+faststart"}
        with _told_plainly(job):
            self.container = av.open(str(target), "w", format=spec.container, options=options)
            try:
                self.container.metadata.update(job.metadata)
                self._add_video()
                self.sound = SoundTrack(av, self.container, spec, job.sound) if job.sound else None
            except BaseException:
                self._drop()
                raise

    def _add_video(self):
        job, spec = self.job, self.job.spec
        # SVT-AV1 writes 25 lines of its own about each clip unless it is told to name errors alone.
        if spec.codec == "libsvtav1":
            os.environ.setdefault("SVT_LOG", "1")
        level = {} if job.level is None else {"crf": str(job.level)}
        self.stream = self.container.add_stream(spec.codec, rate=job.rate, options={**level, **spec.codec_options})
        self.stream.width, self.stream.height = self.width, self.height
        self.stream.pix_fmt = self.pixel_format
        context = self.stream.codec_context
        if spec.codec_tag:
            context.codec_tag = spec.codec_tag
        context.color_primaries = context.color_trc = context.colorspace = BT709
        context.color_range = VIDEO_RANGE

    def __enter__(self):
        return self

    def __exit__(self, exc_type, exc, trace):
        if exc_type is not None:
            self._drop()
            return
        with _told_plainly(self.job):
            self._mux(self.stream.encode(None))
            if self.sound:
                self.sound.finish()
            self.container.close()

    def _drop(self):
        # Closing flushes a file that is about to be removed; its complaints would hide the first error.
        with suppress(Exception):
            self.container.close()

    def add(self, picture):
        """Encode one picture, uint8 or uint16 [H,W,3] or [H,W,4]."""
        frame = av.VideoFrame(self.width, self.height, self.pixel_format)
        fill_frame(frame, np.pad(picture, self.padding, mode="edge"))
        frame.pts, frame.time_base = self.count, 1 / self.job.rate
        self.count += 1
        with _told_plainly(self.job):
            self._mux(self.stream.encode(frame))
            if self.sound:
                self.sound.advance(self.count / self.job.rate)

    def _mux(self, packets):
        for packet in packets:
            # x265 leaves the decoding time of a clip of one or two frames unset; those frames are in order.
            if packet.dts is None or not packet.pts - MOST_REORDERED <= packet.dts <= packet.pts:
                packet.dts = packet.pts
            self.container.mux(packet)


def read_av(path):
    """Return (list of uint8 or uint16 arrays [H,W,3], rate Fraction) of the first video stream of a file."""
    try:
        with av.open(str(path)) as container:
            if not container.streams.video:
                return [], Fraction(1)
            stream = container.streams.video[0]
            pictures = [to_rgb(frame) for frame in container.decode(stream)]
            return pictures, Fraction(stream.average_rate or 1).limit_denominator(100_000)
    except av.FFmpegError as error:
        raise UserError(
            f"Clip {str(path)!r} cannot be read ({error}); it may be damaged or half copied."
        ) from error
