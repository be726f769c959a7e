"""Cosmos-1.0-Autoregressive: the golden numbers through the public road, frames to go on from, texts."""

import json

import pytest
import torch
from safetensors.torch import load_file
from scd_pack.scd_core.errors import UserError
from scd_pack.scd_core.generate import Request, generate
from scd_pack.scd_core.law import LawSettings, token_law
from scd_pack.scd_core.models.load import load_model, open_model
from scd_pack.scd_core.models.session import Session
from scd_pack.scd_core.prompt import Prompt
from scd_pack.scd_core.text_features import features_prompt
from scd_tests.cosmos_files import GOLDEN, lay_out
from scd_tests.test_t5 import add_tokenizer, t5_folder

MODELS = ("cosmos-ar-base", "cosmos-ar-v2w", "cosmos-ar-yarn")
LOGITS = 2e-4
GARBAGE = 5


class Fixture:
    """A loaded fixture and its numbers."""

    def __init__(self, name, place):
        self.want = load_file(GOLDEN / name / "expected.safetensors")
        self.meta = json.loads((GOLDEN / name / "meta.json").read_text(encoding="utf-8"))
        self.model = load_model(lay_out(name, place), "fp32")
        self.decoder, self.family = self.model.decoder, self.model.family
        if "context" in self.want:
            self.family.text_slots = self.want["context"].shape[1]
        self.plan = self.family.plan(self.family.sizes[0])

    def prompt(self):
        if "context" not in self.want:
            return Prompt("")
        rows = self.want["context"][0]
        return Prompt("words", features=rows[rows.ne(0).any(1)])

    def session(self, plan=None, prompt=None):
        plan = plan or self.plan
        streams = self.family.streams(prompt or self.prompt(), None, plan)
        return Session(self.decoder, self.family, plan, streams[:1], torch.full((1, plan.length), -1), 0, "cpu")

    def inputs(self, plan=None):
        """Input ids [1, 1 + N] and positions before them; the first stands for the start token."""
        n = (plan or self.plan).length
        return torch.cat([torch.zeros(1, dtype=torch.long), self.want["codes"][:n]])[None], torch.arange(-1, n)[None]

    @torch.inference_mode()
    def logits(self, plan=None, prompt=None):
        """Teacher-forced logits in one pass, a row for every token that the original reads."""
        tokens, before = self.inputs(plan)
        rows = self.session(plan, prompt).window(tokens, before, tokens.shape[1] - 1, True)[0, 0].float()
        return rows[1 if self.family.network.start is None else 0 :]

    def kept(self, grids=1):
        """The fixture's first token grids, the others to be drawn."""
        codes = self.want["codes"].view(1, self.plan.frames, self.plan.rows, self.plan.cols).clone()
        codes[:, grids:] = -1
        return codes

    def draw(self, method, kept="first", **changes):
        request = Request(**{"method": method, "frames": self.family.sizes[0].frames, **changes})
        return generate(self.decoder, self.family, self.prompt(), None, request, self.kept() if kept else None).codes


@pytest.fixture(scope="module")
def fixtures(tmp_path_factory):
    return {name: Fixture(name, tmp_path_factory.mktemp("models")) for name in MODELS}


@pytest.fixture(params=MODELS)
def golden(request, fixtures):
    return fixtures[request.param]


# --- golden numbers ---------------------------------------------------------------------------------------------------


def test_teacher_forced_logits_and_law(golden):
    logits = golden.logits()
    assert (logits - golden.want["logits"]).abs().max() < LOGITS
    own = golden.family.defaults
    assert (own.temperature, own.top_k, own.top_p, own.cfg) == (1.0, 0, golden.meta["top_p"], 1.0)
    law = LawSettings(own.temperature, own.top_k, own.top_p, own.cfg)
    assert (token_law(logits[None, None], law)[0].exp() - golden.want["probs_top_p"]).abs().max() < 1e-4


@pytest.mark.parametrize("method, window", [("autoregressive", 0), ("seed-exact", 5), ("jacobi", 16)])
def test_greedy_codes_behind_the_given_grid(golden, method, window):
    codes = golden.draw(method, window=window, temperature=0)
    assert torch.equal(codes.flatten(), golden.want["greedy_codes"])


@pytest.mark.parametrize("width", [1, 3, 16])
@torch.inference_mode()
def test_windows_with_rollback_give_the_same_logits(golden, width):
    tokens, before = golden.inputs()
    session, found = golden.session(), []
    for start in range(0, tokens.shape[1], width):
        rows = slice(start, start + width)
        ids, length = tokens[:, rows], int(before[0, rows].max()) + 1
        wrong = torch.cat([ids[:, :1], (ids[:, 1:] + GARBAGE) % golden.plan.vocab], 1)
        session.window(wrong, before[:, rows], length, start == 0)
        found.append(session.window(ids, before[:, rows], length, start == 0)[0, 0])
    found = torch.cat(found)[-len(golden.want["logits"]) :]
    assert (found - golden.want["logits"]).abs().max() < LOGITS


def test_seed_exact_draws_what_autoregressive_draws(golden):
    changes = {"seed": 11, "batch": 2}
    exact = golden.draw("seed-exact", window=6, **changes)
    assert torch.equal(exact, golden.draw("autoregressive", **changes))
    assert torch.equal(exact[:, :1], golden.kept()[:, :1].expand(2, -1, -1, -1)) and not torch.equal(exact[0], exact[1])


def test_positions(golden):
    found = golden.family.positions(golden.decoder, golden.plan, 1, "cpu")
    angles = golden.want["rope_angles"]
    rows = slice(-len(angles), None)
    assert (found.cos[rows] - angles.cos()).abs().max() < 1e-6 and (found.sin[rows] - angles.sin()).abs().max() < 1e-6
    assert torch.equal(found.cos[0], torch.ones_like(found.cos[0]))
    assert (found.absolute is None) == ("abs_pos" not in golden.want)
    if found.absolute is not None:
        assert torch.equal(found.absolute.float(), golden.want["abs_pos"])


# --- frames that a clip goes on from ----------------------------------------------------------------------------------


def test_a_shorter_clip_has_the_law_of_the_longer_ones_beginning(golden):
    short = golden.family.plan(golden.family.sizes[1])
    assert short.frames == golden.plan.frames - 1 and len(golden.family.sizes) == golden.plan.frames - 1
    logits = golden.logits(short)
    assert (logits - golden.want["logits"][: len(logits)]).abs().max() < LOGITS


@pytest.mark.parametrize("name", ["cosmos-ar-base", "cosmos-ar-yarn"])
def test_a_base_model_cannot_start_by_itself(fixtures, name):
    golden = fixtures[name]
    with pytest.raises(UserError, match=r"cannot start by itself.*VQ Encode"):
        golden.draw("seed-exact", kept=None)
    with pytest.raises(UserError, match="cannot start by itself"):
        golden.plan.fixed(2, golden.kept(0))
    assert golden.family.contexts == (1, 9)


@torch.inference_mode()
def test_nothing_sees_the_place_holder_of_a_base_model(fixtures):
    golden = fixtures["cosmos-ar-base"]
    table = golden.decoder.embed.embed_tokens.weight
    kept = table[0].clone()
    before = golden.logits()
    assert 0 not in golden.want["codes"], "the fixture's clip uses the token of the place-holder"
    try:
        table[0] = 100.0
        assert torch.equal(golden.logits(), before)
    finally:
        table[0] = kept


def test_a_video2world_model_has_a_start_token(fixtures):
    golden = fixtures["cosmos-ar-v2w"]
    (stream, _) = golden.family.streams(golden.prompt(), None, golden.plan)
    assert stream.ids.tolist() == [golden.meta["bov_id"]] and stream.mask is None
    drawn = golden.draw("seed-exact", kept=None, window=4)
    assert drawn.shape == (1, 3, 2, 3) and 0 <= int(drawn.min()) <= int(drawn.max()) < golden.plan.vocab


def test_drawn_codes_become_frames(fixtures):
    golden = fixtures["cosmos-ar-base"]
    size = golden.family.sizes[0]
    frames = golden.model.codec.decode_clip(golden.draw("seed-exact")[0])
    assert tuple(frames.shape) == (size.frames, size.height, size.width, 3)


# --- texts ------------------------------------------------------------------------------------------------------------


def test_texts_are_filled_up_with_rows_of_zeros_that_are_seen(fixtures):
    golden = fixtures["cosmos-ar-v2w"]
    stream = golden.family.streams(golden.prompt(), None, golden.plan)[0]
    assert torch.equal(stream.context[None], golden.want["context"]) and stream.mask is None
    slots = golden.family.text_slots
    try:
        golden.family.text_slots = 5  # without its two rows of zeros, which only their sum in the softmax shows
        away = (golden.logits() - golden.want["logits"]).abs().max()
    finally:
        golden.family.text_slots = slots
    assert abs(float(away) - golden.meta["sensitivity"]["dropping the two zero context rows"]) < 1e-3


def test_features_of_a_host(fixtures):
    family = fixtures["cosmos-ar-v2w"].family
    features = torch.zeros(1, 512, 40)
    features[0, :3] = 1.0
    prompt = features_prompt(family, features)
    stream = family.streams(prompt, None, None)[0]
    assert stream.context.shape == (family.text_slots, 40)
    assert stream.context.ne(0).any(1).tolist() == [True] * 3 + [False] * 4
    with pytest.raises(UserError, match=r"64 wide, Cosmos video2world reads 40.*type cosmos"):
        features_prompt(family, torch.ones(1, 4, 64))
    with pytest.raises(UserError, match=r"text features \[tokens, 40\], these are \[4, 64\]"):
        family.streams(Prompt("x", features=torch.ones(4, 64)), None, None)
    with pytest.raises(UserError, match="reads words and no CONDITIONING"):
        features_prompt(fixtures["cosmos-ar-base"].family, features)


def test_a_text_that_nobody_read(fixtures):
    family = fixtures["cosmos-ar-v2w"].family
    assert not family.streams(Prompt(" "), None, None)[0].context.any(), "no text is a text of zeros"
    with pytest.raises(UserError, match=r"text encoder: MISSING, .* t5-11b.*conditioning of Text Encode"):
        family.text.encode("a fox on snow")
    with pytest.raises(UserError, match="wire AR_TEXT"):
        family.streams(Prompt("a fox on snow"), None, None)


def test_base_models_say_that_they_read_no_prompts(fixtures):
    text = fixtures["cosmos-ar-base"].family.text
    assert text.encode("  ").notes == ()
    (note,) = text.encode("a fox").notes
    assert "reads no prompts" in note and "frames" in note


def test_text_encoder_beside_the_model(place):
    folder = lay_out("cosmos-ar-v2w", place)
    t5, _ = t5_folder(place / "google-t5" / "t5-11b", d_model=40, feed_forward_proj="relu")
    add_tokenizer(t5)
    family = open_model(folder).family
    prompt = family.text.encode("red fox")
    assert prompt.features.shape == (3, 40)  # with the end token
    written, small = family.text.ids("Red  fox"), family.text.ids("red fox")
    assert written != small, "texts go in as they are written"
    context = family.streams(prompt, None, None)[0].context
    assert context.shape == (512, 40) and torch.equal(context[:3], prompt.features) and not context[3:].any()


def test_text_encoder_of_another_width(place):
    folder = lay_out("cosmos-ar-v2w", place)
    t5_folder(folder / "t5-11b")
    with pytest.raises(UserError, match="24 wide, the model reads 40: use google-t5/t5-11b"):
        open_model(folder)
