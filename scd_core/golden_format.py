"""Comparisons of families that write a still in lines: which tokens their format imposes, and ids by their role.

Used by `golden` and `verify`, as `golden_video`.
"""

from .errors import UserError
from .models.chameleon_text import END, LINE, PICTURE, TURN, UNIT
from .models.emu3 import Emu3Family
from .models.emu3_text import FRAME, GRID_END, PICTURE_END, START, STOP
from .models.emu3_text import LINE as ROW
from .models.emu3_text import PICTURE as GRID
from .models.lumina2 import Lumina2Family

EMU3 = {"bos": START, "eos": STOP, "boi": GRID, "eoi": PICTURE_END, "img": GRID_END, "eol": ROW, "eof": FRAME}
# Facts of meta.json that the files of Lumina-mGPT 2.0 tell as well: name -> what the model has
LUMINA2 = {
    "newline_id": lambda s: s.family.tokens[LINE],
    "boi_id": lambda s: s.family.tokens[PICTURE],
    "eoi_id": lambda s: s.family.tokens[END],
    "sep_id": lambda s: s.family.tokens[TURN],
    "h_token": lambda s: s.family.units[s.plan.height // UNIT],
    "w_token": lambda s: s.family.units[s.plan.width // UNIT],
    "bos_used": lambda s: int(s.streams[0].ids[0]),
    "image_px": lambda s: [s.plan.height, s.plan.width],
}


def forced(subject, name, want):
    """1 where the format imposes the token, 0 where it is drawn: int32 [N]."""
    return (subject.plan.forced >= 0).int()


def frames(subject, name, want):
    """All frames that the codes stand for [1, F, 3, H, W], not clamped; a still is the first of them."""
    codec = subject.codec
    if codec.cfg.compression == 1:
        raise UserError("this image tokenizer makes one picture of a token grid")
    found = codec.decode_raw_frames(subject.fixture.tensors["codes"].reshape(1, *subject.grid))
    if tuple(found.shape[:2]) != tuple(want.shape[:2]):
        raise UserError(f"the model makes {found.shape[1]} frames of a token grid")
    return found


def tokenizer(subject):
    """The tokenizer that was read from a form of its own, or None."""
    return subject.family.text.tokenizer if isinstance(subject.family, Emu3Family) else None


def facts(subject):
    """{name: (what meta.json says, subject -> what the model has)} of these families."""
    meta, family = subject.meta, subject.family
    if isinstance(family, Lumina2Family):
        return {name: (meta[name], have) for name, have in LUMINA2.items() if meta.get(name) is not None}
    if not isinstance(family, Emu3Family):
        return {}
    ids = meta["ids"] if isinstance(meta.get("ids"), dict) else {}
    told = {
        f"ids {role}": (ids[role], lambda s, token=token: s.family.tokens[token])
        for role, token in EMU3.items()
        if role in ids
    }
    if meta.get("rope_theta") is not None:
        told["rope_theta"] = (meta["rope_theta"], lambda s: s.family.theta)
    return told
