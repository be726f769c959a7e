"""Clip files back to frames."""

from fractions import Fraction
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from ..errors import UserError
from .encoders import load_av


def read_video(path):
    """Read a clip file and return (frames float32 [T,H,W,3] in 0..1, frames per second as Fraction).

    GIF and WebP: the rate is the mean over the stored delays; a picture without delay counts as 1 per
    second. Untagged video is taken as BT.601, as its decoders do. Raises UserError when the file is missing
    or holds no pictures.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"Clip {str(path)!r} is not there or is not a file; check the name.")
    if path.suffix.lower() in (".gif", ".webp"):
        pictures, rate = _read_pillow(path)
    else:
        load_av(f"Clip {path.name!r}")
        from .av_writer import read_av

        pictures, rate = read_av(path)
    if not pictures:
        raise UserError(f"Clip {str(path)!r} holds no pictures; it may be damaged or sound only.")
    top = np.iinfo(pictures[0].dtype).max
    frames = torch.empty(len(pictures), *pictures[0].shape)
    for frame, picture in zip(frames, pictures):
        frame.copy_(torch.from_numpy(picture.astype(np.float32)))
    return frames.div_(top), rate


def _read_pillow(path):
    pictures, milliseconds = [], 0
    with Image.open(path) as image:
        for i in range(getattr(image, "n_frames", 1)):
            image.seek(i)
            pictures.append(np.array(image.convert("RGB")))
            milliseconds += image.info.get("duration", 0)
    rate = Fraction(len(pictures) * 1000, round(milliseconds)) if milliseconds else Fraction(1)
    return pictures, rate.limit_denominator(1001)
