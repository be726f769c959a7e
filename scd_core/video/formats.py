"""The table of clip formats and the rules that go with it: quality, frame rate, size limits.

A new format is one new row in `FORMATS`; rows are appended, never renamed or moved, because saved graphs name
them. All rows are offered on every machine; `encoders.check_encoders` refuses what the installed PyAV cannot
write. Quality 0..100 (higher = better) is a straight line between the two encoder settings in `quality_range`:

    format                  setting            at 0    at 80 (default)   at 100
    mp4 (h264)              x264 crf           43      19                13
    webm (vp9)              libvpx crf         60      22                12
    gif                     colours of the clip  64    217               255
    webp                    libwebp quality    0       80                lossless
    mp4 (h265), 10-bit too  x265 crf           46      22                16
    mp4, webm (av1)         SVT-AV1 crf        63      27                18
    all others              none: the format alone says how good (lossless, or the bit rate of ProRes)
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

    `container` names the muxer ("mp4", "webm", "mov": PyAV; "gif", "webp", "png": Pillow). `extension` is empty
    for a folder of pictures. `alpha_pixel_format` is empty where alpha is laid over black. `depth`: bits a channel
    of the pictures that the writer is given, 16 for formats of more than 8 bits. `loops_in_file`: the file
    itself says how often to play (0 = forever); the others have no such field, so the frames are written again.
    `max_rate` is the fastest rate that players keep: browsers slow GIF delays under 20 ms and WebP delays under
    11 ms down to 100 ms. `plays`: browsers show it. `restores`: the host's page finds the graph in the file.
    """

    container: str
    extension: str
    codec: str = ""
    pixel_format: str = "rgb24"
    alpha_pixel_format: str = ""
    depth: int = 8
    quality_range: tuple[int, int] | None = None
    codec_options: dict[str, str] = field(default_factory=dict)
    codec_tag: str = ""
    audio_codec: str = ""
    audio_bit_rate: int = 0
    loops_in_file: bool = False
    min_side: int = 1
    max_side: int = 16384
    max_rate: int = MAX_RATE
    plays: bool = True
    restores: bool = True

    def level(self, quality):
        """Return the encoder setting (int) for `quality` 0..100, or None where the format has none."""
        if self.quality_range is None:
            return None
        worst, best = self.quality_range
        return round(worst + (best - worst) * quality / 100)


AAC = {"audio_codec": "aac", "audio_bit_rate": 192_000}
OPUS = {"audio_codec": "libopus", "audio_bit_rate": 128_000}
WEBP = {"container": "webp", "extension": ".webp", "alpha_pixel_format": "rgba", "loops_in_file": True,
        "max_side": 16383, "max_rate": 90}
PNG = {"container": "png", "extension": "", "alpha_pixel_format": "rgba", "max_side": 65535}
# x265 (width 48 and less) and SVT-AV1 4.1 (sides under 32) touch memory that is not theirs when frames are small.
SAFE_SIDE = 64
# hvc1 (parameter sets in the header) is the only tag of the two that Apple's players open.
H265 = {
    "container": "mp4", "extension": ".mp4", "codec": "libx265", "codec_tag": "hvc1", "quality_range": (46, 16),
    "codec_options": {"x265-params": "log-level=none:chromaloc=1"}, "min_side": SAFE_SIDE, "max_side": 8192,
    "plays": False, **AAC,
}
# Every AV1 decoder reads 10 bits (main profile), and gradients stay smooth.
AV1 = {"codec": "libsvtav1", "pixel_format": "yuv420p10le", "depth": 16, "quality_range": (63, 18),
       "codec_options": {"preset": "8", "svtav1-params": "lp=2"}, "min_side": SAFE_SIDE, "max_side": 8192}
PRORES = {"container": "mov", "extension": ".mov", "codec": "prores_ks", "depth": 16, "audio_codec": "pcm_s16le",
          "plays": False}

# chromaloc=1: chroma sits in the middle of its pixels, see yuv.py; only these two encoders can say so.
FORMATS = {
    "mp4 (h264)": ClipFormat(
        container="mp4", extension=".mp4", codec="libx264", pixel_format="yuv420p", quality_range=(43, 13),
        codec_options={"x264-params": "chromaloc=1"}, **AAC,
    ),
    "webm (vp9)": ClipFormat(
        container="webm", extension=".webm", codec="libvpx-vp9", pixel_format="yuv420p",
        alpha_pixel_format="yuva420p", quality_range=(60, 12),
        codec_options={"row-mt": "1", "cpu-used": "4"}, **OPUS,
    ),
    "gif": ClipFormat(
        container="gif", extension=".gif", alpha_pixel_format="rgba", quality_range=(64, 255), loops_in_file=True,
        max_side=65535, max_rate=50, restores=False,
    ),
    "webp": ClipFormat(quality_range=(0, 100), **WEBP),
    "png sequence": ClipFormat(**PNG),
    "mp4 (h265)": ClipFormat(pixel_format="yuv420p", **H265),
    "mp4 (h265 10-bit)": ClipFormat(pixel_format="yuv420p10le", depth=16, **H265),
    "mp4 (av1)": ClipFormat(container="mp4", extension=".mp4", **AV1, **AAC),
    "webm (av1)": ClipFormat(container="webm", extension=".webm", **AV1, **OPUS),
    "mov (prores 422 hq)": ClipFormat(
        pixel_format="yuv422p10le", codec_options={"profile": "3", "vendor": "apl0"}, **PRORES,
    ),
    "mov (prores 4444)": ClipFormat(
        pixel_format="yuv444p10le", alpha_pixel_format="yuva444p10le",
        codec_options={"profile": "4", "vendor": "apl0"}, **PRORES,
    ),
    "webp (lossless)": ClipFormat(quality_range=(100, 100), **WEBP),
    "png sequence (16-bit)": ClipFormat(depth=16, **PNG),
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


def check_size(name, spec, height, width):
    """Raise UserError for frames of a size (pixels) that format `name` cannot hold."""
    if min(height, width) < spec.min_side or max(height, width) > spec.max_side:
        raise UserError(
            f"Frames of {width}x{height} do not fit {name}: each side must be {spec.min_side} to {spec.max_side} "
            f"pixels; resize the frames or choose another format."
        )
