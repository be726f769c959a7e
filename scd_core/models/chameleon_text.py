"""Chameleon's vocabulary: which tokens are picture codes, row ends and sizes, all found by name."""

import re
from dataclasses import dataclass

from ..errors import UserError
from ..prompt import Prompt

START = "<s>"
TURN = "<reserved08706>"  # between the request and the answer
PICTURE = "<racm3:break>"  # a picture begins
END = "<eoss>"  # a picture ends (Lumina-mGPT)
LINE = "<reserved08799>"  # end of a row of codes (Lumina-mGPT)
CODE = re.compile(r"IMGIMG([A-J]+)Z")  # the code in decimal, A for 0 ... J for 9
SIZE = re.compile(r"<reserved(\d{5})>")  # 8800 + n stands for n * UNIT pixels (Lumina-mGPT)
SIZE_ZERO, UNIT = 8800, 32
DIGITS = str.maketrans("ABCDEFGHIJ", "0123456789")
# the two spellings of one token that tokenizer files and token maps do not agree on
ALIASES = {"<image>", "<reserved08707>"}


@dataclass(frozen=True)
class TokenMap:
    """Names -> ids of a Chameleon vocabulary.

    Attributes:
        ids: name -> token id. where: file it was read from, for messages.
    """

    ids: dict
    where: str

    def __getitem__(self, name):
        """Id of a token.

        Raises:
            UserError: the vocabulary has no such token.
        """
        if name not in self.ids:
            raise UserError(f"{self.where} has no token {name!r}: it belongs to another model")
        return self.ids[name]

    def picture_codes(self):
        """(first id, number of picture codes); code c has the id first + c.

        Raises:
            UserError: no picture tokens, or tokens whose order is not that of their codes.
        """
        codes = {int(m[1].translate(DIGITS)): id for name, id in self.ids.items() if (m := CODE.fullmatch(name))}
        named = sum(bool(CODE.fullmatch(name)) for name in self.ids)
        if not codes:
            raise UserError(f"{self.where} names no picture tokens (IMGIMGAZ, ...): it belongs to another model")
        if named != len(codes) or sorted(codes) != list(range(len(codes))):
            gap = next((c for c in range(named) if c not in codes), None)
            raise UserError(
                f"{self.where} names {named} picture tokens that do not stand for the codes 0 to {named - 1} once each"
                f"{'' if gap is None else f' (code {gap} is missing)'}: get the file again from the model's page"
            )
        first = codes[0]
        wrong = next((c for c, id in codes.items() if id != first + c), None)
        if wrong is not None:
            raise UserError(
                f"{self.where} gives picture code {wrong} the id {codes[wrong]} where {first + wrong} is expected: "
                "picture tokens must be numbered in the order of their codes, as in all releases of this family"
            )
        return first, len(codes)

    def sizes(self):
        """{n: id} of the tokens that stand for a side of n * UNIT pixels."""
        found = ((int(m[1]) - SIZE_ZERO, id) for name, id in self.ids.items() if (m := SIZE.fullmatch(name)))
        return {n: id for n, id in found if n > 0}

    def agreement(self, other):
        """Share of this map's names that vocabulary `other` (name -> id) gives the same id."""
        same = sum(other.get(name) == id or name in ALIASES for name, id in self.ids.items())
        return same / len(self.ids)


class TextReader:
    """What Text Encode uses: the words are kept, since sizes and separators join them when the size is known.

    Args:
        tokenizer: `HubTokenizer`. tokens: `TokenMap`. start: name of the token that a text begins with.
    """

    def __init__(self, tokenizer, tokens, start=START):
        self.tokenizer, self.tokens, self.start = tokenizer, tokens, start

    def encode(self, text):
        """Text -> `Prompt`."""
        return Prompt(text=text, encoder=self)

    def ids(self, text):
        """Start token, the text, end of turn: list of ids."""
        return [self.tokens[self.start], *self.tokenizer.ids(text), self.tokens[TURN]]
