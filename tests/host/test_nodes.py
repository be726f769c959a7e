"""The five nodes inside the host: their widgets as saved graphs rely on them, and the checks of checks_*.py."""

import json
import os
import pathlib
import re
import subprocess

import pytest
from host_api import ROOT
from workflow_json import input_specs

pytestmark = pytest.mark.host

HERE = pathlib.Path(__file__).parent
KINDS = ("loading", "drawing", "output", "encode", "clips", "models", "compare", "continuous", "preview", "search",
         "interrupts", "memory")
FILES = [HERE / f"checks_{name}.py" for name in KINDS]
CHECKS = [name for file in FILES for name in re.findall(r"(?m)^def (check_\w+)", file.read_text(encoding="utf-8"))]

# Saved graphs hold values by place. Appending to a list is fine; any other change breaks what people saved.
REQUIRED = {
    "SCD_LoadARModel": ["model", "weight_dtype"],
    "SCD_TextEncode": ["ar_text", "text"],
    "SCD_Sampler": [
        "model", "positive", "method", "seed", "window", "temperature", "top_k", "top_p", "cfg", "width", "height",
        "frames", "batch_size", "draft_start", "preview", "memory",
    ],
    "SCD_VQDecode": ["tokens", "vq"],
    "SCD_VQEncode": ["vq", "image", "images_are", "width", "height", "fit", "redraw", "frames", "frames_from"],
    "SCD_VideoCombine": [
        "images", "frame_rate", "loop_count", "filename_prefix", "format", "pingpong", "save_output", "quality",
    ],
}
REQUIRED["SCD_Compare"] = [
    "model", "positive", "methods", "seed", "window", "temperature", "top_k", "top_p", "cfg", "width", "height",
    "frames",
]
REQUIRED["SCD_ContinuousSampler"] = [
    "model", "positive", "mode", "seed", "gamma", "prefill", "tau", "steps", "diffusion_steps", "temperature", "cfg",
    "batch_size",
]
OPTIONAL = {
    "SCD_TextEncode": ["conditioning"],
    "SCD_Sampler": [
        "negative", "kept", "tree_nodes", "relax", "relax_budget", "row_context", "rounds", "on_cancel", "block_rows",
    ],
    "SCD_Compare": ["negative"], "SCD_VideoCombine": ["audio"],
    "SCD_VQEncode": ["mask"], "SCD_ContinuousSampler": ["draft_model", "on_cancel", "preview"],
}
OUTPUTS = {
    "SCD_LoadARModel": ["SCD_MODEL", "SCD_TEXT", "SCD_VQ"],
    "SCD_TextEncode": ["SCD_PROMPT"],
    "SCD_Sampler": ["SCD_TOKENS", "STRING", "IMAGE"],
    "SCD_VQDecode": ["IMAGE"],
    "SCD_VQEncode": ["SCD_TOKENS", "IMAGE", "MASK"],
    "SCD_VideoCombine": ["VIDEO"],
    "SCD_Compare": ["IMAGE", "IMAGE", "STRING"],
    "SCD_ContinuousSampler": ["SCD_LATENTS", "STRING"],
}


@pytest.mark.parametrize("name", REQUIRED)
def test_widgets_and_sockets_are_where_saved_graphs_expect_them(host, name):
    info = host.object_info[name]
    assert info["input_order"]["required"][: len(REQUIRED[name])] == REQUIRED[name]
    assert set(info["input_order"]["required"]) == set(REQUIRED[name]), "a new input must be optional"
    optional = OPTIONAL.get(name, [])
    assert info["input_order"].get("optional", [])[: len(optional)] == optional
    assert info["output"][: len(OUTPUTS[name])] == OUTPUTS[name]


def test_choices_that_people_saved_are_still_there(host):
    sampler = host.object_info["SCD_Sampler"]["input"]["required"]
    methods = {"autoregressive", "jacobi", "sjd", "scd-maximal", "scd-gumbel", "seed-exact"}
    assert methods <= set(sampler["method"][1]["options"]) and sampler["method"][1]["default"] == "seed-exact"
    assert sampler["seed"][1]["max"] == 2**64 - 1 and sampler["seed"][1]["control_after_generate"] is True
    formats = host.object_info["SCD_VideoCombine"]["input"]["required"]["format"][1]["options"]
    assert {"mp4 (h264)", "webm (vp9)", "gif", "webp", "png sequence"} <= set(formats)
    model = host.object_info["SCD_LoadARModel"]["input"]["required"]["model"][1]["options"]
    assert model[0] == "bundled (pictures and clips)"


@pytest.mark.parametrize("language", ["en", "zh", "ja"])
def test_every_word_on_a_node_is_translated(host, language):
    words = json.loads((ROOT / "locales" / language / "nodeDefs.json").read_text(encoding="utf-8"))
    assert set(words) == set(REQUIRED)
    for name, mine in words.items():
        info = host.object_info[name]
        inputs = {key: options for key, (_, options) in input_specs(info).items()}
        assert set(mine["inputs"]) == set(inputs) and len(mine["outputs"]) == len(info["output"])
        entries = [*mine["inputs"].values(), *mine["outputs"].values()]
        assert all(entry["name"] and entry["tooltip"] for entry in entries)
        if language == "en":  # what the page shows and what the nodes say must not drift apart
            assert mine["description"] == info["description"] and mine["display_name"] == info["display_name"]
            assert {key: entry["tooltip"] for key, entry in mine["inputs"].items()} == {
                key: options["tooltip"] for key, options in inputs.items()}


@pytest.fixture(scope="session")
def inside(host, tmp_path_factory):
    """{check: None or its traceback}: all checks run in one process that holds a host. (host: says if there is one.)"""
    comfy = os.environ.get("COMFYUI_DIR") or ROOT / ".comfy" / "ComfyUI"
    asked = subprocess.run(["bash", ROOT / "tools" / "run_comfy.sh", "python"], capture_output=True, text=True)
    command = [asked.stdout.strip(), HERE / "inside.py", comfy, tmp_path_factory.mktemp("inside"), *FILES]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return {line["check"]: line["error"] for line in map(json.loads, done.stdout.splitlines())}


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS)
def test_inside_the_host(inside, check):
    assert check in inside, "the check did not run"
    assert inside[check] is None, inside[check]
