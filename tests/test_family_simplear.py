"""SimpleAR: golden numbers by the public road, prompts, sizes, parts, and parity with transformers' Qwen2."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from scd_pack.scd_core.checkpoint import Source, save_safetensors
from scd_pack.scd_core.convert import convert
from scd_pack.scd_core.errors import UserError
from scd_pack.scd_core.generate import Request, generate
from scd_pack.scd_core.law import guide
from scd_pack.scd_core.models.load import load_model, open_model
from scd_pack.scd_core.models.session import Session
from scd_pack.scd_core.models.simplear import NEVER, SimpleARFamily
from scd_pack.scd_core.verify import verify

GOLDEN = Path(__file__).parent / "data" / "golden"
WANT = load_file(GOLDEN / "simplear" / "expected.safetensors")
META = json.loads((GOLDEN / "simplear" / "meta.json").read_text(encoding="utf-8"))
LOGITS = 2e-4


@pytest.fixture(scope="module")
def model():
    """The miniature in fp32; the video tokenizer lies in the fixture beside it."""
    return load_model(GOLDEN / "simplear" / "model", "fp32")


@pytest.fixture(scope="module")
def plan(model):
    return model.family.plan(model.family.size(64, 64))


@pytest.fixture(scope="module")
def streams(model, plan):
    return list(model.family.streams(model.family.text.encode(META["prompt"]), None, plan))


def session(model, plan, streams):
    return Session(model.decoder, model.family, plan, streams, torch.full((1, plan.length), -1), 0, "cpu")


def inputs(plan):
    ids = WANT["image_seq_ids"]
    return torch.cat([ids[:1], ids[:-1]])[None], torch.arange(plan.length)[None] - 1


def expected(row, plan):
    logits = WANT["logits_cond"][:, plan.base : plan.base + plan.vocab]
    return (logits, WANT["logits_uncond"])[row]


# golden numbers -------------------------------------------------------------------------------------------------------


def test_verify_compares_all_of_the_fixture():
    rows = verify(GOLDEN / "simplear")
    assert all(row.ok for row in rows), [row for row in rows if not row.ok]
    assert set(WANT) <= {row.what for row in rows}


def test_prompts(model, plan, streams):
    for stream, name in zip(streams, ("cond", "uncond")):
        assert torch.equal(stream.ids, WANT[f"prompt_ids_{name}"])
    encode = model.family.text.encode
    spaced = model.family.streams(encode(f"  {META['prompt']}\n"), encode("  "), plan)
    assert all(torch.equal(a.ids, b.ids) for a, b in zip(spaced, streams))
    own = model.family.streams(encode("x"), encode("a {blurred} picture"), plan)[1].ids
    tokenizer = model.family.text.tokenizer
    assert own.tolist() == tokenizer.marked("<|t2i|>An image of a {blurred} picture<|soi|>")
    assert torch.equal(model.family.streams(encode("x"), encode(NEVER), plan)[1].ids, streams[1].ids)


def test_marks_in_a_prompt_are_words(model, plan):
    ids = model.family.streams(model.family.text.encode("a <|soi|> b"), None, plan)[0].ids.tolist()
    assert ids.count(model.family.text.tokenizer.id("<|soi|>")) == 1


@torch.inference_mode()
def test_teacher_forced_logits_and_guidance(model, plan, streams):
    logits = session(model, plan, streams).window(*inputs(plan), plan.length - 1, True)[0].float()
    for row in (0, 1):
        assert (logits[row] - expected(row, plan)).abs().max() < LOGITS
    own = guide(logits[None], model.family.defaults.cfg, model.family.guidance)[0]
    shift = own - WANT["cfg_logits"]  # the original normalises over the words too: one number a row
    assert (shift - shift[:, :1]).abs().max() < LOGITS
    assert (own.softmax(-1) - WANT["cfg_logits"].softmax(-1)).abs().max() < LOGITS


@pytest.mark.parametrize("width", [1, 3, 16])
@torch.inference_mode()
def test_windows_with_rollback_give_the_same_logits(model, plan, streams, width):
    tokens, before = inputs(plan)
    run, found = session(model, plan, streams), []
    for start in range(0, plan.length, width):
        rows = slice(start, start + width)
        length, ids = int(before[0, rows].max()) + 1, tokens[:, rows]
        wrong = torch.cat([ids[:, :1], plan.base + (ids[:, 1:] - plan.base + 5) % plan.vocab], 1)
        run.window(wrong, before[:, rows], length, start == 0)
        found.append(run.window(ids, before[:, rows], length, start == 0)[0])
    found = torch.cat(found, 1)
    for row in (0, 1):
        assert (found[row] - expected(row, plan)).abs().max() < LOGITS


def draw(model, method, **changes):
    prompt = model.family.text.encode(META["prompt"])
    request = Request(method=method, width=64, height=64, **changes)
    return generate(model.decoder, model.family, prompt, None, request).codes


@pytest.mark.parametrize("method, window", [("autoregressive", 0), ("seed-exact", 6), ("jacobi", 16)])
def test_greedy_codes(model, method, window):
    assert torch.equal(draw(model, method, window=window, temperature=0).flatten(), WANT["greedy_codes"])


@pytest.mark.parametrize("window", [1, 5, 16])
def test_seed_exact_draws_what_autoregressive_draws(model, window):
    want = draw(model, "autoregressive", seed=4, batch=2)
    assert torch.equal(draw(model, "seed-exact", seed=4, batch=2, window=window), want)
    assert not torch.equal(want[0], want[1])


@torch.inference_mode()
def test_pictures_are_clips_of_one_grid(model):
    codes = draw(model, "seed-exact", seed=1, batch=2)
    pictures = model.codec.decode(codes[:, 0])
    assert pictures.shape == (2, 64, 64, 3)
    assert torch.allclose(model.codec.decode_clip(codes[1])[0], pictures[1], atol=1e-5)


# sizes ----------------------------------------------------------------------------------------------------------------


def test_sizes(model):
    family = model.family
    assert str(family.size()) == "1024x1024" and str(family.size(width=512)) == "512x512"
    plan = family.plan(family.size(96, 64))
    assert (plan.rows, plan.cols, plan.length, plan.vocab) == (4, 6, 24, 128)
    assert plan.base == META["image_id_offset"]


@pytest.mark.parametrize("asked", [(500, 512), (512, 8), (1024 * 16, 1024 * 16)])
def test_other_sizes_are_refused(model, asked):
    with pytest.raises(UserError, match=r"multiples of 16 pixels.*1024x1024"):
        model.family.size(*asked)


def test_clips_are_refused(model):
    with pytest.raises(UserError, match="set frames to 1"):
        model.family.size(64, 64, 9)


# files ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    """The miniature in a models folder so deep that a search around it stays inside."""
    target = tmp_path / "a" / "b" / "models" / "simplear"
    shutil.copytree(GOLDEN / "simplear" / "model", target)
    return target


def codec_beside(folder, place="../Cosmos-1.0-Tokenizer-DV8x16x16"):
    target = (folder / place).resolve()
    target.mkdir(exist_ok=True)
    for half in ("decoder", "encoder"):
        shutil.copy(GOLDEN / "cosmos-dv8x16x16" / "model" / f"{half}.safetensors", target)


def settings(folder, **changes):
    """Change config.json; None removes a setting."""
    path = folder / "config.json"
    told = json.loads(path.read_text(encoding="utf-8")) | changes
    path.write_text(json.dumps({k: v for k, v in told.items() if v is not None}), encoding="utf-8")


def weights(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_safetensors(tensors, folder / "model.safetensors", {"format": "pt"}, overwrite=True)


@torch.inference_mode()
def logits_of(folder):
    files = open_model(folder, ("decoder",), {"num_attention_heads": 4})
    family, decoder = files.family, files.build("decoder", dtype=torch.float32)
    plan = family.plan(family.size(64, 64))
    streams = list(family.streams(family.text.encode(META["prompt"]), None, plan))
    run = Session(decoder, family, plan, streams, torch.full((1, plan.length), -1), 0, "cpu")
    return run.window(*inputs(plan), plan.length - 1, True)[0]


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": ["Qwen2ForCausalLM"]},
        {"architectures": None, "model_type": None},
        {"rope_theta": None, "rms_norm_eps": None},
        {"rope_theta": None, "rope_parameters": {"rope_theta": 1e6}},
    ],
)
def test_detection_and_what_settings_leave_out(folder, changes):
    settings(folder, **changes)
    logits = logits_of(folder)
    assert (logits[1] - WANT["logits_uncond"]).abs().max() < LOGITS


@pytest.mark.parametrize("changes", [{"rope_theta": 1e4}, {"rms_norm_eps": 1e-3}])
def test_settings_count(folder, changes):
    settings(folder, **changes)
    assert (logits_of(folder)[1] - WANT["logits_uncond"]).abs().max() > 10 * LOGITS


def test_an_unknown_rotary_is_refused(folder):
    settings(folder, rope_scaling={"rope_type": "yarn", "factor": 4.0})
    with pytest.raises(UserError, match="rotary of kind 'yarn'"):
        open_model(folder, ("decoder",))


def test_a_file_without_settings(folder):
    (folder / "config.json").unlink()
    assert (logits_of(folder)[1] - WANT["logits_uncond"]).abs().max() < LOGITS
    with pytest.raises(UserError, match="number of attention heads is unknown"):
        open_model(folder, ("decoder",))


def test_other_qwens_are_not_simplear(folder):
    settings(folder, architectures=["Qwen2ForCausalLM"])
    words = (folder / "tokenizer.json").read_text(encoding="utf-8").replace("<|soi|>", "<|sos|>")
    (folder / "tokenizer.json").write_text(words, encoding="utf-8")
    source = Source.open(folder)
    assert not SimpleARFamily.detect(source)
    with pytest.raises(UserError, match="no model of a supported family"):
        open_model(folder)


@pytest.mark.parametrize("told", [True, False])
def test_tied_tables(folder, told):
    """The head is the picture part of the input table: told by the settings, or by a file without a head."""
    want = load_file(folder / "model.safetensors")
    if told:
        settings(folder, tie_word_embeddings=True)
    else:
        weights(folder, lambda tensors: tensors.pop("lm_head.weight"))
    family = open_model(folder, ("decoder",)).family
    head = family.refs("decoder")["lm_head.weight"].read(torch.float32)
    assert torch.equal(head, want["model.embed_tokens.weight"][296:424].float())
    assert logits_of(folder).shape == (2, 16, 128)


def test_one_file_form_draws_the_same(folder, tmp_path):
    codec_beside(folder)
    target = tmp_path / "c" / "d" / "e" / "simplear.safetensors"
    target.parent.mkdir(parents=True)
    convert(folder, target)
    one, many = load_model(target, "fp32"), load_model(folder, "fp32")
    assert torch.equal(draw(one, "seed-exact", seed=2), draw(many, "seed-exact", seed=2))
    assert one.codec.cfg == many.codec.cfg and one.codec.cfg.encoder is not None


@pytest.mark.parametrize("place", [".", "../Cosmos-Tokenize1-DV8x16x16-720p", "vq"])
def test_the_video_tokenizer_is_found(folder, place):
    codec_beside(folder, place)
    files = open_model(folder)
    assert files.family.codec_config.factor == 16 and files.family.codec_config.encoder is not None


def test_missing_parts_are_listed(folder):
    with pytest.raises(UserError, match=r"video tokenizer: MISSING.*DV8x16x16") as told:
        open_model(folder)
    assert "language model: found" in str(told.value) and "text tokenizer: found" in str(told.value)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="text tokenizer: MISSING"):
        open_model(folder)


def test_a_foreign_tokenizer_is_refused(folder):
    words = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    words["added_tokens"].append({**words["added_tokens"][-1], "id": 500, "content": "<|more|>"})
    words["model"]["vocab"] |= {f"w{i}": 300 + i for i in range(180)}
    (folder / "tokenizer.json").write_text(json.dumps(words), encoding="utf-8")
    with pytest.raises(UserError, match="belongs to another model"):
        open_model(folder)


@pytest.mark.parametrize(
    "change, told",
    [
        (lambda t: t.pop("model.layers.1.self_attn.v_proj.bias"), r"missing.*layers\.1\.self_attn\.v_proj\.bias"),
        (lambda t: t.pop("model.norm.weight"), "language model: MISSING"),
        (lambda t: t.update({"model.layers.0.extra": torch.zeros(1)}), r"unexpected.*layers\.0\.extra"),
    ],
)
def test_missing_and_surplus_weights_are_named(folder, change, told):
    codec_beside(folder)
    weights(folder, change)
    with pytest.raises(UserError, match=told):
        open_model(folder)


# parity ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
@torch.inference_mode()
def test_logits_are_those_of_transformers(folder, tied):
    """Another width, depth and number of heads, drawn at random."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 60, "intermediate_size": 100, "num_hidden_layers": 3, "num_attention_heads": 6}
    sizes |= {"num_key_value_heads": 3, "vocab_size": 296 + 90, "rms_norm_eps": 1e-5, "max_position_embeddings": 512}
    config = transformers.Qwen2Config(**sizes, tie_word_embeddings=tied)
    theirs = transformers.Qwen2ForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(9)
    for name, parameter in theirs.named_parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.15 + ("norm" in name))
    (folder / "model.safetensors").unlink()
    tensors = {name: t.clone() for name, t in theirs.state_dict().items() if not (tied and name == "lm_head.weight")}
    save_safetensors(tensors, folder / "model.safetensors")
    settings(folder, **sizes, rope_theta=10000.0, tie_word_embeddings=tied)
    files = open_model(folder, ("decoder",))
    family, decoder = files.family, files.build("decoder", dtype=torch.float32)
    plan = family.plan(family.size(80, 48))
    assert (plan.rows, plan.cols, plan.vocab) == (3, 5, 90)
    streams = list(family.streams(family.text.encode("a fox"), None, plan))
    codes = torch.randint(0, 90, (plan.length,), generator=generator) + plan.base
    run = Session(decoder, family, plan, streams, torch.full((1, plan.length), -1), 0, "cpu")
    tokens = torch.cat([codes[:1], codes[:-1]])[None]
    found = run.window(tokens, torch.arange(plan.length)[None] - 1, plan.length - 1, True)[0]
    for row, stream in enumerate(streams):
        ids = torch.cat([stream.ids, codes[:-1]])[None]
        want = theirs(input_ids=ids).logits[0, stream.length - 1 :, plan.base :]
        assert (found[row] - want).abs().max() < 1e-5 * want.abs().max().clamp(min=1)
