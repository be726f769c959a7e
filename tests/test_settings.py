"""Settings that no model has, shapes that nobody foresaw: one sentence, and nothing of it reaches the arithmetic."""

import json
import math

import pytest
import torch
from scd_pack.scd_core.checkpoint import Source, save_safetensors
from scd_pack.scd_core.checkpoint.settings import check_settings
from scd_pack.scd_core.errors import UserError
from scd_pack.scd_core.models.load import BUNDLED, fitting, open_model
from scd_tests.sentences import is_one_sentence

FINE = {
    "hidden_size": 64, "num_hidden_layers": 2, "rope_theta": 1e6, "head_dim": None, "text_config": {"dim": 8},
    "vocabulary_map": {"<s>": 0}, "model": "llama", "block_size": 16, "norm_eps": 1e-5, "other": -math.inf,
    "rope_scaling": None, "architectures": ["A"], "vocab_size": -1,
}  # fmt: skip


def test_settings_of_real_models_pass():
    assert check_settings(FINE, "config.json") is FINE
    assert check_settings({}, "config.json") == {}


@pytest.mark.parametrize(
    "name, value",
    [
        ("hidden_size", -1), ("hidden_size", "64"), ("hidden_size", 64.0), ("hidden_size", True),
        ("hidden_size", 10**30), ("num_hidden_layers", 10**6), ("num_hidden_layers", [2]), ("rope_theta", 0),
        ("rope_theta", math.nan), ("rope_theta", math.inf), ("rope_theta", 10**400), ("rms_norm_eps", "1e-5"),
        ("norm_eps", False), ("text_config", 3), ("vq_config", []), ("scd", 1), ("vocabulary_map", ["<s>"]),
        ("vocabulary_map", {"<s>": "0"}), ("vocabulary_map", {"<s>": -1}), ("vocabulary_map", {"<s>": 1 << 40}),
    ],
)  # fmt: skip
def test_settings_that_no_model_has(tmp_path, name, value):
    for config in (FINE | {name: value}, {"text_config": {name: value}}, {"model": {name: value}}):
        with pytest.raises(UserError) as caught:
            check_settings(config, "config.json")
        assert name in str(caught.value) and is_one_sentence(str(caught.value)) and len(str(caught.value)) < 300
    (tmp_path / "config.json").write_text(json.dumps({name: value}), encoding="utf-8")
    save_safetensors({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=name):
        Source.open(tmp_path)
    (tmp_path / "config.json").unlink()
    save_safetensors({"a": torch.zeros(1)}, tmp_path / "one.safetensors", {"config": {name: value}})
    with pytest.raises(UserError, match=name):
        Source.open(tmp_path / "one.safetensors")


@pytest.mark.parametrize("name, value", [("dim", "x"), ("heads", 0), ("unheard_of", 1), ("ffn", 2.5)])
def test_the_middle_of_our_reading_fails_in_one_sentence(tmp_path, name, value):
    source = Source.open(BUNDLED)
    config = source.config | {"decoder": source.config["decoder"] | {name: value}}
    save_safetensors({key: source.read(key) for key in source.keys()}, tmp_path / "m.safetensors", {"config": config})
    with pytest.raises(UserError) as caught:
        open_model(tmp_path / "m.safetensors").build("decoder")
    assert "m.safetensors" in str(caught.value) and is_one_sentence(str(caught.value))


def test_what_is_no_fault_of_the_files_passes_the_guard():
    for error in (MemoryError(), KeyboardInterrupt(), OSError(5, "gone"), UserError("said already: do this")):
        with pytest.raises(type(error)) as caught, fitting("m"):
            raise error
        assert caught.value is error


def test_a_sentence_stays_on_one_line():
    assert str(UserError("a\nb\r\n\tc\0d\u2028e")) == "a b c d e"
