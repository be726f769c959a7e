"""Janus-Pro: the golden numbers through the public road, both layouts, prompts, and what is refused."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from scd_pack.scd_core.checkpoint import Source
from scd_pack.scd_core.errors import UserError
from scd_pack.scd_core.generate import Request, generate
from scd_pack.scd_core.law import guide
from scd_pack.scd_core.models.families import FAMILIES
from scd_pack.scd_core.models.family import Size
from scd_pack.scd_core.models.janus import JanusFamily
from scd_pack.scd_core.models.load import load_model, open_model
from scd_pack.scd_core.models.session import Session

GOLDEN = Path(__file__).parent / "data" / "golden"
MODELS = ("janus-pro-original", "janus-pro-hf")
LOGITS, PIXELS = 2e-4, 1e-4  # the fixtures' own limits in fp32
GARBAGE = 5  # added to codes that a rollback throws away


def expected(name):
    return load_file(GOLDEN / name / "expected.safetensors")


def settings(name):
    return json.loads((GOLDEN / name / "meta.json").read_text(encoding="utf-8"))


class Fixture:
    """A loaded fixture and its numbers."""

    def __init__(self, name, dtype="fp32"):
        self.want, self.meta = expected(name), settings(name)
        self.model = load_model(GOLDEN / name / "model", dtype)
        self.decoder, self.family, self.codec = self.model.decoder, self.model.family, self.model.codec
        self.prompt = self.family.text.encode(self.meta["prompt"])
        self.plan = self.family.plan(self.family.size())
        self.streams = list(self.family.streams(self.prompt, None, self.plan))

    def session(self):
        fixed = torch.full((1, self.plan.length), -1)
        return Session(self.decoder, self.family, self.plan, self.streams, fixed, 0, "cpu")

    def inputs(self):
        """Input ids [1, N] and positions before them for teacher forcing."""
        codes = self.want["codes"]
        return torch.cat([torch.zeros(1, dtype=torch.long), codes[:-1]])[None], torch.arange(len(codes))[None] - 1

    @torch.inference_mode()
    def logits(self):
        """Teacher-forced logits [streams, N, V] in one pass."""
        tokens, before = self.inputs()
        return self.session().window(tokens, before, self.plan.length - 1, True)[0].float()

    def draw(self, method, negative=None, **changes):
        negative = None if negative is None else self.family.text.encode(negative)
        return generate(self.decoder, self.family, self.prompt, negative, Request(method=method, **changes)).codes


@pytest.fixture(scope="module")
def fixtures():
    return {name: Fixture(name) for name in MODELS}


@pytest.fixture(params=MODELS)
def golden(request, fixtures):
    return fixtures[request.param]


@pytest.fixture(params=MODELS)
def folder(request, tmp_path):
    """A copy of a fixture's model that a test may spoil, too deep down to see what other tests left around."""
    place = tmp_path / "host" / "models" / "ar_models" / "a model"
    shutil.copytree(GOLDEN / request.param / "model", place)
    return place


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


def edit(path, change):
    """Rewrite a JSON file."""
    values = json.loads(path.read_text(encoding="utf-8"))
    change(values)
    path.write_text(json.dumps(values), encoding="utf-8")


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


# refusals -------------------------------------------------------------------------------------------------------------


def tensors(folder):
    """All tensors of a model folder; its weight files are removed."""
    state = {}
    for file in sorted(folder.iterdir()):
        if file.suffix == ".bin":
            state |= torch.load(file, weights_only=True)
        elif file.suffix == ".safetensors":
            state |= load_file(file)
        if file.suffix in (".bin", ".safetensors") or file.name.endswith(".index.json"):
            file.unlink()
    return state


def rewrite(folder, change):
    """Pass a folder's tensors through `change` (dict -> dict) into one file."""
    save_file({k: v.contiguous() for k, v in change(tensors(folder)).items()}, folder / "model.safetensors")


def without(*starts):
    return lambda state: {key: value for key, value in state.items() if not key.startswith(starts)}


CODEC = ("gen_vision_model.", "model.vqmodel.")
HEAD = ("gen_embed", "gen_aligner", "gen_head", "model.generation_")
LOST = {
    "image tokenizer": without(*CODEC),
    "image token input and head": without(*HEAD),
    "language model": without("language_model.", "model.language_model."),
    "language model without layers": without("language_model.model.layers", "model.language_model.layers"),
}


@pytest.mark.parametrize("part", LOST)
def test_missing_part_is_named(folder, part):
    rewrite(folder, LOST[part])
    with pytest.raises(UserError) as told:
        open_model(folder)
    title = part.removesuffix(" without layers")
    assert re.search(f"{title}: MISSING, looked for .* in .*{folder.name}.*deepseek-ai/Janus-Pro-1B", str(told.value))
    assert str(told.value).count("MISSING") == 1
    assert f"text tokenizer: found in {folder / 'tokenizer.json'}" in str(told.value)


def test_words_alone(folder):
    """A language model cut out of a release, still with its config.json: both lost parts are named."""
    rewrite(folder, without(*CODEC, *HEAD))
    with pytest.raises(UserError, match=r"image token input and head: MISSING.*image tokenizer: MISSING"):
        open_model(folder)


def test_missing_text_tokenizer(folder):
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"text tokenizer: MISSING, looked for tokenizer.json in .*a model"):
        open_model(folder)


def test_text_tokenizer_of_a_neighbour(folder):
    """Fine-tunes are often published without one."""
    neighbour = folder.parent / "Janus-Pro-1B"
    neighbour.mkdir()
    (folder / "tokenizer.json").rename(neighbour / "tokenizer.json")
    assert open_model(folder).family.text.tokenizer.where == str(neighbour / "tokenizer.json")


def test_text_tokenizer_of_another_model(folder):
    def drop(values):
        values["added_tokens"] = [t for t in values["added_tokens"] if t["content"] != "<begin_of_image>"]
        del values["model"]["vocab"]["<begin_of_image>"]

    edit(folder / "tokenizer.json", drop)
    with pytest.raises(UserError, match=r"tokenizer.json has no token '<begin_of_image>'"):
        open_model(folder)


def test_vocabulary_that_does_not_match(folder):
    def add(values):
        token = dict(values["added_tokens"][-1])
        values["added_tokens"].append(token | {"id": token["id"] + 100, "content": "<|more|>"})

    edit(folder / "tokenizer.json", add)

    def shorten(state):
        key = next(key for key in state if key.endswith("embed_tokens.weight"))
        return state | {key: state[key][:290]}

    rewrite(folder, shorten)
    with pytest.raises(UserError, match=r"tokenizer.json knows \d+ tokens, the language model .* only 290"):
        open_model(folder)


def test_codebooks_of_different_sizes(folder):
    def cut(state):
        return {k: v[:64].clone() if k.endswith("quantize.embedding.weight") else v for k, v in state.items()}

    rewrite(folder, cut)
    with pytest.raises(UserError, match=r"same image codes \(head 96, input table 96, image tokenizer 64\)"):
        open_model(folder)


@pytest.mark.parametrize(
    "name, value", [("hidden_size", 64), ("intermediate_size", 100), ("num_key_value_heads", 2), ("vocab_size", 300)]
)
def test_configuration_of_another_size(folder, name, value):
    def change(config):
        told = config.get("language_config") or config["text_config"]
        told[name] = value

    edit(folder / "config.json", change)
    with pytest.raises(UserError, match=r"has the shape \[.*\], its configuration asks for \["):
        load_model(folder, "fp32")


def test_layer_count_of_another_model(folder):
    def change(config):
        (config.get("language_config") or config["text_config"])["num_hidden_layers"] = 3

    edit(folder / "config.json", change)
    with pytest.raises(UserError, match=r"9 of \d+ needed weights are missing .*layers\.2\."):
        open_model(folder)


@pytest.mark.parametrize("name", ["layers.1.mlp.up_proj.weight", "decoder.norm_out.bias", "vision_head.bias"])
def test_missing_tensor_is_named(folder, name):
    rewrite(folder, lambda state: {key: value for key, value in state.items() if not key.endswith(name)})
    with pytest.raises(UserError, match=rf"1 of \d+ needed weights are missing \('\S+\.{re.escape(name)}'\)"):
        open_model(folder)


@pytest.mark.parametrize("name", ["language_model.model.layers.0.gate.weight", "gen_vision_model.decoder.more.weight"])
def test_unexpected_tensor_is_named(folder, name):
    rewrite(folder, lambda state: state | {name: torch.zeros(2)})
    with pytest.raises(UserError, match=f"1 are unexpected .*{re.escape(name)}"):
        open_model(folder)


def test_missing_shard(folder):
    lost = next(file for file in folder.iterdir() if "00002-of-00002" in file.name)
    lost.unlink()
    with pytest.raises(UserError, match=re.escape(lost.name)):
        open_model(folder)


@pytest.mark.parametrize("sign", ["config", "weights"])
def test_janusflow_is_refused_by_name(folder, sign):
    if sign == "config":
        edit(folder / "config.json", lambda c: c.update(model_type="multi_modality", vision_gen_enc_config={}))
    else:
        (folder / "config.json").unlink()
        flow = {"vision_gen_enc_model.conv.weight": torch.ones(1)}
        rewrite(folder, lambda state: without(*CODEC, *HEAD)(state) | flow)
    with pytest.raises(UserError, match=r"JanusFlow model.*use Janus-Pro instead"):
        open_model(folder)


def test_detected_by_keys_alone(folder):
    (folder / "config.json").unlink()
    assert [f for f in FAMILIES if f.detect(Source.open(folder))] == [JanusFamily]


def test_other_multimodal_model_is_not_taken(tmp_path):
    """The original layout's model type is also that of models that only read pictures."""
    (tmp_path / "config.json").write_text('{"model_type": "multi_modality"}')
    save_file({"language_model.model.norm.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    assert not JanusFamily.detect(Source.open(tmp_path))


# transformers as reference --------------------------------------------------------------------------------------------

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
