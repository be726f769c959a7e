"""The shell's road to kept tokens: a picture that is completed or redrawn in part, a clip that is continued.

The options are those of the VQ Encode node.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError

from .errors import UserError
from .given import ENDS, FITS, REGIONS, Reading, for_plan, prepare
from .video import read_video

CLIPS = ("GIF", "WEBP")  # formats of pictures that may move
OPTIONS = ("redraw", "mask", "fit", "keep_frames", "keep_from")  # of no use without --keep


def add_options(parser):
    """Unset options are None, so that they can be told from chosen ones."""
    group = parser.add_argument_group("kept tokens")
    group.add_argument("--keep", metavar="FILE", help="picture to complete; with --frames above 1 picture or clip to "
                       "go on from")
    group.add_argument("--redraw", type=lambda name: name.replace("-", " "), choices=list(REGIONS),
                       help="what of it is drawn anew, beside what the mask says (default nothing)")
    group.add_argument("--mask", metavar="PICTURE", help="white is drawn anew, black is kept")
    group.add_argument("--fit", choices=FITS, help=f"pictures of other proportions (default {FITS[0]})")
    group.add_argument("--keep-frames", type=int, help="of a clip; 0: as many as the model can take (default)")
    group.add_argument("--keep-from", choices=ENDS, help="which frames of a longer clip (default: the model's own)")


def read(model, args, request):
    """What a run is given.

    Args:
        model: `Model`. args: parsed command line. request: `Request`; more than one frame asks for a clip.

    Returns:
        (`Request` of the size that is drawn, codes as `generate` takes them); as it was and None without --keep.

    Raises:
        UserError: files that are no pictures, a codec that can only draw, sizes or frames that the model cannot take.
    """
    chosen = [name for name in OPTIONS if getattr(args, name) is not None]
    if args.keep is None:
        if chosen:
            raise UserError(f"--{chosen[0].replace('_', '-')} is about what is kept: add --keep FILE, or leave it out")
        return request, None
    cfg, clip = model.codec.cfg, request.frames > 1
    if not getattr(cfg, "encoder", True):
        raise UserError(
            f"{model.name} can draw but not read pictures, because its image tokenizer has no encoder: put "
            f"{model.family.encoder_file} beside it"
        )
    how = Reading(
        request.width, request.height, args.fit or FITS[0], clip, args.keep_frames or 0, args.keep_from or ENDS[0],
        args.redraw or next(iter(REGIONS)),
    )  # fmt: skip
    image = frames_of(args.keep)
    if len(image) > 1 and not clip:
        raise UserError(f"--keep {args.keep} is a clip of {len(image)} frames: say with --frames how many to draw")
    given = prepare(image, None if args.mask is None else mask_of(args.mask), model.family, cfg, how)
    frames = given.frames.to(model.device)
    codes = model.codec.encode_clip(frames)[None] if clip else model.codec.encode(frames)[:, None]
    plan = model.family.plan(model.family.size(given.width, given.height, request.frames))
    return replace(request, width=given.width, height=given.height), for_plan(codes.cpu(), given.kept, plan)


def frames_of(path):
    """Frames float32 [N, H, W, 3] in 0..1 of a picture (N = 1) or clip. Raises UserError."""
    picture = _picture(path)
    if picture is None:
        return read_video(path)[0]
    return torch.from_numpy(np.asarray(picture.convert("RGB")).astype(np.float32) / 255)[None]


def mask_of(path):
    """Mask float32 [1, H, W] of a picture, 1 where it is white. Raises UserError."""
    picture = _picture(path)
    if picture is None:
        raise UserError(f"--mask {path} is no picture: white in it is drawn anew, black is kept")
    return torch.from_numpy(np.asarray(picture.convert("L")).astype(np.float32) / 255)[None]


def _picture(path):
    """A single picture the right way up, or None for what may be a clip.

    Raises:
        UserError: there is no such file.
    """
    if not Path(path).is_file():
        raise UserError(f"{path} is not there, or is no file: check the name")
    try:
        with Image.open(path) as picture:
            if picture.format in CLIPS and picture.n_frames > 1:
                return None
            upright = ImageOps.exif_transpose(picture)
            if upright.mode.startswith("I"):  # 16 bits, which Pillow would cut off at 8
                upright = Image.fromarray((np.asarray(upright) / 257).astype(np.uint8))
            return upright
    except UnidentifiedImageError:
        return None
    except (OSError, Image.DecompressionBombError) as error:
        raise UserError(f"{path} cannot be read ({error}); it may be damaged or half copied") from error
