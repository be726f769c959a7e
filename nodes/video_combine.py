"""Video Combine: pictures become a clip on disk that plays in the node and brings its graph back."""

import logging
from fractions import Fraction

from comfy_api.latest import InputImpl, Types, io, ui

from ..scd_core.errors import UserError
from ..scd_core.video import DEFAULT_QUALITY, FORMATS, write_frames
from . import host

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
                io.Image.Input("images", tooltip="The frames, in order."),
                io.Float.Input(
                    "frame_rate", default=8.0, min=0.01, max=240.0, step=1.0, round=0.001,
                    tooltip="Pictures a second. The bundled model's clips are made for 8.",
                ),
                io.Int.Input(
                    "loop_count", default=0, min=0, max=65534,
                    tooltip="gif and webp: repetitions after the first play, 0 loops forever. mp4, webm and png: the "
                    "frames are written this many times more.",
                ),
                io.String.Input(
                    "filename_prefix", default="SCD/clip",
                    tooltip="Name of the file, with subfolders if you like. A number is added: nothing is overwritten.",
                ),
                io.Combo.Input(
                    "format", options=list(FORMATS), default=next(iter(FORMATS)),
                    tooltip="mp4 plays everywhere, webm is smaller and keeps alpha, gif and webp are pictures that "
                    "move, png sequence is a folder of lossless frames.",
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
                    tooltip="0 is small, 100 is best (webp: lossless). A png sequence is always lossless.",
                ),
                io.Audio.Input(
                    "audio", optional=True,
                    tooltip="Sound for mp4 and webm, cut or filled with silence to the length of the clip.",
                ),
            ],
            outputs=[io.Video.Output(display_name="VIDEO", tooltip="The clip, for Save Video and others.")],
            is_output_node=True,
            **host.newer(search_aliases=["save video", "vhs", "gif", "mp4"]),
        )

    @classmethod
    def execute(cls, images, frame_rate=8.0, loop_count=0, filename_prefix="SCD/clip", format="mp4 (h264)",
                pingpong=False, save_output=True, quality=DEFAULT_QUALITY, audio=None):
        if format not in FORMATS:
            raise UserError(f"unknown format {format!r}: choose one of {', '.join(FORMATS)}")
        spec, (height, width) = FORMATS[format], images.shape[1:3]
        path, file, subfolder, kind = host.output_path(filename_prefix, spec.extension, width, height, save_output)
        written = write_frames(
            images, path, rate=frame_rate, fmt=format, quality=quality, loop_count=loop_count, pingpong=pingpong,
            audio=audio, metadata=host.metadata(cls.hidden), progress=host.Progress(len(images)),
        )
        if spec.container in ("mp4", "webm"):
            video = InputImpl.VideoFromFile(str(written))
        else:
            video = components(images, frame_rate, pingpong, audio)
        return io.NodeOutput(video, ui=shown(spec, written, file, subfolder, io.FolderType(kind)))


def components(images, frame_rate, pingpong, audio):
    """A VIDEO of frames in memory, for the formats that no video reader opens. Sides grow to even numbers."""
    order = [*range(len(images)), *(range(len(images) - 2, 0, -1) if pingpong else ())]
    rows, cols = (list(range(n)) + [n - 1] * (n % 2) for n in images.shape[1:3])
    frames = images[order][:, rows][:, :, cols][..., :3]
    if frames.shape[-1] == 1:
        frames = frames.expand(-1, -1, -1, 3)
    rate = Fraction(frame_rate).limit_denominator(1000)
    return InputImpl.VideoFromComponents(Types.VideoComponents(images=frames, audio=audio, frame_rate=rate))


def shown(spec, path, file, subfolder, kind):
    """What the page shows in the node: a player for mp4, webm and webp, pictures for gif and png sequence."""
    if spec.container == "png":
        folder = f"{subfolder}/{file}" if subfolder else file
        return ui.SavedImages([ui.SavedResult(frame.name, folder, kind) for frame in sorted(path.iterdir())])
    # the page takes every animated file that is not webp or png for a video, and a gif is none
    return ui.SavedImages([ui.SavedResult(file, subfolder, kind)], is_animated=spec.container != "gif")
