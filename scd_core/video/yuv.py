"""RGB pictures to the luma and chroma planes of video frames, and back. BT.709 in video range when writing.

Own arithmetic instead of the library's converter: that one cuts where it should round (about -1 of 255 on the
way to RGB, +1.8 of 1023 on the way to 10 bits), so a clip would change its colours with each save and load.
Source: Rec. ITU-R BT.709-6, item 3 (matrix, quantisation); ITU-T H.273 (code points).
"""

import numpy as np

# Code points of ITU-T H.273, and the red and blue luma weights of each matrix (BT.709, BT.2020).
BT709, VIDEO_RANGE, FULL_RANGE = 1, 1, 2
LUMA_WEIGHTS = {BT709: (0.2126, 0.0722), 9: (0.2627, 0.0593)}
BT601_WEIGHTS = (0.299, 0.114)


def _levels(bits, full):
    """(black, span of luma, span of chroma) of `bits`-bit code values."""
    if full:
        return 0, 2**bits - 1, 2**bits - 1
    return 16 << (bits - 8), 219 << (bits - 8), 224 << (bits - 8)


def _halve(plane, rows, columns):
    """Bring a chroma plane down to its size by the mean of neighbours: it sits in the middle of its pixels.

    FFmpeg writes and reads so, and with it the host and most tools that artists load clips with; the older
    "left" siting comes back half a pixel off (4 dB, measured on a photograph).
    """
    if rows:
        plane = (plane[0::2] + plane[1::2]) / 2
    if columns:
        plane = (plane[:, 0::2] + plane[:, 1::2]) / 2
    return plane


def fill_frame(frame, picture):
    """Write `picture`, uint8 or uint16 [H,W,3] (or [H,W,4] with alpha), into the planes of a video frame.

    frame: av.VideoFrame of H x W in a planar YUV format with 8 to 16 bits and sides that its chroma divides.
    """
    bits = frame.format.components[0].bits
    black, luma, chroma = _levels(bits, full=False)
    red, blue = LUMA_WEIGHTS[BT709]
    scale = np.float32(1 / np.iinfo(picture.dtype).max)
    r, g, b = (picture[..., i] * scale for i in range(3))
    y = red * r + (1 - red - blue) * g + blue * b
    halved = frame.format.chroma_height(4) == 2, frame.format.chroma_width(4) == 2
    middle = 128 << (bits - 8)
    cb = _halve(b - y, *halved) * (chroma / 2 / (1 - blue)) + middle
    cr = _halve(r - y, *halved) * (chroma / 2 / (1 - red)) + middle
    planes = [y * luma + black, cb, cr]
    if picture.shape[2] == 4:
        planes.append(picture[..., 3] * (scale * (2**bits - 1)))
    for plane, values in zip(frame.planes, planes, strict=True):
        _update(plane, values, np.uint8 if bits == 8 else np.uint16)
    frame.colorspace, frame.color_range = BT709, VIDEO_RANGE
    for name in ("color_primaries", "color_trc"):
        # ProRes takes these two from the frame; older builds of PyAV do not know them.
        if hasattr(frame, name):
            setattr(frame, name, BT709)


def _update(plane, values, dtype):
    """Round `values` [h,w] into a plane whose rows may be longer than the picture."""
    rows = np.zeros((plane.height, plane.line_size // np.dtype(dtype).itemsize), dtype)
    rows[: values.shape[0], : values.shape[1]] = np.rint(values)
    plane.update(rows)


def to_rgb(frame):
    """Return a decoded frame as RGB [H,W,3], by its own matrix and range tags.

    uint8, or uint16 for frames of more than 8 bits. Untagged matrices are taken as BT.601, as decoders do. The
    library only brings chroma up to full size.
    """
    bits = frame.format.components[0].bits
    if frame.format.is_rgb:
        return frame.to_ndarray(format="rgb24" if bits == 8 else "rgb48le")
    full = frame.color_range == FULL_RANGE or frame.format.name.startswith("yuvj")
    black, luma, chroma = _levels(bits, full)
    planar = frame.reformat(format="yuv444p" if bits == 8 else f"yuv444p{bits}le")
    y, cb, cr = (_values(plane, bits) for plane in planar.planes[:3])
    red, blue = LUMA_WEIGHTS.get(frame.colorspace, BT601_WEIGHTS)
    middle = 128 << (bits - 8)
    y, cb, cr = (y - black) / luma, (cb - middle) / chroma, (cr - middle) / chroma
    r, b = y + 2 * (1 - red) * cr, y + 2 * (1 - blue) * cb
    g = (y - red * r - blue * b) / (1 - red - blue)
    dtype = np.uint8 if bits == 8 else np.uint16
    top = np.iinfo(dtype).max
    return np.rint(np.stack([r, g, b], axis=-1) * top).clip(0, top).astype(dtype)


def _values(plane, bits):
    """The samples of a plane as float32 [h,w]."""
    rows = np.frombuffer(plane, np.uint8 if bits == 8 else np.uint16).reshape(plane.height, -1)
    return rows[:, : plane.width].astype(np.float32)
