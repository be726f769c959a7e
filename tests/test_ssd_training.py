"""Training heads for the method ssd: from a model that draws its own data to a file that the method finds."""

import importlib.util
import shutil
import sys

import pytest
from scd_pack.scd_core.generate import Request, generate
from scd_pack.scd_core.models.load import load_model
from scd_tests.chameleon_files import lay_out, models
from scd_tests.janus_models import GOLDEN

__all__ = ["models"]  # a fixture
MINIATURES = {"lumina-mgpt-hf": (64, 64), "janus-pro-hf": (0, 0)}  # with and without line ends: a size of some rows


@pytest.fixture(scope="module")
def tool(root):
    """The script. It imports the core under the name that it has outside of a host."""
    path = root / "tools" / "train_ssd_heads.py"
    before, names = list(sys.path), set(sys.modules)
    spec = importlib.util.spec_from_file_location("train_ssd_heads", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.path[:] = before
    for name in set(sys.modules) - names:
        del sys.modules[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", MINIATURES)
def test_training(tool, models, tmp_path, capsys, name):
    """From a model to heads that fit it better with every step and draw with it."""
    folder = models / name
    if "lumina" in name:
        lay_out(name, folder)
    else:
        shutil.copytree(GOLDEN / name / "model", folder)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red fox\na cat\n", encoding="utf-8")
    options = [str(folder), "--prompts", str(prompts), "--dtype", "fp32", "--pictures", "8", "--batch", "4",
               "--steps", "25", "--horizontal", "1", "--width", "16", "--size", *map(str, MINIATURES[name])]
    assert tool.main(options) == 0
    told = capsys.readouterr().out.splitlines()
    for line in (line for line in told if "loss" in line):
        first, last = (float(part.strip(" ;")) for part in line.partition("loss ")[2].partition(";")[0].split("->"))
        assert last < first, line
    model = load_model(folder, "fp32")
    assert model.family.heads.reach(model.decoder) == (1, 2)
    prompt = model.family.text.encode("a red fox")
    for rounds, rows in ((0, 1), (2, 2)):
        width, height = MINIATURES[name]
        request = Request("ssd", rounds=rounds, block_rows=rows, window=4, batch=2, width=width, height=height)
        report = generate(model.decoder, model.family, prompt, request=request).report
        assert report.lossless == (rounds == 0)
    assert tool.main(options) == 1 and "exists already" in capsys.readouterr().err


def test_bundled_heads_know_more_than_the_law_above(tool):
    """On pictures that they were not trained on: first drafts stand more often than those from the law above."""
    model = tool.load_model(dtype="fp32")
    plan, tokens, states, _ = tool.self_generated(model, ["panda on grass"], 4, 4, seed=900, told=str)
    heads = model.family.heads.load(model.decoder, "cpu")
    law = tool.law_settings(tool.Request(**tool.PLAIN), model.family)
    for down in (1, 2):
        where = tool.pairs(plan, 0, down)
        ours, copied = tool.agreement(heads, model.family, plan, (tokens, states), where, 0, down, law)
        assert ours > copied + 0.02, (down, ours, copied)


def test_training_needs_prompts(tool, capsys):
    assert tool.main([str(GOLDEN / "janus-pro-hf" / "model")]) == 1
    assert "--prompts" in capsys.readouterr().err
