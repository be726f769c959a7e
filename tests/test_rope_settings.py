"""Base and scaling of the rotary as configurations tell them, beside transformers."""

import pytest
import torch
from scd_pack.scd_core.errors import UserError
from scd_pack.scd_core.models.load import load_model, open_model
from scd_pack.scd_core.models.rope import rope_1d
from scd_pack.scd_core.models.rope_settings import rope_settings
from scd_tests.janus_models import MODELS, copy_model, edit

TOLD = [
    ({}, (10000.0, 1.0)),
    ({"rope_theta": 500.0, "rope_scaling": None}, (500.0, 1.0)),
    ({"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 4}}, (500.0, 4.0)),
    ({"rope_theta": 500.0, "rope_scaling": {"rope_type": "linear", "factor": 2.5}}, (500.0, 2.5)),
    ({"rope_parameters": {"rope_type": "linear", "rope_theta": 80.0, "factor": 3.0}}, (80.0, 3.0)),
    ({"rope_theta": 500.0, "rope_parameters": {"rope_type": "default", "rope_theta": 80.0}}, (80.0, 1.0)),
    ({"rope_scaling": {"rope_type": "default"}, "rope_parameters": {"rope_theta": 80.0}}, (10000.0, 1.0)),
]


@pytest.mark.parametrize(("config", "want"), TOLD)
def test_both_spellings_are_read(config, want):
    assert rope_settings(config, "a folder", "a model") == want


@pytest.mark.slow  # to import transformers
@pytest.mark.parametrize(("config", "_"), TOLD)
def test_table_equals_transformers(config, _):
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    settings = transformers.LlamaConfig(hidden_size=48, num_attention_heads=4, **config)
    cos, sin = LlamaRotaryEmbedding(settings)(torch.zeros(1), torch.arange(40)[None])
    theta, factor = rope_settings(config, "a folder", "a model")
    found = rope_1d(40, 12, theta, factor=factor)
    for table, want in zip(found, (cos, sin)):
        assert (torch.cat([table, table], -1) - want[0]).abs().max() < 1e-5


@pytest.mark.parametrize(
    "rope",
    [{"rope_type": "yarn", "factor": 2.0}, {"type": "dynamic", "factor": 2.0}, {"rope_type": "llama3"},
     {"rope_type": "linear", "factor": 0.5}, {"rope_type": "linear", "factor": "two"}],
)  # fmt: skip
def test_other_scalings_are_refused_in_a_sentence(rope):
    for name in ("rope_scaling", "rope_parameters"):
        with pytest.raises(UserError, match=r"a model: the configuration in 'a folder' asks for a rotary of kind"):
            rope_settings({name: rope}, "a folder", "a model")


@pytest.mark.parametrize("name", MODELS)
def test_janus_honours_a_linear_scaling(name, tmp_path):
    folder = copy_model(name, tmp_path)

    def scale(config, kind):
        told = config.get("language_config") or config["text_config"]
        told["rope_scaling"] = {"rope_type": kind, "factor": 4.0}

    edit(folder / "config.json", lambda config: scale(config, "linear"))
    model = load_model(folder, "fp32")
    plan = model.family.plan(model.family.size())
    found = model.family.positions(model.decoder, plan, 3, "cpu").cos
    assert torch.equal(found[8], rope_1d(3, 14)[0][2]) and not torch.equal(found[8], rope_1d(9, 14)[0][8])
    edit(folder / "config.json", lambda config: scale(config, "yarn"))
    with pytest.raises(UserError, match=r"Janus-Pro: .*a rotary of kind 'yarn'"):
        open_model(folder)
