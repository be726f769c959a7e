"""What lies beside the weights: tokenizers of other kinds, settings for other programs, code that nobody may run."""

import json

import pytest
import torch
from scd_pack.scd_core.errors import UserError
from scd_pack.scd_core.models.load import open_model
from scd_tests.test_detection import lay_out

FAMILIES = ("janus-pro-hf", "anole-hf", "emu3-hf", "lumina-mgpt-2", "simplear")


def told(folder):
    with pytest.raises(UserError) as error:
        open_model(folder)
    assert "\n" not in str(error.value) and "sentencepiece" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_tokenizer_of_another_kind_is_no_tokenizer(place, name):
    """The file that is missing is named, and nobody is asked to install anything."""
    folder = lay_out(name, place)
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    message = told(folder)
    assert "text tokenizer: MISSING, looked for tokenizer.json" in message
    (folder / "tokenizer.model").unlink()  # settings of it alone
    assert told(folder) == message


@pytest.mark.parametrize("name", FAMILIES)
def test_half_a_tokenizer_is_told(place, name):
    folder = lay_out(name, place)
    data = (folder / "tokenizer.json").read_bytes()
    (folder / "tokenizer.json").write_bytes(data[: len(data) * 9 // 10])
    message = told(folder)
    assert "tokenizer.json" in message and any(word in message for word in ("is no tokenizer file", "is no text file"))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_larger_vocabulary_than_the_models_is_refused(place, name):
    folder = lay_out(name, place)
    text = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    text["added_tokens"].append({"id": 900_000, "content": "<|far|>", "single_word": False, "lstrip": False,
                                 "rstrip": False, "normalized": False, "special": True})
    words = text["model"]["vocab"]
    words.update({f"extra{n}": 800_000 + n for n in range(4000)})
    (folder / "tokenizer.json").write_text(json.dumps(text), encoding="utf-8")
    try:
        family = open_model(folder).family
    except UserError as error:
        assert "tokenizer" in str(error)
        return
    plan = family.plan(min(family.sizes, key=lambda size: size.width * size.height))
    try:
        streams = family.streams(family.text.encode("extra7"), None, plan)
    except UserError as error:
        assert "extra7" in str(error) or "tokenizer" in str(error)
    else:  # such words fall into pieces that the model knows
        assert all(int(stream.ids.max()) < family.decoder_config.vocab for stream in streams)


@pytest.mark.parametrize("name", ["janus-pro-hf", "anole-hf", "emu3-hf", "llamagen-t2i-jadohu", "cosmos-ar-base"])
def test_settings_for_other_programs_are_not_obeyed(place, name):
    """Kernels, number formats and code that a configuration asks for: the same network comes out, nothing is run."""
    folder = lay_out(name, place)
    before = open_model(folder).build("decoder", dtype=torch.float32).state_dict()
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    asked = {"_attn_implementation": "flash_attention_2", "attn_implementation": "flash_attention_2",
             "use_flash_attn": True, "torch_dtype": "float16", "quantization_config": None,
             "auto_map": {"AutoModelForCausalLM": "modeling_x.Model", "AutoTokenizer": ["tokenization_x.T", None]}}
    for part in (settings, *(v for v in settings.values() if isinstance(v, dict) and "hidden_size" in v)):
        part.update(asked)
    (folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    for file in ("modeling_x.py", "tokenization_x.py", "__init__.py", "configuration_x.py", "conftest.py", "setup.py"):
        (folder / file).write_text(f"open({str(folder / 'ran')!r}, 'w')\nraise SystemExit\n", encoding="utf-8")
    after = open_model(folder).build("decoder", dtype=torch.float32).state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    assert not (folder / "ran").exists()
