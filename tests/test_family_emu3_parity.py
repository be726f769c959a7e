"""Emu3: parity with transformers in three spellings, and the original release in one file."""

import shutil

import pytest
import torch
from safetensors.torch import load_file
from scd_pack.scd_core.convert import convert
from scd_pack.scd_core.models.emu3 import Emu3Family
from scd_pack.scd_core.models.family import Size
from scd_pack.scd_core.models.load import load_model
from scd_pack.scd_core.models.tiktoken_file import TiktokenTokenizer
from scd_pack.scd_core.prompt import Prompt
from scd_tests.chameleon_files import save_weights
from scd_tests.emu3_files import CODES, LOGITS, PIXELS, draw, random_codec, vocabulary, write_original
from scd_tests.rollback import windows


def random_reference():
    """A transformers model of sizes that no other test has, with the original release's numbering of tokens."""
    transformers = pytest.importorskip("transformers")
    words = vocabulary()
    rows = max(words.values()) + 9
    config = transformers.Emu3Config(
        text_config={
            "vocab_size": rows, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 3,
            "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "pad_token_id": 0,
        },
        vq_config={
            "codebook_size": CODES, "embed_dim": 4, "latent_channels": 4, "base_channels": 32,
            "channel_multiplier": [1, 2, 1], "hidden_size": 32, "num_res_blocks": 2, "attn_resolutions": [2],
        },
        vocabulary_map={**words, "<image>": rows - 1}, image_token_id=rows - 1,
    )  # fmt: skip
    torch.manual_seed(6)
    reference = transformers.Emu3ForConditionalGeneration(config).eval().requires_grad_(False)
    for name, tensor in reference.named_parameters():
        if "vqmodel" not in name:
            noise = torch.randn_like(tensor)
            tensor.data = 1 + 0.2 * noise if "norm" in name else 0.15 * noise
    random_codec(reference.model.vqmodel, 8)
    return reference


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """(transformers model, {layout: folder}), each layout in a models folder of its own."""
    reference = random_reference()
    deep = tmp_path_factory.mktemp("parity") / "a" / "b"
    hub, memory = deep / "hub" / "c" / "d" / "emu3", deep / "memory" / "c" / "d" / "emu3"
    reference.save_pretrained(hub)
    state = load_file(hub / "model.safetensors")
    original = write_original(deep / "original" / "c" / "d", state, reference.config)
    tokenizer = TiktokenTokenizer(original / "emu3.tiktoken", [*vocabulary()])
    tokenizer.tokenizer.save(str(hub / "tokenizer.json"))
    shutil.copytree(hub, memory)
    save_weights(memory, {
        key.replace("text_model.lm_head", "lm_head").replace("text_model.model.", "model.text_model.")
        .replace("vqmodel.", "model.vqmodel."): tensor for key, tensor in state.items()
    })  # fmt: skip
    return reference, {"transformers": hub, "in memory": memory, "original": original}


@pytest.mark.slow  # to import transformers
@pytest.mark.parametrize("layout", ["transformers", "in memory", "original"])
@torch.inference_mode()
def test_parity_with_transformers(references, layout):
    reference, ours = references[0], load_model(references[1][layout], "fp32")
    family = ours.family
    assert isinstance(family, Emu3Family) and family.factor == 4
    if layout != "in memory":
        state = load_file(references[1]["transformers"] / "model.safetensors")
        assert any(key.startswith("text_model.model.") for key in state)  # what is on disk is what the test renames
    size = Size(20, 12)
    plan = family.plan(family.size(size.width, size.height))
    streams = list(family.streams(Prompt("a red fox, café"), None, plan))
    codes = torch.randint(0, CODES, (1, 1, plan.rows, plan.cols), generator=torch.Generator().manual_seed(9))
    ids = plan.fixed(1, codes)[0]
    found = windows(ours, plan, streams, ids, 4)
    for row, stream in enumerate(streams):
        whole = reference(input_ids=torch.cat([stream.ids, ids[:-1]])[None]).logits[0, stream.length - 1 :]
        want = whole[:, plan.base : plan.base + CODES]
        assert want.std() > 0.5 and (found[row] - want).abs().max() < LOGITS
    codec, grid = reference.model.vqmodel, codes[0]
    assert (ours.codec.decode_raw(grid) - codec.decode(grid)).abs().max() < PIXELS
    assert (ours.codec.decode_raw_frames(grid) - codec.decode(grid[:, None])).abs().max() < PIXELS
    picture = torch.rand(1, 3, 12, 20, generator=torch.Generator().manual_seed(10)) * 2 - 1
    want = codec.encode(picture, image_sizes=torch.tensor([[12, 20]])).image_tokens[0]
    assert torch.equal(ours.codec.encode(picture.permute(0, 2, 3, 1) / 2 + 0.5)[0], want) and len(want.unique()) > 3


@pytest.mark.slow
def test_the_original_release_in_one_file(references, tmp_path):
    folder = references[1]["original"]
    one = load_model(convert(folder, tmp_path / "a" / "b" / "c" / "one.safetensors"), "fp32")
    two = load_model(folder, "fp32")
    assert torch.equal(one.family.text.wanted("x", 2, 3), two.family.text.wanted("x", 2, 3))
    size = Size(12, 8)
    assert torch.equal(draw(one, "seed-exact", size, seed=3), draw(two, "autoregressive", size, seed=3))
    codes = torch.arange(6).view(1, 2, 3)
    assert torch.equal(one.codec.decode_raw(codes), two.codec.decode_raw(codes))
