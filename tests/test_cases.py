"""tests/CASES.md says for each case which tests hold it: every case has its row, and every test named is there."""

import ast
import re

import pytest

CASES = [f"U{number:02}" for number in range(1, 68)]
ROW = re.compile(r"^\| (U\d\d) \| (.+?) \| (.+?) \| (.+?) \|$", re.MULTILINE)
TEST = re.compile(r"`([\w/]+\.py)::(\w+)`")


@pytest.fixture(scope="module")
def rows(root):
    return {case: rest for case, *rest in ROW.findall((root / "tests" / "CASES.md").read_text(encoding="utf-8"))}


def functions(path):
    """Names of the test and check functions of a file, also inside classes."""
    return {node.name for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.FunctionDef)}


def test_every_case_has_its_row(root, rows):
    assert list(rows) == CASES
    lines = [line for line in (root / "tests" / "CASES.md").read_text(encoding="utf-8").splitlines() if "| U" in line]
    assert len(lines) == len(CASES), "a row is written twice or cannot be read"
    assert not [case for case, cells in rows.items() if not all(cell.strip(" -") for cell in cells)]


def test_every_test_named_exists(root, rows):
    known, missing = {}, []
    for case, (_, tests, _) in rows.items():
        named = TEST.findall(tests)
        if not named:
            missing.append(f"{case}: {tests}")
        for file, function in named:
            path = root / "tests" / file
            if file not in known:
                known[file] = functions(path) if path.is_file() else set()
            if function not in known[file]:
                missing.append(f"{case}: {file}::{function}")
    assert not missing
