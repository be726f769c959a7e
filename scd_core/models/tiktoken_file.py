"""Byte-pair tokenizers in tiktoken's form: a line a token, its bytes in base64 and its rank, which is also its id.

The form keeps no merges; they follow from the ranks, since two neighbours join when their joint bytes are a token,
the lowest rank first. Special tokens are listed elsewhere and come behind.
"""

import base64
import binascii

from ..checkpoint.header import AGAIN
from ..errors import UserError
from .tokenizer import HubTokenizer

# Qwen's rule for cutting a text into words, which its descendants share.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class TiktokenTokenizer(HubTokenizer):
    """A .tiktoken file behind the interface of `HubTokenizer`.

    Args:
        file: `SideFile`, or path of the file.
        special: names of special tokens; the first one's id follows the last rank.

    Raises:
        UserError: the file is no such list.
    """

    def __init__(self, file, special):
        self.names = list(special)
        super().__init__(file)

    def _load(self, side):
        from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

        ranks = read_ranks(side)
        letters = byte_letters()

        def spelled(token):
            return "".join(letters[byte] for byte in token)

        words = {spelled(token): rank for token, rank in ranks.items()}
        merges = [(spelled(a), spelled(b)) for a, b in merges_of(ranks)]
        # tiktoken takes a word that is a token as it is
        tokenizer = Tokenizer(models.BPE(words, merges, ignore_merges=True))
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(WORDS), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in self.names])
        return tokenizer


def read_ranks(side):
    """{token bytes: rank} of a .tiktoken file; ranks count up from 0.

    Raises:
        UserError: damaged, or something else.
    """
    try:
        pairs = (line.split() for line in side.text().splitlines() if line.strip())
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    except (ValueError, binascii.Error) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{side.where} is no list of tokens and ranks ({error}); {AGAIN}.") from error
    single = sum(len(token) == 1 for token in ranks)
    if sorted(ranks.values()) != list(range(len(ranks))) or single != 256:
        raise UserError(f"{side.where} has {len(ranks)} tokens, {single} of 256 bytes, or gaps in its ranks; {AGAIN}.")
    return ranks


def merges_of(ranks):
    """Pairs (bytes, bytes) that join, in the order in which they do: by the rank of what they make."""
    found = []
    for token, rank in ranks.items():
        cuts = ((token[:i], token[i:]) for i in range(1, len(token)))
        pairs = [(ranks[a], ranks[b], a, b) for a, b in cuts if a in ranks and b in ranks]
        found += [(rank, *pair) for pair in pairs if max(pair[:2]) < rank]
    return [(a, b) for *_, a, b in sorted(found)]


def byte_letters():
    """A printable letter for every byte, as byte-level tokenizers spell tokens: itself, or one from U+0100 on."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = (byte for byte in range(256) if byte not in shown)
    return {byte: chr(byte) for byte in shown} | {byte: chr(256 + n) for n, byte in enumerate(others)}
