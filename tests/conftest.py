"""Load the pack the way the host does: under a name of its own, from a folder of any name.

The helpers beside the tests are importable as `scd_tests.<module>`.
"""

import importlib.util
import pathlib
import sys

import pytest
import torch

ROOT = pathlib.Path(__file__).resolve().parents[1]


def load_package(alias, folder):
    """Make `folder` importable as package `alias` without executing its entry point."""
    if alias not in sys.modules:
        spec = importlib.util.spec_from_loader(alias, loader=None, is_package=True)
        module = importlib.util.module_from_spec(spec)
        module.__path__ = [str(folder)]
        sys.modules[alias] = module
    return sys.modules[alias]


torch.set_num_threads(1)  # the toys' tensors are small: a second thread only waits
load_package("scd_pack", ROOT)
load_package("scd_tests", ROOT / "tests")


@pytest.fixture(scope="session")
def root():
    return ROOT


@pytest.fixture
def generator():
    """Seeded torch generator: every test that draws, draws the same numbers in every run."""
    return torch.Generator().manual_seed(20240)


@pytest.fixture
def place(tmp_path):
    """A models folder too deep for a search to reach other tests' files."""
    folder = tmp_path / "host" / "models" / "ar_models"
    folder.mkdir(parents=True)
    return folder
