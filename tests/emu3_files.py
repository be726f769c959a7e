"""Emu3 models in their layouts: the golden fixture, and random models of transformers renamed to the original one."""

import base64
import json
import re
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file
from scd_pack.scd_core.checkpoint import save_safetensors
from scd_pack.scd_core.generate import Request, generate
from scd_pack.scd_core.models.emu3_text import SETTINGS, SPECIAL
from scd_pack.scd_core.models.family import Size

GOLDEN = Path(__file__).parent / "data" / "golden"
HUB = GOLDEN / "emu3-hf" / "model"
WANT = load_file(GOLDEN / "emu3-hf" / "expected.safetensors")
META = json.loads((GOLDEN / "emu3-hf" / "meta.json").read_text(encoding="utf-8"))
ROWS, COLS = META["grid"]
SIZE = Size(COLS * META["vq"]["pixels_per_code"], ROWS * META["vq"]["pixels_per_code"])
CODES, LOGITS, PIXELS = 64, 2e-4, 1e-4  # the latter two: how far numbers may be off
# transformers' names -> the original release's, in order
ORIGINAL = (
    (r"^text_model\.lm_head\.", "lm_head."),
    (r"^text_model\.model\.", "model."),
    (r"middle_block\.attn_norm\.", "mid.attn_1.norm."),
    (r"middle_block\.", "mid."),
    (r"(?:down|up)_block\.", ""),
    (r"attn_norms\.(\d+)\.", r"attn.\1.norm."),
    (r"((?:attn_1|attn\.\d+)\.)([qkv])_proj\.", r"\1\2."),
    (r"((?:attn_1|attn\.\d+)\.)out_proj\.", r"\1proj_out."),
)


def draw(model, method, size=SIZE, **changes):
    """Codes of the fixture's prompt."""
    request = Request(method=method, width=size.width, height=size.height, **changes)
    return generate(model.decoder, model.family, model.family.text.encode(META["prompt"]), None, request).codes


def lay_out(folder, **config):
    """The fixture in `folder`; config: settings to change, of the whole or with text_config of the language model."""
    shutil.copytree(HUB, folder)
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    settings["text_config"] |= config.pop("text_config", {})
    (folder / "config.json").write_text(json.dumps(settings | config), encoding="utf-8")
    return folder


def letters_to_bytes():
    """The letters of byte-level tokenizers -> bytes, by the rule of GPT-2's own code."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(b): b for b in shown} | {chr(256 + n): b for n, b in enumerate(hidden)}


def ranks():
    """{token bytes: rank} of the fixture's words."""
    letters = letters_to_bytes()
    words = json.loads((HUB / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    spelled = {word: id for word, id in words.items() if not word.startswith("<|") and word != "<image>"}
    return {bytes(letters[letter] for letter in word): id for word, id in spelled.items()}


def vision_names():
    return ["<|image token|>", "<|image start|>", "<|image end|>"] + [f"<|visual token {n:06d}|>" for n in range(CODES)]


def vocabulary():
    """{name: id} of special tokens, numbered as the original tokenizer's program does."""
    return {name: len(ranks()) + n for n, name in enumerate([*SPECIAL, *vision_names()])}


def write_tiktoken(folder):
    """The original release's two tokenizer files."""
    folder.mkdir(parents=True, exist_ok=True)
    ranked = sorted(ranks().items(), key=lambda pair: pair[1])
    lines = (f"{base64.b64encode(token).decode()} {rank}" for token, rank in ranked)
    (folder / "emu3.tiktoken").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "emu3_vision_tokens.txt").write_text("\n".join(vision_names()) + "\n\n", encoding="utf-8")


def to_original(state):
    """Tensors of transformers' layout -> (language model's, image tokenizer's) as in the original release."""
    words, codec = {}, {}
    for key, tensor in state.items():
        picture = key.startswith("vqmodel.")
        for pattern, new in ORIGINAL:
            key = re.sub(pattern, new, key)
        if re.search(r"attn.*\.(q|k|v|proj_out)\.weight$", key) and picture:
            tensor = tensor[:, :, None, None]
        (codec if picture else words)[key.removeprefix("vqmodel.")] = tensor.contiguous()
    return words, codec


def original_config(config):
    """Settings of the original release for a transformers configuration."""
    text, ids = config.text_config.to_dict(), vocabulary()
    kept = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "rms_norm_eps")  # fmt: skip
    told = {name: ids[token] for name, token in SETTINGS.items()}
    told |= {"model_type": "Emu3", "architectures": ["Emu3ForCausalLM"], "image_area": 48 * 48, "rope_theta": 1e6}
    return told | {name: text[name] for name in kept} | {"pad_token_id": ids["<|endoftext|>"]}


def write_original(folder, state, config):
    """A model of transformers as the original release: Emu3-Gen and Emu3-VisionTokenizer side by side in `folder`."""
    words, codec = to_original(state)
    save_safetensors(words, folder / "Emu3-Gen" / "model.safetensors")
    save_safetensors(codec, folder / "Emu3-VisionTokenizer" / "model.safetensors")
    write_tiktoken(folder / "Emu3-Gen")
    (folder / "Emu3-Gen" / "config.json").write_text(json.dumps(original_config(config)), encoding="utf-8")
    (folder / "Emu3-VisionTokenizer" / "config.json").write_text('{"model_type": "Emu3VisionVQ"}', encoding="utf-8")
    return folder / "Emu3-Gen"


def random_codec(codec, seed):
    """Wide random weights and a wider codebook; running variances stay positive."""
    generator = torch.Generator().manual_seed(seed)
    for key, tensor in codec.state_dict().items():
        if tensor.is_floating_point():
            noise = torch.randn(tensor.shape, generator=generator)
            one = key.endswith(("running_var", "weight")) and tensor.dim() == 1
            tensor.copy_((1 + 0.2 * noise).abs() + 0.05 if one else noise if "quantize" in key else 0.15 * noise)
    return codec
