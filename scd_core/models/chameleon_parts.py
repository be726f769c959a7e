"""Where Chameleon models keep their parts: token map, text tokenizer and image tokenizer lie in one folder or in three.

Lumina-mGPT's folders hold no image tokenizer, and most of them no text tokenizer; both are Chameleon's own, which
people have from Meta's release, from a safetensors conversion or inside of an Anole folder.
"""

import re
from contextlib import suppress

from ..errors import UserError
from .chameleon_text import CODE, TokenMap
from .codec_parts import CodecFiles, around
from .parts import Part
from .tokenizer import HubTokenizer

TOKENIZERS = ("tokenizer.json", "text_tokenizer.json")
ENOUGH = 0.9  # share of equal names at which a tokenizer and a token map are of one family
GET_TEXT = "tokenizer.json of Alpha-VLLM/Lumina-mGPT-7B-768, or text_tokenizer.json of GAIR/Anole-7b-v0.1"
VQGAN = CodecFiles(
    names=(
        *(f"vqgan.{ending}" for ending in ("safetensors", "sft", "ckpt", "pt", "pth")),
        "*[Vv][Qq]*.safetensors",
        "model.safetensors",
        "model.safetensors.index.json",
        "*[Aa]nole*.safetensors",
    ),
    mark="vq",
    foreign="movq",
    looked="vqgan.ckpt, vqgan.safetensors or an Anole folder",
    get="vqgan.ckpt and vqgan.yaml in the folder tokenizer of GAIR/Anole-7b-v0.1",
)


def find_text(source, rows, name):
    """Token map and text tokenizer of a model.

    Args:
        source: `Source` of the language model. rows: rows of its token embedding. name: of the model, for messages.

    Returns:
        (`TokenMap` or None, `HubTokenizer` or None, [`Part`, `Part`]).

    Raises:
        UserError: the model's own tokenizer contradicts its token map.
    """
    listed = source.config.get("vocabulary_map")
    tokens = TokenMap(listed, f"vocabulary_map of '{source.root}'") if isinstance(listed, dict) and listed else None
    fits = [lambda side: _same_words(side, tokens, 1.0, name), lambda side: _same_words(side, tokens, ENOUGH, name)]
    if tokens is None:
        fits = [lambda side: _size(side) == rows, lambda side: 0 < _size(side) <= rows]
    # one that agrees in every name goes before a nearer one that differs in a few
    found = None
    with suppress(UserError):  # what keeps a tokenizer from being read is told by the second, wider search
        found = source.side(*TOKENIZERS, fits=fits[0])
    found = found or source.side(*TOKENIZERS, fits=fits[1])
    tokenizer = found and HubTokenizer(found)
    if tokenizer is not None:
        listed = {} if tokens is None else tokens.ids
        tokens = TokenMap(tokenizer.vocabulary() | listed, tokens.where if tokens else tokenizer.where)
    looked = f"{' or '.join(TOKENIZERS)} {around(source)}"
    parts = [
        Part("text tokenizer", tokenizer and tokenizer.where, looked, GET_TEXT),
        Part("token map", tokens and tokens.where, f"vocabulary_map in config.json, or {looked}", GET_TEXT),
    ]
    return tokens, tokenizer, parts


def _size(side):
    """Entries of a tokenizer with picture tokens; 0 for any other."""
    return HubTokenizer(side).size() if "IMGIMGAZ" in side.text() else 0


def _same_words(side, tokens, share, name):
    """Does a tokenizer give (nearly) all names of a token map the same ids, those of pictures above all?"""
    if share < 1 and "IMGIMGAZ" not in side.text():
        raise UserError(
            f"{name}: '{side.where}' has no picture tokens (IMGIMGAZ, IMGIMGBZ, ...): it belongs to another model; "
            f"take {GET_TEXT}"
        )
    if "IMGIMGAZ" not in side.text():  # far cheaper than reading it
        return False
    words = HubTokenizer(side).vocabulary()
    moved = next((n for n, id in tokens.ids.items() if CODE.fullmatch(n) and words.get(n) != id), None)
    if tokens.agreement(words) >= share and moved is None:
        return True
    if share < 1:
        told = "most of its ids differ" if moved is None else f"{moved} is {words.get(moved)}, not {tokens.ids[moved]}"
        raise UserError(
            f"{name}: '{side.where}' does not fit {tokens.where} ({told}): they belong to different models; "
            f"take {GET_TEXT}"
        )
    return False


def resolution(source, codec):
    """Side in pixels of the pictures that a codec was trained on, as its settings tell, or None.

    Args:
        source: `Source` of the language model. codec: `Source` that holds the image tokenizer.
    """
    for config in (source.config, codec.config):
        settings = config.get("vq_config")
        told = settings.get("resolution") if isinstance(settings, dict) else None
        if isinstance(told, int) and told > 0:
            return told
    side = codec.side(f"{codec.files[0].stem}.yaml", "vqgan.yaml")
    # one number of a settings file: no reason to ask for a YAML library
    told = side and re.search(r"^\s*resolution:\s*(\d+)\s*(?:#.*)?$", side.text(), re.MULTILINE)
    return int(told[1]) if told else None
