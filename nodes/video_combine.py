"""Video Combine: pictures become a clip on disk that plays in the node and brings its graph back."""

import logging

import torch
from comfy_api.latest import InputImpl, Types, io, ui

from ..scd_core.errors import UserError
from ..scd_core.video import DEFAULT_QUALITY, FORMATS, check_encoders, find_format, still_path, write_frames
from ..scd_core.video import frame_rate as exact_rate
from . import host
from .naming import expand

log = logging.getLogger(__name__)


class VideoCombine(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="SCD_VideoCombine",
            display_name="Video Combine",
            category="SCD",
            description="Writes pictures as a clip and plays it here. Dropping the file on the page brings the graph "
            "back.",
            inputs=[
                io.Image.Input("images", tooltip="The frames, in order. With a fourth channel (Join Image with Alpha) "
                               "they keep their transparency where the format can."),
                io.Float.Input(
                    "frame_rate", default=8.0, min=0.01, max=240.0, step=1.0, round=0.001,
                    tooltip="Pictures a second. The bundled model's clips are made for 8.",
                ),
                io.Int.Input(
                    "loop_count", default=0, min=0, max=65534,
                    tooltip="gif and webp: repetitions after the first play, 0 loops forever. The others: the frames "
                    "are written this many times more.",
                ),
                io.String.Input(
                    "filename_prefix", default="SCD/clip",
                    tooltip="Name of the file, with subfolders and words like %date:yyyy-MM-dd% if you like. A number "
                    "is added: nothing is overwritten.",
                ),
                io.Combo.Input(
                    "format", options=list(FORMATS), default=next(iter(FORMATS)),
                    tooltip="mp4 (h264) plays everywhere. av1 has 10 bits for smooth gradients. h265 is for devices, "
                    "ProRes for editors: the node then shows the first frame. Alpha: webm (vp9), gif, webp, png, "
                    "prores 4444.",
                ),
                io.Boolean.Input(
                    "pingpong", default=False, tooltip="Play forwards, then backwards.",
                ),
                io.Boolean.Input(
                    "save_output", default=True,
                    tooltip="On: into the output folder. Off: into the temp folder, which is emptied at each start.",
                ),
                io.Int.Input(
                    "quality", default=DEFAULT_QUALITY, min=0, max=100,
                    tooltip="0 is small, 100 is best (webp: lossless). ProRes, lossless webp and png sequences have "
                    "one quality only.",
                ),
                io.Audio.Input(
                    "audio", optional=True,
                    tooltip="Sound for mp4, webm and mov, cut or filled with silence to the length of the clip.",
                ),
            ],
            outputs=[io.Video.Output(display_name="VIDEO", tooltip="The clip, for Save Video and others.")],
            is_output_node=True,
            **host.newer(search_aliases=["save video", "vhs", "gif", "mp4", "prores", "av1", "h265"]),
        )

    @classmethod
    def validate_inputs(cls, format=None):
        """Refuse a format that this machine cannot write before anything is drawn; None comes over a wire."""
        try:
            if format is not None:
                check_encoders(format)
        except UserError as error:
            return str(error)
        return True

    @classmethod
    def execute(cls, images, frame_rate=8.0, loop_count=0, filename_prefix="SCD/clip", format="mp4 (h264)",
                pingpong=False, save_output=True, quality=DEFAULT_QUALITY, audio=None):
        spec, (height, width) = find_format(format), images.shape[1:3]
        hidden = cls.hidden
        prefix = expand(filename_prefix, hidden and hidden.prompt, hidden and hidden.extra_pnginfo)
        path, file, subfolder, kind = host.output_path(prefix, spec.extension, width, height, save_output)
        metadata = host.metadata(hidden)
        still = not spec.plays or (not spec.restores and bool(metadata))
        written = write_frames(
            images, path, rate=frame_rate, fmt=format, quality=quality, loop_count=loop_count, pingpong=pingpong,
            audio=audio, metadata=metadata, still=still, progress=host.Progress(len(images)),
        )
        if spec.container in ("mp4", "webm"):
            video = InputImpl.VideoFromFile(str(written))
        else:
            video = InputImpl.VideoFromComponents(Played(images, frame_rate, pingpong, audio))
        return io.NodeOutput(video, ui=shown(format, written, file, subfolder, io.FolderType(kind)))


class Played(Types.VideoComponents):
    """A clip of frames in memory, for the files that Save Video cannot copy. Sides grow to even numbers.

    The frames are put in order when somebody asks for them: they would take their own memory once more.
    """

    def __init__(self, images, frame_rate, pingpong, audio):
        self.source, self.pingpong = images, pingpong
        self.audio = audio
        self.frame_rate = exact_rate(frame_rate)

    @property
    def images(self):
        """float32 [T,H,W,3], H and W even."""
        frames = self.source[..., :3]
        if frames.shape[-1] == 1:
            frames = frames.expand(-1, -1, -1, 3)
        if self.pingpong and len(frames) > 2:
            frames = frames[[*range(len(frames)), *range(len(frames) - 2, 0, -1)]]
        for side in (1, 2):
            if frames.shape[side] % 2:
                size = frames.shape[side]
                frames = frames.index_select(side, torch.tensor([*range(size), size - 1], device=frames.device))
        return frames


class Shown(ui.SavedImages):
    """Files for the page and for clients of the API, the clip first, with a sentence for the reader if need be."""

    def __init__(self, results, is_animated=False, note=""):
        super().__init__(results, is_animated)
        self.note = note

    def as_dict(self):
        """The form that the host sends."""
        return {**super().as_dict(), **({"text": (self.note,)} if self.note else {})}


def shown(name, path, file, subfolder, kind):
    """What the page shows in the node: a player, moving pictures, frames, or the first frame and a sentence."""
    spec = FORMATS[name]
    if spec.container == "png":
        folder = f"{subfolder}/{file}" if subfolder else file
        return Shown([ui.SavedResult(frame.name, folder, kind) for frame in sorted(path.iterdir())])
    clip = ui.SavedResult(file, subfolder, kind)
    if not spec.plays:
        note = f"First frame of {file}: most browsers do not play {name}."
        return Shown([clip, ui.SavedResult(still_path(file).name, subfolder, kind)], note=note)
    # the page takes every animated file that is not webp or png for a video, and a gif is none
    return Shown([clip], is_animated=spec.container != "gif")
