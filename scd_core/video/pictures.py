"""Float frames to the integer pictures that writers take, one at a time: checks, order of play, spool.

Memory beyond the input does not grow with the clip, whatever the input is.
"""

import logging
import tempfile

import numpy as np
import torch

from ..errors import UserError

log = logging.getLogger(__name__)


class _Converter:
    """Float frame [H,W,1|3|4] to uint8 or uint16 array [H,W,3|4]; checks values, shape and equal size on the way."""

    def __init__(self, spec):
        self.keep_alpha, self.top = bool(spec.alpha_pixel_format), 2**spec.depth - 1
        self.dtype = np.uint8 if spec.depth == 8 else np.uint16
        self.shape = None

    def __call__(self, frame, index):
        frame = torch.as_tensor(frame).detach()
        shape = tuple(frame.shape)
        if len(shape) != 3 or shape[2] not in (1, 3, 4) or not frame.is_floating_point():
            raise UserError(
                f"Frame {index + 1} has shape {list(shape)} and type {frame.dtype}; expected floats in 0..1 "
                f"of shape [height, width, 3] (or 4 with alpha, 1 for grey)."
            )
        if self.shape is None:
            self.shape = shape
            if shape[2] == 4 and not self.keep_alpha:
                log.info("this clip format has no alpha: frames are laid over black")
        if shape != self.shape:
            raise UserError(
                f"Frame {index + 1} is {shape[1]}x{shape[0]} with {shape[2]} channels, but the clip began "
                f"with {self.shape[1]}x{self.shape[0]} and {self.shape[2]}; bring all to one size first."
            )
        frame = frame.float()
        if not torch.isfinite(frame).all():
            raise UserError(
                f"Frame {index + 1} (counted from 1) holds NaN or Inf values; look at the step that made it "
                f"(often a decoder in half precision), nothing was written."
            )
        frame = frame.clamp(0, 1)
        if shape[2] == 1:
            frame = frame.expand(-1, -1, 3)
        elif shape[2] == 4 and not self.keep_alpha:
            frame = frame[..., :3] * frame[..., 3:]
        # Through int32: torch knows uint16 only in part.
        whole = frame.mul(self.top).round().to(torch.uint8 if self.top == 255 else torch.int32)
        return np.ascontiguousarray(whole.cpu().numpy().astype(self.dtype, copy=False))


class Frames:
    """A tensor or list of frames as a sequence of pictures, each made when it is asked for."""

    def __init__(self, frames, spec):
        self.frames, self.convert = frames, _Converter(spec)

    def __len__(self):
        return len(self.frames)

    def __getitem__(self, index):
        return self.convert(self.frames[index], index)


class Spool:
    """The pictures of a one-way iterable, kept in a nameless file so that they can be read again."""

    def __init__(self, frames, spec, folder):
        # Beside the target: the system's temporary folder may be a small RAM disk.
        self.file, self.count, self.shape, self.dtype = tempfile.TemporaryFile(dir=folder), 0, None, None  # noqa: SIM115
        convert = _Converter(spec)
        try:
            for i, frame in enumerate(frames):
                picture = convert(frame, i)
                self.file.write(picture.tobytes())
                self.count, self.shape, self.dtype = i + 1, picture.shape, picture.dtype
        except BaseException:
            self.file.close()
            raise

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        size = int(np.prod(self.shape)) * self.dtype.itemsize
        self.file.seek(index * size)
        return np.frombuffer(self.file.read(size), self.dtype).reshape(self.shape)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.file.close()


def is_sequence(frames):
    """Whether frames can be asked for by number, any number of times."""
    return hasattr(frames, "__getitem__") and hasattr(frames, "__len__")


def stream(frames, spec):
    """Yield the pictures of a one-way iterable as they come."""
    convert = _Converter(spec)
    for i, frame in enumerate(frames):
        yield convert(frame, i)


def play_order(count, pingpong):
    """Frame indices of one play: [0..T-1], and with pingpong back from T-2 to 1."""
    return [*range(count), *(range(count - 2, 0, -1) if pingpong else ())]
