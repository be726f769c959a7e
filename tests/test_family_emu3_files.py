"""Emu3: its parts in files of their own, and the original tokenizer."""

import base64
import json
import shutil

import pytest
import torch
from scd_pack.scd_core.checkpoint import Source, save_safetensors
from scd_pack.scd_core.errors import UserError
from scd_pack.scd_core.models.emu3_text import SETTINGS
from scd_pack.scd_core.models.family import Size
from scd_pack.scd_core.models.load import open_model
from scd_pack.scd_core.models.tiktoken_file import TiktokenTokenizer
from scd_tests.chameleon_files import models, save_weights, tensors_of
from scd_tests.emu3_files import (
    CODES,
    COLS,
    HUB,
    PIXELS,
    ROWS,
    WANT,
    lay_out,
    ranks,
    vision_names,
    vocabulary,
    write_tiktoken,
)

__all__ = ["models"]  # a fixture


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
