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
    "SimpleAR-1.5B-RL": [("simplear/model", "")],
    "Lumina-mGPT-2.0": [("lumina-mgpt-2/model", ""), ("movqgan/model/movqgan_270M.ckpt", "movqgan_270M.ckpt")],
    "Emu3-Gen-hf": [("emu3-hf/model", "")],
}
# those that need more codes than the fixtures have: what the video tokenizer reads are all of its 64,000
COSMOS = {"Cosmos-1.0-Autoregressive-4B": False, "Cosmos-1.0-Autoregressive-5B-Video2World": True}  # reads a text?
VIDEO_TOKENIZER = "Cosmos-1.0-Tokenizer-DV8x16x16"
GRID = (5, 2, 2)  # token grids, rows and columns of a Cosmos clip: 33 frames of 32x32
# what a miniature cannot read of its workflow: ten classes have no names
TEXTS = {"LlamaGen-c2i-XL-384": "3"}
# what would be thousands of tokens
SIZES = {"SimpleAR-1.5B-RL": (64, 48), "Lumina-mGPT-2.0": (64, 32), "Emu3-Gen-hf": (8, 6)}
WORDS = ["<pad>", "</s>", "<unk>", "▁a", "▁bowl", "▁of", "▁ripe", "▁oranges", "▁table,", "▁"]
T5 = {"vocab_size": 60, "d_model": 24, "d_kv": 5, "d_ff": 40, "num_layers": 2, "num_heads": 4}


def place(root, names=(*MODELS, *COSMOS)):
    """Put miniatures of these names, and what several of them read, into a models folder (path)."""
    for name in names:
        folder = root / name
        folder.mkdir(parents=True, exist_ok=True)
        if name in COSMOS:
            place_cosmos(folder, COSMOS[name])
        for source, target in MODELS.get(name, ()):
            if target:
                shutil.copy(GOLDEN / source, folder / target)
            else:
                shutil.copytree(GOLDEN / source, folder, dirs_exist_ok=True)
    shutil.copytree(GOLDEN / "cosmos-dv8x16x16" / "model", root / VIDEO_TOKENIZER, dirs_exist_ok=True)
    for name in ("flan-t5-xl", "t5-11b"):
        place_t5(root / name)


def place_picture(folder):
    """The picture that a fresh host has in its input folder."""
    import numpy as np
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    ramp = np.arange(96, dtype=np.uint8)
    picture = np.stack(np.broadcast_arrays(2 * ramp[:64, None], 2 * ramp, 255 - ramp[:64, None]), -1)
    Image.fromarray(picture).save(folder / "example.png")


def place_cosmos(folder, text, dim=24, codes=64000):
    """A random Cosmos language model of two layers as the release has it: bf16 under "model", 12 numbers a head."""
    import torch

    attention = {"wq": (24, dim), "wk": (12, dim), "wv": (12, dim), "wo": (dim, 24), "q_norm": (12,), "k_norm": (12,)}
    parts = {f"attention.{name}": shape for name, shape in attention.items()}
    parts |= {"feed_forward.w1": (32, dim), "feed_forward.w3": (32, dim), "feed_forward.w2": (dim, 32)}
    parts |= {"attention_norm": (dim,), "ffn_norm": (dim,)}
    if text:  # as wide as the miniature T5
        parts |= {f"cross_{name}": shape for name, shape in parts.items() if name.startswith("attention")}
    shapes = {"tok_embeddings": (codes + 64 * text, dim), "norm": (dim,), "output": (codes, dim)}
    shapes |= {f"layers.{i}.{name}": shape for i in range(2) for name, shape in parts.items()}
    g, scales = torch.Generator().manual_seed(8), {"tok_embeddings": 1.0, "output": 0.5}
    weights = {name: torch.randn(shape, generator=g) * scales.get(name, 0.3) for name, shape in shapes.items()}
    weights = {f"{name}.weight": (t + (t.dim() == 1)).bfloat16() for name, t in weights.items()}
    torch.save({"model": weights}, folder / "model.pt")
    config = {"vocab_size": codes, "video_latent_shape": GRID, "insert_cross_attn": text, "apply_abs_pos_emb": text}
    (folder / "config.json").write_text(json.dumps(config | ({"context_dim": dim} if text else {})), encoding="utf-8")


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
    """An API prompt whose texts the miniature can read and whose pictures are small; the others stay as they are."""
    chosen = {node["inputs"]["model"] for node in prompt.values() if node["class_type"] == "SCD_LoadARModel"}
    for width, height in (SIZES[name] for name in chosen if name in SIZES):
        for node in prompt.values():
            if node["class_type"] == "SCD_Sampler":
                node["inputs"] |= {"width": width, "height": height}
    for text in (TEXTS[name] for name in chosen if name in TEXTS):
        for node in prompt.values():
            if node["class_type"] == "SCD_TextEncode" and node["inputs"]["text"]:
                node["inputs"]["text"] = text
    return prompt
