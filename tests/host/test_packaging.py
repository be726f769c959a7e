"""The pack as a folder: entry module, requirements, house rules. No server needed."""

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
    "no subprocess": "import subprocess",
    "no pickle.load": "import pickle\npickle.load(open('x', 'rb'))",
    "no weights_only=False": "import torch\ntorch.load('x', weights_only=False)",
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


def test_lint_command_reports_and_fails(tmp_path):
    (tmp_path / "nodes").mkdir()
    (tmp_path / "nodes" / "host.py").write_text("import comfy.utils\n\nprint(1)\n", encoding="utf-8")
    command = [sys.executable, ROOT / "tools" / "lint_rules.py", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "nodes/host.py:3: no print; use logging\n")
