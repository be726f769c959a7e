"""What the commands of the shell share: from parsed options to drawn pictures, and to files."""

import re
from functools import partial
from pathlib import Path

import torch
from PIL import Image

from . import shell_continuous, shell_keep
from .errors import UserError
from .generate import Request, generate
from .models.load import SHIPPED, load_model
from .video import write_frames


def usable_device(name):
    """A torch device that this machine has.

    Raises:
        UserError.
    """
    try:
        torch.zeros(1, device=name)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"device {name!r} cannot be used here ({str(error).splitlines()[0]}): try cpu") from error
    return name


def model_path(name):
    return SHIPPED.get(name) or Path(name)


def request_of(args, method):
    """Command line -> `Request`."""
    return Request(
        method=method,
        seed=args.seed,
        window=args.window,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        cfg=args.cfg,
        width=args.width,
        height=args.height,
        frames=args.frames,
        batch=args.batch,
        start=args.start,
        memory=not args.no_memory,
        nodes=args.nodes,
        relax=args.relax,
        relax_budget=args.relax_budget,
        row_context=args.row_context,
        rounds=args.rounds,
        block_rows=args.block_rows,
    )


def prompts_of(model, args):
    """(prompt, negative prompt or None) of the command line."""
    encode = model.family.text.encode
    return encode(args.prompt), encode(args.negative) if args.negative else None


def draw(model, args, request, bar):
    """Run one request; bar: called as bar(label, progress)."""
    if model.family.continuous:
        return shell_continuous.draw(
            model, args, lambda name: load_model(model_path(name), args.dtype, model.device), bar
        )
    request, kept = shell_keep.read(model, args, request)
    return generate(
        model.decoder, model.family, *prompts_of(model, args), request, kept, model.device, partial(bar, request.method)
    )


def frames_of(model, drawn):
    """Frames float32 [T, H, W, 3] of each sample, one at a time; T is 1 for pictures."""
    decode = model.codec.decode if model.family.continuous else model.codec.decode_clip
    for codes in drawn.latents[:, None] if model.family.continuous else drawn.codes:
        yield decode(codes.to(model.device)).cpu()


def stem_of(prompt):
    """The part of a file name that a prompt gives; most systems take 255 bytes for a whole name."""
    return re.sub(r"[^\w-]+", "-", prompt).strip("-")[:60].encode()[:180].decode(errors="ignore") or "empty"


def suffix_of(frames):
    return ".mp4" if len(frames) > 1 else ".png"


def write(frames, path, rate):
    """Write a picture or clip; `path` with the suffix that `suffix_of` gives must not exist."""
    if len(frames) > 1:
        write_frames(frames, path, rate=rate, fmt="mp4 (h264)")
        return
    picture = (frames[0] * 255).round().to(torch.uint8).numpy()
    with open(path, "xb") as file:
        Image.fromarray(picture).save(file, "PNG")
