"""Cosmos-1.0-Autoregressive: layouts of its files, what does not fit together, sizes and memory."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from scd_pack.scd_core.budget import cache_bytes, sampler_bytes
from scd_pack.scd_core.checkpoint import Source, save_safetensors
from scd_pack.scd_core.errors import UserError
from scd_pack.scd_core.models.cosmos import CosmosFamily
from scd_pack.scd_core.models.family import Size
from scd_pack.scd_core.models.load import load_model, open_model
from scd_pack.scd_core.models.transformer import DecoderConfig
from scd_pack.scd_core.plan import TokenPlan
from scd_tests.cosmos_files import lay_out, tensors_of

# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["", "model.", "module.net."])
@pytest.mark.parametrize("fused", [False, True])
def test_prefixes_and_fused_projections(place, prefix, fused):
    folder = lay_out("cosmos-ar-v2w", place)
    tensors = {key.removeprefix("model."): t for key, t in tensors_of(folder).items() if "_extra_state" not in key}
    for i in range(2 if fused else 0):
        stem = f"layers.{i}.attention."
        tensors[stem + "wqkv.weight"] = torch.cat([tensors.pop(f"{stem}w{name}.weight") for name in "qkv"])
    (folder / "model.pt").unlink()
    save_safetensors({prefix + key: t for key, t in tensors.items()}, folder / "model.safetensors")
    again, _ = load_model(folder, "fp32").decoder, shutil.rmtree(folder)
    whole = load_model(lay_out("cosmos-ar-v2w", place, codec=False), "fp32").decoder
    assert all(torch.equal(a, b) for a, b in zip(again.state_dict().values(), whole.state_dict().values()))


def test_cross_attention_in_some_layers_only(place):
    folder = lay_out("cosmos-ar-v2w", place)
    tensors = tensors_of(folder)
    (folder / "model.pt").unlink()
    tensors = {key: t for key, t in tensors.items() if "layers.1.cross" not in key}
    save_safetensors(tensors, folder / "model.safetensors")
    decoder = load_model(folder, "fp32").decoder
    assert [block.crosses for block in decoder.layers] == [True, False]


def spoil(folder, settings=None, **tensors):
    """Change settings (None takes one away) and tensors of a model; a tensor that is None goes."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) | (settings or {})
    path.write_text(json.dumps({k: v for k, v in config.items() if v != "gone"}), encoding="utf-8")
    if tensors:
        found = tensors_of(folder) | tensors
        (folder / "model.pt").unlink()
        save_safetensors({k: t for k, t in found.items() if t is not None}, folder / "model.safetensors")


@pytest.mark.parametrize(
    "settings, tensors, told",
    [
        ({"n_layers": 3}, {}, "n_layers 3, not 2 as the weights have it"),
        ({"n_heads": 2, "head_dim": 32}, {}, "n_heads 2, not 4; head_dim 32, not 16"),
        ({"insert_cross_attn": True}, {}, "insert_cross_attn True, not False"),
        ({"rope_dim": "1D"}, {}, "rope_dim '1D', which no video model of the release has"),
        ({"video_latent_shape": [3, 2]}, {}, r"video_latent_shape \[3, 2\]; three whole numbers"),
        ({"apply_yarn": True, "original_latent_shape": "wide"}, {}, "original_latent_shape wide; three whole"),
        (None, {"layers.1.attention.wk.weight": None}, r"1 of \d+ needed weights are missing .*layers.1.attention.wk"),
        (None, {"layers.1.attention.bias": torch.zeros(3)}, "1 are unexpected .*layers.1.attention.bias"),
        (None, {"output.weight": torch.zeros(64001, 64), "tok_embeddings.weight": torch.zeros(64001, 64)},
         "vocab_size 128, not 64001"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_told_in_one_sentence(place, settings, tensors, told):
    folder = lay_out("cosmos-ar-base", place)
    spoil(folder, settings, **tensors)
    with pytest.raises(UserError, match=told) as error:
        open_model(folder)
    assert "\n" not in str(error.value)


def test_more_codes_than_the_codec_has(place):
    folder = lay_out("cosmos-ar-base", place)
    tables = {name: torch.zeros(64001, 64) for name in ("output.weight", "tok_embeddings.weight")}
    spoil(folder, {"vocab_size": "gone"}, **tables)
    shutil.move(place / "Cosmos-1.0-Tokenizer-DV8x16x16" / "decoder.safetensors", folder)
    with pytest.raises(UserError, match="has 64000 codes, the language model draws 64001"):
        open_model(folder / "model.safetensors")


def test_without_the_video_tokenizer(place):
    folder = lay_out("cosmos-ar-base", place, codec=False)
    with pytest.raises(UserError, match=r"language model: found in .*video tokenizer: MISSING, looked for decoder"):
        open_model(folder)
    assert open_model(folder, need=("decoder",)).build("decoder").cfg.layers == 2


# --- sizes ------------------------------------------------------------------------------------------------------------


def bare(folder, dim, head_rows=64, rows=64, context=0):
    """Weights of one thin layer of a width, without any settings."""
    names = {"attention_norm": (dim,), "ffn_norm": (dim,), "attention.q_norm": (8,), "attention.k_norm": (8,),
             "attention.wq": (16, dim), "attention.wk": (8, dim), "attention.wv": (8, dim), "attention.wo": (dim, 16),
             "feed_forward.w1": (2, dim), "feed_forward.w3": (2, dim), "feed_forward.w2": (dim, 2)}  # fmt: skip
    if context:
        cross = {f"cross_{name}": shape for name, shape in names.items() if "attention." in name}
        names |= {**cross, "cross_attention.wk": (8, context), "cross_attention.wv": (8, context)}
        names["cross_attention_norm"] = (dim,)
    tensors = {f"layers.0.{name}.weight": torch.zeros(shape) for name, shape in names.items()}
    tensors |= {"tok_embeddings.weight": torch.zeros(rows, dim), "norm.weight": torch.zeros(dim),
                "output.weight": torch.zeros(head_rows, dim)}  # fmt: skip
    folder.mkdir()
    return save_safetensors(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("dim, context, top_p", [(4096, 0, 0.8), (5120, 0, 0.9), (4096, 1024, 0.7), (5120, 1024, 0.8)])
def test_the_releases_without_settings(place, dim, context, top_p):
    """4B, 12B, 5B and 13B by their widths: what no tensor tells is as published."""
    family = CosmosFamily(Source.open(bare(place / "model", dim, 64, 128 if context else 64, context)))
    assert family.sizes == tuple(Size(1024, 640, frames) for frames in (33, 25, 17, 9))
    assert family.defaults.top_p == top_p and family.network.start == (64 if context else None)
    yarn = {"shape": (3, 40, 64), "scale": 2, "beta_fast": 4, "beta_slow": 1}
    assert family.network.theta == 5e5 and family.network.yarn == (yarn if dim == 5120 else None)
    cfg = family.decoder_config
    assert (cfg.eps, cfg.qk_eps, cfg.abs_pos) == (1e-5, 1e-5, "every_layer" if context else None)
    plan = family.plan(family.size(0, 0, 33))
    assert (plan.frames, plan.rows, plan.cols, plan.length) == (5, 40, 64, 12800)
    assert (plan.row_stride, plan.frame_stride) == (64, 2560)
    positions = family.positions(None, plan, 1, "cpu")
    assert len(positions.cos) == 12801
    if context:
        assert positions.absolute.shape == (12801, dim) and positions.absolute.dtype == torch.bfloat16


def test_sizes_from_settings_of_another_kind(place):
    folder = lay_out("cosmos-ar-base", place)
    spoil(folder, {"video_latent_shape": "gone", "num_video_frames": 25, "video_height": 48, "video_width": 80})
    family = open_model(folder).family
    assert family.sizes == (Size(80, 48, 25), Size(80, 48, 17), Size(80, 48, 9))
    with pytest.raises(UserError, match=r"clips of 9 or 17 or 25 frames, .* not of 1: set frames to 25"):
        family.size()
    with pytest.raises(UserError, match="cannot draw 64xany with 25 frames: choose one of 80x48, 25 frames"):
        family.size(64, 0, 25)


def test_memory_of_a_long_clip():
    """4B, 12,800 tokens, bf16: 65,536 bytes a token (0.84 GB), and laws for the window alone."""
    cfg = DecoderConfig(4096, 16, 32, 8, 128, 14336, 64000, 64000)
    plan = TokenPlan(5, 40, 64, vocab=64000)
    cache = cache_bytes(cfg, 1 + plan.length, 1, 2)
    assert cache == 65536 * 12802
    whole = sampler_bytes(cfg, 2, plan, 1, 1, 1, 64)
    assert cache < whole < cache + plan.length * plan.vocab * 4 / 8
    twice = sampler_bytes(cfg, 2, replace(plan, frames=10, cells=None, forced=None), 1, 1, 1, 64)
    assert twice - whole == 65536 * plan.length
