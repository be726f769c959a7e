"""What the checks inside the host share: the nodes in a row, small and quick."""

import contextlib
import re

BUNDLED = "bundled (pictures and clips)"
PROMPT = "fox on snow"
QUICK = {"width": 32, "height": 32, "frames": 2, "window": 16, "preview": "off"}  # 128 tokens


def loaded(inside, model=BUNDLED, dtype="fp32"):
    return inside.call("SCD_LoadARModel", model=model, weight_dtype=dtype).args


def encoded(inside, text, words=PROMPT):
    return inside.call("SCD_TextEncode", ar_text=text, text=words).args[0]


def drawn(inside, model, positive, **widgets):
    """(tokens, report, map) of the sampler."""
    return inside.call("SCD_Sampler", model=model, positive=positive, **{**QUICK, **widgets}).args


def ready(inside):
    model, text, vq = loaded(inside)
    return model, encoded(inside, text), vq


def graph(**widgets):
    """API prompt of the whole road."""
    sampler = {"method": "seed-exact", "seed": 3, "temperature": -1, "top_k": -1, "top_p": -1, "cfg": -1,
               "batch_size": 1, "draft_start": "auto", "memory": True, **QUICK}
    return {
        "load": {"class_type": "SCD_LoadARModel", "inputs": {"model": BUNDLED, "weight_dtype": "fp32"}},
        "text": {"class_type": "SCD_TextEncode", "inputs": {"ar_text": ["load", 1], "text": PROMPT}},
        "draw": {"class_type": "SCD_Sampler", "inputs": {
            "model": ["load", 0], "positive": ["text", 0], **sampler, **widgets}},
        "decode": {"class_type": "SCD_VQDecode", "inputs": {"tokens": ["draw", 0], "vq": ["load", 2]}},
        "save": {"class_type": "SCD_VideoCombine", "inputs": {
            "images": ["decode", 0], "frame_rate": 8.0, "loop_count": 0, "filename_prefix": "SCD/clip",
            "format": "mp4 (h264)", "pingpong": False, "save_output": True, "quality": 80}},
    }


@contextlib.contextmanager
def replaced(place, name, value):
    old = getattr(place, name)
    setattr(place, name, value)
    try:
        yield
    finally:
        setattr(place, name, old)


def previews_whatever_they_take(inside):
    """Short runs show pictures, too, while this lasts."""
    return replaced(inside.module("nodes.preview"), "SHARE", 1e9)


@contextlib.contextmanager
def refused(pattern="", kind=ValueError):
    """The block must raise `kind` with one sentence that holds `pattern` (the host's Python may have no pytest)."""
    try:
        yield
    except kind as error:
        text = str(error)
        assert re.search(pattern, text), text
        assert "\n" not in text and (kind is not ValueError or len(text) > 20), text
    else:
        raise AssertionError(f"nothing was refused; expected {pattern!r}")
