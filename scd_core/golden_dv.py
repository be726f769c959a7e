"""Comparisons of a video tokenizer whose codes stand for several frames (Cosmos DV). Used by `golden` and `verify`.

Its fixtures number their tensors by token grids (`codes_T2`) and by frames (`video_F9`).
"""

from contextlib import suppress

import torch

from .checkpoint import Source
from .codecs.dv_layouts import find_dv
from .errors import UserError
from .models.dv_parts import DECODERS, video_codec


def decoder_file(folder):
    """The file in a folder that holds such a codec's decoder (Path), or None."""
    for name in DECODERS:
        for path in sorted(folder.glob(name)):
            with suppress(UserError), Source.open(path) as source:
                if find_dv(source) is not None:
                    return path
    return None


def layout(source):
    """`CodecLayout` of such a codec, with its encoder from the file beside, or None when `source` holds another."""
    return None if find_dv(source) is None else video_codec(source, source)


def codes(subject, name, want):
    """Codes go in as they are, if they are codes [1, T, h, w]."""
    book = subject.codec.cfg.codes
    if want.dim() != 4 or f"codes_T{want.shape[1]}" != name or int(want.min()) < 0 or int(want.max()) >= book:
        raise UserError(f"these are not the codes from 0 to {book - 1} of a clip of so many grids")
    needs(subject, f"pixels_{name.partition('_')[2]}")
    return want


def video(subject, name, want):
    """Frames go in as they are."""
    if want.dim() != 5 or name != f"video_F{want.shape[2]}":
        raise UserError("these are not so many frames of a clip")
    tail = name.partition("_")[2]
    needs(subject, f"encoder_codes_{tail}", f"encoder_latent_{tail}")
    return want


def indices(subject, name, want):
    """Codes that come back when their own values are rounded again."""
    needs(subject, "fsq_codes")
    return subject.codec.rounded(subject.codec.values(want))


def needs(subject, *uses):
    """Raises UserError when an input serves nothing."""
    if not any(subject.fixture.get(use) is not None for use in uses):
        raise UserError(f"nothing is computed from it: none of {', '.join(uses)} is there")


@torch.inference_mode()
def pixels(subject, name, want):
    """Decoded clip [1, 3, F, H, W], not clamped."""
    return subject.codec.decode_raw(subject.fixture.tensors[f"codes_{name.partition('_')[2]}"])


@torch.inference_mode()
def latent(subject, name, want):
    """Features before rounding [1, D, T, h, w]."""
    if not subject.codec.cfg.encoder:
        raise UserError("the files hold no complete encoder")
    return subject.codec.features(subject.fixture.tensors[f"video_{name.rpartition('_')[2]}"])


def encoded(subject, name, want):
    """Codes [1, T, h, w]."""
    return subject.codec.nearest(latent(subject, name, want))


# name, what it needs, kind of number, what the model makes of it (see `verify.Check`)
ROWS = (
    (r"codes_T\d+", "codec", "exact", codes),
    (r"pixels_T\d+", "codec", "pixels", pixels),
    (r"fsq_indices", "codec", "exact", indices),
    (r"fsq_codes", "codec", "probs", lambda s, name, want: s.codec.values(s.fixture.tensors["fsq_indices"])),
    (r"video_F\d+", "codec", "exact", video),
    (r"encoder_latent_F\d+", "codec", "logits", latent),
    (r"encoder_codes_F\d+", "codec", "exact", encoded),
)


def _multiples(subject):
    """Channels of the encoder's levels over those behind its first convolution."""
    half = subject.codec.cfg.encoder
    return [channels / half.entry for channels in half.channels]


SHAPE = {
    "channels": lambda s: s.codec.cfg.encoder.entry,
    "num_res_blocks": lambda s: s.codec.cfg.decoder.blocks - 1,
    "channels_mult": _multiples,
    "z_channels": lambda s: s.codec.cfg.decoder.z,
    "patch_size": lambda s: s.codec.cfg.patch,
}


def facts(meta):
    """{name: (what meta.json tells, what the model has)} of such a codec's fixture."""
    found = {}
    if "fsq_levels" in meta:
        found["fsq_levels"] = (meta["fsq_levels"], lambda s: list(s.codec.cfg.levels))
        shape = meta.get("vq")
        for name, value in (shape.items() if isinstance(shape, dict) else ()):
            if name in SHAPE:
                found[f"vq {name}"] = (value, SHAPE[name])
    return found
