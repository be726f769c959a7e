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
NETWORK = {"socket", "ssl", "http", "urllib", "ftplib", "requests", "httpx", "aiohttp", "huggingface_hub"}
NOT_IN_PACK = {"subprocess", "multiprocessing", "marshal"} | NETWORK
CALLS = {"eval", "exec", "os.system", "os.popen", "pickle.load", "pickle.loads", "pickle.Unpickler"}
TEXT = {".py", ".sh", ".md", ".toml", ".txt", ".yml", ".yaml", ".json", ".ini", ""}
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


def call_breaches(node, may_print):
    """Calls that the pack must not make."""
    name = dotted(node.func)
    if name in CALLS:
        yield f"no {name}"
    if name == "print" and not may_print:
        yield "no print; use logging"
    if name.endswith(".cuda"):
        yield "no .cuda(); the device comes from the caller"
    for keyword in node.keywords:
        if keyword.arg == "weights_only" and getattr(keyword.value, "value", None) is False:
            yield "no weights_only=False"


def code_breaches(path, part):
    """(line, rule) of one Python file of the pack."""
    may_print = path.name == "__main__.py"
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            found = import_breaches(node, part)
        elif isinstance(node, ast.Call):
            found = call_breaches(node, may_print)
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
        if path.suffix == ".py" and inside.parts[0] in PACK:
            found += code_breaches(path, inside.parts[0])
        yield from (f"{inside.as_posix()}:{line}: {rule}" for line, rule in sorted(found))


def main():
    found = list(breaches(pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT))
    print("\n".join(found) if found else "house rules: all kept")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
