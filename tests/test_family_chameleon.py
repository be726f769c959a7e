"""Lumina-mGPT and Anole: golden numbers by the public road, layouts, sizes and prompts."""

import copy
import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from scd_pack.scd_core.checkpoint import save_safetensors
from scd_pack.scd_core.errors import UserError
from scd_pack.scd_core.generate import Request, generate
from scd_pack.scd_core.law import LawSettings, guide, token_law
from scd_pack.scd_core.models.chameleon import AnoleFamily, LuminaFamily, is_anole, refuse_plain
from scd_pack.scd_core.models.family import Size
from scd_pack.scd_core.models.load import load_model, open_model
from scd_pack.scd_core.models.session import Session
from scd_pack.scd_core.prompt import Prompt
from scd_tests.chameleon_files import ANOLE, GOLDEN, LUMINA, VQ, lay_out, models, save_weights, tensors_of

__all__ = ["models"]  # a fixture
LOGITS, PIXELS = 2e-4, 1e-4  # the fixtures' own limits in fp32


class Fixture:
    """A loaded fixture and its numbers; the Lumina ones find their image tokenizer in the folder beside."""

    def __init__(self, name, dtype="fp32"):
        self.want = load_file(GOLDEN / name / "expected.safetensors")
        self.meta = json.loads((GOLDEN / name / "meta.json").read_text(encoding="utf-8"))
        self.model = load_model(GOLDEN / name / "model", dtype)
        self.decoder, self.family = self.model.decoder, self.model.family
        height, width = self.meta.get("image_px", (0, 0))
        self.size = self.family.size(width, height)
        self.plan = self.family.plan(self.size)
        self.prompt = self.family.text.encode(self.meta["prompt"])
        self.streams = list(self.family.streams(self.prompt, None, self.plan))

    def session(self):
        free = torch.full((1, self.plan.length), -1)
        return Session(self.decoder, self.family, self.plan, self.streams, free, 0, "cpu")

    def inputs(self):
        """Input ids [1, N] and positions before them for teacher forcing."""
        ids, n = self.want["image_seq_ids"], self.plan.length
        return torch.cat([ids[:1], ids[: n - 1]])[None], torch.arange(n)[None] - 1

    def logits(self):
        """Teacher-forced logits [2, N, V] in one pass."""
        tokens, before = self.inputs()
        return self.session().window(tokens, before, self.plan.length - 1, True)[0].float()

    def expected(self, stream):
        """The fixture's logits [N, V], picture codes only."""
        want, plan = self.want[f"logits_{stream}"][: self.plan.length], self.plan
        return want if want.shape[1] == plan.vocab else want[:, plan.base : plan.base + plan.vocab]

    def draw(self, method, **changes):
        request = Request(method=method, width=self.size.width, height=self.size.height, **changes)
        return generate(self.decoder, self.family, self.prompt, None, request).codes


@pytest.fixture(scope="module")
def fixtures():
    """name -> `Fixture`, each loaded once."""
    loaded = {}

    def get(name):
        if name not in loaded:
            loaded[name] = Fixture(name)
        return loaded[name]

    return get


@pytest.fixture(params=LUMINA + ANOLE)
def golden(request, fixtures):
    return fixtures(request.param)


# golden numbers -----------------------------------------------------------------------------------------------------


def test_prompt_ids(golden):
    for stream, name in zip(golden.streams, ("cond", "uncond")):
        assert torch.equal(stream.ids, golden.want[f"prompt_ids_{name}"])
        assert stream.ids.tolist().count(golden.family.tokens["<s>"]) <= 1


def test_token_sequence(golden):
    codes = golden.want["codes"].view(1, 1, golden.plan.rows, golden.plan.cols)
    sequence = golden.plan.fixed(1, codes)[0].tolist() + list(golden.family.ending)
    assert sequence == golden.want["image_seq_ids"].tolist()
    assert torch.equal(golden.plan.codes(torch.tensor(sequence[: golden.plan.length])[None]), codes)


@torch.inference_mode()
def test_teacher_forced_logits(golden):
    logits = golden.logits()
    for row, name in enumerate(("cond", "uncond")):
        assert (logits[row] - golden.expected(name)).abs().max() < LOGITS
    scale = golden.meta.get("cfg_scale", golden.meta.get("cfg_scale_text"))
    assert golden.family.defaults.cfg == scale
    assert (guide(logits[None], scale)[0] - golden.want["cfg_logits"][: golden.plan.length]).abs().max() < LOGITS


@pytest.mark.parametrize("name", ANOLE)
@torch.inference_mode()
def test_law_of_anole(fixtures, name):
    golden, own = fixtures(name), fixtures(name).family.defaults
    law = LawSettings(own.temperature, own.top_k, own.top_p, own.cfg)
    assert (token_law(golden.logits()[None], law)[0].exp() - golden.want["probs"]).abs().max() < 1e-4


@pytest.mark.parametrize("width", [1, 3, 16])
@torch.inference_mode()
def test_windows_with_rollback_give_the_same_logits(golden, width):
    tokens, before = golden.inputs()
    session, found, plan = golden.session(), [], golden.plan
    for start in range(0, plan.length, width):
        rows = slice(start, start + width)
        length, ids = int(before[0, rows].max()) + 1, tokens[:, rows]
        wrong = torch.cat([ids[:, :1], plan.base + (ids[:, 1:] + 5) % plan.vocab], 1)
        session.window(wrong, before[:, rows], length, start == 0)
        found.append(session.window(ids, before[:, rows], length, start == 0)[0])
    found = torch.cat(found, 1)
    for row, name in enumerate(("cond", "uncond")):
        assert (found[row] - golden.expected(name)).abs().max() < LOGITS


@pytest.mark.parametrize("method, window", [("autoregressive", 0), ("seed-exact", 9), ("jacobi", 16)])
def test_greedy_codes(golden, method, window):
    assert torch.equal(golden.draw(method, window=window, temperature=0).flatten(), golden.want["greedy_codes"])


def test_seed_exact_draws_what_autoregressive_draws(golden):
    """Windows that end inside, at and behind a row; the line tokens between rows are given."""
    want = golden.draw("autoregressive", seed=11, batch=2)
    for window in (golden.plan.cols, golden.plan.cols + 1, 17):
        assert torch.equal(golden.draw("seed-exact", seed=11, batch=2, window=window), want)


@pytest.mark.parametrize("name", ["chameleon-tokenizer", *ANOLE])
@torch.inference_mode()
def test_codec(fixtures, name):
    golden = fixtures(LUMINA[0] if name == "chameleon-tokenizer" else name)
    want, codec = load_file(GOLDEN / name / "expected.safetensors"), golden.model.codec
    rows, cols = golden.plan.rows, golden.plan.cols
    assert (codec.decode_raw(want["codes"].view(1, rows, cols)) - want["pixels"]).abs().max() < PIXELS
    assert codec.cfg.encoder == ("encoder_codes" in want)
    if codec.cfg.encoder:
        assert torch.equal(codec.encode(want["picture"].permute(0, 2, 3, 1) / 2 + 0.5).flatten(), want["encoder_codes"])


@torch.inference_mode()
def test_bf16_computation(fixtures):
    golden, exact = Fixture(LUMINA[0], "bf16"), fixtures(LUMINA[0])
    want = golden.want["logits_cond_bf16_compute"][: golden.plan.length, golden.plan.base :][:, : golden.plan.vocab]
    typical = (want - exact.expected("cond")).abs().mean()
    assert 0 < (golden.logits()[0] - want).abs().mean() < 2 * typical


def test_the_head_holds_picture_codes_alone(golden):
    assert len(golden.decoder.lm_head.weight) == golden.plan.vocab == golden.meta["codebook"]


# layouts ------------------------------------------------------------------------------------------------------------


def as_meta(tensors, heads, kv_heads):
    """transformers' names and half-split rotary -> Meta's names and adjacent pairs (one q and k norm for all heads)."""
    names = {
        "model.embed_tokens": "tok_embeddings", "lm_head": "output", "model.": "", "self_attn": "attention",
        "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3", "mlp.down_proj": "feed_forward.w2",
        "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm", "_norm.": "_normalization.",
    }  # fmt: skip
    out = {"rope.freqs": torch.ones(3)}
    for key, tensor in tensors.items():
        head_norm = "q_norm" in key or "k_norm" in key
        for old, new in names.items():
            if old != "_norm." or head_norm:
                key = key.replace(old, new)
        for part, count in (("q", heads), ("k", kv_heads)):
            if f"attention.{part}_proj" in key:
                tensor = tensor.unflatten(0, (count, 2, -1)).transpose(1, 2).flatten(0, 2)
        for part in "qkvo":
            key = key.replace(f"attention.{part}_proj", f"attention.w{part}")
        out[key] = tensor.view(2, -1).t().flatten() if head_norm else tensor
    return {key: tensor.contiguous() for key, tensor in out.items()}


@torch.inference_mode()
def causal_logits(model, ids):
    """Logits [N, V] of a row of token ids, without any cache."""
    plan = model.family.plan(model.family.sizes[-1])
    positions = model.family.positions(model.decoder, plan, len(ids), "cpu")
    rows = positions.ready(model.decoder.cfg.rope_pairing, torch.float32).rows(torch.arange(len(ids))[None])
    return model.decoder.logits(model.decoder.hidden(model.decoder.embed.image(ids, torch.float32)[None], rows))[0]


def test_metas_layout_holds_the_same_network(models, fixtures):
    tensors, cfg = tensors_of(GOLDEN / LUMINA[0] / "model"), fixtures(LUMINA[0]).decoder.cfg
    weights, settings = models / "anole" / "models" / "7b", {"dim": cfg.dim, "n_heads": cfg.heads, "norm_eps": cfg.eps}
    weights.mkdir(parents=True)
    torch.save(as_meta(tensors, cfg.heads, cfg.kv_heads), weights / "consolidated.pth")
    (weights / "params.json").write_text(json.dumps({"model": settings}), encoding="utf-8")
    shutil.copytree(VQ / "model", models / "anole" / "tokenizer")
    model = load_model(models / "anole", "fp32")
    assert isinstance(model.family, AnoleFamily) and model.decoder.cfg.rope_pairing == "pair"
    assert model.family.sizes == (Size(64, 64),)  # as vqgan.yaml says
    ids = torch.randperm(300, generator=torch.Generator().manual_seed(3))[:40]
    difference = causal_logits(model, ids) - causal_logits(fixtures(LUMINA[0]).model, ids)
    assert difference.abs().max() < 2e-5


def test_a_tied_head_is_read_from_the_embedding(models):
    folder = lay_out(LUMINA[0], models / "lumina", tie_word_embeddings=True)
    tensors = tensors_of(folder)
    del tensors["lm_head.weight"]
    save_weights(folder, tensors)
    model = load_model(folder, "fp32")
    assert torch.equal(model.decoder.lm_head.weight, tensors["model.embed_tokens.weight"][4:68].float())


def test_settings_count(models, fixtures):
    """What no tensor tells comes from the configuration, under its old and its new name."""
    ids, want = torch.arange(20, 60), None
    changes = [{}, {"rms_norm_eps": 1e-2}, {"swin_norm": True}]
    changes.append({"rope_theta": None, "rope_parameters": {"rope_theta": 50}})
    changes.append({"rope_scaling": {"type": "linear", "factor": 2}})
    for i, change in enumerate(changes):
        found = causal_logits(load_model(lay_out(LUMINA[0], models / f"lumina{i}", **change), "fp32"), ids)
        want = found if want is None else want
        assert (i == 0) == torch.equal(found, want)


@pytest.mark.parametrize(
    "change, told",
    [
        ({"num_attention_heads": 8}, "says num_attention_heads 8, the weights say 4"),
        ({"hidden_size": 64}, "says hidden_size 64, the weights say 48"),
        ({"num_hidden_layers": 3}, r"13 of 42 needed weights are missing \('model.layers.2"),
        ({"num_hidden_layers": 1}, r"13 are unexpected \('model.layers.1"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "a rotary of kind 'dynamic'"),
    ],
)
def test_configuration_of_another_model_is_refused(models, change, told):
    with pytest.raises(UserError, match=told):
        open_model(lay_out(LUMINA[0], models / "lumina", **change))


@pytest.mark.parametrize("change", ["missing", "extra", "extra in the codec"])
def test_every_name_counts(models, change):
    folder = lay_out(LUMINA[0], models / "lumina", vq=False)
    tensors, codec = tensors_of(folder), tensors_of(VQ / "model" / "vqgan.ckpt")
    codec = {key: tensor for key, tensor in codec.items() if not key.startswith("loss.")}
    key = "model.layers.1.mlp.bias"
    if change == "missing":
        key = "model.layers.1.mlp.up_proj.weight"
        del tensors[key]
    else:
        (codec if "codec" in change else tensors)[key] = torch.zeros(3)
    save_weights(folder, tensors)
    save_safetensors(codec, folder / "vqgan.safetensors")
    with pytest.raises(UserError, match=rf"1 (are unexpected|of 29 needed weights are missing) \('{key}'\)"):
        open_model(folder)


class Named:
    """What detection looks at."""

    def __init__(self, keys, root="model", file="model.safetensors", **config):
        self.root, self.files, self.config, self._keys = Path(root), (Path(root) / file,), config, keys

    def keys(self):
        return self._keys


HUB_KEYS = ["model.layers.0.self_attn.q_norm.bias"]
INSIDE = [*HUB_KEYS, "model.vqmodel.quantize.embedding.weight"]


@pytest.mark.parametrize(
    "source, anole",
    [
        (Named(["layers.0.attention.q_normalization.weight"]), True),
        (Named(INSIDE, architectures=["ChameleonXLLMXForConditionalGeneration"]), False),
        (Named(INSIDE, root="anole", mask_image_logits=False), False),
        (Named(HUB_KEYS, root="Anole-7b-v0.1-hf"), True),
        (Named(HUB_KEYS, file="anole_fp8.safetensors"), True),
        (Named(INSIDE, root="Lumina-mGPT-7B-768"), False),
        (Named(INSIDE), True),
        (Named(HUB_KEYS), False),
        (Named(INSIDE, scd={"family": "Lumina-mGPT"}), False),
        (Named(HUB_KEYS, scd={"family": "Anole"}), True),
    ],
)
def test_which_family(source, anole):
    assert is_anole(source) == anole == AnoleFamily.detect(source)
    assert LuminaFamily.detect(source) != anole


META_KEYS = ["layers.0.attention.q_normalization.weight"]
RELEASE = {"root": "models/7b", "file": "consolidated.pth"}


@pytest.mark.parametrize(
    "source",
    [
        Named(INSIDE, root="chameleon-7b"),
        Named(HUB_KEYS, root="Chameleon_7B_mGPT", architectures=["ChameleonXLLMXForConditionalGeneration"]),
        Named(HUB_KEYS, root="Meta", file="chameleon-7b-fp8.safetensors"),
        Named(META_KEYS, **{**RELEASE, "root": "chameleon-7b-release/models/7b"}),
    ],
)
def test_plain_chameleon_is_refused_by_name(source):
    with pytest.raises(UserError, match=r"is called Chameleon, which reads pictures .* use Anole 7B or Lumina-mGPT"):
        refuse_plain(source)


@pytest.mark.parametrize(
    "source, warned",
    [
        (Named(INSIDE), True),
        (Named(META_KEYS, **RELEASE), True),
        (Named([*INSIDE, "model.vqmodel.decoder.conv_in.weight"]), False),  # Chameleon had no decoder inside
        (Named(META_KEYS, **{**RELEASE, "root": "Anole-7b-v0.1/models/7b"}), False),
        (Named(INSIDE, root="chameleon-anole"), False),
        (Named(INSIDE, root="mine", _name_or_path="leloy/Anole-7b-v0.1-hf"), False),
        (Named(INSIDE, root="mine", _name_or_path="facebook/chameleon-7b"), True),  # Anole, too, may come from there
        (Named(HUB_KEYS, root="mine"), False),  # taken for Lumina-mGPT
        (Named(INSIDE, root="chameleon", scd={"family": "Anole"}), False),
    ],
)
def test_what_may_be_plain_chameleon_is_warned_of(source, warned, caplog):
    refuse_plain(source)
    assert ("unable to draw" in caplog.text) == warned


def test_plain_chameleon_is_refused_on_the_way_in(models):
    with pytest.raises(UserError, match="is called Chameleon"):
        open_model(lay_out("anole-hf", models / "chameleon-7b", vq=False))


def test_other_models_are_not_taken_for_it():
    for key in ("model.layers.0.self_attn.q_norm.weight", "layers.0.attention.q_norm.weight", "decoder.conv_in.weight"):
        assert not LuminaFamily.detect(Named([key])) and not AnoleFamily.detect(Named([key]))


# sizes --------------------------------------------------------------------------------------------------------------


def full_sized(family, side):
    """The fixture's family as a release of this target: all size tokens are there."""
    family = copy.copy(family)
    family.units, family.target = {n: 5000 + n for n in range(1, 200)}, side // 32
    family.sizes = family._crops()
    return family


def trained_crops(patches, ratio=4.0):
    """The shapes that the authors cropped their pictures to: from the widest to the highest, along the area's edge."""
    found, width, height = [], patches, 1
    while width > 0:
        if max(width, height) / min(width, height) <= ratio:
            found.append((width, height))
        if (height + 1) * width <= patches:
            height += 1
        else:
            width -= 1
    return found


@pytest.mark.parametrize("side", [512, 768, 1024])
def test_every_crop_size_has_a_consistent_plan(fixtures, side):
    golden = fixtures(LUMINA[0])
    family, line, units = full_sized(golden.family, side), golden.meta["newline_id"], (side // 32) ** 2
    asked = {(s.width // 32, s.height // 32) for s in family.sizes}
    pairs = [(w, h) for w in range(1, 99) for h in range(1, 99)]
    assert asked == {(w, h) for w, h in pairs if w * h <= units and max(w, h) <= 4 * min(w, h)}
    assert asked >= set(trained_crops(units))
    assert len(asked) == len(family.sizes) and family.size() == Size(side, side)
    for size in family.sizes:
        plan = family.plan(size)
        rows, cols = size.height // 16, size.width // 16
        assert (plan.rows, plan.cols, plan.length) == (rows, cols, rows * (cols + 1))
        ends = torch.arange(1, rows + 1) * (cols + 1) - 1
        assert torch.equal((plan.forced == line).nonzero()[:, 0], ends) and (plan.forced != line).sum() == rows * cols
        assert (plan.cells[ends] == -1).all()
        assert torch.equal(plan.cells[plan.cells >= 0], torch.arange(rows * cols))
        head = [golden.meta["boi_id"], 5000 + size.height // 32, 5000 + size.width // 32]
        assert family.streams(Prompt("x"), None, plan)[1].ids.tolist() == head


@pytest.mark.parametrize(
    "folder, config, side",
    [
        ("Lumina-mGPT-7B-1024", {}, 1024),
        ("Lumina-mGPT-34B-512", {}, 512),
        ("lumina", {"_name_or_path": "Alpha-VLLM/Lumina-mGPT-7B-512"}, 512),
        ("lumina", {}, 768),
        ("lumina", {"max_position_embeddings": 2048}, 512),
        ("lumina-512", {"scd": {"side": 1024}}, 1024),
    ],
)
def test_target_of_a_release(models, folder, config, side):
    family = open_model(lay_out(LUMINA[0], models / folder, **config)).family
    assert family.target == side // 32
    assert family.marks == {"family": "Lumina-mGPT", "side": side}
    assert family.sizes[0] == Size(320, 320)  # the miniature has no tokens for more


def test_sizes_are_filled_in_or_refused_with_the_nearest(fixtures):
    family = full_sized(fixtures(LUMINA[0]).family, 768)
    assert family.size(1024) == Size(1024, 576) and family.size(0, 768) == Size(768, 768)
    assert family.size(768, 512) == Size(768, 512)
    for asked, told in (
        ((1000, 500), "cannot draw 1000x500: sides are multiples of 32 pixels.*the area is that of 768x768 at most.*"
         "nearest size is 992x512"),
        ((2048, 2048), "nearest size is 768x768"),
        ((1024, 64), "no side is over 4 times the other; the nearest size is "),
        ((0, 64, 9), "draws pictures, not clips"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=told):
            family.size(*asked)


def test_anole_draws_one_size(fixtures):
    family = fixtures("anole-hf").family
    assert family.size() == Size(8, 8)
    with pytest.raises(UserError, match="Anole cannot draw 768xany: choose one of 8x8"):
        family.size(768)


# prompts ------------------------------------------------------------------------------------------------------------


def test_names_of_special_tokens_are_plain_text_for_users(golden):
    special = [golden.meta[name] for name in ("boi_id", "eoi_id", "sep_id")]
    text = golden.family.text.encode("a <racm3:break> <reserved08706><eoss> <s> cat")
    cond = golden.family.streams(text, None, golden.plan)[0].ids.tolist()
    assert [cond.count(id) for id in special] == [1, 0, 1] and cond.count(0) == 1


def test_negative_prompts_take_the_place_of_the_unconditional_stream(golden):
    negatives = [None, *map(Prompt, ("", " ", golden.prompt.text))]
    streams = [golden.family.streams(golden.prompt, negative, golden.plan) for negative in negatives]
    assert all(torch.equal(streams[0][1].ids, other[1].ids) for other in streams[1:3])
    assert torch.equal(streams[3][1].ids, streams[3][0].ids)


# transformers -------------------------------------------------------------------------------------------------------


@pytest.mark.slow  # to import transformers
@pytest.mark.parametrize("swin, kv_heads, inside", [(False, 4, False), (True, 2, False), (False, 2, True)])
@torch.inference_mode()
def test_parity_with_transformers(models, swin, kv_heads, inside):
    """A random model of another size, saved by transformers itself, whose image tokenizer lacks a decoder."""
    pytest.importorskip("transformers")
    from transformers import ChameleonConfig, ChameleonForConditionalGeneration

    words = json.loads((GOLDEN / LUMINA[0] / "model" / "config.json").read_text(encoding="utf-8"))["vocabulary_map"]
    config = ChameleonConfig(
        vocab_size=378, hidden_size=64, intermediate_size=112, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=kv_heads, swin_norm=swin, vocabulary_map=words,
        vq_config={
            "embed_dim": 16, "num_embeddings": 64, "latent_channels": 16, "base_channels": 32, "resolution": 32,
        },
    )  # fmt: skip
    torch.manual_seed(swin + kv_heads)
    reference = ChameleonForConditionalGeneration(config).eval()
    for name, p in reference.named_parameters():
        noise = torch.randn_like(p)
        p.copy_(0.2 * noise if p.dim() > 1 and "norm" not in name else 0.1 * noise + (not name.endswith("bias")))
    folder = models / ("anole" if inside else "lumina")
    reference.save_pretrained(folder)
    shutil.copy(GOLDEN / LUMINA[0] / "model" / "tokenizer.json", folder)
    shutil.copy(VQ / "model" / "vqgan.ckpt", folder)
    model = load_model(folder, "fp32")
    assert isinstance(model.family, AnoleFamily if inside else LuminaFamily)
    assert model.decoder.cfg.qk_norm_rows == (4, kv_heads)
    ids = torch.randint(0, 378, (50,))
    hidden = reference.model(input_ids=ids[None]).last_hidden_state[0]
    want = F.linear(hidden, reference.lm_head.weight[4:68])  # its own forward blots out picture tokens
    assert want.std() > 0.5 and (causal_logits(model, ids) - want).abs().max() < 1e-4
