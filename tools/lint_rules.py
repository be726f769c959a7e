"""House rules that ruff does not know. Prints each breach as file:line: rule; exit code 1 if there is any.

    python tools/lint_rules.py [FOLDER]
"""

import ast
import os
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
LONGEST = 400
LONGEST_TEST = 700  # tables of cases may be longer than code
PACK = ("scd_core", "nodes")  # what runs inside the host
NOT_IN_CORE = {"comfy", "comfy_api", "comfy_execution", "comfy_extras", "folder_paths", "transformers"}
NETWORK = {"socket", "ssl", "http", "urllib", "urllib3", "ftplib", "smtplib", "telnetlib", "xmlrpc", "requests",
           "httpx", "aiohttp", "websockets", "huggingface_hub", "webbrowser"}
PROGRAMS = {"subprocess", "multiprocessing", "pty", "pip", "ensurepip", "ctypes", "cffi"}
UNPICKLERS = {"marshal", "shelve", "dill", "cloudpickle", "joblib"}
NOT_IN_PACK = NETWORK | PROGRAMS | UNPICKLERS
CALLS = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "os.startfile", "os.fork", "os.kill",
         "pickle.load", "pickle.loads", "pickle.Unpickler", "torch.hub", "yaml.load", "yaml.unsafe_load"}
# what the host and other packs share; by full name, since a generator of our own has a seed, too
SHARED = {"torch.manual_seed", "torch.set_default_dtype", "torch.set_default_device", "torch.set_num_threads",
          "torch.set_grad_enabled", "torch.use_deterministic_algorithms", "random.seed", "np.random.seed",
          "numpy.random.seed"}
STARTS = re.compile(r"os\.(exec|spawn|posix_spawn)|torch\.hub\.|sys\.(path|meta_path|modules)\.(?!get$)")
OWN_PROCESS = {"batch_ray.py"}  # its workers are processes of their own
IN_PLACE = {"sys.path", "sys.meta_path", "sys.modules"}
PAGE = re.compile(r"\beval\(|\bnew Function\b|\b(?:inner|outer)HTML\b|https?://|\bimport\(")
TEXT = {".py", ".js", ".sh", ".md", ".toml", ".txt", ".yml", ".yaml", ".json", ".ini", ""}
SKIPPED = {".git", ".venv", ".comfy", ".data", ".pytest_cache", ".ruff_cache", "__pycache__", "build", "out",
           "node_modules"}
# written with classes so that this file does not match itself
MACHINE_PATH = re.compile(r"(?<![\w.:/<])/(?:[w]ork|[t]mp|[r]oot|[h]ome/\w+)(?=[/\s\"'`),;]|$)")
UNFINISHED = re.compile(r"\b(?:[T]ODO|[F]IXME|[X]XX)\b")


def dotted(node):
    """`a.b.c` of a name or attribute chain; a call in the chain ends it: `x().cuda` gives `.cuda`."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id if isinstance(node, ast.Name) else "", *reversed(parts)])


def import_breaches(node, part):
    """Imports that the pack must not have: its own rooms by absolute name, the host in the core, ..."""
    if isinstance(node, ast.ImportFrom):
        names = [] if node.level else [node.module]
        for name in (f"{node.module}.{alias.name}" for alias in node.names):
            if name in CALLS | SHARED | {"torch.load"} or STARTS.match(name):
                yield f"no {name} under another name"
    else:
        names = [alias.name for alias in node.names]
    for name in names:
        top = name.split(".")[0]
        if top in PACK:
            yield f"absolute import of {top}; write a relative one"
        if top in NOT_IN_PACK:
            yield f"no {top} in {part}"
        if part == "scd_core" and top in NOT_IN_CORE:
            yield f"scd_core must not import {top}"


def call_breaches(node, file):
    """Calls that a file of this name in the pack must not make."""
    name = dotted(node.func)
    given = {keyword.arg: getattr(keyword.value, "value", None) for keyword in node.keywords}
    if name in CALLS or STARTS.match(name):
        yield f"no {name}"
    if name in SHARED and file not in OWN_PROCESS:
        yield f"no {name}: others share it"
    if name == "torch.load" and given.get("weights_only") is not True:
        yield "torch.load needs weights_only=True"
    if given.get("allow_pickle") is True:
        yield "no allow_pickle=True"
    if name == "print" and file != "__main__.py":
        yield "no print; use logging"
    if name.endswith(".cuda"):
        yield "no .cuda(); the device comes from the caller"
    if given.get("weights_only") is False:
        yield "no weights_only=False"


def written_breaches(node):
    """Places that the pack must not write to."""
    targets = node.targets if isinstance(node, (ast.Assign, ast.Delete)) else [node.target]
    for target in targets:
        name = dotted(target.value if isinstance(target, ast.Subscript) else target)
        if name in IN_PLACE:
            yield f"no change of {name}"


def code_breaches(path, part):
    """(line, rule) of one Python file of the pack."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            found = import_breaches(node, part)
        elif isinstance(node, ast.Call):
            found = call_breaches(node, path.name)
        elif isinstance(node, (ast.Assign, ast.AugAssign, ast.Delete)):
            found = written_breaches(node)
        else:
            continue
        yield from ((node.lineno, rule) for rule in found)


def text_breaches(path):
    """(line, rule) of any text file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    longest = LONGEST_TEST if "tests" in path.parts else LONGEST
    if path.suffix == ".py" and len(lines) > longest:
        yield len(lines), f"longer than {longest} lines"
    for number, line in enumerate(lines, 1):
        found = MACHINE_PATH.search(line)
        if found:
            yield number, f"path of one machine: {found.group()}"
        found = path.suffix == ".js" and PAGE.search(line)
        if found:
            yield number, f"not on somebody's page: {found.group()}"
        if UNFINISHED.search(line):
            yield number, "unfinished work is finished or dropped, not noted"


def text_files(root):
    """Paths of the project's own text files, in order; links are not followed."""
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(set(folders) - SKIPPED)
        for name in sorted(names):
            path = pathlib.Path(folder) / name
            if path.suffix in TEXT and name != "LICENSE" and not path.is_symlink():
                yield path


def breaches(root):
    """Every breach under `root` as `file:line: rule`."""
    for path in text_files(root):
        inside = path.relative_to(root)
        found = list(text_breaches(path))
        if path.suffix == ".py" and inside.parts[0] in (*PACK, "__init__.py"):
            found += code_breaches(path, inside.parts[0])
        yield from (f"{inside.as_posix()}:{line}: {rule}" for line, rule in sorted(found))


def main():
    found = list(breaches(pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT))
    print("\n".join(found) if found else "house rules: all kept")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
