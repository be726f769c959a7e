"""Text tokenizers of the public checkpoints (tokenizer.json), read with the `tokenizers` library."""

import re
from pathlib import Path

from ..checkpoint.beside import SideFile
from ..errors import UserError


class HubTokenizer:
    """A tokenizer.json without its automatic extras: a family puts start and end tokens in by itself.

    Args:
        file: `SideFile`, or path of the file.

    Raises:
        UserError: the file is no tokenizer.
    """

    def __init__(self, file):
        side = file if isinstance(file, SideFile) else SideFile(Path(file).name, str(file), Path(file))
        self.where = side.where
        self.tokenizer = self._load(side)
        added = self.tokenizer.get_added_tokens_decoder().values()
        # plain letters and runs of spaces may be added tokens too: those are text
        names = (t.content for t in added if t.special or re.fullmatch(r"<.+>", t.content))
        self.special = sorted(names, key=len, reverse=True)

    def _load(self, side):
        """The library's tokenizer."""
        from tokenizers import Tokenizer  # the host has it; imported late because it starts threads

        try:
            return Tokenizer.from_str(side.text())
        except UserError:
            raise
        except Exception as error:  # the library raises bare Exceptions
            raise UserError(
                f"{side.where} is no tokenizer file ({error}): download it again from the model's page"
            ) from error

    def ids(self, text):
        """Text -> list of token ids; nothing is added, and the names of special tokens count as plain text."""
        return self.marked(self.plain(text))

    def plain(self, text):
        """Text in which no special token's name is one any more, as what a user typed must be."""
        # a zero-width joint keeps the library from seeing the name
        for name in self.special:
            if name in text:
                text = text.replace(name, name[:1] + "\u200b" + name[1:])
        return text

    def marked(self, text):
        """Text -> list of token ids, where the names of special tokens stand for those (a family's template)."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def id(self, name):
        """Id of a token by its exact name.

        Raises:
            UserError: the tokenizer has no such token.
        """
        number = self.tokenizer.token_to_id(name)
        if number is None:
            raise UserError(f"{self.where} has no token {name!r}: it belongs to another model")
        return number

    def vocabulary(self):
        """All tokens, special ones included: {name: id}."""
        return self.tokenizer.get_vocab(with_added_tokens=True)

    def size(self):
        """Rows that an embedding table needs: 1 + the largest id."""
        return 1 + max(self.vocabulary().values(), default=-1)
