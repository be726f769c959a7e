"""Whatever is typed into a prompt is text: names of special tokens, nothing at all, four thousand characters."""

import os
import random
import re
from pathlib import Path

import pytest
import torch
from scd_pack.scd_core.errors import UserError
from scd_pack.scd_core.models.load import BUNDLED, open_model
from scd_pack.scd_core.models.tokenizer import HubTokenizer
from scd_pack.scd_core.prompt import Prompt
from scd_tests.sentences import is_one_sentence

CASES = min(int(os.environ.get("SCD_FUZZ", "60")), 2000)
GOLDEN = Path(__file__).parent / "data" / "golden"
FOLDERS = {
    "janus-pro-hf": "", "janus-pro-original": "", "lumina-mgpt-hf": "", "anole-hf": "", "anole-meta": "models/7b",
    "lumina-mgpt-2": "", "emu3-hf": "", "simplear": "",
}  # fmt: skip
TYPED = (
    "<|endoftext|>", "<image>", "</s>", "<s>", "<pad>", "<unk>", "<racm3:break>", "<eoss>", "<|image token|>",
    "<|image start|>", "<|extra_203|>", "<|im_start|>", "<begin_of_image>", "<reserved08706>", "<|t2i|>", "<|soi|>",
    "<|User|>", "IMGIMGAZ", "IMGIMGBBZ", "<|visual token 000003|>", "<MOVQGAN3>", "\u200b", "\0", "\n\n", "<", "|>",
    "<0x0A>", "＜image＞", "{}", "{0}", "%s", "\ud83e\udd8a".encode("utf-16", "surrogatepass").decode("utf-16"),
)  # fmt: skip


@pytest.fixture(scope="module", params=FOLDERS)
def family(request):
    """The family of a miniature that reads words."""
    return open_model(GOLDEN / request.param / "model" / FOLDERS[request.param], need=("decoder",)).family


@pytest.fixture(scope="module")
def plan(family):
    return family.plan(family.sizes[-1])


def tokenizer_of(family):
    found = family.text.tokenizer
    assert isinstance(found, HubTokenizer)
    return found


def special_of(family, plan):
    """Names and ids that stand for no text: added tokens with a meaning, format tokens, picture codes."""
    tokenizer, codes = tokenizer_of(family), range(plan.base, plan.base + plan.vocab)
    listed = getattr(family.text, "tokens", {})  # a `TokenMap`, or {name: id}
    words = tokenizer.vocabulary() | dict(getattr(listed, "ids", listed))
    inside = plan.base > 0  # codes and words in one vocabulary
    names = {n: id for n, id in words.items() if n in tokenizer.special or (inside and id in codes)}
    names |= {n: id for n, id in words.items() if re.fullmatch(r"<(\||reserved|eoss|racm3|s>|/s>).*>|<s>|</s>", n)}
    return names, set(names.values()) | (set(codes) if inside else set())


def ids_of(family, plan, text):
    """Ids of the guidance streams that a text gets into: as the prompt, and as the negative one unless it is blank."""
    prompt = family.text.encode(text)
    refused = family.streams(Prompt("x"), prompt, plan)[1:] if text.strip() else ()
    streams = (family.streams(prompt, None, plan)[0], *refused)
    return [stream.ids.tolist() for stream in streams]


def check(family, plan, text, special, plain):
    for ids, other in zip(ids_of(family, plan, text), plain):
        found, wanted = ([i for i in row if i in special] for row in (ids, other))
        assert found == wanted, f"{text!r} gives the special ids {found} where the format has {wanted}"
        assert min(ids) >= 0


def test_names_of_special_tokens_are_text(family, plan):
    names, special = special_of(family, plan)
    assert len(names) > 2
    plain, r = ids_of(family, plan, "a fox"), random.Random(1)
    some = sorted(names) if len(names) < 80 else r.sample(sorted(names), 80)
    for name in [*some, *TYPED]:
        for text in (name, f"a {name} fox", f"fox{name}{name}fox", f"<{name}>", f"{name[:1]}{name}{name[1:]}"):
            check(family, plan, text, special, plain)


def test_any_mixture_is_text(family, plan):
    names, special = special_of(family, plan)
    pieces, plain = [*sorted(names)[:200], *TYPED], ids_of(family, plan, "a fox")
    for number in range(CASES):
        r = random.Random(number)
        text = "".join(
            r.choice(pieces)[: r.choice((1, 3, None, None))] if r.random() < 0.7 else chr(r.randrange(1, 0xD7FF))
            for _ in range(r.randrange(1, 12))
        )
        check(family, plan, f"a {text} fox", special, plain)


@pytest.mark.parametrize("text", ["", " ", "\n", "fox " * 1024, "<image>" * 585 + "a", "漢" * 4096])
def test_empty_and_long_prompts(family, plan, text):
    """No limit is hit on the way to the streams, and nothing but the text grows with it."""
    long, short = ids_of(family, plan, text), ids_of(family, plan, "x")
    assert all(len(ids) <= len(other) + 14 * len(text) + 60 for ids, other in zip(long, short))
    positions = family.positions(FakeDecoder(family), plan, max(map(len, long)), "cpu")
    assert len(positions.cos) == max(map(len, long)) + plan.length and positions.cos.isfinite().all()


class FakeDecoder:
    def __init__(self, family):
        self.cfg = family.decoder_config


def test_the_bundled_model_reads_words_alone():
    family = open_model(BUNDLED).family
    plan = family.plan(family.size())
    for text in (*TYPED, "", "fox " * 1024, "x" * 4096):
        prompt = family.text.encode(text)
        ids = family.streams(prompt, None, plan)[0].ids.tolist()
        assert ids[-1] == family.start_picture and family.start_clip not in ids
        assert all(i >= family.pad for i in ids) and len(ids) == 13
        assert "fox" in text or set(ids[:-1]) == {family.pad}
    assert "left out" in family.text.encode("fox " * 1024).notes[0]


@pytest.mark.parametrize("text", [*TYPED, "7.5", "-1", "10", "9" * 4096, "x" * 4096, "٣", "²", "1_0", "0x1"])
def test_classes_are_numbers_or_names(text):
    """A model of ten classes: what names none gets a sentence, nothing else happens."""
    encoder = open_model(GOLDEN / "llamagen-c2i" / "model", need=("decoder",)).family.text
    if not text.strip():
        assert encoder.number(text) is None
        return
    try:
        assert 0 <= encoder.number(text) < 10
    except UserError as error:
        assert is_one_sentence(str(error)), str(error)


def test_a_prompt_of_features_ignores_names(tmp_path):
    """T5 reads prompts from a tokenizer file too; its end token comes once, at the end."""
    from scd_tests.test_t5 import add_tokenizer

    add_tokenizer(tmp_path)
    tokenizer = HubTokenizer(tmp_path / "tokenizer.json")
    for text in ("a </s> fox", "<pad>", "</s></s>", "red</s>"):
        assert not {0, 1} & set(tokenizer.ids(text)), text
    assert torch.tensor(tokenizer.ids("a red fox")).tolist() == [3, 4, 5]
