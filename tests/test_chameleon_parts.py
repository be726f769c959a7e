"""Lumina-mGPT and Anole: where their parts lie, which of them fit together, and what is said when one is missing."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from scd_pack.scd_core.checkpoint import save_safetensors
from scd_pack.scd_core.convert import convert
from scd_pack.scd_core.errors import UserError
from scd_pack.scd_core.models.chameleon import LuminaFamily
from scd_pack.scd_core.models.chameleon_text import TokenMap
from scd_pack.scd_core.models.load import load_model, open_model
from scd_tests.chameleon_files import ANOLE, GOLDEN, LUMINA, VQ, lay_out, models, save_weights, tensors_of

__all__ = ["models"]  # a fixture
PIXELS = 1e-4


# parts and where they lie -------------------------------------------------------------------------------------------


def put_codec(kind, models):
    """Chameleon's image tokenizer in one of the forms that people have it in; returns the file to be found."""
    codec = {k: t for k, t in tensors_of(VQ / "model" / "vqgan.ckpt").items() if not k.startswith("loss.")}
    if kind == "meta":
        shutil.copytree(VQ / "model", models / "chameleon-tokenizer")
        return models / "chameleon-tokenizer" / "vqgan.ckpt"
    if kind == "meta inside":
        shutil.copytree(VQ / "model", models / "Lumina-mGPT-7B-768" / "tokenizer")
        return models / "Lumina-mGPT-7B-768" / "tokenizer" / "vqgan.ckpt"
    if kind == "safetensors":
        folder = models / "Lumina-mGPT-7B-768"
        return save_safetensors(codec, folder / "vqgan.safetensors")
    if kind == "conversion":
        return save_safetensors(codec, models / "Anole-7b-v0.1-vqvae-hf" / "model.safetensors")
    shutil.copytree(GOLDEN / "anole-hf" / "model", models / "Anole-7b-v0.1-hf")
    language = tensors_of(models / "Anole-7b-v0.1-hf")
    language = {key: tensor for key, tensor in language.items() if "vqmodel" not in key}
    save_weights(models / "Anole-7b-v0.1-hf", language | {f"model.vqmodel.{key}": t for key, t in codec.items()})
    return models / "Anole-7b-v0.1-hf" / "model.safetensors"


@pytest.mark.parametrize("kind", ["meta", "meta inside", "safetensors", "conversion", "anole"])
@torch.inference_mode()
def test_image_tokenizer_in_every_form(models, kind):
    lay_out(LUMINA[0], models / "Lumina-mGPT-7B-768", vq=False)
    where = put_codec(kind, models)
    files = open_model(models / "Lumina-mGPT-7B-768")
    assert isinstance(files.family, LuminaFamily)
    assert files.family.parts[1].where == where
    want = load_file(VQ / "expected.safetensors")
    pixels = files.build("codec", dtype=torch.float32).decode_raw(want["codes"].view(1, 4, 6))
    assert (pixels - want["pixels"]).abs().max() < PIXELS


def test_other_codecs_and_tokenizers_around_are_passed_over(models):
    """A neighbour must fit: the codes, the pixels a code, the ids; one that cannot be read is no reason to stop."""
    folder = lay_out(LUMINA[1], models / "Lumina-mGPT-34B-512", vq=False)
    shutil.copytree(GOLDEN / "anole-meta" / "model" / "tokenizer", models / "anole-tokenizer")  # 2 pixels a code
    shutil.copytree(GOLDEN / "janus-pro-hf" / "model", models / "janus")
    (models / "broken").mkdir()
    (models / "broken" / "vqgan.ckpt").write_bytes(b"version https://git-lfs")
    (models / "broken" / "tokenizer.json").write_text("{}", encoding="utf-8")
    shutil.copytree(VQ / "model", models / "z" / "chameleon")
    family = open_model(folder).family
    assert [Path(part.where).parent.name for part in family.parts[1:3]] == ["chameleon"] * 2
    words = load_file(VQ / "expected.safetensors")["tok_0"]
    assert family.text.ids("a red fox in the snow") == [0, *words.tolist(), 70]


@pytest.mark.parametrize("name", [LUMINA[1], *ANOLE])
def test_one_file_holds_everything(models, name):
    """Alone in its folder, under a name that tells nothing, it is the same model of the same sizes."""
    source = GOLDEN / name / "model"
    if name in LUMINA:
        source = lay_out(name, models / "Lumina-mGPT-34B-1024", text=False)
        shutil.copy(VQ / "model" / "text_tokenizer.json", source)
    one = convert(source, models.parent / "one" / "alone" / "mine" / "thing.safetensors")
    many, single = load_model(source, "fp32"), load_model(one, "fp32")
    assert type(single.family) is type(many.family) and single.family.marks == many.family.marks
    assert single.family.sizes == many.family.sizes
    for part in ("decoder", "codec"):
        wanted = getattr(many, part).state_dict()
        found = getattr(single, part).state_dict()
        assert wanted.keys() == found.keys() and all(torch.equal(found[key], wanted[key]) for key in wanted)
    assert single.family.text.ids("a cat") == many.family.text.ids("a cat")


def test_missing_parts_are_told_with_those_that_are_there(models):
    folder = lay_out(LUMINA[0], models / "Lumina-mGPT-7B-512", vq=False, text=False)
    with pytest.raises(UserError) as caught:
        open_model(folder)
    told = str(caught.value)
    assert f"language model: found in {folder}" in told
    assert "image tokenizer: MISSING, looked for vqgan.ckpt" in told and "GAIR/Anole-7b-v0.1" in told
    assert "text tokenizer: MISSING, looked for tokenizer.json or text_tokenizer.json" in told
    assert "token map: found in vocabulary_map of" in told


def test_missing_token_map_and_language_model(models):
    folder = lay_out(LUMINA[0], models / "a", text=False, vocabulary_map=None)
    with pytest.raises(UserError, match=r"image tokenizer: found in .*text tokenizer: MISSING.*token map: MISSING"):
        open_model(folder)
    folder = lay_out(LUMINA[0], models / "b" / "b")
    save_weights(folder, {"model.norm.weight": torch.ones(48)})
    (folder / "vqgan.ckpt").rename(folder / "vqgan.pt")
    told = r"language model: MISSING, looked for model\.embed_tokens\.weight.*; image tokenizer: found"
    with pytest.raises(UserError, match=told):
        open_model(folder)


def test_the_codec_may_be_missing_where_it_is_not_needed(models):
    files = open_model(lay_out(LUMINA[0], models / "Lumina", vq=False), need=("decoder",))
    assert files.build("decoder").cfg.head_rows == 64
    with pytest.raises(UserError, match="image tokenizer: MISSING"):
        files.build("codec")


def test_a_tokenizer_without_token_map_is_enough(models):
    folder = lay_out(LUMINA[0], models / "Lumina", vocabulary_map=None)
    family = open_model(folder).family
    assert family.base == 4 and family.parts[3].where == str(folder / "tokenizer.json")


def test_own_parts_of_another_model_are_refused(models):
    folder = lay_out(LUMINA[0], models / "a")
    codec = torch.load(VQ / "model" / "vqgan.ckpt", weights_only=True)["state_dict"]
    codec["quantize.embedding.weight"] = codec["quantize.embedding.weight"][:40].clone()
    torch.save({"state_dict": codec}, folder / "vqgan.ckpt")
    with pytest.raises(UserError, match=r"vqgan\.ckpt' has 40 codes, the token map names 64"):
        open_model(folder)
    shutil.copy(GOLDEN / "anole-meta" / "model" / "tokenizer" / "vqgan.ckpt", folder / "vqgan.ckpt")
    with pytest.raises(UserError, match="draws 2 pixels a code, the size tokens count on 16"):
        open_model(folder)
    folder = lay_out(LUMINA[0], models / "b" / "b" / "b" / "b")  # far from the other one's tokenizer
    shutil.copy(GOLDEN / "janus-pro-hf" / "model" / "tokenizer.json", folder)
    with pytest.raises(UserError, match=r"tokenizer\.json' has no picture tokens"):
        open_model(folder)


def test_token_map_of_another_model_is_refused(models):
    words = json.loads((GOLDEN / LUMINA[0] / "model" / "config.json").read_text(encoding="utf-8"))["vocabulary_map"]
    moved = {name: id + 1000 * name.startswith("IMGIMG") for name, id in words.items()}
    with pytest.raises(UserError, match=r"does not fit vocabulary_map .*IMGIMGAZ is 4, not 1004"):
        open_model(lay_out(LUMINA[0], models / "a", vocabulary_map=moved))
    moved = {name: id + 1000 * (not name.startswith("IMGIMG")) for name, id in words.items()}
    with pytest.raises(UserError, match="most of its ids differ"):
        open_model(lay_out(LUMINA[0], models / "b", vocabulary_map=moved))


# vocabulary ---------------------------------------------------------------------------------------------------------


def spelled(code):
    return "IMGIMG" + "".join("ABCDEFGHIJ"[int(digit)] for digit in str(code)) + "Z"


def test_picture_codes_are_read_from_their_names():
    codes = list(range(8192))
    ids = {spelled(code): 4 + code for code in reversed(codes)}
    assert TokenMap(ids | {"<s>": 0, "IMGIMGKZ": 9000, "IMGIMG": 9001}, "map").picture_codes() == (4, 8192)
    assert spelled(8191) == "IMGIMGIBJBZ"


@pytest.mark.parametrize(
    "ids, told",
    [
        ({"<s>": 0}, "names no picture tokens"),
        ({spelled(c): c for c in (0, 1, 3)}, r"once each \(code 2 is missing\)"),
        ({"IMGIMGBZ": 1, "IMGIMGABZ": 2}, r"once each \(code 0 is missing\)"),
        ({spelled(c): 10 - c for c in range(3)}, "gives picture code 1 the id 9 where 11 is expected"),
        ({spelled(c): c + (c > 1) for c in range(3)}, "gives picture code 2 the id 3 where 2 is expected"),
    ],
)
def test_picture_codes_that_are_no_row_are_refused(ids, told):
    with pytest.raises(UserError, match=told):
        TokenMap(ids, "map").picture_codes()


def test_picture_tokens_beyond_the_language_model_are_refused(models):
    folder = lay_out(LUMINA[0], models / "lumina")
    tensors = tensors_of(folder)
    for key in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[key] = tensors[key][:60].contiguous()
    save_weights(folder, tensors)
    with pytest.raises(UserError, match="numbers picture tokens up to 67, the language model has 60 tokens"):
        open_model(folder)


def test_a_missing_token_is_named():
    with pytest.raises(UserError, match="map has no token '<reserved08706>'"):
        TokenMap({"<s>": 0}, "map")["<reserved08706>"]
