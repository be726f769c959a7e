"""Emu3: golden numbers, parity with transformers in three spellings, prompts, sizes, parts, the original tokenizer."""

import base64
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
from scd_pack.scd_core.law import LawSettings, token_law
from scd_pack.scd_core.models.emu3 import Emu3Family
from scd_pack.scd_core.models.emu3_text import SETTINGS, UNWANTED, WANTED
from scd_pack.scd_core.models.family import Size
from scd_pack.scd_core.models.load import load_model, open_model
from scd_pack.scd_core.models.tiktoken_file import TiktokenTokenizer
from scd_pack.scd_core.prompt import Prompt
from scd_tests.chameleon_files import models, save_weights, tensors_of
from scd_tests.emu3_files import (
    CODES,
    GOLDEN,
    HUB,
    lay_out,
    random_codec,
    ranks,
    vision_names,
    vocabulary,
    write_original,
    write_tiktoken,
)
from scd_tests.rollback import windows

__all__ = ["models"]  # a fixture
NAME, LOGITS, PIXELS = "emu3-hf", 2e-4, 1e-4
WANT = load_file(GOLDEN / NAME / "expected.safetensors")
META = json.loads((GOLDEN / NAME / "meta.json").read_text(encoding="utf-8"))
ROWS, COLS = META["grid"]
SIZE = Size(COLS * META["vq"]["pixels_per_code"], ROWS * META["vq"]["pixels_per_code"])


@pytest.fixture(scope="module")
def model():
    return load_model(HUB, "fp32")


@pytest.fixture(scope="module")
def drawing(model):
    """(plan, streams) of the fixture's picture."""
    plan = model.family.plan(model.family.size(SIZE.width, SIZE.height))
    return plan, list(model.family.streams(model.family.text.encode(META["prompt"]), None, plan))


def draw(model, method, size=SIZE, **changes):
    request = Request(method=method, width=size.width, height=size.height, **changes)
    return generate(model.decoder, model.family, model.family.text.encode(META["prompt"]), None, request).codes


# golden numbers -----------------------------------------------------------------------------------------------------


def test_prompts_and_format(model, drawing):
    plan, streams = drawing
    for stream, name in zip(streams, ("cond", "uncond")):
        assert torch.equal(stream.ids, WANT[f"prompt_ids_{name}"])
    codes = WANT["codes"].view(1, 1, plan.rows, plan.cols)
    assert plan.fixed(1, codes)[0].tolist() + list(model.family.ending) == WANT["image_seq_ids"].tolist()
    assert [*(plan.forced >= 0).int().tolist(), 1, 1, 1] == WANT["forced"].tolist()


@pytest.mark.parametrize("width", [1, 3, 16])
def test_logits_of_both_streams_in_every_window(model, drawing, width):
    plan, streams = drawing
    found = windows(model, plan, streams, WANT["image_seq_ids"], width)
    pictures = slice(plan.base, plan.base + plan.vocab)
    assert (found[0] - WANT["logits_cond"][: plan.length, pictures]).abs().max() < LOGITS
    assert (found[1] - WANT["logits_uncond"][: plan.length]).abs().max() < LOGITS


def test_the_law_is_that_of_the_whole_vocabulary(model, drawing):
    """The original mixes log-probabilities of all words, then allows picture tokens, then takes the best k."""
    plan, _ = drawing
    cond = WANT["logits_cond"][: plan.length]
    others = torch.full_like(cond, -3.0)
    uncond = others.clone()
    pictures = slice(plan.base, plan.base + plan.vocab)
    uncond[:, pictures] = WANT["logits_uncond"][: plan.length]
    allowed = torch.zeros(cond.shape[1], dtype=torch.bool)
    allowed[pictures] = True
    settings = LawSettings(cfg=META["cfg_scale"], top_k=20, temperature=0.9)
    whole = token_law(torch.stack([cond, uncond])[None], settings, "logprobs", allowed)[0, :, pictures]
    cut = torch.stack([cond[:, pictures], uncond[:, pictures]])[None]
    found = token_law(cut, settings, model.family.guidance)[0]
    assert (found.exp() - whole.exp()).abs().max() < 1e-5
    assert model.family.guidance == "logprobs" and model.family.defaults.cfg == META["cfg_scale"]
    assert model.family.defaults.top_k == 2048 and len(model.decoder.lm_head.weight) == plan.vocab == CODES


@pytest.mark.parametrize("method, window", [("autoregressive", 0), ("seed-exact", 5), ("jacobi", 12)])
def test_greedy_codes(model, method, window):
    assert torch.equal(draw(model, method, window=window, temperature=0).flatten(), WANT["greedy_codes"])


def test_seed_exact_draws_what_autoregressive_draws(model):
    want = draw(model, "autoregressive", seed=11, batch=2)
    for window in (COLS, COLS + 1, 9):
        assert torch.equal(draw(model, "seed-exact", seed=11, batch=2, window=window), want)


@torch.inference_mode()
def test_codec(model):
    codec, codes = model.codec, WANT["codes"].view(1, ROWS, COLS)
    assert (codec.decode_raw(codes) - WANT["pixels"]).abs().max() < PIXELS
    assert (codec.decode_raw_frames(codes) - WANT["pixels_4frames"]).abs().max() < PIXELS
    assert torch.equal(codec.encode(WANT["picture"].permute(0, 2, 3, 1) / 2 + 0.5).flatten(), WANT["encoder_codes"])


# transformers -------------------------------------------------------------------------------------------------------


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


# which model it is --------------------------------------------------------------------------------------------------


class Named:
    """What detection looks at."""

    def __init__(self, lead, rows=400, extra=(), **config):
        self.root, self.config, self.rows = Path("model"), config, rows
        self.names = [f"{lead}embed_tokens.weight", f"{lead}layers.0.self_attn.q_proj.weight", *extra]

    def keys(self):
        return self.names

    def shape(self, key):
        return (self.rows, 64)


@pytest.mark.parametrize(
    "source, ours",
    [
        (Named("text_model.model."), True),
        (Named("model.text_model."), True),
        (Named("model.", 184622), True),
        (Named("model.", 32000), False),  # any other Llama
        (Named("model.", 32000, model_type="Emu3"), True),
        (Named("model.", 282926, ["model.layers.0.self_attn.q_norm.weight"], model_type="Emu3"), False),  # Emu3.5
        (Named("language_model.model.", 184622), False),
    ],
)
def test_which_family(source, ours):
    assert Emu3Family.detect(source) == ours


@pytest.mark.parametrize(
    "change, told",
    [
        ({"num_key_value_heads": 4}, "says num_key_value_heads 4, the weights say 2"),
        ({"hidden_size": 64}, "says hidden_size 64, the weights say 48"),
        ({"num_hidden_layers": 3}, r"9 of 30 needed weights are missing \('text_model\.model\.layers\.2"),
        ({"num_hidden_layers": 1}, r"9 are unexpected \('text_model\.model\.layers\.1"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "a rotary of kind 'dynamic'"),
    ],
)
def test_configuration_of_another_model_is_refused(models, change, told):
    with pytest.raises(UserError, match=told):
        open_model(lay_out(models / "emu3", text_config=change))


def test_settings_count(models, drawing):
    """What no tensor tells comes from the configuration, under its old and its new name."""
    plan, streams = drawing
    want = None
    changes = [{}, {"rms_norm_eps": 1e-2}, {"rope_theta": None, "rope_parameters": {"rope_theta": 50}}]
    changes.append({"rope_scaling": {"type": "linear", "factor": 4}})
    for i, change in enumerate(changes):
        other = load_model(lay_out(models / f"emu{i}", text_config=change), "fp32")
        found = windows(other, plan, streams, WANT["image_seq_ids"], 16)
        want = found if want is None else want
        assert (i == 0) == torch.equal(found, want)


def test_a_tied_head_is_read_from_the_embedding(models):
    folder = lay_out(models / "emu3", text_config={"tie_word_embeddings": True})
    tensors = tensors_of(folder)
    del tensors["text_model.lm_head.weight"]
    save_weights(folder, tensors)
    head = load_model(folder, "fp32").decoder.lm_head.weight
    assert torch.equal(head, tensors["text_model.model.embed_tokens.weight"][290:354])


# prompts ------------------------------------------------------------------------------------------------------------


def test_the_authors_praise_is_said_once_and_their_dislikes_give_way(model, drawing):
    plan, text = drawing[0], model.family.text
    streams = model.family.streams
    assert META["positive_suffix"] == WANTED and META["negative_prompt"] == UNWANTED
    plain, praised = (streams(Prompt(words), None, plan)[0].ids for words in ("a cat", "a cat" + WANTED))
    assert torch.equal(plain, praised)
    for negative in (None, Prompt(""), Prompt("  ")):
        assert torch.equal(streams(Prompt("x"), negative, plan)[1].ids, drawing[1][1].ids)
    own = streams(Prompt("x"), Prompt("blurry"), plan)[1].ids
    assert torch.equal(own, text.unwanted("blurry", plan.rows, plan.cols)) and len(own) < len(drawing[1][1].ids)


def test_the_pictures_size_is_said_rows_first(model):
    family = model.family
    plan = family.plan(Size(14, 6))
    ids = family.streams(Prompt("x"), None, plan)[0].ids.tolist()
    tokens = family.tokens
    between = ids[ids.index(tokens["<|image start|>"]) + 1 : -1]
    assert between == family.text.tokenizer.ids("3*7") and ids[-1] == tokens["<|image token|>"]
    assert ids[0] == tokens["<|extra_203|>"]


def test_names_of_special_tokens_are_plain_text_for_users(model, drawing):
    ids = model.family.streams(Prompt("a <|image token|> <|extra_200|> cat"), None, drawing[0])[0].ids.tolist()
    assert [ids.count(META["ids"][name]) for name in ("img", "eol", "boi", "bos")] == [1, 0, 1, 1]


# sizes --------------------------------------------------------------------------------------------------------------


def authors_grid(ratio, area, factor=8):
    """(rows, columns) by the authors' rule: both sides of the ratio scaled to the area, in tokens."""
    sides = [int(side) for side in ratio.split(":")]
    scale = (area / (sides[1] * sides[0])) ** 0.5
    return round(sides[1] * scale / factor), round(sides[0] * scale / factor)


@pytest.mark.parametrize("area", [518400, 262144])
def test_sizes_are_those_of_the_authors_program(model, area):
    family = object.__new__(Emu3Family)
    family.__dict__.update(model.family.__dict__, factor=8, area=area)
    for ratio in ("1:1", "4:3", "3:4", "3:2", "2:3", "16:9", "9:16", "2:1", "1:2", "21:9"):
        rows, cols = authors_grid(ratio, area)
        size = family.size(cols * 8, rows * 8)
        plan = family.plan(size)
        assert (plan.rows, plan.cols, plan.length) == (rows, cols, rows * (cols + 1))
        with pytest.raises(UserError, match="sides are multiples of 8 pixels, the area is that of"):
            family.size(cols * 8 + 64, rows * 8 + 64)


def test_default_sizes_and_refusals(models):
    family = open_model(lay_out(models / "emu3"), need=("decoder",)).family
    assert family.size() == family.sizes[0] == Size(720, 720)  # two pixels a code in the miniature
    assert family.size(720) == Size(720, 720) and len(set(family.sizes)) == len(family.sizes) == 9
    for asked, told in (
        ((721, 720), "cannot draw 721x720: sides are multiples of 2 pixels, the area is that of 720x720 at most; "
         "a size near to it is 720x720"),
        ((0, 99), "cannot draw anyx99"),
        ((720, 720, 4), "draws pictures, not clips: set frames to 1"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=told):
            family.size(*asked)
    smaller = open_model(lay_out(models / "stage1", image_area=512 * 512), need=("decoder",)).family
    assert smaller.size() == Size(512, 512)


# parts --------------------------------------------------------------------------------------------------------------


def split(models):
    """The fixture as two folders: the language model, and the image tokenizer beside it."""
    folder = lay_out(models / "Emu3-Gen")
    tensors = tensors_of(folder)
    codec = {key.removeprefix("vqmodel."): t for key, t in tensors.items() if key.startswith("vqmodel.")}
    save_weights(folder, {key: t for key, t in tensors.items() if not key.startswith("vqmodel.")})
    save_safetensors(codec, models / "Emu3-VisionTokenizer" / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    "place", ["Emu3-VisionTokenizer/model", "Emu3-Gen/vq/model", "vae/Emu3-VisionTokenizer", "x/emu3_vq"]
)
@torch.inference_mode()
def test_the_image_tokenizer_beside_the_language_model(models, place):
    folder = split(models)
    target = models / f"{place}.safetensors"
    target.parent.mkdir(exist_ok=True, parents=True)
    (models / "Emu3-VisionTokenizer" / "model.safetensors").rename(target)
    files = open_model(folder)
    assert files.family.parts[1].where == target
    found = files.build("codec").decode_raw(WANT["codes"].view(1, ROWS, COLS))
    assert (found - WANT["pixels"]).abs().max() < PIXELS


def test_what_is_missing_is_told_part_by_part(models):
    folder = split(models)
    shutil.rmtree(models / "Emu3-VisionTokenizer")
    told = r"language model: found in .*image tokenizer: MISSING, looked for model\.safetensors in a folder Emu3-Vision"
    with pytest.raises(UserError, match=told + r".*text tokenizer: found in"):
        open_model(folder)
    assert open_model(folder, need=("decoder",)).family.size() == Size(720, 720)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"text tokenizer: MISSING, looked for tokenizer\.json or emu3\.tiktoken in"):
        open_model(folder, need=("decoder",))


def test_an_image_tokenizer_with_other_codes_is_refused(models):
    folder = split(models)
    codec = tensors_of(models / "Emu3-VisionTokenizer")
    codec["quantize.embedding.weight"] = torch.zeros(72, 4)
    save_safetensors(codec, folder / "emu3_vq.safetensors")
    with pytest.raises(UserError, match="has 72 codes, the token map names 64"):
        open_model(folder / "model.safetensors")


def test_a_tokenizer_that_does_not_fit_is_refused(models):
    folder = lay_out(models / "emu3")
    words = json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocabulary_map"]
    lay_out(models / "other", vocabulary_map={**words, "<|extra_200|>": 279})
    with pytest.raises(UserError, match=r"belongs to another model: <\|extra_200\|> is 282, not 279"):
        open_model(models / "other")


def test_picture_tokens_must_count_up(models):
    folder = lay_out(models / "emu3")
    words = json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocabulary_map"]
    with pytest.raises(UserError, match=r"names 64 picture tokens .* do not count up"):
        open_model(lay_out(models / "other", vocabulary_map={**words, "<|visual token 000063|>": 354}))


# the original tokenizer ---------------------------------------------------------------------------------------------


def naive(piece, table):
    """tiktoken's own loop: the pair of neighbours with the lowest joint rank joins, until none has a rank."""
    parts = [bytes([byte]) for byte in piece]
    if piece in table:
        return [table[piece]]
    while len(parts) > 1:
        joint = [table.get(a + b, 1 << 30) for a, b in zip(parts, parts[1:])]
        at = joint.index(min(joint))
        if joint[at] == 1 << 30:
            break
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return [table[part] for part in parts]


def random_table(seed, size):
    """Ranks of all bytes and of random joins of earlier tokens."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(256, generator=generator).tolist()
    table = {bytes([byte]): rank for rank, byte in enumerate(order)}
    letters = [bytes([ord(c)]) for c in "abcd"]
    while len(table) < size:
        pool = letters + [t for t in table if len(t) > 1]
        a, b = (pool[int(torch.randint(0, len(pool), (), generator=generator))] for _ in "ab")
        table.setdefault(a + b, len(table))
    return table


def test_byte_pairs_are_joined_as_tiktoken_does(tmp_path):
    table = random_table(1, 340)
    file = tmp_path / "emu3.tiktoken"
    file.write_text("".join(f"{base64.b64encode(t).decode()} {rank}\n" for t, rank in table.items()), encoding="utf-8")
    tokenizer = TiktokenTokenizer(file, ["<|endoftext|>"])
    generator = torch.Generator().manual_seed(2)
    for length in range(1, 40):
        word = "".join("abcd"[i] for i in torch.randint(0, 4, (length,), generator=generator).tolist())
        assert tokenizer.ids(word) == naive(word.encode(), table)
    assert tokenizer.marked("a<|endoftext|>") == [table[b"a"], 340] and tokenizer.id("<|endoftext|>") == 340


def test_words_are_cut_as_in_the_original(tmp_path):
    write_tiktoken(tmp_path)
    tokenizer, table = TiktokenTokenizer(tmp_path / "emu3.tiktoken", [*vocabulary()]), ranks()
    pieces = ["a", " red", " fox", ",", " ", "1", "2", "3", "!", "\n\n", "don", "'t"]
    want = [id for piece in pieces for id in naive(piece.encode(), table)]
    assert tokenizer.ids("a red fox, 123!\n\ndon't") == want
    assert tokenizer.ids("cafe\u0301") == tokenizer.ids("caf\u00e9")  # composed first
    for name, id in vocabulary().items():
        assert tokenizer.id(name) == id
    assert tokenizer.size() == max(vocabulary().values()) + 1


@pytest.mark.parametrize(
    "text, told",
    [
        ("YQ== 0\nYg== x\n", "is no list of tokens and ranks"),
        ("YQ== 0\n", "has 1 tokens, 1 of 256 bytes, or gaps in its ranks"),
        ("hello\n", "is no list of tokens and ranks"),
        ("", "has 0 tokens"),
    ],
)
def test_a_damaged_list_is_told(tmp_path, text, told):
    file = tmp_path / "emu3.tiktoken"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=told):
        TiktokenTokenizer(file, [])


def originals(models):
    """The fixture's weights, widened to the original numbering, with the original release's files around them."""
    words = vocabulary()
    tensors = {key: t for key, t in tensors_of(HUB).items() if not key.startswith("vqmodel.")}
    for name in ("text_model.model.embed_tokens.weight", "text_model.lm_head.weight"):
        tensors[name] = torch.zeros(max(words.values()) + 1, tensors[name].shape[1])
    tensors = {key.replace("text_model.lm_head", "lm_head").replace("text_model.model", "model"): t
               for key, t in tensors.items()}  # fmt: skip
    folder = models / "Emu3-Gen"
    save_safetensors(tensors, folder / "model.safetensors")
    write_tiktoken(folder)
    text = json.loads((HUB / "config.json").read_text(encoding="utf-8"))["text_config"]
    told = {**text, "model_type": "Emu3", "vocab_size": max(words.values()) + 1}
    told |= {key: words[token] for key, token in SETTINGS.items()}
    (folder / "config.json").write_text(json.dumps(told), encoding="utf-8")
    return folder


def test_the_original_release_reads_its_own_tokenizer(models):
    folder, words = originals(models), vocabulary()
    family = open_model(folder, need=("decoder",)).family
    assert family.base == words["<|visual token 000000|>"] and family.decoder_config.head_rows == CODES
    assert family.parts[2].where == str(folder / "emu3.tiktoken")
    assert set(Source.open(folder).sides) == set()  # nothing is looked for before it is needed


@pytest.mark.parametrize("gone", ["emu3_vision_tokens.txt", "emu3.tiktoken", "one id"])
def test_a_tokenizer_in_parts_is_told(models, gone):
    folder = originals(models)
    if gone == "one id":
        file = folder / "config.json"
        told = json.loads(file.read_text(encoding="utf-8"))
        file.write_text(json.dumps({**told, "eol_token_id": 5}), encoding="utf-8")
        match = r"belongs to another model: <\|extra_200\|> is 483, not 5"
    else:
        (folder / gone).unlink()
        match = "needs emu3_vision_tokens.txt beside it" if "vision" in gone else "text tokenizer: MISSING"
    with pytest.raises(UserError, match=match):
        open_model(folder, need=("decoder",))
    assert len(vision_names()) == CODES + 3
