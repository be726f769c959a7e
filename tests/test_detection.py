"""Which family a checkpoint belongs to, and what is said when it is none, incomplete or spoilt. All families alike."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from scd_pack.scd_core.checkpoint import Source, save_safetensors
from scd_pack.scd_core.errors import UserError
from scd_pack.scd_core.models.families import FAMILIES
from scd_pack.scd_core.models.load import BUNDLED, open_model

GOLDEN = Path(__file__).parent / "data" / "golden"
CODECS = ("chameleon-tokenizer", "llamagen-vq-ds16", "movqgan", "cosmos-dv8x16x16")
SECOND = "lumina-mgpt-2"
# by folder or by the first part of its name
OWNERS = {
    "janus": "JanusFamily",
    "lumina": "LuminaFamily",
    SECOND: "Lumina2Family",
    "anole": "AnoleFamily",
    "llamagen": "LlamaGenFamily",
    "mar": "MarFamily",
    "emu3": "Emu3Family",
    "simplear": "SimpleARFamily",
    "cosmos": "CosmosFamily",
}
FOLDERS = sorted(folder.name for folder in GOLDEN.iterdir() if folder.name not in CODECS)
MODELS = {name: owner for name in FOLDERS if (owner := OWNERS.get(name) or OWNERS.get(name.split("-")[0]))}
SHARDED = [name for name in MODELS if len(list((GOLDEN / name / "model").glob("*-of-*"))) > 1]


def lay_out(name, place, vq=True):
    """A copy of a fixture's model that has all its parts (`vq`: with the image tokenizer of another folder)."""
    folder = place / name
    shutil.copytree(GOLDEN / name / "model", folder)
    if name == "mar":  # the fixture holds one model in two layouts
        shutil.rmtree(folder / "mar_base")
    first = name.startswith("lumina") and name != SECOND
    if first:
        shutil.copy(GOLDEN / "lumina-mgpt-hf" / "model" / "tokenizer.json", folder)
    beside = place / "image tokenizer"
    beside.mkdir(exist_ok=True)
    if vq and name.startswith("lumina"):
        codec = "chameleon-tokenizer" if first else "movqgan"
        shutil.copytree(GOLDEN / codec / "model", beside, dirs_exist_ok=True)
    if vq and name.startswith("llamagen"):
        kind = "c2i" if "c2i" in name else "t2i"
        shutil.copy(GOLDEN / "llamagen-vq-ds16" / "model" / "vq_ds16_c2i.pt", beside / f"vq_ds16_{kind}.pt")
    if vq and name.startswith(("cosmos", "simplear")):
        shutil.copytree(GOLDEN / "cosmos-dv8x16x16" / "model", beside, dirs_exist_ok=True)
    return folder


def weight_files(folder):
    files = [f for f in folder.rglob("*") if f.suffix in (".pt", ".pth", ".bin", ".safetensors") and "vq" not in f.name]
    return sorted(file for file in files if file.is_file())


def rewrite(folder, change):
    """Change the tensors of a folder's weights, which become one safetensors file; side files stay as they are."""
    source = Source.open(folder)
    tensors = {key: source.read(key).clone() for key in source.keys()}
    change(tensors)
    source.close()
    stem = source.files[0].with_suffix(".safetensors") if len(source.files) == 1 else source.root / "model.safetensors"
    for file in [*weight_files(folder), *folder.glob("*.index.json")]:
        file.unlink()
    save_safetensors(tensors, stem)
    return folder


def owners(source):
    return [family.__name__ for family in FAMILIES if family.detect(source)]


# --- what is there ----------------------------------------------------------------------------------------------------


def test_every_fixture_has_an_owner():
    assert list(MODELS) == FOLDERS


@pytest.mark.parametrize("name", MODELS)
def test_one_family_claims_each_model(place, name):
    folder = lay_out(name, place)
    assert owners(Source.open(folder)) == [MODELS[name]]
    assert type(open_model(folder).family).__name__ == MODELS[name]
    first = weight_files(folder)[0]
    assert type(open_model(first).family).__name__ == MODELS[name]  # people select a file, too


@pytest.mark.parametrize("name", [name for name in MODELS if name != SECOND])  # told by its vocabulary's real size
def test_names_and_shapes_are_enough(place, name):
    """Without any configuration the names of the tensors decide, whatever file they are in."""
    source = Source.open(rewrite(lay_out(name, place), lambda tensors: None))
    source.config = {}
    assert owners(source) == [MODELS[name]]


def test_the_bundled_model_is_its_own_family():
    assert owners(Source.open(BUNDLED)) == ["BundledFamily"]


@pytest.mark.parametrize("name", ["janus-pro-hf", "lumina-mgpt-hf", "lumina-mgpt-2", "emu3-hf"])
def test_the_configuration_goes_first(place, name):
    """Weights that fit no names of a family: the configuration tells which one it should be, and what is missing."""
    folder = lay_out(name, place)

    def rename(tensors):
        for key in list(tensors):
            tensors[f"foreign.{key.replace('layers', 'blocks').replace('embed', 'words')}"] = tensors.pop(key)

    rewrite(folder, rename)
    with pytest.raises(UserError, match="language model: MISSING"):
        open_model(folder)


# --- what is not ------------------------------------------------------------------------------------------------------

STRANGERS = {
    "a text model": ["model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight", "lm_head.weight"],
    "a text model with norms": ["model.layers.0.self_attn.q_norm.weight", "model.layers.0.self_attn.k_norm.weight"],
    "a diffusion model": ["model.diffusion_model.input_blocks.0.0.weight", "model.diffusion_model.out.2.weight"],
    "a text encoder": ["encoder.block.0.layer.0.SelfAttention.q.weight", "shared.weight"],
    "a picture encoder": ["vision_model.encoder.layers.0.self_attn.q_proj.weight"],
    "an adapter": ["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"],
    "one tensor": ["x"],
}


@pytest.mark.parametrize("what", STRANGERS)
def test_strangers_are_told_what_was_found(place, what):
    path = save_safetensors({key: torch.zeros(2, 2) for key in STRANGERS[what]}, place / "some model.safetensors")
    assert owners(Source.open(path)) == []
    with pytest.raises(UserError) as told:
        open_model(path)
    message = str(told.value)
    assert "some model.safetensors" in message and f"{len(STRANGERS[what])} tensors" in message
    assert sorted(STRANGERS[what])[0] in message and "\n" not in message
    assert all(family.title in message for family in FAMILIES)


@pytest.mark.parametrize("name", CODECS)
def test_an_image_tokenizer_without_a_language_model(place, name):
    shutil.copytree(GOLDEN / name / "model", place / name)
    whole = place / name / "decoder.safetensors"  # a tokenizer of two files is told by one of them
    with pytest.raises(UserError, match="an image tokenizer and no language model"):
        open_model(whole if whole.exists() else place / name)


@pytest.mark.parametrize("name", [name for name in MODELS if name.startswith(("lumina", "llamagen"))])
def test_a_language_model_without_its_image_tokenizer(place, name):
    folder = lay_out(name, place, vq=False)
    with pytest.raises(UserError, match=r"language model: found in .*image tokenizer: MISSING, looked for .*vq"):
        open_model(folder)
    assert open_model(folder, need=("decoder",)).build("decoder").cfg.layers == 2


@pytest.mark.parametrize("name", [name for name in MODELS if name.startswith(("janus", "anole", "emu3"))])
def test_an_image_tokenizer_cut_out_of_its_model(place, name):
    folder = lay_out(name, place)
    prefixes = ("gen_vision_model.", "model.vqmodel.", "vqmodel.")
    for file in folder.rglob("vqgan.*"):
        file.unlink()
    rewrite(folder, lambda tensors: [tensors.pop(key) for key in list(tensors) if key.startswith(prefixes)])
    with pytest.raises(UserError, match="image tokenizer: MISSING"):
        open_model(folder)


# the video tokenizer of the others has a fixed number of codes, and no table of them; that of a MAR has none at all
@pytest.mark.parametrize("name", [name for name in MODELS if not name.startswith(("cosmos", "simplear", "mar"))])
def test_codebook_and_vocabulary_that_do_not_match(place, name):
    """An image tokenizer with a few codes more, in the model's own folder."""
    folder = lay_out(name, place)

    def more(tensors):
        for key in tensors:
            if key.endswith("quantize.embedding.weight"):
                tensors[key] = torch.cat([tensors[key], tensors[key][:8]])

    shutil.copytree(place / "image tokenizer", folder, dirs_exist_ok=True)
    shutil.rmtree(place / "image tokenizer")
    codec = next((f for f in folder.rglob("*vq*") if f.suffix in (".ckpt", ".pt")), None)
    if codec is None:
        rewrite(folder, more)
    else:
        tensors = {key: tensor.clone() for key, tensor in read(codec).items()}
        more(tensors)
        codec.unlink()
        save_safetensors(tensors, codec.with_suffix(".safetensors"))
        folder = weight_files(folder)[0]
    with pytest.raises(UserError) as told:
        open_model(folder)
    numbers = set(map(int, re.findall(r"\d+", str(told.value))))
    assert any({codes, codes + 8} <= numbers for codes in (64, 80, 96)), told.value


def read(path):
    source = Source.open(path)
    return {key: source.read(key) for key in source.keys()}


# --- what is spoilt ---------------------------------------------------------------------------------------------------


def last_matrix(tensors):
    """A weight of the last layer that every layout has, by its own name."""
    found = (key for key in tensors if re.search(r"(layers|decoder_blocks)\.1\..*(down_proj|w2|fc2)\.weight$", key))
    return max(key for key in found if "vision" not in key)


@pytest.mark.parametrize("name", MODELS)
def test_a_missing_tensor_is_named(place, name):
    gone = []

    def drop(tensors):
        gone.append(last_matrix(tensors))
        del tensors[gone[0]]

    with pytest.raises(UserError) as told:
        open_model(rewrite(lay_out(name, place), drop))
    assert f"'{gone[0]}'" in str(told.value) and "missing" in str(told.value)


@pytest.mark.parametrize("name", MODELS)
def test_a_tensor_too_many_is_named(place, name):
    extra = []

    def add(tensors):
        extra.append(last_matrix(tensors).replace("weight", "surprise"))
        tensors[extra[0]] = torch.zeros(3)

    with pytest.raises(UserError) as told:
        open_model(rewrite(lay_out(name, place), add))
    assert f"'{extra[0]}'" in str(told.value) and "unexpected" in str(told.value)


@pytest.mark.parametrize("name", MODELS)
def test_a_tensor_of_another_shape_is_named(place, name):
    wrong = []

    def cut(tensors):
        wrong.append(last_matrix(tensors))
        tensors[wrong[0]] = tensors[wrong[0]][:-1].clone()

    with pytest.raises(UserError) as told:
        open_model(rewrite(lay_out(name, place), cut)).build("decoder")
    assert wrong[0] in str(told.value) and "shape" in str(told.value)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9976570304\n"
SPOILT = {
    "cut in half": lambda data: data[: len(data) // 2],
    "cut at its start": lambda data: data[:20],
    "empty": lambda data: b"",
    "a web page": lambda data: b"<!DOCTYPE html><html>log in</html>",
    "a pointer": lambda data: POINTER,
}


@pytest.mark.parametrize("how", SPOILT)
@pytest.mark.parametrize("name", MODELS)
def test_truncated_and_fake_files_are_named(place, name, how):
    folder = lay_out(name, place)
    file = weight_files(folder)[-1]
    file.write_bytes(SPOILT[how](file.read_bytes()))
    with pytest.raises(UserError) as told:
        open_model(folder)
    message = str(told.value)
    assert file.name in message and "bytes" in message and "\n" not in message


@pytest.mark.parametrize("name", SHARDED)
def test_a_missing_shard_is_named(place, name):
    folder = lay_out(name, place)
    lost, *_ = weight_files(folder)
    lost.unlink()
    for selected in (folder, weight_files(folder)[0]):
        with pytest.raises(UserError) as told:
            open_model(selected)
        assert f"missing: '{lost.name}'" in str(told.value) and "1 of 2" in str(told.value)


@pytest.mark.parametrize("name", SHARDED)
def test_a_shard_of_another_download_is_told(place, name):
    folder = lay_out(name, place)
    index = next(folder.glob("*.index.json"))
    weight_map = json.loads(index.read_text(encoding="utf-8"))
    key = next(iter(weight_map["weight_map"]))
    weight_map["weight_map"][f"{key}.of.another"] = weight_map["weight_map"][key]
    index.write_text(json.dumps(weight_map), encoding="utf-8")
    with pytest.raises(UserError, match=rf"index names 1 tensors that their files lack \(first: '{key}.of.another'"):
        open_model(folder)
