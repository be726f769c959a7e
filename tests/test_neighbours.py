"""A models folder full of broken files of other people's models: they concern nobody who does not need them."""

import shutil

import pytest
from scd_pack.scd_core.checkpoint import list_models
from scd_pack.scd_core.errors import UserError
from scd_pack.scd_core.models.load import open_model
from scd_tests.test_detection import MODELS, lay_out

NAMES = (
    "tokenizer.json", "text_tokenizer.json", "tokenizer.model", "spiece.model", "emu3.tiktoken", "config.json",
    "emu3_vision_tokens.txt", "tokenizer_config.json", "vqgan.ckpt", "vqgan.yaml", "vq_ds16_c2i.pt", "vq_ds16_t2i.pt",
    "movqgan_270M.ckpt", "decoder.jit", "decoder.safetensors", "encoder.jit", "kl16.ckpt", "model.safetensors",
    "model.safetensors.index.json", "preprocessor_config.json",
)  # fmt: skip
BROKEN = {
    "cut": b'{"version": "1.0", "model": {"vocab": {"IMGIMGAZ": 4, "<|image|>',
    "empty": b"",
    "web page": b"<!DOCTYPE html><html>",
    "pointer": b"version https://git-lfs.github.com/spec/v1\nsize 9\n",
    "noise": bytes(range(256)) * 3,
}
SAID = {"cut": "is no tokenizer file", "empty": "is empty (0 bytes)", "web page": "is a web page", "noise": "no text",
        "pointer": "is a Git LFS pointer"}
TOKENIZERS = ("tokenizer.json", "text_tokenizer.json")


@pytest.fixture
def place(tmp_path):
    """A models folder with broken neighbours in front of and behind whatever is put beside them."""
    place = tmp_path / "host" / "models" / "ar_models"
    for first in "az":
        for kind, data in BROKEN.items():
            for sub in ("", "tokenizer", "flan-t5-xl"):
                folder = place / f"{first} {kind}" / sub
                folder.mkdir(parents=True, exist_ok=True)
                for name in NAMES:
                    (folder / name).write_bytes(data)
        for kind in ("folders", "links", "loops"):
            (place / f"{first} {kind}").mkdir()
        for name in NAMES:
            (place / f"{first} folders" / name).mkdir()
            (place / f"{first} links" / name).symlink_to("nowhere")
            (place / f"{first} loops" / name).symlink_to(name)
    return place


@pytest.mark.parametrize("name", ["anole-meta", "cosmos-ar-v2w", "emu3-hf", "janus-pro-hf", "llamagen-c2i", "simplear"])
def test_broken_neighbours_do_not_matter(place, name):
    folder = lay_out(name, place)
    assert type(open_model(folder).family).__name__ == MODELS[name]
    assert any(listed.startswith(name) for listed in list_models([place]))


@pytest.mark.parametrize("name", ["anole-meta", "emu3-hf", "janus-pro-hf", "lumina-mgpt-2", "simplear"])
def test_a_good_tokenizer_among_broken_ones_is_found(place, name):
    folder = lay_out(name, place)
    files = [file for file in folder.rglob("*") if file.name in TOKENIZERS]
    assert files
    (place / "m good").mkdir()
    for file in files:
        shutil.move(file, place / "m good")
    source = open_model(folder).source
    assert [file.parent.name for file in source.all_files() if file.name in TOKENIZERS] == ["m good"]
    shutil.rmtree(place / "m good")
    with pytest.raises(UserError, match="text tokenizer: MISSING"):
        open_model(folder)


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_file_in_the_models_own_folder_is_told_when_it_is_needed(place, kind):
    folder = lay_out("anole-meta", place)  # it has tokenizer/text_tokenizer.json
    (folder / "tokenizer.json").write_bytes(BROKEN[kind])
    open_model(folder)
    shutil.move(folder / "tokenizer" / "text_tokenizer.json", folder / "tokenizer" / "old.txt")
    with pytest.raises(UserError) as told:
        open_model(folder)
    assert "tokenizer.json" in str(told.value) and SAID[kind] in str(told.value) and "\n" not in str(told.value)
