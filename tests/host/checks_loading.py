"""Checks inside the host: the whole road, and how models come and go."""

import gc
import os
import re
import shutil
import sys
import weakref

import torch
from checks_common import BUNDLED, drawn, encoded, graph, loaded, ready


def check_road_runs_and_is_cached(inside):
    assert set(inside.run(graph())) == {"load", "text", "draw", "decode", "save"}
    assert inside.outcome()[0] == "execution_success", inside.outcome()
    assert inside.run(graph()) == []
    assert "load" not in inside.run(graph(seed=4)) and inside.outcome()[0] == "execution_success"


def check_road_opens_no_connection(inside):
    """Python tells such a hook what any library is about to do; it cannot be taken out again, only switched off."""
    starts, seen, on = ("socket.", "urllib.", "http.", "subprocess.", "os.system", "os.exec", "os.posix_spawn"), [], [1]

    def watch(event, given):
        if on and event.startswith(starts) and event != "socket.__new__":  # the host's event loops make pairs of them
            seen.append((event, str(given)))

    sys.addaudithook(watch)
    inside.nodes["SCD_LoadARModel"].INPUT_TYPES()
    inside.run(graph(seed=5))
    on.clear()
    assert inside.outcome()[0] == "execution_success", inside.outcome()
    assert seen == [], seen


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
        alone = node.INPUT_TYPES()["required"]["model"][1]["options"]
        assert alone == [BUNDLED, "bundled MAR (one subject)", "bundled MAR draft (one subject)"]
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


def check_scaled_fp8_stays_in_8_bits(inside):
    folder = inside.base / "models" / "ar_models"
    folder.mkdir(parents=True, exist_ok=True)
    source = inside.module("scd_core.models.load").BUNDLED
    inside.module("scd_core.convert").convert(source, folder / "eight.safetensors", "fp8")
    model, text, vq = loaded(inside, "eight.safetensors", dtype="auto")
    layer = model.net.layers[0].self_attn.q_proj
    assert layer.weight.dtype == torch.float8_e4m3fn and float(layer.scale_weight) != 1
    assert model.net.norm.weight.dtype != torch.float8_e4m3fn
    plain = loaded(inside, "eight.safetensors", dtype="fp32")[0]
    weight = plain.net.layers[0].self_attn.q_proj.weight
    assert weight.dtype == torch.float32 and torch.allclose(weight, layer.weight.float() * layer.scale_weight)
    tokens, _, _ = drawn(inside, model, encoded(inside, text))
    assert torch.isfinite(inside.call("SCD_VQDecode", tokens=tokens, vq=vq).args[0]).all()
    small, full = (m.patcher.model_size() for m in (model, plain))
    assert small < 0.6 * full, "8 bits take less room, and the host counts them"


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


def check_folders_of_extra_model_paths_are_searched(inside):
    """A real extra_model_paths.yaml: relative folders, blanks and accents, a drive that is not there."""
    import folder_paths
    from utils.extra_config import load_extra_path_config

    place, source = inside.base / "shared drive é 猫", inside.module("scd_core.models.load").BUNDLED
    for folder in ("ar models", "second/ar"):
        (place / folder / "Sub").mkdir(parents=True)
        shutil.copy(source, place / folder / "Sub" / "same.safetensors")
    shutil.copy(source, place / "second" / "ar" / "only here.safetensors")
    text = ("one:\n  base_path: .\n  ar_models: |\n    ar models/\n    second/ar\n"
            "two:\n  base_path: /mnt/none\n  ar_models: ar\n")
    (place / "extra_model_paths.yaml").write_text(text, encoding="utf-8")
    known, node, here = folder_paths.folder_names_and_paths, inside.nodes["SCD_LoadARModel"], os.getcwd()
    saved = known["ar_models"]
    known["ar_models"] = (list(saved[0]), saved[1])
    try:
        load_extra_path_config(str(place / "extra_model_paths.yaml"))
        os.chdir("/")
        options = node.INPUT_TYPES()["required"]["model"][1]["options"]
        assert {"Sub", "only here.safetensors"} <= set(options), options
        host = inside.module("nodes.host")
        assert host.model_path("Sub\\same.safetensors") == place / "ar models" / "Sub" / "same.safetensors"
        assert loaded(inside, "only here.safetensors")[0].name == "only here.safetensors"
        paths = known["ar_models"][0]
        paths.reverse()
        assert host.model_path("Sub/same.safetensors") == place / "second" / "ar" / "Sub" / "same.safetensors"
    finally:
        os.chdir(here)
        known["ar_models"] = saved


def check_stamps_of_a_model_name_no_folder(inside):
    """The host writes them into the pictures that people share."""
    stamp = inside.nodes["SCD_LoadARModel"].fingerprint_inputs(BUNDLED, "fp32")
    assert re.fullmatch("[0-9a-f]{64}", stamp), stamp
