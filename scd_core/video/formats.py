"""The table of clip formats and the rules that go with it: quality, frame rate, size limits.

A new format is one new row in `FORMATS`. Quality 0..100 (higher = better) is a straight line between the
two encoder settings in `quality_range`:

    format          setting            at 0    at 80 (default)   at 100
    mp4 (h264)      x264 crf           43      19                13
    webm (vp9)      libvpx crf         60      22                12
    gif             colours a picture  64      218               256
    webp            libwebp quality    0       80                lossless
    png sequence    none: always lossless, quality has no effect
"""

import math
from dataclasses import dataclass, field
from fractions import Fraction

from ..errors import UserError

DEFAULT_QUALITY = 80
MIN_RATE, MAX_RATE = Fraction(1, 100), 240
MAX_LOOPS = 65534


@dataclass(frozen=True)
class ClipFormat:
    """One row: how a format is stored and what it can hold.

    `container` names the muxer ("mp4", "webm": PyAV; "gif", "webp", "png": Pillow). `extension` is empty
    for a folder of pictures. `loops_in_file`: the file itself says how often to play (0 = forever); the
    others have no such field, so the frames are written again. `max_rate` is the fastest rate that players
    keep: browsers slow GIF delays under 20 ms and WebP delays under 11 ms down to 100 ms.
    """

    container: str
    extension: str
    codec: str = ""
    pixel_format: str = "rgb24"
    alpha_pixel_format: str = ""
    quality_range: tuple[int, int] | None = None
    codec_options: dict[str, str] = field(default_factory=dict)
    audio_codec: str = ""
    audio_bit_rate: int = 0
    loops_in_file: bool = False
    max_side: int = 16384
    max_rate: int = MAX_RATE

    def level(self, quality):
        """Return the encoder setting (int) for `quality` 0..100, or None where the format has none."""
        if self.quality_range is None:
            return None
        worst, best = self.quality_range
        return round(worst + (best - worst) * quality / 100)


FORMATS = {
    "mp4 (h264)": ClipFormat(
        container="mp4", extension=".mp4", codec="libx264", pixel_format="yuv420p", quality_range=(43, 13),
        audio_codec="aac", audio_bit_rate=192_000,
    ),
    "webm (vp9)": ClipFormat(
        container="webm", extension=".webm", codec="libvpx-vp9", pixel_format="yuv420p",
        alpha_pixel_format="yuva420p", quality_range=(60, 12),
        codec_options={"row-mt": "1", "cpu-used": "4"},
        audio_codec="libopus", audio_bit_rate=128_000,
    ),
    "gif": ClipFormat(
        container="gif", extension=".gif", quality_range=(64, 256), loops_in_file=True, max_side=65535,
        max_rate=50,
    ),
    "webp": ClipFormat(
        container="webp", extension=".webp", alpha_pixel_format="rgba", quality_range=(0, 100),
        loops_in_file=True, max_side=16383, max_rate=90,
    ),
    "png sequence": ClipFormat(container="png", extension="", alpha_pixel_format="rgba", max_side=65535),
}


def find_format(name):
    """Return the row of `FORMATS` called `name`; UserError lists the names when there is none."""
    if name not in FORMATS:
        raise UserError(f"Video format {name!r} is unknown; choose one of: {', '.join(FORMATS)}.")
    return FORMATS[name]


def frame_rate(rate):
    """Return `rate` (frames per second; int, float or Fraction) as an exact Fraction.

    Floats typed as 23.976, 29.97 or 59.94 mean the broadcast rates 24000/1001, 30000/1001, 60000/1001: a
    float within 5e-6 of n * 1000/1001 becomes that fraction, so that sound and editors stay in step.
    Raises UserError unless 0.01 <= rate <= 240.
    """
    number = isinstance(rate, (int, float, Fraction)) and not isinstance(rate, bool)
    if not number or not math.isfinite(rate) or not MIN_RATE <= rate <= MAX_RATE:
        raise UserError(
            f"Frame rate is {rate!r}; expected frames per second from {float(MIN_RATE)} to {MAX_RATE}."
        )
    if isinstance(rate, float):
        broadcast = Fraction(round(rate * 1.001) * 1000, 1001)
        if abs(float(broadcast) / rate - 1) < 5e-6:
            return broadcast
    return Fraction(rate).limit_denominator(100_000)


def check_settings(name, spec, rate, quality, loop_count):
    """Raise UserError for a quality, loop count or rate (Fraction) that format `name` cannot take."""
    if isinstance(quality, bool) or not isinstance(quality, int) or not 0 <= quality <= 100:
        raise UserError(f"Video quality is {quality!r}; expected a whole number, 0 (small) to 100 (best).")
    if isinstance(loop_count, bool) or not isinstance(loop_count, int) or not 0 <= loop_count <= MAX_LOOPS:
        raise UserError(f"Loop count is {loop_count!r}; expected a whole number from 0 to {MAX_LOOPS}.")
    if rate > spec.max_rate:
        raise UserError(
            f"Frame rate {float(rate):g} is too fast for {name}: players keep at most {spec.max_rate} "
            f"pictures per second; lower the rate or choose mp4 or webm."
        )
