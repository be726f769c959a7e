"""The pack as a folder: entry module, requirements, house rules. No server needed."""

import json
import re
import subprocess
import sys

import lint_rules
import pytest
import tomllib
from host_api import ROOT

LOAD = """
import importlib.util, pathlib, sys, types
taken = {name: types.ModuleType(name) for name in ("nodes", "scd_core", "utils", "tests")}
sys.modules.update(taken)
path = list(sys.path)
for folder in map(pathlib.Path, sys.argv[1:]):
    name = str(folder).replace(".", "_x_")
    spec = importlib.util.spec_from_file_location(name, folder / "__init__.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.WEB_DIRECTORY == "./web" and not hasattr(module, "comfy_entrypoint")
assert sys.path == path
assert all(sys.modules[name] is module for name, module in taken.items())
assert "torch" not in sys.modules
"""


def test_entry_loads_from_any_folder_name_without_a_host(run_python, tmp_path):
    folders = [tmp_path / name for name in ("ComfyUI-SCD", "scd@1.0.2", "my nodes.v2 猫")]
    for folder in folders:
        folder.symlink_to(ROOT, target_is_directory=True)
    done = run_python(LOAD, *folders, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_missing_module_inside_a_host_is_named(run_python, tmp_path):
    (tmp_path / "pack").symlink_to(ROOT, target_is_directory=True)
    code = f"import sys, types; sys.modules['folder_paths'] = types.ModuleType('folder_paths')\n{LOAD}"
    done = run_python(code, tmp_path / "pack", cwd=tmp_path)
    assert done.returncode == 1
    assert "No module named 'comfy" in done.stderr


def test_nothing_is_installed_with_the_pack():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line.strip() and not line.startswith("#")] == []
    assert project["dependencies"] == []


# what the host brings, in builds of its own choice
HOSTS = {"torch", "torchvision", "torchaudio", "torchsde", "xformers", "triton", "flash-attn", "numpy", "pillow",
         "scipy", "safetensors", "einops", "transformers", "tokenizers", "sentencepiece", "av", "aiohttp", "pyyaml"}


def test_extras_leave_the_hosts_packages_alone():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = [line for extra in project.get("optional-dependencies", {}).values() for line in extra]
    for line in [*asked, *project["dependencies"]]:
        assert re.match(r"[\w.-]+", line)[0].lower().replace("_", "-") not in HOSTS, line
        assert not re.search(r"<|==|~=|@|://", line), f"{line}: neither upper bounds nor sources"


def test_installing_plans_nothing(tmp_path):
    """What pip would do with the requirements, asked without a network: nothing, in whatever environment."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-index", "--quiet", "--report", "-"]
    done = subprocess.run([*command, "-r", ROOT / "requirements.txt"], capture_output=True, text=True, cwd=tmp_path)
    if "No module named pip" in done.stderr:
        pytest.skip("this Python has no pip")
    assert done.returncode == 0 and json.loads(done.stdout)["install"] == [], done.stderr


def test_workflows_and_project_name_one_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert {"PublisherId", "DisplayName", "requires-comfyui"} <= set(project["tool"]["comfy"])
    assert re.fullmatch(r"\d+\.\d+\.\d+", project["project"]["version"]) and project["project"]["urls"]["Repository"]
    for file in (ROOT / "workflows").glob("*.json"):
        for node in json.loads(file.read_text(encoding="utf-8"))["nodes"]:
            if node["type"].startswith("SCD_"):
                told = {key: node["properties"][key] for key in ("cnr_id", "ver")}
                assert told == {"cnr_id": project["project"]["name"], "ver": project["project"]["version"]}, file.name


def test_changelog_begins_with_the_version_of_the_project():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    headings = [line for line in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()
                if line.startswith("## ")]
    assert headings[0].split()[1] == version


def test_tree_holds_no_clutter():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    clutter = (".pyc", ".zip", ".whl", ".ckpt", ".pt", ".pth", ".log", ".orig", ".DS_Store")
    # miniature checkpoints in the public layouts are the tests' own data, and are not published
    files = [name for name in listed.stdout.split("\0") if not name.startswith("tests/data/golden/")]
    assert [name for name in files if name.endswith(clutter)] == []


RULES = {
    "no eval": "eval('1')",
    "no os.system": "import os\nos.system('ls')",
    "no os.system under another name": "from os import system as s",
    "no os.execv": "import os\nos.execv('ls', [])",
    "no __import__": "__import__('os')",
    "no compile": "compile('1', '', 'eval')",
    "no subprocess": "import subprocess",
    "no pip": "from pip import main",
    "no ctypes": "import ctypes",
    "no dill": "from dill import load",
    "no urllib": "import urllib.request",
    "no pickle.load": "import pickle\npickle.load(open('x', 'rb'))",
    "no allow_pickle=True": "import numpy\nnumpy.load('x', allow_pickle=True)",
    "torch.load needs weights_only=True": "import torch\ntorch.load('x')",
    "weights_only": "import torch\ntorch.load('x', weights_only=False)",
    "no torch.hub.load": "import torch\ntorch.hub.load('x', 'y')",
    "no torch.manual_seed": "import torch\ntorch.manual_seed(1)",
    "no sys.path.insert": "import sys\nsys.path.insert(0, 'x')",
    "no change of sys.modules": "import sys\nsys.modules['x'] = None",
    "no print": "print('hello')",
    "no .cuda()": "def f(x):\n    return x.to('cpu').cuda()",
    "absolute import of scd_core": "from scd_core.law import law",
    "absolute import of nodes": "import nodes",
    "scd_core must not import comfy": "import comfy.utils",
    "scd_core must not import folder_paths": "from folder_paths import models_dir",
    "longer than 400 lines": "x = 1\n" * 401,
    "path of one machine": f"x = '/{'tmp'}/a'",
    "unfinished work": f"# {'TO' + 'DO'} later",
}


@pytest.mark.parametrize("rule", RULES)
def test_each_house_rule_can_fail(tmp_path, rule):
    (tmp_path / "scd_core").mkdir()
    (tmp_path / "scd_core" / "law.py").write_text(RULES[rule], encoding="utf-8")
    found = list(lint_rules.breaches(tmp_path))
    assert found and all(rule in line and line.startswith("scd_core/law.py:") for line in found)


@pytest.mark.parametrize("line", [
    "eval('1')", "new Function('x')", "box.innerHTML = name", "fetch('https://' + host)", "import('./x.js')",
])
def test_house_rules_of_the_page_can_fail(tmp_path, line):
    (tmp_path / "web").mkdir()
    (tmp_path / "web" / "x.js").write_text(line + "\n", encoding="utf-8")
    assert [found.split("page: ")[0] for found in lint_rules.breaches(tmp_path)] == ["web/x.js:1: not on somebody's "]


def test_the_entry_is_looked_at_too(tmp_path):
    (tmp_path / "__init__.py").write_text("import subprocess\n", encoding="utf-8")
    assert list(lint_rules.breaches(tmp_path)) == ["__init__.py:1: no subprocess in __init__.py"]


def test_lint_command_reports_and_fails(tmp_path):
    (tmp_path / "nodes").mkdir()
    (tmp_path / "nodes" / "host.py").write_text("import comfy.utils\n\nprint(1)\n", encoding="utf-8")
    command = [sys.executable, ROOT / "tools" / "lint_rules.py", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "nodes/host.py:3: no print; use logging\n")
