"""Names of models: what is listed, and how a saved name is found again on another machine."""

import os
import shutil

import pytest
import torch
from scd_pack.scd_core.checkpoint import Source, list_models, resolve_model
from scd_pack.scd_core.checkpoint import names as model_names
from scd_tests.model_files import A, B, put, refused, two_shards, weights


@pytest.fixture
def shelf(tmp_path):
    """Two roots: hub folders, organising folders, lone files, half a model, a Meta release, and clutter."""
    one, two = tmp_path / "one", tmp_path / "zwei é und mehr"
    two_shards(one / "janus" / "Pro-7B")
    put(one / "janus" / "Pro-7B" / "config.json", "{}")
    put(one / "janus" / "Pro-7B" / "tokenizer" / "config.json", "{}")
    weights(one / "janus" / "Pro-7B" / "tokenizer" / "vq.pt")
    weights(one / "llamagen" / "c2i_B.pt")
    weights(one / "llamagen" / "vq_ds16.pt")
    weights(one / "lone.safetensors")
    weights(one / "same" / "model.safetensors", a=A)
    put(one / "half" / "config.json", "{}")
    weights(one / "anole" / "models" / "7b" / "consolidated.pth")
    weights(one / "anole" / "tokenizer" / "vqgan.ckpt")
    two_shards(one / "loose" / "x", index=False)
    put(one / "loose" / "x" / "config.json", "{}")
    weights(one / "loose" / "b.safetensors")
    weights(one / "loose" / "vae" / "c.safetensors")
    two_shards(one, index=False)
    for clutter in (
        "lone.safetensors.part",
        "a.incomplete",
        "notes.txt",
        ".cache/m.safetensors",
        "optimizer.pt",
    ):
        put(one / clutter, b"x")
    weights(two / "same" / "model.safetensors", a=A + 1)
    weights(two / "été" / "model.safetensors")
    return [one, two]


def test_list_models(shelf):
    """One name a model; shards, side folders, downloads and clutter are not listed."""
    assert list_models(shelf) == [
        "anole/models/7b", "anole/tokenizer", "half", "janus/Pro-7B", "llamagen", "lone.safetensors",
        "loose", "loose/x",
        "model-00001-of-00002.safetensors", "same", "été",
    ]  # fmt: skip


def test_everything_listed_resolves_and_opens(shelf):
    for name in list_models(shelf):
        path = resolve_model(name, shelf)
        if name == "half":
            refused(lambda: Source.open(path), "config.json", "no weight file")  # noqa: B023
        else:
            assert len(Source.open(path).keys()) >= 1


def test_image_tokenizers_and_text_encoders_are_no_models(tmp_path):
    """A folder of one language model and its image tokenizer is one model; of several, each file but the tokenizer."""
    for name in ("c2i_B_256.pt", "vq_ds16_c2i.pt", "vq_ds8_c2i.safetensors"):
        weights(tmp_path / "LlamaGen" / name, a=A, **{name: B})
    for name in ("lumina.safetensors", "VQGAN.ckpt", "vqgan.yaml"):
        weights(tmp_path / "Lumina" / name) if "yaml" not in name else put(tmp_path / "Lumina" / name, "x")
    for name in ("c2i_B_256.pt", "c2i_B_384.pt", "vq-ds16.pt"):
        weights(tmp_path / "several" / name)
    weights(tmp_path / "alone" / "vq_ds16_c2i.pt")
    weights(tmp_path / "top.safetensors")
    weights(tmp_path / "movqgan_270M.ckpt")
    for folder in ("flan-t5-xl", "LlamaGen/T5-11b", "my-t5"):
        weights(tmp_path / folder / "model.safetensors")
        put(tmp_path / folder / "config.json", "{}")
    assert list_models([tmp_path]) == [
        "alone", "LlamaGen", "Lumina", "my-t5", "several/c2i_B_256.pt", "several/c2i_B_384.pt", "top.safetensors",
    ]  # fmt: skip
    assert "c2i_B_256.pt" in Source.open(tmp_path / "LlamaGen").keys()
    assert [file.name for file in Source.open(tmp_path / "Lumina").files] == ["lumina.safetensors"]
    refused(lambda: Source.open(tmp_path / "several"), "2 weight files", "c2i_B_384.pt")
    assert resolve_model("vq-ds16.pt", [tmp_path]) == tmp_path / "several" / "vq-ds16.pt"  # graphs keep their names


def test_list_models_never_raises(tmp_path, monkeypatch):
    file = put(tmp_path / "file", b"x")
    for roots in ([], None, [None, 3, b"x", ""], [tmp_path / "none"], [file], ["/mnt/none", "a\0b"], 7):
        assert list_models(roots) == []
    weights(tmp_path / "rel" / "m.pt")
    monkeypatch.chdir(tmp_path)
    assert list_models(["rel"]) == list_models("rel") == ["m.pt"]


def aged(roots, age=0):
    """Give all folders the age that those of a real models folder have, another one at each call."""
    for root in roots:
        for folder, _, _ in os.walk(root):
            os.utime(folder, (1_600_000_000 + age, 1_600_000_000 + age))


def test_folders_are_read_again_only_when_they_changed(shelf, monkeypatch):
    read = []
    monkeypatch.setattr(model_names, "scan", lambda folder, scan=model_names.scan: read.append(folder) or scan(folder))
    aged(shelf)
    first = list_models(shelf)
    assert read and list_models(shelf) == first
    count = len(read)
    list_models(shelf).clear()  # the caller's own
    assert list_models(shelf) == list_models([str(root) for root in shelf]) == first and len(read) == count
    (one, two), age = shelf, 0
    for change, gone, new in (
        (lambda: weights(two / "neu" / "model.safetensors"), (), ["neu"]),
        (lambda: (one / "lone.safetensors").rename(one / "alone.safetensors"), ["lone.safetensors"],
         ["alone.safetensors"]),
        (lambda: shutil.rmtree(two / "été"), ["été"], ()),
        (lambda: put(one / "loose" / "b.safetensors.aria2"), ["loose/b.safetensors"], ()),
        (lambda: weights(one / "llamagen" / "other.pt"), ["llamagen"], ["llamagen/c2i_B.pt", "llamagen/other.pt"]),
    ):
        before = set(list_models(shelf))
        change()
        assert set(list_models(shelf)) == (before - set(gone)) | set(new)
        aged(shelf, age := age + 1)
        list_models(shelf)
    assert list_models([one / "gone"]) == []
    weights(one / "gone" / "late.pt")
    assert list_models([one / "gone"]) == ["late.pt"], "a drive that was connected later"


def test_a_folder_that_just_changed_is_read_again(tmp_path):
    for number in range(5):  # faster than a file system's clock may tick
        weights(tmp_path / f"m{number}.pt")
        assert len(list_models([tmp_path])) == number + 1


def test_a_hub_cache_is_a_folder_of_links(tmp_path):
    """Its files are links to blobs without an ending."""
    cache, root = tmp_path / "hub" / "models--org--name", tmp_path / "root"
    snapshot = cache / "snapshots" / "rev"
    for number, name in enumerate(two_shards(snapshot)):
        blob = cache / "blobs" / f"0a{number}"
        blob.parent.mkdir(exist_ok=True)
        (snapshot / name).rename(blob)
        (snapshot / name).symlink_to(f"../../blobs/{blob.name}")
    root.mkdir()
    (root / "hub").symlink_to(tmp_path / "hub", target_is_directory=True)
    (name,) = list_models([root])
    assert name == "hub/models--org--name/snapshots/rev"
    for spelled in (name, name.replace("/", "\\"), "rev", f"{name}/model-00002-of-00002.safetensors"):
        source = Source.open(resolve_model(spelled, [root]))
        assert torch.equal(source.read("a"), A) and torch.equal(source.read("b"), B)


def test_links_are_followed_and_loops_end(tmp_path):
    far, root = tmp_path / "far", tmp_path / "root"
    two_shards(far / "blobs")
    weights(far / "file.safetensors")
    (root / "sub").mkdir(parents=True)
    try:
        (root / "sub" / "up").symlink_to(root, target_is_directory=True)
    except OSError:
        pytest.skip("this system forbids links")
    (root / "self").symlink_to(root / "self")
    (root / "dangling.safetensors").symlink_to(tmp_path / "none")
    (root / "linked.safetensors").symlink_to(far / "file.safetensors")
    (root / "janus").symlink_to(far / "blobs", target_is_directory=True)
    assert list_models([root]) == ["janus", "linked.safetensors"]
    for name in ("janus", "linked.safetensors"):
        path = resolve_model(name, [root])
        assert path == root / name  # judged as written, read through the link
        assert torch.equal(Source.open(path).read("a"), A)


def test_resolve_model_spellings(shelf):
    one, two = shelf
    shard = one / "janus" / "Pro-7B" / "model-00001-of-00002.safetensors"
    assert resolve_model("janus\\Pro-7B", shelf) == one / "janus" / "Pro-7B"
    assert (
        resolve_model("janus/Pro-7B/", shelf)
        == resolve_model("./janus//Pro-7B", shelf)
        == one / "janus" / "Pro-7B"
    )
    assert resolve_model("JANUS\\pro-7b\\Model-00001-of-00002.safetensors", shelf) == shard
    assert (
        resolve_model("pro-7b", shelf) == resolve_model("old/place/Pro-7B", shelf) == one / "janus" / "Pro-7B"
    )
    assert resolve_model("elsewhere\\vq_ds16.pt", shelf) == one / "llamagen" / "vq_ds16.pt"
    assert resolve_model("e\u0301te\u0301", shelf) == two / "été"  # accents as macOS writes them
    assert resolve_model("same", shelf) == one / "same"  # the first root wins
    assert resolve_model("same", shelf[::-1]) == two / "same"


def test_resolve_model_refuses(shelf, tmp_path):
    for name in (
        "../one/lone.safetensors",
        "a/../../x",
        "..\\x",
        "/etc/passwd",
        "C:\\m.pt",
        "c:m.pt",
        "\\\\host\\m.pt",
        "a/.. /x",
        "a\0b",
        str(tmp_path / "one" / "lone.safetensors"),
    ):
        refused(lambda: resolve_model(name, shelf), "refused")  # noqa: B023
    refused(lambda: resolve_model("model.safetensors", shelf), "same", "été")  # two models have it
    # A name that every release uses does not stand for another release.
    refused(lambda: resolve_model("gone/model.safetensors", shelf), "No model", "'janus/Pro-7B'", *shelf)
    for name in ("", ".", "nothing", "notes.txt", None):
        refused(lambda: resolve_model(name, shelf), "No model", "lone.safetensors", *shelf)  # noqa: B023
    refused(lambda: resolve_model("x", [tmp_path / "none"]), "none at all", tmp_path / "none")
    refused(lambda: resolve_model("x", []), "models folder")


def test_bare_common_name_resolves_when_only_one_has_it(tmp_path):
    path = weights(tmp_path / "janus" / "model.safetensors")
    assert resolve_model("model.safetensors", [tmp_path]) == path
    assert resolve_model("old\\Janus\\model.safetensors", [tmp_path]) == path


def test_names_that_differ_in_case_only(tmp_path):
    weights(tmp_path / "Toy" / "model.pt")
    if (tmp_path / "toy").exists():
        pytest.skip("this disk does not tell case apart")
    weights(tmp_path / "toy" / "model.pt")
    assert resolve_model("toy", [tmp_path]) == tmp_path / "toy"
    refused(lambda: resolve_model("TOY", [tmp_path]), tmp_path / "toy", tmp_path / "Toy")
