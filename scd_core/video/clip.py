"""Frames to a clip on disk: one entry for all formats of the table.

Frames are converted one at a time, so memory beyond the input does not grow with the clip. Everything is
written under a temporary name beside the target and renamed at the end: a clip is there whole or not at all.
"""

import os
import re
import shutil
import uuid
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from json import dumps
from pathlib import Path

import numpy as np
from PIL import Image

from ..errors import UserError
from .encoders import check_encoders, load_av
from .formats import DEFAULT_QUALITY, ClipFormat, check_settings, check_size, find_format, frame_rate
from .gif_writer import GifWriter, make_palette, sample_frames
from .pictures import Frames, Spool, is_sequence, play_order, stream
from .png_writer import PngWriter, write_png
from .sound import check_sound
from .webp_writer import WebpWriter

JSON_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
PILLOW_WRITERS = {"gif": GifWriter, "webp": WebpWriter, "png": PngWriter}


@dataclass(frozen=True)
class ClipJob:
    """All a writer needs to know; size and alpha are filled in from the first frame, palette for gif alone."""

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
    palette: Image.Image | None = None


def still_path(path):
    """Where `write_frames(..., still=True)` puts the first frame of the clip `path`."""
    return Path(path).with_suffix(".png")


def write_frames(
    frames, path, *, rate, fmt, quality=DEFAULT_QUALITY, loop_count=0, pingpong=False, audio=None,
    metadata=None, still=False, progress=None,
):
    """Write `frames` as one clip and return its Path (for a png sequence the Path of the folder).

    frames: float tensor [T,H,W,C] on any device, a sequence of [H,W,C], or any iterable of [H,W,C] (streamed,
      never held); values in 0..1, outside is clipped; C = 3, 4 (straight alpha, 1 = opaque) or 1 (grey). Formats
      without alpha lay frames over black. A one-way iterable that is needed twice (pingpong, repetitions, gif)
      is kept as whole numbers in a nameless file beside the target.
    path: target with the extension of the format (`FORMATS[fmt].extension`), its folder exists, itself does
      not. png sequences: a folder to be made; pictures are `path/<name>_00001.png` and so on.
    rate: frames per second, see `frame_rate`. quality: 0..100, higher = better, see `formats`.
    loop_count: repetitions after the first play. GIF and WebP store the number and 0 means forever; the
      other formats hold the frames 1 + loop_count times.
    pingpong: play forwards, then backwards without repeating the two ends (T frames become 2T - 2).
    audio: {"waveform": [1,C,S], "sample_rate": Hz} (see `check_sound`), cut or padded with silence to the length
      of the clip; mp4 (AAC), webm (Opus) and mov (PCM) only.
    metadata: {key: JSON string}, stored with some characters as JSON \\u escapes: container tags (mp4,
      webm, mov), comments (gif), EXIF Model/Make as the host writes them (webp), text chunks of the first
      picture (png).
    still: also write the first frame, with the metadata, as a PNG to `still_path(path)`.
    progress: called as progress(frames_written, total or None) after each frame; may raise to cancel.

    MP4, WebM and MOV are tagged and converted as BT.709, video range; odd sizes grow by one row or column of
    repeated edge where the format stores colour at half size. Raises UserError on bad input and for a format
    that the installed PyAV cannot write; whatever is raised, also by `progress` or by the iterable, nothing
    stays on disk.
    """
    spec, path = find_format(fmt), Path(os.path.abspath(path))
    rate = frame_rate(rate)
    check_settings(fmt, spec, rate, quality, loop_count)
    _check_target(path, fmt, spec, still)
    sound = check_sound(audio, fmt) if audio is not None else None
    check_encoders(fmt, sound=sound is not None)
    job = ClipJob(fmt, spec, path, rate, spec.level(quality), loop_count, _escaped(metadata), sound)
    plays = 1 if spec.loops_in_file else 1 + loop_count
    part = path.with_name(f".{uuid.uuid4().hex}.part")
    still_part = part.with_suffix(".still") if still else None
    try:
        _write(frames, part, still_part, job, plays, pingpong, progress)
        _place([(still_part, still_path(path)), (part, path)] if still else [(part, path)])
    finally:
        for left in filter(None, (part, still_part)):
            _remove(left)
    return path


def _write(frames, part, still_part, job, plays, pingpong, progress):
    """Bring the frames into a form that can be read as often as needed, and encode them."""
    with ExitStack() as stack:
        again = plays > 1 or pingpong or job.spec.container == "gif"
        if not is_sequence(frames) and not again:
            _encode(stream(frames, job.spec), part, still_part, job, None, progress)
            return
        if is_sequence(frames):
            source = Frames(frames, job.spec)
        else:
            source = stack.enter_context(Spool(frames, job.spec, part.parent))
        order = play_order(len(source), pingpong) * plays
        if job.spec.container == "gif" and order:
            chosen = sample_frames(len(source))
            job = replace(job, palette=make_palette((source[i] for i in chosen), len(chosen), job.level))
        _encode((source[i] for i in order), part, still_part, job, len(order), progress)


def _encode(pictures, part, still_part, job, total, progress):
    """Write the pictures to the temporary `part` with the writer of the format, the first one to `still_part`."""
    picture = next(pictures, None)
    if picture is None:
        raise UserError("There are no frames to write; the clip needs at least one.")
    height, width, channels = picture.shape
    check_size(job.name, job.spec, height, width)
    job = replace(job, height=height, width=width, alpha=channels == 4)
    if still_part is not None:
        write_png(still_part, picture, job.metadata)
    with _writer(job)(part, job) as writer:
        done = 0
        while picture is not None:
            writer.add(picture)
            done += 1
            if progress is not None:
                progress(done, total)
            picture = next(pictures, None)


def _writer(job):
    if job.spec.container in PILLOW_WRITERS:
        return PILLOW_WRITERS[job.spec.container]
    load_av(job.name)
    from .av_writer import AvWriter

    return AvWriter


def _check_target(path, name, spec, still):
    if path.suffix.lower() != spec.extension and spec.extension:
        raise UserError(f"File name {path.name!r} does not fit {name}: it must end in {spec.extension}.")
    if not path.parent.is_dir():
        raise UserError(f"Folder {str(path.parent)!r} does not exist; make it first or choose another one.")
    for target in (path, still_path(path)) if still else (path,):
        _refuse_existing(target)


def _refuse_existing(path):
    if os.path.lexists(path):
        raise UserError(f"{str(path)!r} exists already and is not overwritten; choose another name.")


def _place(moves):
    """Rename each (part, path); what was placed is taken back when a later name turns out to be taken."""
    placed = []
    try:
        for part, path in moves:
            _rename(part, path)
            placed.append(path)
    except BaseException:
        for path in placed:
            _remove(path)
        raise


def _rename(part, path):
    """Give `part` the name `path`, which must not exist."""
    # A second name, unlike a rename, never replaces a file that came meanwhile; some disks (exFAT) have none.
    with suppress(OSError):
        if part.is_file():
            os.link(part, path)
            return
    _refuse_existing(path)
    os.rename(part, path)


def _escaped(metadata):
    """Escape the way JSON does; the parsed JSON stays the same.

    EXIF and GIF comments are ASCII, and the page finds the end of a graph in a WebM by counting braces, those
    inside of strings too.
    """

    def escape(text):
        if not isinstance(text, str):
            raise UserError(f"Clip metadata must be text (JSON strings), found {type(text).__name__}.")
        text = re.sub(r"[^\x00-\x7f]", lambda match: dumps(match.group())[1:-1], text)
        return JSON_STRING.sub(lambda match: re.sub("[{}]", _code_point, match.group()), text)

    return {escape(key): escape(value) for key, value in (metadata or {}).items()}


def _code_point(match):
    return f"\\u{ord(match.group()):04x}"


def _remove(part):
    if part.is_dir():
        shutil.rmtree(part, ignore_errors=True)
    else:
        part.unlink(missing_ok=True)
