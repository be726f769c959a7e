"""Reading model files: what opens, what is refused and in which words."""

import argparse
import gzip
import io
import json
import os
import struct
import tarfile
import zipfile
from collections import OrderedDict

import pytest
import torch
from safetensors.torch import save_file
from scd_pack.scd_core.checkpoint import Source, check_keys, list_models, save_safetensors
from scd_pack.scd_core.checkpoint import header as checkpoint_header
from scd_tests.model_files import A, B, header_file, put, refused, two_shards, weights, whole_bytes

# ---- one file ---------------------------------------------------------------------------------------------


def test_safetensors_file_is_described_from_its_header_alone(tmp_path, monkeypatch):
    path = tmp_path / "Modèle é" / "my model.safetensors"
    path.parent.mkdir()
    save_file({"a": A.bfloat16(), "b": B}, path, metadata={"config": '{"dim": 3}', "note": "x"})
    monkeypatch.setattr("scd_pack.scd_core.checkpoint.readers.safe_open", None)
    source = Source.open(str(path))
    assert (source.root, source.files, set(source.keys())) == (path.parent, (path,), {"a", "b"})
    assert (
        source.shape("a") == (2, 3)
        and source.dtype("a") is torch.bfloat16
        and source.dtype("b") is torch.int64
    )
    assert source.config == {"dim": 3} and source.metadata["note"] == "x"


def test_read_casts_floats_only_and_never_writes_back(tmp_path):
    path = weights(tmp_path / "m.safetensors", a=A, b=B)
    before = path.read_bytes()
    with Source.open(path) as source:
        assert source.read("a", dtype=torch.float16).dtype is torch.float16
        assert source.read("b", dtype=torch.float16).dtype is torch.int64
        mine = source.read("a")
        assert torch.equal(mine, A)
        mine += 1
    assert path.read_bytes() == before and torch.equal(Source.open(path).read("a"), A)
    assert torch.equal(mine, A + 1)
    refused(lambda: Source.open(path).read("zz"), "zz")


@pytest.mark.parametrize("length", [0x3C, 0x80 + 0x200, 0x80 + 0x400, 0x4B50])
def test_header_lengths_that_look_like_other_formats_open(tmp_path, length):
    """A length whose low bytes spell '<', a pickle's start or 'PK' is still only a length."""
    raw = json.dumps(
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, separators=(",", ":")
    ).encode()
    path = header_file(tmp_path / "m.safetensors", raw.ljust(length), struct.pack("<f", 7.0))
    assert Source.open(path).read("a").item() == 7.0


def zipped(data, name="model.safetensors"):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr(name, data)
    return out.getvalue()


def bad_safetensors(tmp_path):
    """name -> (bytes, words that the message must hold)"""
    good = whole_bytes(tmp_path)
    size, inside = len(good), struct.unpack("<Q", good[:8])[0]
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 14567890\n"
    page = b"<!DOCTYPE html><html><body>Sign in</body></html>"
    pickled, old = io.BytesIO(), io.BytesIO()
    torch.save({"a": A}, pickled)
    torch.save({"a": A}, old, _use_new_zipfile_serialization=False)
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}
    wrong = json.dumps({"a": entry}).encode()
    return {
        "empty": (b"", ["0 bytes", "expected"]),
        "two_bytes": (b"\x10\x00", ["2 bytes", "at least 8"]),
        "half": (good[: size // 2], [f"{size // 2:,} bytes"]),
        "cut_in_data": (good[:-40], [f"{size - 40:,} bytes", f"{size:,} are expected", "cut"]),
        "one_byte_short": (good[:-1], [f"{size - 1:,} bytes", f"{size:,} are expected", "cut"]),
        "cut_in_header": (good[:20], ["20 bytes", f"at least {inside + 8:,}", "cut"]),
        "longer": (good + b"xyz", [f"{size + 3:,} bytes", f"{size:,} are expected", "appended"]),
        "pointer": (pointer, ["Git LFS", f"{len(pointer)} bytes", "14,567,890 bytes"]),
        "page": (page, ["web page", f"{len(page)} bytes"]),
        "page_later": (b"\n  <html>" + page, ["web page"]),
        "text": (b'{"error": "Repository not found, sign in"}', ["text of"]),
        "pickle": (pickled.getvalue(), ["pickled", ".pt"]),
        "old_pickle": (old.getvalue(), ["pickled", ".pt"]),
        "huge_header": (struct.pack("<Q", 1 << 60) + b"\0" * 50, ["58 bytes", f"{1 << 60:,}"]),
        "broken_json": (struct.pack("<Q", 9) + b'{"a": [1,' + b"\0" * 9, ["26 bytes", "header"]),
        "not_a_dict": (struct.pack("<Q", 2) + b"[]", ["header"]),
        "annex": (b"/annex/objects/SHA256E-s14567890--0a1b.safetensors\n", ["git-annex", "14,567,890", "51 bytes"]),
        "gguf": (b"GGUF" + b"\3\0\0\0" * 20, ["GGUF", "84 bytes"]),
        "seven_zip": (b"7z\xbc\xaf\x27\x1c" + b"\0" * 30, ["7z archive", "unpack"]),
        "gzip": (gzip.compress(good), ["gzip", "unpack"]),
        "zip": (zipped(good), ["zip archive", "unpack"]),
        "cut_zip": (zipped(good)[:90], ["90 bytes", "archive", "cut off"]),
        "wrong_range": (struct.pack("<Q", len(wrong)) + wrong + b"\0" * 4, ["header", "[2]"]),
    }


BAD = [
    "empty", "two_bytes", "half", "cut_in_data", "one_byte_short", "cut_in_header",
    "longer", "pointer", "page", "page_later", "text", "pickle",
    "old_pickle", "huge_header", "broken_json", "not_a_dict", "wrong_range",
    "annex", "gguf", "seven_zip", "gzip", "zip", "cut_zip",
]  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
def test_bad_safetensors_say_name_size_and_cause(tmp_path, kind):
    cases = bad_safetensors(tmp_path)
    assert set(cases) == set(BAD)
    data, words = cases[kind]
    path = put(tmp_path / "bad file.safetensors", data)
    refused(lambda: Source.open(path), "'bad file.safetensors'", "bytes", *words)


def test_stored_type_unknown_to_torch_is_named_only_when_read(tmp_path):
    entries = {
        "a": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]},
        "b": {"dtype": "F32", "shape": [1], "data_offsets": [2, 6]},
    }
    source = Source.open(header_file(tmp_path / "m.safetensors", entries, b"\0" * 6))
    assert source.shape("a") == (4,) and source.dtype("b") is torch.float32
    refused(lambda: source.dtype("a"), "F4", "m.safetensors")
    refused(lambda: source.read("a"), "F4")


def test_missing_paths_and_foreign_endings(tmp_path):
    refused(lambda: Source.open(tmp_path / "none.safetensors"), "'none.safetensors'", "does not exist")
    refused(lambda: Source.open(put(tmp_path / "m.gguf", b"GGUF")), "m.gguf", ".safetensors")


def test_links_that_lead_nowhere_are_told(tmp_path):
    (tmp_path / "gone.safetensors").symlink_to(tmp_path / "blobs" / "0a1b")
    (tmp_path / "annex.safetensors").symlink_to(".git/annex/objects/Xk/J8/SHA256E-s9--0a.safetensors")
    (tmp_path / "loop.safetensors").symlink_to("loop.safetensors")
    refused(lambda: Source.open(tmp_path / "gone.safetensors"), "is a link to", "0a1b", "not there")
    refused(lambda: Source.open(tmp_path / "annex.safetensors"), "git annex get")
    refused(lambda: Source.open(tmp_path / "loop.safetensors"), "'loop.safetensors'", "cannot be read")
    assert list_models([tmp_path]) == []
    put(tmp_path / "config.json", "{}")
    two_shards(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    (tmp_path / "model-00002-of-00002.safetensors").symlink_to("blobs/0a1b")
    refused(lambda: Source.open(tmp_path), "1 of 2", "'model-00002-of-00002.safetensors'")


def test_denied_file_is_named(tmp_path, monkeypatch):
    path = weights(tmp_path / "m.safetensors")

    def deny(name, *_, **__):  # chmod would not stop a test that runs as root
        raise PermissionError(13, "Permission denied", str(name))

    monkeypatch.setattr(checkpoint_header, "open", deny, raising=False)
    refused(lambda: Source.open(path), "'m.safetensors'", "permissions")


def test_denied_folder_is_named_and_skipped_in_lists(tmp_path, monkeypatch):
    weights(tmp_path / "closed" / "m.safetensors")
    weights(tmp_path / "m.safetensors")
    listdir, scandir = os.listdir, os.scandir

    def deny(real):
        def call(name):
            if os.path.basename(name) == "closed":
                raise PermissionError(13, "Permission denied", str(name))
            return real(name)

        return call

    monkeypatch.setattr(os, "listdir", deny(listdir))
    monkeypatch.setattr(os, "scandir", deny(scandir))
    refused(lambda: Source.open(tmp_path / "closed"), "'closed'", "permissions")
    assert list_models([tmp_path]) == ["m.safetensors"]


# ---- pickles ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("new", [True, False])
@pytest.mark.parametrize("wrap", [None, "model", "module", "state_dict"])
def test_pickles_are_unwrapped(tmp_path, wrap, new):
    flat = OrderedDict(a=A, b=B.clone(), steps=3, extra=io.BytesIO(b"left by a library"))
    whole = (
        flat if wrap is None else {wrap: flat, "optimizer": {"state": {}}, "args": argparse.Namespace(lr=1)}
    )
    torch.save(whole, tmp_path / "m.pt", _use_new_zipfile_serialization=new)
    source = Source.open(tmp_path / "m.pt")
    assert set(source.keys()) == {"a", "b"} and source.config == {} == source.metadata
    assert (
        source.shape("a") == (2, 3) and source.dtype("b") is torch.int64 and torch.equal(source.read("a"), A)
    )


def test_other_parts_are_taken_only_by_name(tmp_path):
    torch.save({"model": {"a": A}, "model_ema": {"a": A + 1}, "epoch": 4}, tmp_path / "m.pth")
    assert torch.equal(Source.open(tmp_path / "m.pth").read("a"), A)
    assert torch.equal(Source.open(tmp_path / "m.pth", part="model_ema").read("a"), A + 1)
    refused(lambda: Source.open(tmp_path / "m.pth", part="ema"), "'ema'", "'model'", "'model_ema'")


def test_pickle_is_mapped_and_the_file_never_written(tmp_path, monkeypatch):
    path = weights(tmp_path / "m.bin", a=A)
    load, asked = torch.load, {}
    monkeypatch.setattr(torch, "load", lambda *args, **kwargs: asked.update(kwargs) or load(*args, **kwargs))
    before = path.read_bytes()
    Source.open(path).read("a").add_(1)
    assert path.read_bytes() == before and asked == {
        "map_location": "cpu",
        "weights_only": True,
        "mmap": True,
    }


class Evil:
    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return os.mkdir, (self.target,)


class Custom:
    pass


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("new", [True, False])
@pytest.mark.parametrize("protocol", [2, 4])
def test_malicious_pickle_is_refused_unrun(tmp_path, new, protocol):
    target = tmp_path / "pwned"
    torch.save(
        {"a": A, "x": Evil(str(target))},
        tmp_path / "m.ckpt",
        pickle_protocol=protocol,
        _use_new_zipfile_serialization=new,
    )
    refused(
        lambda: Source.open(tmp_path / "m.ckpt"), "'m.ckpt'", f"{os.mkdir.__module__}.mkdir", ".safetensors"
    )
    assert not target.exists()
    function, arguments = Evil(str(target)).__reduce__()
    function(*arguments)
    assert target.exists()  # the trap would have worked


def test_custom_class_and_numpy_scalar_are_refused_by_name(tmp_path):
    numpy = pytest.importorskip("numpy")
    for value, name in ((Custom(), "Custom"), (numpy.float64(1.5), "numpy")):
        torch.save({"model": {"a": A}, "x": value}, tmp_path / "m.pt")
        refused(lambda: Source.open(tmp_path / "m.pt"), name, ".safetensors")


@pytest.mark.parametrize("new", [True, False])
def test_cut_pickles(tmp_path, new):
    buffer = io.BytesIO()
    torch.save({"a": torch.rand(500)}, buffer, _use_new_zipfile_serialization=new)
    data = buffer.getvalue()
    for kept in (len(data) - 1, len(data) // 2, 40):
        path = put(tmp_path / "m.pt", data[:kept])
        refused(lambda: Source.open(path), "'m.pt'", f"{kept:,} bytes", "cut off")  # noqa: B023


def test_other_things_under_a_pickle_ending(tmp_path):
    archive = tmp_path / "zip.pt"
    with zipfile.ZipFile(archive, "w") as out:
        out.writestr("readme.txt", "x")
    torch.save([A], tmp_path / "list.pt")
    with tarfile.open(tmp_path / "tar.pt", "w") as out:
        out.add(tmp_path / "list.pt", "\x80\x02storages")
    with zipfile.ZipFile(tmp_path / "script.pt", "w") as out:
        for name in ("script/data.pkl", "script/constants.pkl", "script/code/net.py"):
            out.writestr(name, "x")
    cases = {
        "zip.pt": None, "list.pt": None, "script.pt": None,
        "empty.pt": b"", "short.pt": b"\x80\x02", "safe.pt": whole_bytes(tmp_path), "noise.pt": b"\x01" * 64,
        "tar.pt": None, "gguf.pt": b"GGUF" + b"\3\0\0\0" * 20, "annex.pt": b"/annex/objects/MD5-s9--0a\n",
        "page.pt": b"<html>", "pointer.pt": b"version https://git-lfs.github.com/spec/v1\nsize 9\n",
    }  # fmt: skip
    words = dict(
        zip(
            cases,
            [
                "zip archive",
                "list",
                "TorchScript",
                "0 bytes",
                "2 bytes",
                "rename",
                "unknown kind",
                "tar archive",
                "GGUF",
                "git-annex",
                "web page",
                "Git LFS",
            ],
        )
    )
    for name, data in cases.items():
        path = tmp_path / name if data is None else put(tmp_path / name, data)
        refused(lambda: Source.open(path), f"'{name}'", words[name])  # noqa: B023


# ---- folders ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["safetensors", "bin"])
@pytest.mark.parametrize("index", [True, False])
def test_shards_open_as_one_from_folder_or_any_shard(tmp_path, ending, index):
    names = two_shards(tmp_path, ending, index)
    put(tmp_path / "config.json", '{"model_type": "toy"}')
    if index:
        weights(tmp_path / "model.safetensors", a=A + 9)  # a stray copy beside the set
        weights(tmp_path / names[0], a=A, b=B + 9)  # the index says that b counts in the second file
    for path in (tmp_path, tmp_path / names[0], tmp_path / names[1]):
        source = Source.open(path)
        assert [file.name for file in source.files] == names and source.config == {"model_type": "toy"}
        assert torch.equal(source.read("a"), A) and torch.equal(source.read("b"), B)
    if index:
        assert torch.equal(Source.open(tmp_path / "model.safetensors").read("a"), A + 9)


@pytest.mark.parametrize("index", [True, False])
def test_missing_shard_is_named(tmp_path, index):
    names = two_shards(tmp_path, index=index)
    (tmp_path / names[1]).unlink()
    for path in (tmp_path, tmp_path / names[0]):
        message = refused(lambda: Source.open(path), "1 of 2", names[1])  # noqa: B023
        assert names[0] not in message


def test_unreadable_index_and_entries_outside(tmp_path):
    outside = weights(tmp_path / "secret.safetensors")
    folder = tmp_path / "m"
    names = two_shards(folder)
    index = folder / "model.safetensors.index.json"
    for entry in (
        "../secret.safetensors",
        str(outside),
        "..\\secret.safetensors",
        "C:secret.safetensors",
        "sub/../../secret.safetensors",
        "config.json",
    ):
        put(index, json.dumps({"weight_map": {"a": entry}}))
        refused(lambda: Source.open(folder), index.name, entry)
    for text in ("", "<html>", "{", "[]", '{"weight_map": {}}', '{"weight_map": {"a": 1}}'):
        put(index, text)
        refused(lambda: Source.open(folder), index.name)
        refused(lambda: Source.open(folder / names[0]), index.name)
    assert set(Source.open(weights(folder / "other.safetensors")).keys()) == {"a"}
    put(index, json.dumps({"weight_map": {"a": names[0], "zz": names[1]}}))
    refused(lambda: Source.open(folder), "'zz'", names[1])


def test_complete_index_wins_over_one_without_its_files(tmp_path):
    names = two_shards(tmp_path, "bin")
    put(
        tmp_path / "model.safetensors.index.json",
        json.dumps({"weight_map": {"a": "model-00001-of-00001.safetensors"}}),
    )
    assert [file.name for file in Source.open(tmp_path).files] == names


def test_tensor_twice_without_index_is_refused(tmp_path):
    names = two_shards(tmp_path, index=False)
    weights(tmp_path / names[1], a=A + 1, b=B)
    refused(lambda: Source.open(tmp_path), "'a'", *names)


@pytest.mark.parametrize(
    "name", ["model.safetensors", "pytorch_model.bin", "model.pt", "consolidated.pth", "any name.sft"]
)
def test_single_file_folders(tmp_path, name):
    folder = tmp_path / "my model é"
    put(folder / name, whole_bytes(tmp_path)) if name.endswith(("safetensors", "sft")) else weights(
        folder / name, a=A, b=B
    )
    torch.save({}, folder / "training_args.bin")
    put(folder / "._model.safetensors", b"finder")
    put(folder / "params.json", '{"dim": 4}')
    assert list_models([tmp_path]) == ["my model é"]
    source = Source.open(folder)
    assert [file.name for file in source.files] == [name] and source.config == {"dim": 4}


def test_known_name_wins_and_unrelated_files_are_listed(tmp_path):
    weights(tmp_path / "first.safetensors")
    weights(tmp_path / "second.pt")
    refused(lambda: Source.open(tmp_path), "2 weight files", "'first.safetensors'", "'second.pt'")
    weights(tmp_path / "first.pt")  # the same weights in the older format
    weights(tmp_path / "pytorch_model.bin", b=B)
    assert Source.open(tmp_path).files == (tmp_path / "pytorch_model.bin",)
    weights(tmp_path / "model.safetensors", a=A, b=B)
    assert Source.open(tmp_path).files == (tmp_path / "model.safetensors",)


def test_folder_without_weights_says_what_is_there(tmp_path):
    refused(lambda: Source.open(tmp_path), "no weight file", "empty")
    put(tmp_path / "config.json", "{}")
    put(tmp_path / "tokenizer.json", "{}")
    put(tmp_path / "model.safetensors.part", b"x")
    put(tmp_path / "decoder.jit", b"x")
    weights(tmp_path / "deep" / "m.pt")
    refused(
        lambda: Source.open(tmp_path),
        "'config.json'",
        "'tokenizer.json'",
        "unfinished",
        "decoder.jit",
        "deep/m.pt",
    )


def test_unfinished_aria2_download(tmp_path):
    path = weights(tmp_path / "m.safetensors")
    put(tmp_path / "m.safetensors.aria2", b"x")
    refused(lambda: Source.open(path), "'m.safetensors'", "downloaded")
    assert list_models([tmp_path]) == []


@pytest.mark.parametrize("ending", [".part", ".crdownload", ".aria2", ".incomplete", ".download", ".tmp"])
def test_other_unfinished_downloads(tmp_path, ending):
    put(tmp_path / "half" / f"model.safetensors{ending}", b"x" * 9)
    put(tmp_path / "half" / "Unconfirmed 123.crdownload", b"x")
    assert list_models([tmp_path]) == []
    refused(lambda: Source.open(tmp_path / "half"), "unfinished downloads", f"'model.safetensors{ending}'")
    put(tmp_path / "half" / "model.safetensors")  # the browser's place holder
    refused(lambda: Source.open(tmp_path / "half"), "still being downloaded", "'model.safetensors'")
    refused(lambda: Source.open(tmp_path / "half" / "model.safetensors"), "still being downloaded")


def test_broken_config_is_named(tmp_path):
    weights(tmp_path / "model.safetensors")
    for text in ("{", "[1]", "<html>", "", "version https://git-lfs.github.com/spec/v1\nsize 9\n"):
        put(tmp_path / "config.json", text)
        refused(lambda: Source.open(tmp_path), "'config.json'")


def test_side_files_are_found_near_the_model_only(tmp_path):
    weights(tmp_path / "lone.safetensors")
    weights(tmp_path / "full" / "model.safetensors")
    put(tmp_path / "full" / "tokenizer" / "text_tokenizer.json", "{}")
    put(tmp_path / "full" / "vqgan.yaml", "x")
    full = Source.open(tmp_path / "full")
    assert (
        full.find("tokenizer.json", "text_tokenizer.json")
        == tmp_path / "full" / "tokenizer" / "text_tokenizer.json"
    )
    assert full.find("vqgan.yaml") == tmp_path / "full" / "vqgan.yaml" and full.find("nothing.json") is None
    lone = Source.open(tmp_path / "lone.safetensors")
    assert lone.find("vqgan.yaml", "text_tokenizer.json") is None  # these belong to a neighbour
    put(tmp_path / "vqgan.yaml", "x")
    assert lone.find("vqgan.yaml") == tmp_path / "vqgan.yaml"
    put(tmp_path / "full" / "config.json", "{}")
    assert Source.open(tmp_path / "full" / "model.safetensors").find("text_tokenizer.json")


def test_meta_release_opens_from_its_top_and_finds_its_tokenizer(tmp_path):
    weights(tmp_path / "models" / "7b" / "consolidated.pth")
    put(tmp_path / "models" / "7b" / "params.json", '{"model": {"dim": 8}}')
    put(tmp_path / "tokenizer" / "text_tokenizer.json", "{}")
    for path in (tmp_path, tmp_path / "models" / "7b"):
        source = Source.open(path)
        assert source.config == {"model": {"dim": 8}} and source.root == tmp_path / "models" / "7b"
        assert source.find("text_tokenizer.json") == tmp_path / "tokenizer" / "text_tokenizer.json"


# ---- names of tensors -------------------------------------------------------------------------------------


def test_check_keys():
    wanted = [f"layers.{n}.w" for n in range(20)]
    check_keys(wanted[::-1], wanted)
    check_keys([*wanted, "vision.a", "rope.3.freqs"], wanted, ignore=["vision.", r"rope\.\d+\.freqs$"])
    refused(lambda: check_keys([*wanted, "xvision.a"], wanted, ["vision."]), "1 are unexpected", "xvision.a")
    message = refused(
        lambda: check_keys(["other"], wanted, where="'toy'"), "'toy'", "20 of 20", "layers.0.w", "16 more"
    )
    assert "layers.9.w" not in message and "'other'" in message
    refused(lambda: check_keys(wanted[1:], wanted, ignore=["layers."]), "1 of 20", "layers.0.w")


# ---- writing ----------------------------------------------------------------------------------------------


def test_save_and_open_again(tmp_path):
    path = tmp_path / "neu é" / "m.safetensors"
    big = torch.rand(4, 5)
    tensors = {
        "tied": big,
        "tied_too": big,
        "part": big[1:3],
        "turned": big.t(),
        "whole": B,
        "bf": A.bfloat16(),
        "grad": torch.nn.Parameter(A),
        "none": torch.zeros(0, 3),
    }
    assert save_safetensors(tensors, path, {"config": {"dim": 3, "name": "é"}, "format": "pt"}) == path
    source = Source.open(path)
    assert source.config == {"dim": 3, "name": "é"} and source.metadata["format"] == "pt"
    check_keys(source.keys(), tensors)
    for key, value in tensors.items():
        assert torch.equal(source.read(key), value) and source.dtype(key) is value.dtype
    assert os.listdir(path.parent) == ["m.safetensors"]
    plain = put(path.parent / "plain", b"x")
    assert path.stat().st_mode == plain.stat().st_mode  # as readable as any other new file


def test_save_overwrites_only_when_asked_and_leaves_nothing_half_written(tmp_path, monkeypatch):
    path = save_safetensors({"a": A}, tmp_path / "m.safetensors")
    refused(lambda: save_safetensors({"a": B}, path), "'m.safetensors'", "exists")
    refused(lambda: save_safetensors({"a": B}, tmp_path / "m.pt"), ".safetensors")
    save_safetensors({"a": A + 1}, path, overwrite=True)
    assert torch.equal(Source.open(path).read("a"), A + 1)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("scd_pack.scd_core.checkpoint.writer._bytes", full)
    refused(lambda: save_safetensors({"a": A}, path, overwrite=True), "'m.safetensors'", "No space left")
    refused(lambda: save_safetensors({"a": A}, path / "deeper" / "x.safetensors"), "x.safetensors", "written")
    assert os.listdir(tmp_path) == ["m.safetensors"] and torch.equal(Source.open(path).read("a"), A + 1)
