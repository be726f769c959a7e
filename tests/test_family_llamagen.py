"""LlamaGen: the golden numbers through the public road, both layouts, the parts, what a prompt may be."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from scd_pack.scd_core.checkpoint import Source, save_safetensors
from scd_pack.scd_core.errors import UserError
from scd_pack.scd_core.generate import Request, generate
from scd_pack.scd_core.law import LawSettings, guide, token_law
from scd_pack.scd_core.models.family import Size
from scd_pack.scd_core.models.llamagen import LlamaGenFamily
from scd_pack.scd_core.models.load import load_model, open_model
from scd_pack.scd_core.models.session import Session
from scd_pack.scd_core.prompt import Prompt

GOLDEN = Path(__file__).parent / "data" / "golden"
MODELS = ("llamagen-c2i", "llamagen-c2i-bf16", "llamagen-t2i", "llamagen-t2i-jadohu")
LOGITS, PIXELS = 2e-4, 1e-4  # the fixtures' own limits in fp32
GARBAGE = 5  # a code that no fixture draws first


def lay_out(name, folder):
    """Copy a fixture's language model into `folder`, with the codec under its kind's name; returns what to open."""
    for file in (GOLDEN / name / "model").iterdir():
        shutil.copy(file, folder)
    kind = name.split("-")[1]
    shutil.copy(GOLDEN / "llamagen-vq-ds16" / "model" / "vq_ds16_c2i.pt", folder / f"vq_ds16_{kind}.pt")
    return next(file for file in folder.iterdir() if "vq" not in file.name and file.suffix != ".json")


class Fixture:
    """A loaded fixture and its numbers."""

    def __init__(self, name, folder, dtype="fp32"):
        self.want = load_file(GOLDEN / name / "expected.safetensors")
        self.meta = json.loads((GOLDEN / name / "meta.json").read_text(encoding="utf-8"))
        self.model = load_model(lay_out(name, folder), dtype)
        self.decoder, self.family = self.model.decoder, self.model.family
        self.plan = self.family.plan(self.family.size())
        self.streams = list(self.family.streams(self.prompt(), None, self.plan))

    def prompt(self):
        if self.family.classes:
            return self.family.text.encode(str(self.meta["class_id"]))
        valid = self.want["text_mask"][0] > 0
        return Prompt("a caption", features=self.want["text_features"][0][valid])

    def session(self, streams=None):
        fixed = torch.full((1, self.plan.length), -1)
        return Session(self.decoder, self.family, self.plan, streams or self.streams, fixed, 0, "cpu")

    def inputs(self):
        """Input ids [1, N] and positions before them for teacher forcing."""
        codes, n = self.want["codes"], self.plan.length
        return torch.cat([torch.zeros(1, dtype=torch.long), codes[:-1]])[None], torch.arange(n)[None] - 1

    @torch.inference_mode()
    def logits(self, streams=None):
        """Teacher-forced logits [streams, N, V] in one pass."""
        tokens, before = self.inputs()
        return self.session(streams).window(tokens, before, self.plan.length - 1, True)[0].float()

    def draw(self, method, **changes):
        request = Request(method=method, **changes)
        return generate(self.decoder, self.family, self.prompt(), None, request).codes


@pytest.fixture(scope="module")
def fixtures(tmp_path_factory):
    """name -> `Fixture`, each in a models folder of its own."""
    return {name: Fixture(name, tmp_path_factory.mktemp("models") / ".") for name in MODELS}


@pytest.fixture(params=MODELS)
def golden(request, fixtures):
    return fixtures[request.param]


# golden numbers -----------------------------------------------------------------------------------------------------


def test_teacher_forced_logits(golden):
    logits, scale = golden.logits(), golden.meta["cfg_scale"]
    assert golden.family.defaults.cfg == scale
    assert (logits - golden.want["logits"]).abs().max() < LOGITS
    guided = guide(logits[None], scale)[0]
    assert (guided - golden.want["cfg_logits"]).abs().max() < LOGITS


@pytest.mark.parametrize(
    "key, settings", [("probs_topk", (1.0, 20, 1.0)), ("probs_topk_topp", (0.9, 50, 0.8))]
)
def test_law(golden, key, settings):
    law = LawSettings(*settings, cfg=golden.meta["cfg_scale"])
    p = token_law(golden.logits()[None], law)[0].exp()
    assert (p - golden.want[key]).abs().max() < 1e-4


@pytest.mark.parametrize("method, window", [("autoregressive", 0), ("seed-exact", 5), ("jacobi", 16)])
def test_greedy_codes(golden, method, window):
    codes = golden.draw(method, window=window, temperature=0)
    assert torch.equal(codes.flatten(), golden.want["greedy_codes"])


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


def test_seed_exact_draws_what_autoregressive_draws(golden):
    changes = {"seed": 11, "batch": 2}
    assert torch.equal(golden.draw("seed-exact", window=6, **changes), golden.draw("autoregressive", **changes))


def test_rotary_table_has_an_empty_row_for_the_class(fixtures):
    golden = fixtures["llamagen-c2i"]
    found = golden.family.positions(golden.decoder, golden.plan, 1, "cpu")
    assert torch.equal(torch.stack([found.cos, found.sin], -1), golden.want["rope_table"])


@pytest.mark.parametrize("name", ["llamagen-t2i", "llamagen-t2i-jadohu"])
def test_captions_stand_at_the_right_end(fixtures, name):
    golden = fixtures[name]
    cond, uncond = golden.streams
    assert torch.equal(cond.features, golden.want["caption"][0])
    assert torch.equal(cond.mask, golden.want["caption_mask"][0] > 0) and torch.equal(uncond.mask, cond.mask)
    for stream, vectors in zip(golden.streams, golden.want["cond_embeds"]):
        assert (golden.decoder.embed.prompt(stream, torch.float32) - vectors).abs().max() < 1e-5


def test_bf16_weights_computed_in_bf16(tmp_path):
    golden = Fixture("llamagen-c2i-bf16", tmp_path, "bf16")
    difference = (golden.logits() - golden.want["logits_bf16_compute"]).abs()
    assert difference.max() < 2 * golden.meta["bf16_vs_fp32_max"] and difference.mean() < 0.03


@torch.inference_mode()
def test_codec(fixtures):
    want = load_file(GOLDEN / "llamagen-vq-ds16" / "expected.safetensors")
    codec = fixtures["llamagen-c2i"].model.codec
    codes = want["codes"].view(1, 3, 4)
    assert (codec.decode_raw(codes) - want["pixels"]).abs().max() < PIXELS
    features = codec.features(want["picture"])
    assert (features - want["encoder_latent"]).abs().max() < PIXELS
    assert torch.equal(codec.nearest(features).flatten(), want["encoder_codes"])


# layouts and sizes --------------------------------------------------------------------------------------------------


def native_shapes(dim, heads, kv_heads, layers, ffn, codes, classes):
    """Names and shapes of the release's layout; with `kv_heads` below `heads` keys and values are shared."""
    shapes = {"tok_embeddings.weight": (codes, dim), "output.weight": (codes, dim), "norm.weight": (dim,)}
    shapes["cls_embedding.embedding_table.weight"] = (classes + 1, dim)
    for i in range(layers):
        tails = {
            "attention.wqkv": (dim + 2 * kv_heads * (dim // heads), dim), "attention.wo": (dim, dim),
            "feed_forward.w1": (ffn, dim), "feed_forward.w3": (ffn, dim), "feed_forward.w2": (dim, ffn),
            "attention_norm": (dim,), "ffn_norm": (dim,),
        }  # fmt: skip
        shapes |= {f"layers.{i}.{tail}.weight": shape for tail, shape in tails.items()}
    return shapes


def native(kv_heads=5, codes=40):
    """Random weights of another size than the fixtures'."""
    g = torch.Generator().manual_seed(0)
    shapes = native_shapes(80, 5, kv_heads, 3, 56, codes, 6)
    noise = {key: torch.randn(shape, generator=g) for key, shape in shapes.items()}
    return {k: t * t.shape[-1] ** -0.5 if t.dim() > 1 else 1 + 0.2 * t for k, t in noise.items()}


def as_llama(weights, heads, kv_heads):
    """The same weights under Llama's names."""
    tails = {
        "attention.wo": "self_attn.o_proj", "feed_forward.w1": "mlp.gate_proj", "feed_forward.w3": "mlp.up_proj",
        "feed_forward.w2": "mlp.down_proj", "attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
        "tok_embeddings": "embed_tokens",
    }  # fmt: skip
    out = {"lm_head.weight": weights["output.weight"]}
    for key, tensor in weights.items():
        if "wqkv" in key:
            part = len(tensor) // (heads + 2 * kv_heads)
            for n, rows in zip("qkv", tensor.split([heads * part, kv_heads * part, kv_heads * part])):
                out["model." + key.replace("attention.wqkv", f"self_attn.{n}_proj")] = rows
        elif key != "output.weight":
            for old, new in tails.items():
                key = key.replace(old, new)
            out["model." + key] = tensor
    return out


class Loose(LlamaGenFamily):
    """The family without its other parts: what the language model's file alone tells."""

    def _find_codec(self):
        self.codec_config = None

    def _find_text(self):
        pass


@torch.inference_mode()
def first_logits(path):
    """Logits [2, N, V] of a fixed row of codes, from the decoder alone."""
    files = open_model(path)
    decoder, family = files.build("decoder", dtype=torch.float32), files.family
    plan = family.plan(family.size(5 * family.factor))
    streams = list(family.streams(family.text.encode("2"), None, plan))
    session = Session(decoder, family, plan, streams, torch.full((1, plan.length), -1), 0, "cpu")
    tokens = torch.arange(plan.length)[None] % plan.vocab
    return session.window(tokens, torch.arange(plan.length)[None] - 1, plan.length - 1, True)[0]


def save(folder, tensors, config=None, name="model.safetensors", wrap=None):
    """One checkpoint in a folder, beside a codec with as many codes as it needs."""
    folder.mkdir(parents=True)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if name.endswith(".pt"):
        torch.save(tensors if wrap is None else {wrap: tensors}, folder / name)
    else:
        save_safetensors(tensors, folder / name)
    codec = torch.load(GOLDEN / "llamagen-vq-ds16" / "model" / "vq_ds16_c2i.pt", weights_only=True)["model"]
    codec["quantize.embedding.weight"] = codec["quantize.embedding.weight"][:40].clone()
    torch.save({"model": codec}, folder / "vq_ds16_c2i.pt")
    return folder / name


@pytest.mark.parametrize("kv_heads", [5, 1])
def test_layouts_and_wrappings_hold_one_network(tmp_path, kv_heads):
    weights = native(kv_heads=kv_heads)
    config = {"num_attention_heads": 5, "rms_norm_eps": 1e-5}
    buffers = {"freqs_cis": torch.zeros(26, 8, 2)}
    want = first_logits(save(tmp_path / "a", weights, config))
    others = [
        save(tmp_path / "b", as_llama(weights, 5, kv_heads), config),
        save(tmp_path / "c", weights | buffers, config, "c2i_B_80.pt"),
        save(tmp_path / "d", weights, config, "c2i_B_80.pt", wrap="module"),
        save(tmp_path / "e", {f"_orig_mod.{k}": v for k, v in weights.items()}, config, "c2i_B_80.pt", wrap="model"),
    ]
    for path in others:
        assert torch.equal(first_logits(path), want), path


def test_eps_heads_and_base_come_from_the_configuration(tmp_path):
    weights, seen = native(), []
    for i, change in enumerate(({}, {"rms_norm_eps": 1e-2}, {"num_attention_heads": 4}, {"rope_base": 50})):
        path = save(tmp_path / str(i), weights, {"num_attention_heads": 5, **change})
        seen.append(first_logits(path))
    assert all((seen[0] - other).abs().max() > 1e-3 for other in seen[1:])


class Shapes:
    """A `Source` that knows shapes alone."""

    def __init__(self, name, dim, cond=None, **config):
        self.root, self.files, self.config = Path("models"), (Path("models") / name,), config
        self.shapes = native_shapes(dim, 1, 1, 1, 8, 8, 6)
        if cond:
            del self.shapes["cls_embedding.embedding_table.weight"]
            cap = {"fc1": (dim, cond[1]), "fc2": (dim, dim)}
            self.shapes |= {f"cls_embedding.cap_proj.{k}.weight": s for k, s in cap.items()}
            self.shapes["cls_embedding.uncond_embedding"] = cond

    def keys(self):
        return self.shapes.keys()

    def shape(self, key):
        return self.shapes[key]


@pytest.mark.parametrize(
    "name, dim, heads, grid",
    [
        ("c2i_B_256.pt", 768, 12, 16),
        ("c2i_B_384.pt", 768, 12, 24),
        ("t2i_XL_stage2_512.pt", 1280, 20, 32),
        ("mine.safetensors", 1024, 16, 16),
        ("c2i_3B_384.pt", 3200, 32, 24),
    ],
)
def test_released_files_tell_heads_and_grid_by_width_and_name(name, dim, heads, grid):
    family = Loose(Shapes(name, dim, cond=(120, 2048) if name.startswith("t2i") else None))
    cfg = family.decoder_config
    assert (cfg.heads, cfg.kv_heads, cfg.head_dim) == (heads, heads, dim // heads)
    assert (cfg.eps, cfg.rope_pairing) == (1e-5, "pair")
    assert family.sizes[0] == Size(16 * grid, 16 * grid)
    assert {str(s) for s in family.sizes} == {"256x256", "384x384", "512x512"}
    assert family.condition == (120 if name.startswith("t2i") else 1)


def test_grid_from_the_configuration_goes_before_the_name():
    assert Loose(Shapes("c2i_B_384.pt", 768, block_size=49)).sizes[0] == Size(112, 112)
    assert Loose(Shapes("c2i_B_384.pt", 768, scd=Loose(Shapes("c2i_B_512.pt", 768)).marks)).sizes[0] == Size(512, 512)


def test_an_unknown_width_is_logged(caplog):
    assert Loose(Shapes("x.pt", 80)).decoder_config.heads == 4
    assert "num_attention_heads" in caplog.text


@pytest.mark.parametrize("config", [{"hidden_size": 64}, {"num_attention_heads": 7}, {"num_attention_heads": 40}])
def test_configuration_of_another_model_is_refused(config):
    with pytest.raises(UserError, match="belong"):
        Loose(Shapes("c2i.pt", 80, **config))


def test_any_square_may_be_asked_for(fixtures):
    family = fixtures["llamagen-c2i"].family
    assert family.size() == Size(8, 8)  # four tokens of two pixels
    assert family.size(10) == family.size(0, 10) == Size(10, 10)
    for asked in ((8, 10), (9, 9), (130, 130), (8, 8, 2), (-2, 0)):
        with pytest.raises(UserError, match="cannot draw"):
            family.size(*asked)
    codes = fixtures["llamagen-c2i"].draw("seed-exact", window=4, width=12)
    assert codes.shape == (1, 1, 6, 6)


def test_other_models_are_not_taken_for_it(tmp_path):
    weights = as_llama(native(), 5, 5)
    del weights["model.cls_embedding.embedding_table.weight"]
    save_safetensors(weights, tmp_path / "llama.safetensors")
    assert not LlamaGenFamily.detect(Source.open(tmp_path / "llama.safetensors"))
    with pytest.raises(UserError, match="no model of a supported family"):
        open_model(tmp_path / "llama.safetensors")


# parts --------------------------------------------------------------------------------------------------------------


def test_missing_codec_is_told_with_the_part_that_is_there(tmp_path):
    folder = tmp_path / "a" / "b" / "c"  # nothing of another test two levels above
    folder.mkdir(parents=True)
    shutil.copy(GOLDEN / "llamagen-c2i" / "model" / "c2i_B_64.pt", folder)
    with pytest.raises(UserError, match=r"model: found in .*c2i_B_64.pt; image tokenizer: MISSING.*vq_ds16_c2i"):
        load_model(folder)
    assert open_model(folder, need=("decoder",)).build("decoder").cfg.layers == 2


@pytest.mark.parametrize(
    "place", ["models/LlamaGen/vq_ds8_c2i.pt", "models/LlamaGen/vae/vq_ds16_c2i.pt", "models/vae/vq_ds16_c2i.pt"]
)
def test_codec_is_found_beside_below_and_around(tmp_path, place):
    folder = tmp_path / "models" / "LlamaGen"
    folder.mkdir(parents=True)
    shutil.copy(GOLDEN / "llamagen-c2i" / "model" / "c2i_B_64.pt", folder)
    (tmp_path / place).parent.mkdir(exist_ok=True)
    shutil.copy(GOLDEN / "llamagen-vq-ds16" / "model" / "vq_ds16_c2i.pt", tmp_path / place)
    assert open_model(folder / "c2i_B_64.pt").family.parts[1].where == tmp_path / place


def test_codec_of_another_model_is_refused(tmp_path):
    path = save(tmp_path / "m", native(codes=41))
    with pytest.raises(UserError, match="has 40 codes, the language model draws 41"):
        open_model(path)


@pytest.mark.parametrize("change, told", [("drop", "1 of 25 needed weights are missing"), ("add", "1 are unexpected")])
def test_every_name_counts(tmp_path, change, told):
    weights = native()
    if change == "drop":
        del weights["layers.1.attention.wqkv.weight"]
    else:
        weights["layers.1.attention.bias"] = torch.zeros(2)
    with pytest.raises(UserError, match=rf"{told} \('layers.1.attention"):
        open_model(save(tmp_path / "m", weights))


# prompts ------------------------------------------------------------------------------------------------------------


def test_unconditional_and_negative_classes(fixtures):
    family = fixtures["llamagen-c2i"].family
    for text, negative, want in (("3", None, [3, 10]), ("", "4", [10, 4])):
        streams = family.streams(Prompt(text), negative and Prompt(negative), None)
        assert [s.ids.item() for s in streams] == want
    with pytest.raises(UserError, match="0 to 9"):
        family.text.encode("10")
    with pytest.raises(UserError, match="write a number"):
        family.text.encode("goldfish")  # ten classes are not ImageNet's


def test_negative_captions_have_their_own_place(fixtures):
    golden = fixtures["llamagen-t2i"]
    slots, width = golden.family.condition, golden.want["caption"].shape[2]
    prompt, negative = (Prompt("", features=torch.ones(n, width)) for n in (3, slots + 2))
    cond, uncond = golden.family.streams(prompt, negative, golden.plan)
    assert cond.mask.tolist() == [False] * (slots - 3) + [True] * 3
    assert uncond.mask.all() and len(uncond.features) == slots
    with pytest.raises(UserError, match=rf"reads text features \[tokens, {width}\]"):
        golden.family.streams(Prompt("", features=torch.ones(3, width + 1)), None, golden.plan)


def test_a_text_without_its_encoder_is_told(fixtures):
    text = fixtures["llamagen-t2i"].family.text
    assert text.encode(" ").features is None  # stands for the unconditional, needs no encoder
    with pytest.raises(UserError, match=r"image tokenizer: found .* text encoder: MISSING.*flan-t5-xl"):
        text.encode("a fox")
