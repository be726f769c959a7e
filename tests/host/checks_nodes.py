"""Checks of the nodes inside a running host; inside.py runs them, test_nodes.py reports them."""

import contextlib
import gc
import json
import math
import os
import pathlib
import shutil
import socket
import weakref

import numpy as np
import pytest
import torch

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


# --- the whole road ----------------------------------------------------------------------------------------------


def check_road_runs_and_is_cached(inside):
    assert set(inside.run(graph())) == {"load", "text", "draw", "decode", "save"}
    assert inside.outcome()[0] == "execution_success", inside.outcome()
    assert inside.run(graph()) == []
    assert "load" not in inside.run(graph(seed=4)) and inside.outcome()[0] == "execution_success"


def check_road_opens_no_connection(inside):
    def refuse(*_):
        raise AssertionError("a node tried to reach the network")

    with replaced(socket.socket, "connect", refuse):
        inside.run(graph(seed=5))
    assert inside.outcome()[0] == "execution_success", inside.outcome()


def check_saved_prompt_of_release_1_still_runs(inside):
    """Prompts that API clients saved hold these inputs and no others; later inputs must have defaults."""
    inside.run(json.loads((pathlib.Path(__file__).parent / "api_v1.json").read_text(encoding="utf-8")))
    assert inside.outcome()[0] == "execution_success", inside.outcome()


# --- loading -----------------------------------------------------------------------------------------------------


def check_two_loaders_share_one_copy(inside):
    first, second = loaded(inside), loaded(inside)
    assert first[0] is second[0] and first[2] is second[2]
    half = loaded(inside, dtype="bf16")
    assert half[0].net is not first[0].net and half[2] is first[2]
    assert next(half[0].net.parameters()).dtype == torch.bfloat16
    assert first[0].get_ram_usage() > 1 << 20 and first[2].get_ram_usage() > 1 << 20


def check_changed_file_is_read_again(inside):
    folder = inside.base / "models" / "ar_models"
    folder.mkdir(parents=True, exist_ok=True)
    node = inside.nodes["SCD_LoadARModel"]
    shutil.copy(inside.module("scd_core.models.load").BUNDLED, folder / "copy.safetensors")
    before, first = node.fingerprint_inputs("copy.safetensors", "fp32"), loaded(inside, "copy.safetensors")
    assert node.fingerprint_inputs("copy.safetensors", "fp32") == before
    assert loaded(inside, "copy.safetensors")[0] is first[0]
    os.utime(folder / "copy.safetensors", (1, 1))
    assert node.fingerprint_inputs("copy.safetensors", "fp32") != before
    assert loaded(inside, "copy.safetensors")[0] is not first[0]


def check_model_list_never_fails_and_takes_foreign_names(inside):
    import folder_paths

    node, folder = inside.nodes["SCD_LoadARModel"], inside.base / "more models é"
    (folder / "Sub").mkdir(parents=True)
    shutil.copy(inside.module("scd_core.models.load").BUNDLED, folder / "Sub" / "One.safetensors")
    (inside.base / "a file").write_text("x", encoding="utf-8")
    known = folder_paths.folder_names_and_paths
    saved = known["ar_models"]
    places = [str(inside.base / "a file"), "none/at/all", str(folder)]
    known["ar_models"] = ([*saved[0], *places], saved[1])
    try:
        options = node.INPUT_TYPES()["required"]["model"][1]["options"]
        assert options[0] == BUNDLED and "Sub" in options
        for name in ("Sub", "Sub/One.safetensors", "Sub\\One.safetensors", "sub/ONE.safetensors", "One.safetensors"):
            assert node.validate_inputs(name) is True, name
        for name in ("../../secret", str(folder / "Sub" / "One.safetensors"), "gone.safetensors"):
            assert isinstance(node.validate_inputs(name), str), name
        del known["ar_models"]
        assert node.INPUT_TYPES()["required"]["model"][1]["options"] == [BUNDLED]
    finally:
        known["ar_models"] = saved
    assert node.validate_inputs() is True


def check_every_weight_dtype_draws(inside):
    for name, stored in (("fp16", torch.float16), ("bf16", torch.bfloat16), ("fp32", torch.float32)):
        model, text, vq = loaded(inside, dtype=name)
        assert next(model.net.parameters()).dtype == stored
        tokens, report, _ = drawn(inside, model, encoded(inside, text))
        assert str(model.net.dtype).removeprefix("torch.") in report
        assert torch.isfinite(inside.call("SCD_VQDecode", tokens=tokens, vq=vq).args[0]).all()


def check_unloaded_weights_come_back(inside):
    model, positive, vq = ready(inside)
    before = drawn(inside, model, positive, seed=8)[0].codes
    inside.mm.unload_all_models()
    inside.mm.soft_empty_cache()
    assert (drawn(inside, model, positive, seed=8)[0].codes == before).all()
    # and nothing of ours holds them when the host's cache lets go
    net = weakref.ref(model.net)
    del model, positive, vq
    inside.executor = inside.fresh_executor()
    inside.mm.unload_all_models()
    gc.collect()
    inside.mm.cleanup_models_gc()
    assert net() is None
    assert inside.run(graph(seed=8)) and inside.outcome()[0] == "execution_success"


# --- drawing -----------------------------------------------------------------------------------------------------


def check_every_widget_does_something(inside):
    model, positive, _ = ready(inside)
    base = {"method": "sjd", "temperature": 1.0, "top_k": 0, "top_p": 1.0, "cfg": 1.0, "seed": 11}

    def codes(**widgets):
        return drawn(inside, model, positive, **{**base, **widgets})[0].codes

    reference = codes()
    assert (codes() == reference).all()
    changes = {"seed": 12, "temperature": 0.3, "top_k": 2, "top_p": 0.2, "cfg": 6.0, "window": 3,
               "draft_start": "left", "method": "scd-maximal"}
    for name, value in changes.items():
        assert (codes(**{name: value}) != reference).any(), name
    assert codes(frames=3).shape == (1, 3, 8, 8)
    assert codes(frames=1, width=0, height=0).shape == (1, 1, 16, 16)
    pair = codes(batch_size=2)
    assert pair.shape[0] == 2 and (pair[0] == reference[0]).all() and (pair[1] != pair[0]).any()


def check_minus_one_is_the_models_own(inside):
    model, positive, _ = ready(inside)
    own = model.family.defaults
    spelled = {name: getattr(own, name) for name in ("temperature", "top_k", "top_p", "cfg")}
    first, second = drawn(inside, model, positive), drawn(inside, model, positive, **spelled)
    assert (first[0].codes == second[0].codes).all()
    assert f"temperature {own.temperature}, top-k {own.top_k}" in first[1]


def check_seed_exact_equals_autoregressive(inside):
    """Window, draft start and memory change the passes, never the tokens."""
    model, positive, _ = ready(inside)
    reference = drawn(inside, model, positive, method="autoregressive", seed=2)[0].codes
    for widgets in ({"window": 5}, {"window": 0}, {"draft_start": "above"}, {"memory": False}, {"preview": "auto"}):
        tokens = drawn(inside, model, positive, seed=2, **widgets)[0]
        assert (tokens.codes == reference).all(), widgets
    passes = {memory: drawn(inside, model, positive, seed=2, memory=memory, window=64)[1].split(" passes")[0]
              for memory in (True, False)}
    assert passes[True] != passes[False]


def check_negative_acts_with_guidance_only(inside):
    model, text, _ = loaded(inside)
    positive, negative = encoded(inside, text), encoded(inside, text, "red car")
    for cfg, equal in ((1.0, True), (4.0, False)):
        with_negative = drawn(inside, model, positive, negative=negative, cfg=cfg)[0].codes
        assert bool((with_negative == drawn(inside, model, positive, cfg=cfg)[0].codes).all()) is equal


def check_prompt_acts_and_unknown_words_are_told(inside):
    model, text, _ = loaded(inside)
    first = drawn(inside, model, encoded(inside, text, "red car"), cfg=6.0)[0].codes
    assert (first != drawn(inside, model, encoded(inside, text, "green frog"), cfg=6.0)[0].codes).any()
    made = inside.call("SCD_TextEncode", ar_text=text, text="a fox on blarg")
    assert "'blarg'" in made.ui.as_dict()["text"][0]
    assert "'blarg'" in drawn(inside, model, made.args[0])[1]
    assert inside.call("SCD_TextEncode", ar_text=text, text="a fox").ui is None


def check_what_cannot_be_drawn_is_told_in_a_sentence(inside):
    model, positive, _ = ready(inside)
    wrong = ({"width": 100, "height": 100}, {"frames": 500}, {"temperature": -0.5}, {"top_p": -0.5},
             {"method": "warp"}, {"draft_start": "nowhere"}, {"seed": 1 << 64}, {"batch_size": 0})
    for widgets in wrong:
        with pytest.raises(ValueError) as caught:
            drawn(inside, model, positive, **widgets)
        assert "\n" not in str(caught.value) and len(str(caught.value)) > 20, widgets
    with pytest.raises(ValueError, match="64x64"):
        drawn(inside, model, positive, width=100, height=100)


def check_seeds_of_64_bits(inside):
    model, positive, _ = ready(inside)
    made = [drawn(inside, model, positive, seed=seed, batch_size=2, window=64)[0].codes
            for seed in (0, (1 << 32) - 1, 1 << 32, (1 << 64) - 1)]
    assert len({codes.numpy().tobytes() for codes in made}) == 4


def check_report_names_the_window_and_the_map_has_its_shape(inside):
    model, positive, _ = ready(inside)
    tokens, report, heat = drawn(inside, model, positive, window=0, batch_size=2)
    assert "window 0" not in report and "window " in report
    assert heat.shape[0] == 2 and min(heat.shape[1:3]) >= 256 and heat.shape[3] == 3
    assert heat.dtype == torch.float32 and heat.min() >= 0 and heat.max() <= 1
    assert tokens.codes.shape == (2, 2, 8, 8)


def check_nobodys_random_state_is_touched(inside):
    model, positive, vq = ready(inside)
    states = torch.get_rng_state(), np.random.get_state()[1].copy()
    tokens = drawn(inside, model, positive, preview="auto")[0]
    inside.call("SCD_VQDecode", tokens=tokens, vq=vq)
    assert (torch.get_rng_state() == states[0]).all() and (np.random.get_state()[1] == states[1]).all()


def cut(tokens):
    """The same tokens without their last column."""
    return type(tokens)(tokens.codes[..., :-1], 32, 32, tokens.vocab, tokens.model, tokens.family)


def check_kept_tokens_stay(inside):
    model, positive, _ = ready(inside)
    tokens = drawn(inside, model, positive, seed=1)[0]
    again, report, _ = drawn(inside, model, positive, seed=2, kept=tokens)
    assert (again.codes == tokens.codes).all() and "0 tokens in 0 passes" in report
    half = torch.zeros_like(tokens.codes, dtype=torch.bool)
    half[:, :, :4] = True
    part = type(tokens)(tokens.codes, 32, 32, tokens.vocab, tokens.model, tokens.family, kept=half)
    mixed = drawn(inside, model, positive, seed=2, kept=part)[0].codes
    assert (mixed[half] == tokens.codes[half]).all() and (mixed != tokens.codes).any()
    longer = drawn(inside, model, positive, seed=2, kept=tokens, frames=4)[0].codes
    assert longer.shape[1] == 4 and (longer[:, :2] == tokens.codes).all()
    pair = drawn(inside, model, positive, seed=2, kept=part, batch_size=2)[0].codes
    assert (pair[0] == mixed[0]).all() and (pair[1] != mixed[0]).any()
    for word, widgets in {"grid": {"frames": 2, "width": 0, "height": 0, "kept": cut(tokens)},
                          "frames": {"frames": 1, "width": 0, "height": 0, "kept": tokens}}.items():
        with pytest.raises(ValueError, match=word):
            drawn(inside, model, positive, **widgets)


# --- progress, cancel, memory --------------------------------------------------------------------------------------


def check_progress_counts_tokens(inside):
    model, positive, _ = ready(inside)
    inside.progress.clear()
    report = drawn(inside, model, positive, preview="auto", batch_size=2)[1]
    values = [value for value, _, _ in inside.progress]
    assert values == sorted(values) and values[-1] == 256 and {total for _, total, _ in inside.progress} == {256}
    assert len(values) == int(report.split(" tokens in ")[1].split()[0])
    assert any(picture for *_, picture in inside.progress)
    inside.progress.clear()
    drawn(inside, model, positive, preview="off")
    assert not any(picture for *_, picture in inside.progress)


def check_a_broken_preview_costs_no_run(inside):
    model, positive, _ = ready(inside)
    before = drawn(inside, model, positive)[0].codes

    def fail(codes):
        raise RuntimeError("no picture today")

    model.codec.net.decode = fail
    try:
        assert (drawn(inside, model, positive, preview="auto")[0].codes == before).all()
    finally:
        del model.codec.net.decode


def large_tensors():
    """Bytes of all tensors that are alive, weights included."""
    gc.collect()
    return sum(t.nbytes for t in gc.get_objects() if isinstance(t, torch.Tensor) and t.device.type == "cpu")


def check_cancel_stops_within_a_pass_and_frees_memory(inside):
    inside.run(graph(seed=20, method="autoregressive"))
    model = ready(inside)[0]
    undisturbed, alive = [], large_tensors()

    def stop(value, total):
        if value >= 5 and total > 100:
            inside.mm.interrupt_current_processing(True)

    for seed in (21, 22, 23):
        inside.on_progress = stop
        inside.run(graph(seed=seed, method="autoregressive"))
        assert inside.outcome()[0] == "execution_interrupted"
        assert max(value for value, _, _ in inside.progress) < 7
        inside.on_progress = None
    assert large_tensors() <= alive * 1.01
    positive = ready(inside)[1]
    for _ in range(2):
        undisturbed.append(drawn(inside, model, positive, seed=24)[0].codes)
    assert (undisturbed[0] == undisturbed[1]).all()


def check_out_of_memory_reaches_the_host_and_leaves_nothing(inside):
    model, positive, _ = ready(inside)
    before = drawn(inside, model, positive, seed=30)[0].codes
    calls = []

    def fail(*_, **__):
        calls.append(1)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("no room")
        return type(model.net).logits(model.net, *_, **__)

    alive = large_tensors()
    model.net.logits = fail
    try:
        with pytest.raises(torch.OutOfMemoryError):
            drawn(inside, model, positive, seed=30)
    finally:
        del model.net.logits
    assert large_tensors() <= alive * 1.01
    assert (drawn(inside, model, positive, seed=30)[0].codes == before).all()


def check_impossible_size_is_refused_with_numbers(inside):
    model, positive, _ = ready(inside)
    with replaced(inside.mm, "get_total_memory", lambda *_: 1 << 20), pytest.raises(ValueError, match="GB"):
        drawn(inside, model, positive, batch_size=64)


# --- decoding ------------------------------------------------------------------------------------------------------


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
        with pytest.raises(ValueError, match="not numbers"):
            inside.call("SCD_VQDecode", tokens=tokens, vq=vq)
    finally:
        del net.decode


def check_foreign_tokens_are_refused(inside):
    model, positive, vq = ready(inside)
    tokens = drawn(inside, model, positive)[0]
    wrong = {"codebook": {"vocab": 4}, "pixels": {"width": 64}, "missing": {"codes": tokens.codes - 1000}}
    for word, fields in wrong.items():
        made = {"codes": tokens.codes, "width": 32, "height": 32, "vocab": tokens.vocab, "model": "x", "family": "x"}
        with pytest.raises(ValueError, match=word):
            inside.call("SCD_VQDecode", tokens=type(tokens)(**{**made, **fields}), vq=vq)
    foreign = type(positive)(positive.prompt, "another family")
    with pytest.raises(ValueError, match="another family"):
        drawn(inside, model, foreign)


# --- clips -----------------------------------------------------------------------------------------------------------


def combine(inside, frames, **widgets):
    return inside.call("SCD_VideoCombine", images=frames, **widgets)


def check_each_format_is_written_and_shown(inside):
    frames = torch.rand(3, 33, 35, 3)
    for name, animated in (("mp4 (h264)", True), ("webm (vp9)", True), ("gif", False), ("webp", True),
                           ("png sequence", False)):
        for keep, folder in ((True, "output"), (False, "temp")):
            made = combine(inside, frames, format=name, save_output=keep, filename_prefix="a b/é")
            ui = made.ui.as_dict()
            assert bool(ui.get("animated", (False,))[0]) is animated, name
            assert {item["type"] for item in ui["images"]} == {folder}
            for item in ui["images"]:
                assert (inside.base / folder / item["subfolder"] / item["filename"]).stat().st_size > 50
            width, height = made.args[0].get_dimensions()
            assert width % 2 == 0 and height % 2 == 0, name
        assert len(ui["images"]) == (3 if name == "png sequence" else 1)


def check_clips_are_never_overwritten(inside):
    frames = torch.rand(2, 32, 32, 3)
    names = [combine(inside, frames, format=kind, filename_prefix="again").ui.as_dict()["images"][0]["filename"]
             for kind in ("gif", "gif", "webp", "gif")]
    assert len({name.split(".")[0] for name in names}) == 4
    for prefix in ("../out", "", "/etc/clip"):
        with pytest.raises(ValueError, match="filename_prefix"):
            combine(inside, frames, filename_prefix=prefix)


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
    assert json.loads(found["prompt"], parse_constant=pytest.fail) == {"1": {"is_changed": [None], "é": "ü"}}
    assert json.loads(found["workflow"], parse_constant=pytest.fail) == {"x": None}
    with replaced(args, "disable_metadata", True):
        assert not {"prompt", "workflow"} & set(stored())


def check_cancel_leaves_no_half_clip(inside):
    before = sorted((inside.base / "output").rglob("*"))
    inside.on_progress = lambda value, total: inside.mm.interrupt_current_processing(True)
    with pytest.raises(inside.mm.InterruptProcessingException):
        combine(inside, torch.rand(9, 32, 32, 3), filename_prefix="SCD/clip")
    inside.on_progress = None
    assert sorted((inside.base / "output").rglob("*")) == before
