"""Janus-Pro: what is missing, foreign or spoilt is told by name when a model is opened."""

import re

import pytest
import torch
from safetensors.torch import save_file
from scd_pack.scd_core.checkpoint import Source
from scd_pack.scd_core.errors import UserError
from scd_pack.scd_core.models.families import FAMILIES
from scd_pack.scd_core.models.janus import JanusFamily
from scd_pack.scd_core.models.load import load_model, open_model
from scd_tests.janus_models import MODELS, copy_model, edit, rewrite, without


@pytest.fixture(params=MODELS)
def folder(request, tmp_path):
    return copy_model(request.param, tmp_path)


CODEC = ("gen_vision_model.", "model.vqmodel.")
HEAD = ("gen_embed", "gen_aligner", "gen_head", "model.generation_")
LOST = {
    "image tokenizer": without(*CODEC),
    "image token input and head": without(*HEAD),
    "language model": without("language_model.", "model.language_model."),
    "language model without layers": without("language_model.model.layers", "model.language_model.layers"),
}


@pytest.mark.parametrize("part", LOST)
def test_missing_part_is_named(folder, part):
    rewrite(folder, LOST[part])
    with pytest.raises(UserError) as told:
        open_model(folder)
    title = part.removesuffix(" without layers")
    assert re.search(f"{title}: MISSING, looked for .* in .*{folder.name}.*deepseek-ai/Janus-Pro-1B", str(told.value))
    assert str(told.value).count("MISSING") == 1
    assert f"text tokenizer: found in {folder / 'tokenizer.json'}" in str(told.value)


def test_words_alone(folder):
    """A language model cut out of a release, still with its config.json: both lost parts are named."""
    rewrite(folder, without(*CODEC, *HEAD))
    with pytest.raises(UserError, match=r"image token input and head: MISSING.*image tokenizer: MISSING"):
        open_model(folder)


def test_missing_text_tokenizer(folder):
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"text tokenizer: MISSING, looked for tokenizer.json in .*a model"):
        open_model(folder)


def test_text_tokenizer_of_a_neighbour(folder):
    """Fine-tunes are often published without one."""
    neighbour = folder.parent / "Janus-Pro-1B"
    neighbour.mkdir()
    (folder / "tokenizer.json").rename(neighbour / "tokenizer.json")
    assert open_model(folder).family.text.tokenizer.where == str(neighbour / "tokenizer.json")


def test_text_tokenizer_of_another_model(folder):
    def drop(values):
        values["added_tokens"] = [t for t in values["added_tokens"] if t["content"] != "<begin_of_image>"]
        del values["model"]["vocab"]["<begin_of_image>"]

    edit(folder / "tokenizer.json", drop)
    with pytest.raises(UserError, match=r"tokenizer.json has no token '<begin_of_image>'"):
        open_model(folder)


def test_vocabulary_that_does_not_match(folder):
    def add(values):
        token = dict(values["added_tokens"][-1])
        values["added_tokens"].append(token | {"id": token["id"] + 100, "content": "<|more|>"})

    edit(folder / "tokenizer.json", add)

    def shorten(state):
        key = next(key for key in state if key.endswith("embed_tokens.weight"))
        return state | {key: state[key][:290]}

    rewrite(folder, shorten)
    with pytest.raises(UserError, match=r"tokenizer.json knows \d+ tokens, the language model .* only 290"):
        open_model(folder)


def test_codebooks_of_different_sizes(folder):
    def cut(state):
        return {k: v[:64].clone() if k.endswith("quantize.embedding.weight") else v for k, v in state.items()}

    rewrite(folder, cut)
    with pytest.raises(UserError, match=r"same image codes \(head 96, input table 96, image tokenizer 64\)"):
        open_model(folder)


@pytest.mark.parametrize(
    "name, value", [("hidden_size", 64), ("intermediate_size", 100), ("num_key_value_heads", 2), ("vocab_size", 300)]
)
def test_configuration_of_another_size(folder, name, value):
    def change(config):
        told = config.get("language_config") or config["text_config"]
        told[name] = value

    edit(folder / "config.json", change)
    with pytest.raises(UserError, match=r"has the shape \[.*\], its configuration asks for \["):
        load_model(folder, "fp32")


def test_layer_count_of_another_model(folder):
    def change(config):
        (config.get("language_config") or config["text_config"])["num_hidden_layers"] = 3

    edit(folder / "config.json", change)
    with pytest.raises(UserError, match=r"9 of \d+ needed weights are missing .*layers\.2\."):
        open_model(folder)


@pytest.mark.parametrize("name", ["layers.1.mlp.up_proj.weight", "decoder.norm_out.bias", "vision_head.bias"])
def test_missing_tensor_is_named(folder, name):
    rewrite(folder, lambda state: {key: value for key, value in state.items() if not key.endswith(name)})
    with pytest.raises(UserError, match=rf"1 of \d+ needed weights are missing \('\S+\.{re.escape(name)}'\)"):
        open_model(folder)


@pytest.mark.parametrize("name", ["language_model.model.layers.0.gate.weight", "gen_vision_model.decoder.more.weight"])
def test_unexpected_tensor_is_named(folder, name):
    rewrite(folder, lambda state: state | {name: torch.zeros(2)})
    with pytest.raises(UserError, match=f"1 are unexpected .*{re.escape(name)}"):
        open_model(folder)


def test_missing_shard(folder):
    lost = next(file for file in folder.iterdir() if "00002-of-00002" in file.name)
    lost.unlink()
    with pytest.raises(UserError, match=re.escape(lost.name)):
        open_model(folder)


@pytest.mark.parametrize("sign", ["config", "weights"])
def test_janusflow_is_refused_by_name(folder, sign):
    if sign == "config":
        edit(folder / "config.json", lambda c: c.update(model_type="multi_modality", vision_gen_enc_config={}))
    else:
        (folder / "config.json").unlink()
        flow = {"vision_gen_enc_model.conv.weight": torch.ones(1)}
        rewrite(folder, lambda state: without(*CODEC, *HEAD)(state) | flow)
    with pytest.raises(UserError, match=r"JanusFlow model.*use Janus-Pro instead"):
        open_model(folder)


def test_detected_by_keys_alone(folder):
    (folder / "config.json").unlink()
    assert [f for f in FAMILIES if f.detect(Source.open(folder))] == [JanusFamily]


def test_other_multimodal_model_is_not_taken(tmp_path):
    """The original layout's model type is also that of models that only read pictures."""
    (tmp_path / "config.json").write_text('{"model_type": "multi_modality"}')
    save_file({"language_model.model.norm.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    assert not JanusFamily.detect(Source.open(tmp_path))
