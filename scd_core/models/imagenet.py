"""The 1000 classes of ImageNet (ILSVRC 2012) by name or number, for class-conditional models.

`imagenet.txt` holds one class a line, in the order of the challenge (sorted by WordNet id): the WordNet 3.0 lemmas of
its synset, separated by commas. The two cranes share all their lemmas and carry one more of ours.
"""

import difflib
import re
from functools import cache
from pathlib import Path

from ..errors import UserError
from ..prompt import Prompt

FILE = Path(__file__).with_name("imagenet.txt")
SHOWN = 12  # candidates that a message lists


@cache
def class_names():
    """The names of all classes, best first: tuple of tuples of str, by class number."""
    lines = FILE.read_text(encoding="utf-8").splitlines()
    return tuple(tuple(name.strip() for name in line.split(",")) for line in lines)


def _plain(text):
    """Text without case, article and double spaces: what two spellings of a name have in common."""
    return re.sub(r"^(an?|the) ", "", " ".join(re.sub(r"[-_]", " ", text).casefold().split()))


@cache
def _spellings():
    """{plain name: class numbers}."""
    found = {}
    for number, names in enumerate(class_names()):
        for name in dict.fromkeys(map(_plain, names)):
            found.setdefault(name, []).append(number)
    return found


def candidates(text):
    """Class numbers that a name fits: those called exactly so, else those with all its words in one of their names."""
    wanted, spellings = _plain(text), _spellings()
    if wanted in spellings:
        return list(spellings[wanted])
    words = set(wanted.split())
    inside = {n for name, numbers in spellings.items() if words <= set(name.split()) for n in numbers}
    return sorted(inside) if words else []


def _alike(text):
    """Class numbers to propose for a text that is no name: names inside it, then names spelled like it."""
    wanted, spellings = _plain(text), _spellings()
    inside = [name for name in spellings if f" {name} " in f" {wanted} "]
    close = difflib.get_close_matches(wanted, spellings, n=SHOWN, cutoff=0.6)
    names = sorted(inside, key=len, reverse=True) + close
    return list(dict.fromkeys(n for name in names for n in spellings[name]))


def _listed(numbers):
    names = class_names()
    more = f"; and {len(numbers) - SHOWN} more" if len(numbers) > SHOWN else ""
    return "; ".join(f"{n} ({', '.join(names[n][:2])})" for n in numbers[:SHOWN]) + more


class ClassEncoder:
    """Reads a class by number or by its ImageNet name.

    Args:
        classes: number of classes; names are known for a model of all 1000 alone.
    """

    def __init__(self, classes):
        self.classes = classes

    def encode(self, text):
        """Text -> `Prompt`. Raises UserError for what names no class, or several."""
        self.number(text)
        return Prompt(text=text, encoder=self)

    def number(self, text):
        """Text -> class number, or None for an empty text (no class at all).

        Raises:
            UserError: no class, or several; the sentence lists candidates.
        """
        text = text.strip()
        if not text:
            return None
        if re.fullmatch(r"[+-]?\d+", text):
            if not 0 <= int(text) < self.classes:
                raise UserError(f"there is no class {text}: this model's classes are 0 to {self.classes - 1}")
            return int(text)
        if self.classes != len(class_names()):
            raise UserError(
                f"{text!r} is no class number: this model has {self.classes} classes of its own, whose names are "
                f"unknown here; write a number from 0 to {self.classes - 1}"
            )
        fitting = candidates(text)
        if len(fitting) == 1:
            return fitting[0]
        if fitting:
            raise UserError(f"{text!r} fits several ImageNet classes: {_listed(fitting)}; write the number of one")
        near = _alike(text)
        hint = f"did you mean {_listed(near)}?" if near else "write a name such as 'golden retriever' or its number"
        raise UserError(
            f"{text!r} is none of the {self.classes} ImageNet classes, and this model draws nothing else; {hint}"
        )
