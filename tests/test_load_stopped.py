"""Reading a model can be stopped between two tensors: nothing of it stays, and the next reading is a whole one."""

import shutil

import pytest
import torch
from scd_pack.scd_core.checkpoint import Source
from scd_pack.scd_core.checkpoint.readers import open_reader
from scd_pack.scd_core.convert import convert
from scd_pack.scd_core.models.load import open_model
from scd_tests.janus_models import GOLDEN
from scd_tests.test_memory_pressure import tensors


class Stop(Exception):
    pass


class At:
    """A callback that ends the reading when it is called for the `call`-th time."""

    def __init__(self, call=None):
        self.call, self.told = call, []

    def __call__(self, read, total):
        self.told.append((read, total))
        if len(self.told) == self.call:
            raise Stop


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Path by kind of file."""
    root = tmp_path_factory.mktemp("models")
    shutil.copytree(GOLDEN / "janus-pro-hf" / "model", root / "janus")
    shutil.copytree(GOLDEN / "janus-pro-original" / "model", root / "original")
    return {"safetensors": root / "janus", "pickle": root / "original",
            "fp8": convert(root / "janus", root / "eight.safetensors", "fp8")}


@pytest.mark.parametrize(("kind", "part", "dtype"), [
    ("safetensors", "decoder", torch.float32), ("pickle", "decoder", torch.float32), ("fp8", "decoder", torch.bfloat16),
    ("safetensors", "codec", None),
])  # fmt: skip
def test_nothing_of_a_stopped_reading_stays(models, kind, part, dtype):
    files, seen = open_model(models[kind]), At()
    want = files.build(part, dtype=dtype, callback=seen).state_dict()
    refs = files.family.refs(part).values()
    read, total = zip(*seen.told)
    assert len(read) == len(refs) + 1 and list(read) == sorted(read) and read[0] == 0 and {*total} == {read[-1]}

    def alive():
        for ref in refs:
            ref.source.release()  # a mapped file is nothing that was read
        return tensors()

    before = alive()
    for call in (1, len(read) // 2, len(read)):
        at = At(call)
        with pytest.raises(Stop) as caught:
            files.build(part, dtype=dtype, callback=at)
        assert at.told == seen.told[:call], "it stops at once"
        del caught
        assert alive() == before
    again = files.build(part, dtype=dtype).state_dict()
    assert want.keys() == again.keys() and all(torch.equal(want[key], again[key]) for key in want)


def test_no_tensor_is_read_once_it_is_stopped(models, monkeypatch):
    path, reads = models["safetensors"], []
    kind = type(open_reader(Source.open(path).files[0]))
    real = kind.tensor
    monkeypatch.setattr(kind, "tensor", lambda self, key: reads.append(key) or real(self, key))
    with pytest.raises(Stop):
        open_model(path).build("decoder", callback=At(4))
    assert len(reads) == 3
