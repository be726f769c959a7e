"""TorchScript files: their weights are read, their program never runs."""

import pickle
import zipfile

import pytest
import torch
from scd_pack.scd_core.checkpoint import Source, list_models
from scd_pack.scd_core.errors import UserError


class Inner(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv3d(2, 3, (1, 3, 2)).bfloat16()
        self.conv.weight.data = self.conv.weight.data.transpose(3, 4)  # not dense in the file
        self.register_buffer("count", torch.tensor(7, dtype=torch.int32))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("values", torch.arange(24, dtype=torch.float16)[4:20:3])
        self.register_buffer("nothing", torch.zeros(0, 3))
        self.steps = [1, 2]

    def forward(self, x):
        return self.conv(x)


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    path = tmp_path_factory.mktemp("jit") / "decoder.jit"
    net = torch.nn.Sequential(torch.nn.Sequential(Inner()), torch.nn.Identity())
    net[0].shared = net[0][0].conv.bias
    torch.jit.save(torch.jit.trace(net, torch.zeros(1, 2, 1, 4, 4).bfloat16()), path)
    return path


def test_tensors_are_those_of_the_state_dict(program):
    want, source = torch.jit.load(program).state_dict(), Source.open(program)
    assert set(want) <= set(source.keys())
    for name, tensor in want.items():
        found = source.read(name)
        assert found.dtype == tensor.dtype == source.dtype(name) and source.shape(name) == tuple(tensor.shape)
        assert torch.equal(found, tensor), name


def archive(path, description, **entries):
    with zipfile.ZipFile(path, "w") as made:
        made.writestr("x/data.pkl", description)
        made.writestr("x/constants.pkl", b"")
        for name, data in entries.items():
            made.writestr(f"x/{name}", data)
    return path


class Harm:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize("protocol", [2, 4])
def test_what_a_description_asks_for_is_never_called(tmp_path, protocol):
    victim = tmp_path / "victim"
    description = pickle.dumps({"harm": Harm(victim)}, protocol)
    with pytest.raises(UserError, match=r"x\.jit"):
        Source.open(archive(tmp_path / "x.jit", description))
    assert not victim.exists()


BROKEN = {
    "cut off": lambda raw: raw[: len(raw) // 2],
    "nothing": lambda raw: b"",
    "a page": lambda raw: b"<!DOCTYPE html><html></html>",
    "another kind": lambda raw: b"PK\x05\x06" + bytes(18),
}


@pytest.mark.parametrize("how", BROKEN)
def test_broken_files_are_one_sentence(program, tmp_path, how):
    path = tmp_path / "decoder.jit"
    path.write_bytes(BROKEN[how](program.read_bytes()))
    with pytest.raises(UserError, match=r"decoder\.jit") as told:
        Source.open(path)
    assert "\n" not in str(told.value)


def spoiled(program, path, old, new):
    """A copy whose description has other bytes."""
    with zipfile.ZipFile(program) as source, zipfile.ZipFile(path, "w") as target:
        for name in source.namelist():
            data = source.read(name)
            target.writestr(name, data.replace(old, new) if name.endswith("/data.pkl") else data)
    return path


@pytest.mark.parametrize(
    "old, new",
    [
        (b"BFloat16Storage", b"QFloat16Storage"),  # a type that is none
        (b"_rebuild_tensor_v2", b"_rebuild_terror_v2"),  # no tensors
        (b"\x81}", b"\x81)"),  # attributes that are none
    ],
)
def test_other_descriptions_are_one_sentence(program, tmp_path, old, new):
    with pytest.raises(UserError, match=r"decoder\.jit"):
        Source.open(spoiled(program, tmp_path / "decoder.jit", old, new))


def test_a_storage_that_is_too_short_is_told_when_it_is_read(program, tmp_path):
    path = tmp_path / "decoder.jit"
    with zipfile.ZipFile(program) as source, zipfile.ZipFile(path, "w") as target:
        for name in source.namelist():
            data = source.read(name)
            target.writestr(name, data[:-2] if "/data/" in name else data)
    source = Source.open(path)
    with pytest.raises(UserError, match=r"0\.0\.conv\.weight"):
        source.read("0.0.conv.weight")


def test_programs_are_opened_by_name_and_never_offered(program, tmp_path):
    (tmp_path / "codec").mkdir()
    (tmp_path / "codec" / "decoder.jit").write_bytes(program.read_bytes())
    assert list_models([tmp_path]) == []
    with pytest.raises(UserError, match=r"decoder\.jit"):
        Source.open(tmp_path / "codec")
