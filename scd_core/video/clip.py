"""Frames to clips and back: MP4 and WebM through PyAV, GIF, WebP and PNG through Pillow.

Frames are converted one at a time, so memory beyond the input does not grow with the clip. Everything is
written under a temporary name beside the target and renamed at the end: a clip is there whole or not at all.
"""

import logging
import os
import re
import shutil
import tempfile
import uuid
from contextlib import closing
from dataclasses import dataclass, replace
from fractions import Fraction
from json import dumps
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from ..errors import UserError
from .formats import DEFAULT_QUALITY, FORMATS, ClipFormat, check_settings, find_format, frame_rate
from .pillow_writer import PILLOW_WRITERS
from .sound import check_sound

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ClipJob:
    """All a writer needs to know; size and alpha are filled in from the first frame."""

    name: str
    spec: ClipFormat
    path: Path
    rate: Fraction
    level: int | None
    loop_count: int
    metadata: dict[str, str]
    sound: tuple[np.ndarray, int] | None
    height: int = 0
    width: int = 0
    alpha: bool = False


def write_frames(
    frames, path, *, rate, fmt, quality=DEFAULT_QUALITY, loop_count=0, pingpong=False, audio=None,
    metadata=None, progress=None,
):
    """Write `frames` as one clip and return its Path (for "png sequence" the Path of the folder).

    frames: float tensor [T,H,W,C] on any device, a sequence of [H,W,C], or any iterable of [H,W,C] (streamed,
      never held); values in 0..1, outside is clipped; C = 3, 4 (alpha) or 1 (grey). WebM, WebP and PNG keep
      alpha, the others are laid over black. A one-way iterable that must be replayed (pingpong, repetitions)
      is kept as 8-bit frames in a nameless file beside the target.
    path: target with the extension of the format (`FORMATS[fmt].extension`), its folder exists, itself does
      not. "png sequence": a folder to be made; pictures are `path/<name>_00001.png` and so on.
    rate: frames per second, see `frame_rate`. quality: 0..100, higher = better, see `formats`.
    loop_count: repetitions after the first play. GIF and WebP store the number and 0 means forever; the
      other formats hold the frames 1 + loop_count times.
    pingpong: play forwards, then backwards without repeating the two ends (T frames become 2T - 2).
    audio: {"waveform": float [1,C,S], "sample_rate": Hz}, cut or padded with silence to the length of the
      clip; mp4 (AAC) and webm (Opus) only.
    metadata: {key: JSON string}, stored with non-ASCII characters as JSON \\u escapes: container tags (mp4,
      webm), comments (gif), EXIF Model/Make as the host writes them (webp), text chunks of the first
      picture (png).
    progress: called as progress(frames_written, total or None) after each frame; may raise to cancel.

    MP4 and WebM are tagged and converted as BT.709, video range; odd sizes grow by one row or column of
    repeated edge. Raises UserError on bad input; whatever is raised, also by `progress` or by the iterable,
    nothing stays on disk.
    """
    spec, path = find_format(fmt), Path(os.path.abspath(path))
    rate = frame_rate(rate)
    check_settings(fmt, spec, rate, quality, loop_count)
    _check_target(path, fmt, spec)
    sound = check_sound(audio, fmt) if audio is not None else None
    job = ClipJob(fmt, spec, path, rate, spec.level(quality), loop_count, _ascii(metadata), sound)
    plays = 1 if spec.loops_in_file else 1 + loop_count
    part = path.with_name(f".{uuid.uuid4().hex}.part")
    try:
        with closing(_pictures(frames, plays, pingpong, path.parent, bool(spec.alpha_pixel_format))) as flow:
            _encode(flow, part, job, _count(frames, plays, pingpong), progress)
        _refuse_existing(path)
        os.replace(part, path)
    except BaseException:
        _remove(part)
        raise
    return path


def _encode(pictures, part, job, total, progress):
    """Write the uint8 arrays of `pictures` to the temporary `part` with the writer of the format."""
    picture = next(pictures, None)
    if picture is None:
        raise UserError("There are no frames to write; the clip needs at least one.")
    height, width, channels = picture.shape
    _check_size(height, width, job.name, job.spec)
    job = replace(job, height=height, width=width, alpha=channels == 4)
    with _writer(job)(part, job) as writer:
        done = 0
        while picture is not None:
            writer.add(picture)
            done += 1
            if progress is not None:
                progress(done, total)
            picture = next(pictures, None)


def _check_target(path, name, spec):
    if path.suffix.lower() != spec.extension and spec.extension:
        raise UserError(f"File name {path.name!r} does not fit {name}: it must end in {spec.extension}.")
    if not path.parent.is_dir():
        raise UserError(f"Folder {str(path.parent)!r} does not exist; make it first or choose another one.")
    _refuse_existing(path)


def _refuse_existing(path):
    if os.path.lexists(path):
        raise UserError(f"{str(path)!r} exists already and is not overwritten; choose another name.")


def _check_size(height, width, name, spec):
    if min(height, width) < 1 or max(height, width) > spec.max_side:
        raise UserError(
            f"Frames of {width}x{height} do not fit {name}: each side must be 1 to {spec.max_side} pixels."
        )


def _ascii(metadata):
    """Escape the way JSON does: EXIF and GIF comments are ASCII, and the parsed JSON stays the same."""

    def escape(text):
        if not isinstance(text, str):
            raise UserError(f"Clip metadata must be text (JSON strings), found {type(text).__name__}.")
        return re.sub(r"[^\x00-\x7f]", lambda match: dumps(match.group())[1:-1], text)

    return {escape(key): escape(value) for key, value in (metadata or {}).items()}


def _remove(part):
    if part.is_dir():
        shutil.rmtree(part, ignore_errors=True)
    else:
        part.unlink(missing_ok=True)


def _writer(job):
    if job.spec.container in PILLOW_WRITERS:
        return PILLOW_WRITERS[job.spec.container]
    return _video_av(job.name).AvWriter


def _video_av(need):
    try:
        # Only here, so that the Pillow formats work without PyAV and importing the pack stays quick.
        from . import av_writer
    except ImportError as error:
        names = ", ".join(name for name, spec in FORMATS.items() if spec.container in PILLOW_WRITERS)
        raise UserError(
            f"{need} needs the Python package av (PyAV), which cannot be loaded ({error}); install it or use "
            f"one of: {names}."
        ) from error
    return av_writer


def _play_order(count, pingpong):
    """Frame indices of one play: [0..T-1], and with pingpong back from T-2 to 1."""
    return [*range(count), *(range(count - 2, 0, -1) if pingpong else ())]


def _is_sequence(frames):
    return hasattr(frames, "__getitem__") and hasattr(frames, "__len__")


def _count(frames, plays, pingpong):
    return plays * len(_play_order(len(frames), pingpong)) if _is_sequence(frames) else None


def _pictures(frames, plays, pingpong, folder, keep_alpha):
    """Yield uint8 arrays [H,W,3 or 4] in the order of play, holding one frame at a time."""
    convert = _Converter(keep_alpha)
    if _is_sequence(frames):
        order = _play_order(len(frames), pingpong)
        for _ in range(plays):
            for i in order:
                yield convert(frames[i], i)
    elif plays == 1 and not pingpong:
        for i, frame in enumerate(frames):
            yield convert(frame, i)
    else:
        # The spool lies beside the target: the system's temporary folder may be a small RAM disk.
        with tempfile.TemporaryFile(dir=folder) as spool:
            count, picture = 0, None
            for i, frame in enumerate(frames):
                count, picture = i + 1, convert(frame, i)
                spool.write(picture.tobytes())
                yield picture
            if picture is not None:
                yield from _replay(spool, count, plays, pingpong, picture.shape)


def _replay(spool, count, plays, pingpong, shape):
    order = _play_order(count, pingpong)
    size = int(np.prod(shape))
    for play in range(plays):
        for i in order if play else order[count:]:
            spool.seek(i * size)
            yield np.frombuffer(spool.read(size), np.uint8).reshape(shape)


class _Converter:
    """Float frame [H,W,1|3|4] to uint8 array [H,W,3|4]; checks values, shape and equal size on the way."""

    def __init__(self, keep_alpha):
        self.keep_alpha, self.shape = keep_alpha, None

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
        return frame.mul(255).round().to(torch.uint8).cpu().contiguous().numpy()


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
        pictures, rate = _video_av(f"Clip {path.name!r}").read_av(path)
    if not pictures:
        raise UserError(f"Clip {str(path)!r} holds no pictures; it may be damaged or sound only.")
    return torch.from_numpy(np.stack(pictures)).float().div_(255), rate


def _read_pillow(path):
    pictures, milliseconds = [], 0
    with Image.open(path) as image:
        for i in range(getattr(image, "n_frames", 1)):
            image.seek(i)
            pictures.append(np.array(image.convert("RGB")))
            milliseconds += image.info.get("duration", 0)
    rate = Fraction(len(pictures) * 1000, round(milliseconds)) if milliseconds else Fraction(1)
    return pictures, rate.limit_denominator(1001)
