"""The nodes inside the host: their words, and the checks of checks_*.py. What saved graphs need: test_kept_api.py."""

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


def test_the_bundled_model_is_offered_first(host):
    models = host.object_info["SCD_LoadARModel"]["input"]["required"]["model"][1]["options"]
    assert models[0] == "bundled (pictures and clips)"


@pytest.mark.parametrize("language", ["en", "zh", "ja"])
def test_every_word_on_a_node_is_translated(host, language):
    words = json.loads((ROOT / "locales" / language / "nodeDefs.json").read_text(encoding="utf-8"))
    assert set(words) == {name for name in host.object_info if name.startswith("SCD_")}
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
