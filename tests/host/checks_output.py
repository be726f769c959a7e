"""Checks inside the host: tokens to pictures, pictures to files."""

import json
import math
from fractions import Fraction

import torch
from checks_common import drawn, ready, refused, replaced


def check_chunks_change_nothing_and_shrink_when_memory_is_short(inside):
    model, positive, vq = ready(inside)
    tokens, decode = drawn(inside, model, positive, batch_size=3)[0], inside.module("nodes.vq_decode")
    codes, net = tokens.codes.flatten(0, 1), vq.net

    def frames(chunk):
        return decode.decode(net, codes, chunk, "cpu", lambda done: None)

    whole = inside.call("SCD_VQDecode", tokens=tokens, vq=vq).args[0]
    assert whole.shape == (6, 32, 32, 3) and whole.dtype == torch.float32
    assert whole.min() >= 0 and whole.max() <= 1
    with torch.inference_mode():
        assert all(torch.allclose(frames(chunk), whole, atol=1e-5) for chunk in (1, 4))
        asked = []

        def short(part):
            asked.append(len(part))
            if len(part) > 2:
                raise torch.OutOfMemoryError("no room")
            return type(net).decode(net, part)

        net.decode = short
        try:
            assert torch.allclose(frames(6), whole, atol=1e-5) and asked == [6, 3, 1, 1, 1, 1, 1, 1]
        finally:
            del net.decode


def check_pixels_that_are_no_numbers_are_refused(inside):
    model, positive, vq = ready(inside)
    tokens, net = drawn(inside, model, positive)[0], vq.net

    def spoiled(codes):
        frames = type(net).decode(net, codes)
        frames[0, 0, 0, 0] = math.nan
        return frames

    net.decode = spoiled
    try:
        with refused("not numbers"):
            inside.call("SCD_VQDecode", tokens=tokens, vq=vq)
    finally:
        del net.decode


def check_foreign_tokens_are_refused(inside):
    model, positive, vq = ready(inside)
    tokens = drawn(inside, model, positive)[0]
    wrong = {"codebook": {"vocab": 4}, "pixels": {"width": 64}, "missing": {"codes": tokens.codes - 1000}}
    for word, fields in wrong.items():
        made = {"codes": tokens.codes, "width": 32, "height": 32, "vocab": tokens.vocab, "model": "x", "family": "x"}
        with refused(word):
            inside.call("SCD_VQDecode", tokens=type(tokens)(**{**made, **fields}), vq=vq)
    foreign = type(positive)(positive.prompt, "another family")
    with refused("another family"):
        drawn(inside, model, foreign)


def combine(inside, frames, **widgets):
    return inside.call("SCD_VideoCombine", images=frames, **widgets)


def check_each_format_is_written_and_shown(inside):
    frames = torch.rand(3, 65, 67, 3)
    for name, animated in (("mp4 (h264)", True), ("webm (vp9)", True), ("gif", False), ("webp", True),
                           ("mp4 (h265 10-bit)", False), ("mp4 (av1)", True), ("mov (prores 422 hq)", False),
                           ("webp (lossless)", True), ("png sequence (16-bit)", False), ("png sequence", False)):
        for keep, folder in ((True, "output"), (False, "temp")):
            made = combine(inside, frames, format=name, save_output=keep, filename_prefix="a b/é")
            ui = made.ui.as_dict()
            assert bool(ui.get("animated", (False,))[0]) is animated, name
            assert {item["type"] for item in ui["images"]} == {folder}
            for item in ui["images"]:
                assert (inside.base / folder / item["subfolder"] / item["filename"]).stat().st_size > 50
            width, height = made.args[0].get_dimensions()
            assert width % 2 == 0 and height % 2 == 0, name
            unplayable = "h265" in name or "prores" in name
            assert [name in text for text in ui.get("text", ())] == [True] * unplayable
            assert len(ui["images"]) == (3 if "png" in name else 2 if unplayable else 1), name
            assert unplayable == ui["images"][-1]["filename"].endswith(".png") or "png" in name


def check_clips_in_memory_are_put_in_order_when_asked_for(inside):
    frames = torch.arange(4.0)[:, None, None, None].expand(4, 65, 66, 3) / 8
    video = combine(inside, frames, format="gif", pingpong=True, frame_rate=23.976).args[0]
    found = video.get_components()
    assert [round(float(frame.mean()) * 8) for frame in found.images] == [0, 1, 2, 3, 2, 1]
    assert found.images.shape[1:3] == (66, 66) and found.frame_rate == Fraction(24000, 1001)


def check_a_missing_encoder_is_refused_before_anything_is_drawn(inside):
    import av

    node = inside.nodes["SCD_VideoCombine"]
    assert node.validate_inputs(format="mp4 (av1)") is True and node.validate_inputs(format=None) is True
    assert "choose one of: mp4 (h264)" in node.validate_inputs(format="mp4 (nvenc)")
    with replaced(av, "codecs_available", av.codecs_available - {"libsvtav1"}):
        assert "needs the encoder libsvtav1" in node.validate_inputs(format="mp4 (av1)")


def check_names_are_filled_in_and_stay_inside(inside):
    hidden = {"prompt": {"7": {"class_type": "Other", "inputs": {"name": "../../up"}}}}
    node = inside.nodes["SCD_VideoCombine"]
    made = node.PREPARE_CLASS_CLONE({getattr(inside.module("nodes.host").io.Hidden, k): v for k, v in hidden.items()})
    item = made.EXECUTE_NORMALIZED(
        images=torch.rand(2, 32, 34, 3), filename_prefix="%date:yyyy%/%Other.name%_%width%x%height%", format="gif",
    ).ui.as_dict()["images"][0]
    assert item["filename"].startswith(".._.._up_34x32_0") and item["subfolder"].isdigit()
    beside = inside.base / "output" / item["subfolder"] / item["filename"].replace(".gif", ".png")
    assert beside.is_file(), "the page reads no gif: a picture beside it brings the graph back"


def check_clips_are_never_overwritten(inside):
    frames = torch.rand(2, 32, 32, 3)
    names = [combine(inside, frames, format=kind, filename_prefix="again").ui.as_dict()["images"][0]["filename"]
             for kind in ("gif", "gif", "webp", "gif")]
    assert len({name.split(".")[0] for name in names}) == 4
    for prefix in ("../out", "", "/etc/clip"):
        with refused("filename_prefix"):
            combine(inside, frames, filename_prefix=prefix)


def never(constant):
    raise AssertionError(f"{constant} in JSON")


def check_metadata_holds_no_nan(inside):
    import av
    from comfy.cli_args import args

    frames = torch.rand(2, 32, 32, 3)
    hidden = {"prompt": {"1": {"is_changed": [math.nan], "é": "ü"}}, "extra_pnginfo": {"workflow": {"x": math.inf}}}

    def stored():
        node = inside.nodes["SCD_VideoCombine"]
        made = node.PREPARE_CLASS_CLONE({getattr(inside.module("nodes.host").io.Hidden, k): v
                                         for k, v in hidden.items()})
        item = made.EXECUTE_NORMALIZED(images=frames).ui.as_dict()["images"][0]
        with av.open(str(inside.base / "output" / item["subfolder"] / item["filename"])) as container:
            return dict(container.metadata)

    found = stored()
    assert json.loads(found["prompt"], parse_constant=never) == {"1": {"is_changed": [None], "é": "ü"}}
    assert json.loads(found["workflow"], parse_constant=never) == {"x": None}
    with replaced(args, "disable_metadata", True):
        assert not {"prompt", "workflow"} & set(stored())


def check_cancel_leaves_no_half_clip(inside):
    before = sorted((inside.base / "output").rglob("*"))
    inside.on_progress = lambda value, total: inside.mm.interrupt_current_processing(True)
    with refused(kind=inside.mm.InterruptProcessingException):
        combine(inside, torch.rand(9, 32, 32, 3), filename_prefix="SCD/clip")
    inside.on_progress = None
    assert sorted((inside.base / "output").rglob("*")) == before
