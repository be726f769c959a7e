"""Miniature checkpoints under the names that the shipped workflows ask for, as a user would have put them there."""

import json
import pathlib
import shutil

GOLDEN = pathlib.Path(__file__).resolve().parents[1] / "data" / "golden"
# folder below models/ar_models: [(file or folder of tests/data/golden, name in the folder; "" for what is inside)]
MODELS = {
    "Janus-Pro-1B": [("janus-pro-original/model", "")],
    "Lumina-mGPT-7B-768": [
        ("lumina-mgpt-hf/model", ""),
        ("chameleon-tokenizer/model/vqgan.ckpt", "vqgan.ckpt"),
        ("chameleon-tokenizer/model/vqgan.yaml", "vqgan.yaml"),
    ],
    "Anole-7b-v0.1-hf": [("anole-hf/model", "")],
    "LlamaGen-c2i-XL-384": [
        ("llamagen-c2i/model/c2i_B_64.pt", "c2i_B_64.pt"),
        ("llamagen-vq-ds16/model/vq_ds16_c2i.pt", "vq_ds16_c2i.pt"),
    ],
    "LlamaGen-t2i-XL-512": [
        ("llamagen-t2i/model/t2i_XL_stage1_64.pt", "t2i_XL_stage1_64.pt"),
        ("llamagen-vq-ds16/model/vq_ds16_c2i.pt", "vq_ds16_t2i.pt"),
    ],
}
# what a miniature cannot read of its workflow: ten classes have no names
TEXTS = {"LlamaGen-c2i-XL-384": "3"}
WORDS = ["<pad>", "</s>", "<unk>", "▁a", "▁bowl", "▁of", "▁ripe", "▁oranges", "▁table,", "▁"]
T5 = {"vocab_size": 60, "d_model": 24, "d_kv": 5, "d_ff": 40, "num_layers": 2, "num_heads": 4}


def place(root, names=tuple(MODELS)):
    """Put miniatures of these names, and a text encoder, into a models folder (path)."""
    for name in names:
        folder = root / name
        folder.mkdir(parents=True, exist_ok=True)
        for source, target in MODELS[name]:
            if target:
                shutil.copy(GOLDEN / source, folder / target)
            else:
                shutil.copytree(GOLDEN / source, folder, dirs_exist_ok=True)
    place_t5(root / "flan-t5-xl")


def place_t5(folder):
    """A random T5 encoder of the release's kind, as wide as the miniature reads, with a tokenizer of a few words."""
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    config = {"model_type": "t5", "feed_forward_proj": "gated-gelu", **T5}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    dim, inner, ffn = T5["d_model"], T5["d_kv"] * T5["num_heads"], T5["d_ff"]
    shapes = {"shared": (T5["vocab_size"], dim), "encoder.final_layer_norm": (dim,)}
    for i in range(T5["num_layers"]):
        attention, dense = f"encoder.block.{i}.layer.0", f"encoder.block.{i}.layer.1"
        shapes |= {f"{attention}.SelfAttention.{p}": (inner, dim) for p in "qkv"}
        shapes |= {f"{attention}.SelfAttention.o": (dim, inner), f"{attention}.layer_norm": (dim,)}
        shapes |= {f"{dense}.DenseReluDense.{p}": (ffn, dim) for p in ("wi_0", "wi_1")}
        shapes |= {f"{dense}.DenseReluDense.wo": (dim, ffn), f"{dense}.layer_norm": (dim,)}
    shapes["encoder.block.0.layer.0.SelfAttention.relative_attention_bias"] = (32, T5["num_heads"])
    g = torch.Generator().manual_seed(4)
    noise = {f"{name}.weight": torch.randn(shape, generator=g) for name, shape in shapes.items()}
    save_file({k: 1 + 0.2 * t if t.dim() == 1 else 0.3 * t for k, t in noise.items()}, folder / "model.safetensors")
    tokenizer = Tokenizer(models.Unigram([(word, -1.0) for word in WORDS], unk_id=2))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.add_special_tokens(WORDS[:3])
    tokenizer.save(str(folder / "tokenizer.json"))


def fitted(prompt):
    """An API prompt whose texts the miniature can read; the others stay as they are."""
    chosen = {node["inputs"]["model"] for node in prompt.values() if node["class_type"] == "SCD_LoadARModel"}
    for text in (TEXTS[name] for name in chosen if name in TEXTS):
        for node in prompt.values():
            if node["class_type"] == "SCD_TextEncode" and node["inputs"]["text"]:
                node["inputs"]["text"] = text
    return prompt
