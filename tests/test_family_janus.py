"""Janus-Pro: the golden numbers through the public road, both layouts, prompts, and what is read off the files."""

import shutil

import pytest
import torch
from scd_pack.scd_core.checkpoint import Source
from scd_pack.scd_core.convert import convert
from scd_pack.scd_core.errors import UserError
from scd_pack.scd_core.generate import Request, generate
from scd_pack.scd_core.law import guide
from scd_pack.scd_core.models.family import Size
from scd_pack.scd_core.models.load import load_model, open_model
from scd_tests.janus_models import LOGITS, MODELS, PIXELS, Fixture, copy_model, edit

GARBAGE = 5  # added to codes that a rollback throws away


@pytest.fixture(scope="module")
def fixtures():
    return {name: Fixture(name) for name in MODELS}


@pytest.fixture(params=MODELS)
def golden(request, fixtures):
    return fixtures[request.param]


@pytest.fixture(params=MODELS)
def folder(request, tmp_path):
    return copy_model(request.param, tmp_path)


# golden numbers -----------------------------------------------------------------------------------------------------


def test_prompt_ids(golden):
    cond, uncond = golden.streams
    assert torch.equal(cond.ids, golden.want["prompt_ids_cond"])
    assert torch.equal(uncond.ids, golden.want["prompt_ids_uncond"])
    assert cond.mask is None and uncond.mask is None  # the padding is attended
    assert int((cond.ids == golden.meta["bos_id"]).sum()) == 1


def test_tokenizer_samples(golden):
    for sample in golden.meta["tokenizer_samples"]:
        assert golden.family.text.tokenizer.marked(sample["text"]) == sample["ids"]


@torch.inference_mode()
def test_image_embeddings(golden):
    found = golden.decoder.embed.image(golden.want["codes"], torch.float32)
    assert (found - golden.want["image_embeds"]).abs().max() < LOGITS


@torch.inference_mode()
def test_hidden_states(golden):
    """All positions, prompt included, by one causal forward without a cache."""
    longest = golden.streams[0].length
    tables = golden.family.positions(golden.decoder, golden.plan, longest, "cpu").ready("half", torch.float32)
    image = golden.decoder.embed.image(golden.want["codes"][:-1], torch.float32)
    prompts = [golden.decoder.embed.prompt(stream, torch.float32) for stream in golden.streams]
    x = torch.stack([torch.cat([prompt, image]) for prompt in prompts])
    hidden = golden.decoder.hidden(x, tables.rows(golden.want["positions"][None]))
    assert (hidden - golden.want["hidden"]).abs().max() < LOGITS


def test_teacher_forced_logits(golden):
    logits, scale = golden.logits(), golden.meta["cfg_scale"]
    assert golden.family.defaults.cfg == scale
    assert (logits - golden.want["logits"]).abs().max() < LOGITS
    assert (guide(logits[None], scale)[0] - golden.want["cfg_logits"]).abs().max() < LOGITS


@pytest.mark.parametrize("width", [1, 3, 16])
@torch.inference_mode()
def test_windows_with_rollback_give_the_same_logits(golden, width):
    tokens, before = golden.inputs()
    session, found = golden.session(), []
    for start in range(0, golden.plan.length, width):
        rows = slice(start, start + width)
        length, ids = int(before[0, rows].max()) + 1, tokens[:, rows]
        wrong = torch.cat([ids[:, :1], (ids[:, 1:] + GARBAGE) % golden.plan.vocab], 1)
        session.window(wrong, before[:, rows], length, start == 0)
        found.append(session.window(ids, before[:, rows], length, start == 0)[0])
    assert (torch.cat(found, 1) - golden.want["logits"]).abs().max() < LOGITS


@pytest.mark.parametrize("method, window", [("autoregressive", 0), ("seed-exact", 5), ("jacobi", 16)])
def test_greedy_codes(golden, method, window):
    codes = golden.draw(method, window=window, temperature=0)
    assert torch.equal(codes.flatten(), golden.want["greedy_codes"])


@torch.inference_mode()
def test_pixels(golden):
    rows, cols = golden.meta["grid"]
    for codes, pixels in (("codes", "pixels"), ("greedy_codes", "greedy_pixels")):
        if pixels in golden.want:
            found = golden.codec.decode_raw(golden.want[codes].view(1, rows, cols))
            assert (found - golden.want[pixels]).abs().max() < PIXELS


@pytest.mark.parametrize("window", [2, 7, 16])
def test_seed_exact_is_autoregressive(golden, window):
    want = golden.draw("autoregressive", seed=11, batch=2)
    assert torch.equal(golden.draw("seed-exact", seed=11, batch=2, window=window), want)
    assert not torch.equal(golden.draw("autoregressive", seed=12, batch=2), want)


def test_bf16():
    """Same numbers as the reference's own bf16 forward, up to the order of roundings."""
    golden = Fixture("janus-pro-hf", "bf16")
    assert golden.decoder.dtype == torch.bfloat16 and golden.codec.dtype == torch.float32
    error = (golden.logits() - golden.want["logits_bf16_compute"]).abs()
    told = golden.meta["bf16_vs_fp32"]
    assert error.max() < 2 * told["max"] and error.mean() < 2 * told["mean"]


# what the family reads off the files ----------------------------------------------------------------------------------


def test_size(golden):
    side = golden.meta["grid"][0] * golden.meta["vq"]["pixels_per_code"] if "vq" in golden.meta else 8
    assert golden.family.sizes == (Size(side, side),)
    assert (golden.plan.rows, golden.plan.cols) == tuple(golden.meta["grid"])
    with pytest.raises(UserError, match=f"cannot draw 64x64.*{side}x{side}"):
        golden.family.size(64, 64)


@pytest.mark.parametrize("text", ["<begin_of_image>", "a <|User|> b", "<｜begin▁of▁sentence｜>", "{} {0} {a}", "ö 猫"])
def test_typed_names_are_text(golden, text):
    """Whatever is typed, there is one start token, one turn each, and one start of picture, at the end."""
    ids = golden.family.text.ids(text).tolist()
    id = golden.family.text.tokenizer.id
    for name in ("<｜begin▁of▁sentence｜>", "<|User|>", "<|Assistant|>", "<begin_of_image>"):
        assert ids.count(id(name)) == 1, name
    assert ids[0] == golden.meta["bos_id"] and ids[-1] == golden.meta["boi_id"]


def test_negative_prompt(golden):
    """It takes the place of the blank stream, in the same template; an empty one is the family's own."""
    encode = golden.family.text.encode
    cond, other = golden.family.streams(golden.prompt, encode("fog"), golden.plan)
    assert torch.equal(other.ids, golden.family.text.ids("fog")) and other.length < cond.length
    assert torch.equal(cond.ids, golden.streams[0].ids)
    blank = golden.family.streams(golden.prompt, encode("  "), golden.plan)[1]
    assert torch.equal(blank.ids, golden.streams[1].ids)
    other = golden.draw("autoregressive", "fog", temperature=0)
    assert not torch.equal(other.flatten(), golden.want["greedy_codes"])


def test_missing_settings_are_the_releases_own(folder):
    """Sizes come from the tensors, the norm's eps and the rotary base from the network's defaults."""
    heads = {"num_attention_heads": 4}

    def strip(config):
        for name in ("language_config", "text_config"):
            if name in config:
                config[name] = heads

    before = open_model(folder).family.decoder_config
    edit(folder / "config.json", strip)
    assert open_model(folder).family.decoder_config == before


def test_rotary_base_and_eps_come_from_the_settings(folder):
    def change(config):
        told = config.get("language_config") or config["text_config"]
        told.pop("rope_theta", None)
        told |= {"rms_norm_eps": 1e-3, "rope_parameters": {"rope_theta": 50.0, "rope_type": "default"}}

    edit(folder / "config.json", change)
    model = load_model(folder, "fp32")
    assert model.family.decoder_config.eps == 1e-3
    plan = model.family.plan(model.family.size())
    cos = model.family.positions(model.decoder, plan, 3, "cpu").cos
    assert torch.allclose(cos[2], torch.cos(2 * 50.0 ** (-torch.arange(0, 14, 2) / 14)))


@pytest.mark.parametrize("folder", ["janus-pro-original"], indirect=True)
def test_grid_of_the_original_layout(folder):
    """Side in pixels over 16, taken from the picture processor where the configuration lacks it."""
    edit(folder / "config.json", lambda c: c["vision_config"]["params"].update(image_size=96))
    assert open_model(folder).family.grid == 6
    edit(folder / "config.json", lambda c: c.pop("vision_config"))
    assert open_model(folder).family.grid == 4
    (folder / "preprocessor_config.json").unlink()
    assert open_model(folder).family.grid == 24


def test_names_of_the_roles_come_from_the_tokenizers_settings(folder):
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        edit(folder / name, lambda values: values.update(pad_token={"content": "<|ref|>"}))
    text = open_model(folder).family.text
    assert text.pad == text.tokenizer.id("<|ref|>")


@pytest.mark.parametrize("name", MODELS)
def test_one_file_draws_the_same(name, tmp_path, fixtures):
    """Settings and tokenizer travel inside the file; what pictures do not need stays behind."""
    folder = copy_model(name, tmp_path)
    path = convert(folder, tmp_path / "alone" / "a" / "b" / "c" / "one.safetensors")
    shutil.rmtree(folder)
    model, want = load_model(path, "fp32"), fixtures[name].want
    prompt = model.family.text.encode(fixtures[name].meta["prompt"])
    drawn = generate(model.decoder, model.family, prompt, request=Request(method="seed-exact", temperature=0))
    assert torch.equal(drawn.codes.flatten(), want["greedy_codes"])
    assert not any("vision_model.encoder" in key or "lm_head" in key for key in Source.open(path).keys())
