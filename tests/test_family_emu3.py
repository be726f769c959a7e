"""Emu3: golden numbers, which model it is, prompts, sizes."""

from pathlib import Path

import pytest
import torch
from scd_pack.scd_core.errors import UserError
from scd_pack.scd_core.law import LawSettings, token_law
from scd_pack.scd_core.models.emu3 import Emu3Family
from scd_pack.scd_core.models.emu3_text import UNWANTED, WANTED
from scd_pack.scd_core.models.family import Size
from scd_pack.scd_core.models.load import load_model, open_model
from scd_pack.scd_core.prompt import Prompt
from scd_tests.chameleon_files import models, save_weights, tensors_of
from scd_tests.emu3_files import CODES, COLS, HUB, LOGITS, META, PIXELS, ROWS, SIZE, WANT, draw, lay_out
from scd_tests.rollback import windows

__all__ = ["models"]  # a fixture


@pytest.fixture(scope="module")
def model():
    return load_model(HUB, "fp32")


@pytest.fixture(scope="module")
def drawing(model):
    """(plan, streams) of the fixture's picture."""
    plan = model.family.plan(model.family.size(SIZE.width, SIZE.height))
    return plan, list(model.family.streams(model.family.text.encode(META["prompt"]), None, plan))


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
