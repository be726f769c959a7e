"""Cosmos' language models against transformers' Qwen3 layers, which have the same block; the rest is written out here.

Random weights, wide enough that a wrong norm, angle or order shows; a grid with three different sides.
"""

import json
import math

import pytest
import torch
from scd_pack.scd_core.checkpoint import Source, save_safetensors
from scd_pack.scd_core.models.cosmos import CosmosFamily
from scd_pack.scd_core.models.load import ModelFiles
from scd_pack.scd_core.models.session import Session
from scd_pack.scd_core.prompt import Prompt

transformers = pytest.importorskip("transformers")

GRID, CODES, WIDTH, THETA = (3, 2, 4), 90, 20, 5e5
SIZES = {"hidden_size": 72, "head_dim": 24, "num_attention_heads": 4, "num_key_value_heads": 2,
         "intermediate_size": 112, "num_hidden_layers": 3, "rms_norm_eps": 1e-5, "vocab_size": CODES}  # fmt: skip
NAMES = {
    "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_norm": "attention.q_norm",
    "self_attn.k_norm": "attention.k_norm", "self_attn.q_proj": "attention.wq", "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv", "self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3", "mlp.down_proj": "feed_forward.w2",
}  # fmt: skip
YARN = {
    "apply_yarn": True, "original_latent_shape": [2, 3, 9], "yarn_scale": 2, "yarn_beta_fast": 4, "yarn_beta_slow": 1,
}  # fmt: skip


def random_qwen():
    torch.manual_seed(7)
    model = transformers.Qwen3Model(transformers.Qwen3Config(**SIZES)).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(1 + 0.2 * torch.randn_like(p) if "norm" in name else 0.15 * torch.randn_like(p))
    return model


def cosmos_file(folder, model, text, settings):
    """The weights under Cosmos' names, with an output head and, for `text`, cross-attention and a start token."""
    dim, inner, kv, hd = 72, 4 * 24, 2 * 24, 24
    tensors = {"tok_embeddings.weight": model.embed_tokens.weight, "norm.weight": model.norm.weight}
    tensors["output.weight"] = 0.3 * torch.randn(CODES, dim)
    for i, layer in enumerate(model.layers):
        for ours, theirs in NAMES.items():
            tensors[f"layers.{i}.{theirs}.weight"] = layer.get_submodule(ours).weight
        if text:
            shapes = {"wq": (inner, dim), "wk": (kv, WIDTH), "wv": (kv, WIDTH), "wo": (dim, inner)}
            cross = {f"cross_attention.{name}": 0.2 * torch.randn(shape) for name, shape in shapes.items()}
            cross |= {f"cross_attention.{p}_norm": 1 + 0.2 * torch.randn(hd) for p in "qk"}
            cross["cross_attention_norm"] = 1 + 0.2 * torch.randn(dim)
            tensors |= {f"layers.{i}.{name}.weight": t for name, t in cross.items()}
    if text:
        tensors["tok_embeddings.weight"] = torch.cat([model.embed_tokens.weight, 0.15 * torch.randn(64, dim)])
    tensors = {name: t.detach().clone() for name, t in tensors.items()}
    save_safetensors(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"video_latent_shape": GRID, **settings}), encoding="utf-8")
    return tensors


def angle(t, h, w, settings):
    """Rotary angles of one cell by the closed formula, [head_dim / 2]."""
    hd = SIZES["head_dim"]
    spatial = hd // 6 * 2
    found = []
    for place, d, axis in ((t, hd - 2 * spatial, 0), (h, spatial, 1), (w, spatial, 1)):
        for j in range(d // 2):
            f = THETA ** (-2 * j / d)
            if settings:
                length = settings["original_latent_shape"][axis]
                low, high = (2 * math.pi * settings[f"yarn_beta_{name}"] / length for name in ("slow", "fast"))
                s = min(max((f - low) / (high - low), 0), 1)
                f *= (1 - s) / settings["yarn_scale"] + s
            found.append(place * f)
    return found


def absolute(t, h, w, dim):
    """The position vector of one cell by the closed formula, rounded as the release keeps it."""
    spatial, found = dim // 6 * 2, []
    for place, d in ((t, dim - 2 * spatial), (h, spatial), (w, spatial)):
        waves = [place * 10000 ** (-i / (d / 2)) for i in range(d // 2)]
        found += [math.sin(x) for x in waves] + [math.cos(x) for x in waves]
    return torch.tensor(found, dtype=torch.float64).bfloat16().float()


def rms(x, weight):
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def cross(x, context, weights, stem):
    """Attention from every position to every row of the text, head by head."""
    x = rms(x, weights[stem + "cross_attention_norm.weight"])
    q, k, v = (
        (source @ weights[f"{stem}cross_attention.w{name}.weight"].t()).unflatten(-1, (-1, 24))
        for name, source in zip("qkv", (x, context, context))
    )
    q, k = (rms(y, weights[f"{stem}cross_attention.{name}_norm.weight"]) for name, y in (("q", q), ("k", k)))
    heads = []
    for head in range(4):
        p = (q[:, head] @ k[:, head // 2].t() / math.sqrt(24)).softmax(-1)
        heads.append(p @ v[:, head // 2])
    return torch.cat(heads, -1) @ weights[stem + "cross_attention.wo.weight"].t()


def reference(model, weights, ids, cells, context, settings):
    """Logits [S, CODES] of token ids [S] at cells (None: the start token)."""
    none = [0.0] * (SIZES["head_dim"] // 2)
    angles = torch.tensor([none if cell is None else angle(*cell, settings) for cell in cells])
    turn = torch.cat([angles, angles], 1)[None]
    places = [torch.zeros(72) if cell is None else absolute(*cell, 72) for cell in cells]
    mask = torch.full((len(ids), len(ids)), float("-inf")).triu(1)[None, None]
    x = weights["tok_embeddings.weight"][ids][None]
    for i, layer in enumerate(model.layers):
        if context is not None:
            x = x + torch.stack(places)
        h = layer.self_attn(
            layer.input_layernorm(x), position_embeddings=(turn.cos(), turn.sin()), attention_mask=mask
        )[0]
        x = x + h
        if context is not None:
            x = x + cross(x[0], context, weights, f"layers.{i}.")[None]
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return model.norm(x)[0] @ weights["output.weight"].t()


@pytest.mark.parametrize("kind", ["base", "yarn", "text"])
@torch.inference_mode()
def test_logits_equal_transformers_layers(tmp_path, kind):
    model, text, settings = random_qwen(), kind == "text", YARN if kind == "yarn" else {}
    folder = tmp_path / "models" / "cosmos"  # neighbours are looked into: those of other tests must not be any
    folder.mkdir(parents=True)
    weights = cosmos_file(folder, model, text, settings)
    source = Source.open(folder)
    family = CosmosFamily(source)
    decoder = ModelFiles(source, family, "random").build("decoder", dtype=torch.float32)
    plan = family.plan(family.sizes[0])
    codes = torch.randint(1, CODES, (plan.length,), generator=torch.Generator().manual_seed(2))
    features = torch.randn(5, WIDTH) if text else None
    family.text_slots = 9
    prompt = Prompt("words" if text else "", features=features)
    stream = family.streams(prompt, None, plan)[0]
    session = Session(decoder, family, plan, [stream], torch.full((1, plan.length), -1), 0, "cpu")
    ids, before = torch.cat([codes[:1], codes])[None], torch.arange(-1, plan.length)[None]
    found = session.window(ids, before, plan.length, True)[0, 0][0 if text else 1 :]
    cells = [(t, h, w) for t in range(GRID[0]) for h in range(GRID[1]) for w in range(GRID[2])]
    context = torch.cat([features, torch.zeros(4, WIDTH)]) if text else None
    read = torch.cat([torch.tensor([CODES]), codes]) if text else codes
    want = reference(model, weights, read, [None, *cells] if text else cells, context, settings)
    assert want.std() > 0.3 and (found - want).abs().max() < 5e-5
    other = reference(model, weights, read, [None, *cells] if text else cells, context, {} if settings else YARN)
    assert (other - want).abs().max() > 0.05, "the angles do not show in these numbers"
