"""Checks inside the host: the whole road, and how models come and go."""

import gc
import json
import os
import pathlib
import shutil
import socket
import weakref

import torch
from checks_common import BUNDLED, drawn, encoded, graph, loaded, ready, replaced


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
