"""Emu3's words: two forms of its tokenizer, the format's tokens by name, the prompt around the user's text."""

import re

import torch

from ..errors import UserError
from ..prompt import Prompt
from .codec_parts import around
from .parts import Part
from .tiktoken_file import TiktokenTokenizer
from .tokenizer import HubTokenizer

START, STOP = "<|extra_203|>", "<|extra_204|>"
PICTURE, PICTURE_END = "<|image start|>", "<|image end|>"
GRID_END = "<|image token|>"  # between the picture's size and its codes
LINE, FRAME = "<|extra_200|>", "<|extra_201|>"  # end of a row of codes, end of the last row
CODE = re.compile(r"<\|visual token (\d+)\|>")
# What the authors' program puts behind every prompt, and what it steers away from.
WANTED = " masterpiece, film grained, best quality."
UNWANTED = (
    "lowres, bad anatomy, bad hands, text, error, missing fingers, extra digit, fewer digits, cropped, worst quality, "
    "low quality, normal quality, jpeg artifacts, signature, watermark, username, blurry."
)
# The original configuration's settings -> names of tokens.
SETTINGS = {
    "bos_token_id": START, "eos_token_id": STOP, "img_token_id": GRID_END, "boi_token_id": PICTURE,
    "eoi_token_id": PICTURE_END, "eol_token_id": LINE, "eof_token_id": FRAME,
}  # fmt: skip
TIKTOKEN, VISION = "emu3.tiktoken", "emu3_vision_tokens.txt"
TOKENIZERS = ("tokenizer.json", TIKTOKEN)
# Special tokens of the original tokenizer's program; those of pictures follow from a file.
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{n}|>" for n in range(205)))
GET = f"{TIKTOKEN} and {VISION} of BAAI/Emu3-Gen, or tokenizer.json of BAAI/Emu3-Gen-hf"


def find_text(source, name):
    """Token ids by name, and the tokenizer of a model.

    Args:
        source: `Source` of the language model. name: of the model, for messages.

    Returns:
        ({name: id}, `HubTokenizer` or None, `Part`).

    Raises:
        UserError: the model's own tokenizer contradicts its configuration.
    """
    listed, seen = dict(source.config.get("vocabulary_map") or {}), []
    told = {SETTINGS[key]: id for key, id in source.config.items() if key in SETTINGS and isinstance(id, int)}

    def fits(side):
        tokenizer = _read(source, side)
        words = tokenizer.vocabulary()
        for token in SETTINGS.values():
            wanted = listed.get(token, told.get(token, words.get(token)))
            if words.get(token) is None or words[token] != wanted:
                raise UserError(
                    f"{name}: '{side.where}' belongs to another model: {token} is {words.get(token)}, not {wanted}; "
                    f"take {GET}"
                )
        seen.append(tokenizer)

    found = source.side(*TOKENIZERS, fits=fits)
    tokenizer = found and (seen[-1] if seen else _read(source, found))  # what is stored in the one file fits
    words = tokenizer.vocabulary() if tokenizer else {}
    looked = f"{' or '.join(TOKENIZERS)} {around(source)}"
    return {**words, **listed}, tokenizer, Part("text tokenizer", found and found.where, looked, GET)


def _read(source, side):
    if not side.name.endswith(TIKTOKEN):
        return HubTokenizer(side)

    def beside(other):
        return other.path is None or side.path is None or other.path.parent == side.path.parent

    names = source.side(VISION, fits=beside)
    if names is None:
        raise UserError(f"'{side.where}' needs {VISION} beside it, which names the picture tokens; take {GET}")
    return TiktokenTokenizer(side, [*SPECIAL, *filter(None, map(str.strip, names.text().splitlines()))])


def picture_codes(ids, name):
    """(id of code 0, number of codes) of a vocabulary {name: id}.

    Raises:
        UserError: no picture tokens, or ids that do not count up.
    """
    codes = {int(m[1]): id for token, id in ids.items() if (m := CODE.fullmatch(token))}
    first = codes.get(0)
    if first is None or any(codes.get(n) != first + n for n in range(len(codes))):
        raise UserError(
            f"{name}: the tokenizer names {len(codes)} picture tokens (<|visual token 000000|>, ...) whose ids do not "
            f"count up from the first one's: it is damaged or of another model; take {GET}"
        )
    return first, len(codes)


class Emu3Text:
    """Words -> ids of a guidance stream; the words are kept, as the picture's size joins them.

    Args:
        tokenizer: `HubTokenizer`. ids: {name: id}.
    """

    def __init__(self, tokenizer, ids):
        self.tokenizer, self.tokens = tokenizer, ids

    def encode(self, text):
        """Text -> `Prompt`."""
        return Prompt(text=text, encoder=self)

    def wanted(self, text, rows, cols):
        """A prompt with the authors' praise behind it, which is not said twice: int64 [P]."""
        return self._ids(text if text.endswith(WANTED) else text + WANTED, rows, cols)

    def unwanted(self, text, rows, cols):
        """A negative prompt; an empty one is the authors' own."""
        return self._ids(text if text.strip() else UNWANTED, rows, cols)

    def _ids(self, text, rows, cols):
        token, words = self.tokens, self.tokenizer.ids
        grid = words(f"{rows}*{cols}")
        return torch.tensor([token[START], *words(text), token[PICTURE], *grid, token[GRID_END]])
