"""Janus-Pro beside transformers' own network on random weights, in its layout and in the original one."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file
from scd_pack.scd_core.generate import Request, generate
from scd_pack.scd_core.models.family import Size
from scd_pack.scd_core.models.load import load_model
from scd_pack.scd_core.models.session import Session
from scd_tests.janus_models import GOLDEN, LOGITS, PIXELS

RENAMES = {
    r"^model\.language_model\.": "language_model.model.",
    r"^lm_head\.": "language_model.lm_head.",
    r"^model\.generation_embeddings\.": "gen_embed.",
    r"^model\.generation_aligner\.fc1\.": "gen_aligner.layers.0.",
    r"^model\.generation_aligner\.hidden_layers\.0\.": "gen_aligner.layers.2.",
    r"^model\.generation_aligner\.hidden_layers\.1\.": "gen_aligner.layers.4.",
    r"^model\.generation_head\.proj_out\.": "gen_head.output_mlp_projector.",
    r"^model\.generation_head\.": "gen_head.",
    r"^model\.vqmodel\.": "gen_vision_model.",
    r"^model\.": "",
    r"(gen_vision_model\.(?:en|de)coder)\.(?:up|down)\.": r"\1.conv_blocks.",
    r"(conv_blocks\.\d+)\.block\.": r"\1.res.",
    r"\.mid\.block_1\.": ".mid.0.",
    r"\.mid\.attn_1\.": ".mid.1.",
    r"\.mid\.block_2\.": ".mid.2.",
}


def random_reference():
    """A transformers model with sizes that no other test has, and wide random weights."""
    transformers = pytest.importorskip("transformers")
    words = transformers.LlamaConfig(
        hidden_size=48, intermediate_size=72, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2,
        vocab_size=320, rms_norm_eps=1e-6, max_position_embeddings=512,
    )  # fmt: skip
    vision = transformers.JanusVisionConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=60, patch_size=12, projection_dim=48,
        num_image_tokens=25,
    )  # fmt: skip
    vq = transformers.JanusVQVAEConfig(
        embed_dim=6, num_embeddings=70, latent_channels=16, base_channels=32, channel_multiplier=[1, 2, 1],
        num_res_blocks=1, num_patches=5, num_hidden_layers=3, projection_dim=48, image_token_embed_dim=48,
    )  # fmt: skip
    config = transformers.JanusConfig(
        text_config=words, vision_config=vision, vq_config=vq, image_token_id=283, tie_word_embeddings=False
    )
    torch.manual_seed(5)
    model = transformers.JanusForConditionalGeneration(config).eval()
    for name, tensor in model.named_parameters():
        tensor.data = 1 + 0.2 * torch.randn_like(tensor) if "norm" in name else 0.15 * torch.randn_like(tensor)
    model.generation_config = transformers.GenerationConfig(
        do_sample=False, guidance_scale=5.0, bos_token_id=280, eos_token_id=281, pad_token_id=282, max_length=200
    )
    model.generation_config.generation_kwargs = {"boi_token_id": 289}
    return model


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """(transformers model, {layout: our model of the same weights})."""
    model = random_reference()
    places = {name: tmp_path_factory.mktemp(name) for name in ("transformers", "original")}
    for folder in places.values():
        for file in (GOLDEN / "janus-pro-original" / "model").glob("*token*.json"):
            shutil.copy(file, folder)
    model.save_pretrained(places["transformers"])
    state = load_file(places["transformers"] / "model.safetensors")
    for pattern, new in RENAMES.items():
        state = {re.sub(pattern, new, key): value for key, value in state.items()}
    torch.save(state, places["original"] / "pytorch_model.bin")
    config = {
        "model_type": "multi_modality",
        "language_config": {"num_attention_heads": 6, "num_key_value_heads": 2},
        "gen_vision_config": {"cls": "VQ-12"},
        "vision_config": {"params": {"image_size": 60}},
    }
    (places["original"] / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return model, {name: load_model(folder, "fp32") for name, folder in places.items()}


@pytest.mark.parametrize("layout", ["transformers", "original"])
@torch.inference_mode()
def test_parity_with_transformers(reference, layout):
    model, ours = reference[0], reference[1][layout]
    family, decoder = ours.family, ours.decoder
    assert (decoder.cfg.kv_heads, decoder.cfg.head_dim, decoder.cfg.embed_args) == (2, 8, (70, 6, 3))
    assert family.sizes == (Size(20, 20),)
    prompt = family.text.encode("two owls")
    plan = family.plan(family.size())
    streams = family.streams(prompt, None, plan)

    ids = streams[0].ids[None]
    want = model.generate(ids, attention_mask=torch.ones_like(ids), generation_mode="image")
    found = generate(decoder, family, prompt, request=Request(method="seed-exact", window=6, temperature=0)).codes
    assert torch.equal(found.flatten(), want.flatten())
    assert len(set(want.flatten().tolist())) > 3

    fixed = torch.full((1, plan.length), -1)
    session = Session(decoder, family, plan, list(streams), fixed, 0, "cpu")
    before = torch.arange(plan.length)[None] - 1
    codes = torch.randint(0, 70, (1, plan.length), generator=torch.Generator().manual_seed(2))
    logits = session.window(torch.cat([codes[:, :1], codes[:, :-1]], 1), before, plan.length - 1, True)[0]
    for stream, row in zip(streams, logits):
        image = model.prepare_embeddings_for_image_generation(codes[:, :-1])
        x = torch.cat([model.get_input_embeddings()(stream.ids[None]), image], 1)
        hidden = model.model.language_model(inputs_embeds=x).last_hidden_state[0, stream.length - 1 :]
        assert (model.model.generation_head(hidden) - row).abs().max() < LOGITS

    pixels = model.model.vqmodel.decode(codes)
    assert (ours.codec.decode_raw(codes.view(1, 5, 5)) - pixels).abs().max() < PIXELS
    assert ours.codec.cfg.encoder
    picture = torch.rand(1, 3, 20, 20) * 2 - 1
    features = model.model.vqmodel.quant_conv(model.model.vqmodel.encoder(picture))
    assert (ours.codec.features(picture) - features).abs().max() < PIXELS
