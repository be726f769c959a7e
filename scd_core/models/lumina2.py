"""Lumina-mGPT 2.0 (arXiv 2507.17801): Chameleon's network trained anew, Qwen's words, MoVQ's pictures.

Picture code c has the id `base` + c behind a gap in the vocabulary; the tokenizer's file does not name these tokens.
"""

from ..errors import UserError
from .chameleon import SECOND, SECOND_NAME, LuminaFamily, is_chameleon, is_second
from .chameleon_text import END, LINE, PICTURE, TURN, UNIT, TokenMap
from .codec_parts import CodecFiles, around
from .family import Defaults, Size
from .parts import Part
from .tokenizer import HubTokenizer

BASE, CODES = 155000, 16384  # of the release, for files without its token map
FORMAT = (PICTURE, END, LINE, TURN)
CHAMELEON = "IMGIMGAZ"  # a picture token that the older models' tokenizers name
ENOUGH = 0.9  # share of equal ids at which a tokenizer and a token map are of one model
ROLES = ("tokenizer_config.json", "special_tokens_map.json")
START = "<|endoftext|>"  # where no file tells
SIDE = 768  # pixels of the square that it was trained to draw
MOST = 10240  # tokens of a picture that the authors' program draws at most
GET = "tokenizer.json and tokenizer_config.json of Alpha-VLLM/Lumina-mGPT-2.0"
MOVQ = CodecFiles(
    # the authors' program keeps it under movqgan/270M
    names=tuple(
        f"{folder}{stem}.{ending}"
        for stem in ("*[Mm]o[Vv][Qq]*270[Mm]*", "*[Mm]o[Vv][Qq]*", "*MOVQ*")
        for ending in ("safetensors", "sft", "ckpt", "pt", "pth", "bin")
        for folder in ("", "270M/", "movqgan/270M/")
    ),
    mark="movq",
    foreign=r"(67|102)M",
    looked="movqgan_270M.ckpt or .safetensors",
    get="movqgan_270M.ckpt of ai-forever/MoVQGAN",
)


class Lumina2Family(LuminaFamily):
    """Lumina-mGPT 2.0 and its Omni release, as text to picture: 8 pixels a code, otherwise as Lumina-mGPT."""

    name = title = SECOND_NAME
    defaults = Defaults(temperature=1.0, top_k=4096, top_p=1.0, cfg=4.0)
    factor = 8
    codec_files = MOVQ
    encoder_file = MOVQ.get

    @staticmethod
    def detect(source):
        return is_chameleon(source) and is_second(source)

    def _refuse_others(self):
        """Nothing else has this vocabulary, whatever its folder is called."""

    def _find_text(self):
        """As `chameleon_parts.find_text`; the tokenizer knows everything but the picture tokens."""
        listed = self.source.config.get("vocabulary_map") or {}
        found = self.source.side("tokenizer.json", fits=lambda side: self._same_words(side, listed))
        tokenizer, self._where = found and HubTokenizer(found), found
        words = {**(tokenizer.vocabulary() if tokenizer else {}), **listed}
        where = f"vocabulary_map of '{self.source.root}'" if listed else tokenizer and tokenizer.where
        part = Part("text tokenizer", found and found.where, f"tokenizer.json {around(self.source)}", GET)
        return (TokenMap(words, where) if words else None), tokenizer, [part]

    def _same_words(self, side, listed):
        """Is this the tokenizer of the model that the token map belongs to?"""
        text = side.text()
        words = HubTokenizer(side).vocabulary() if PICTURE in text and CHAMELEON not in text else {}
        shared = words.keys() & listed.keys()
        moved = next((n for n in FORMAT if n not in words or listed.get(n, words[n]) != words[n]), None)
        if moved is None and sum(words[n] == listed[n] for n in shared) >= ENOUGH * len(shared):
            return True
        told = f"{moved} is {words.get(moved)}" if moved else "most of its ids differ"
        raise UserError(f"{self.name}: '{side.where}' belongs to another model ({told}); take {GET}")

    def _picture_codes(self):
        """(id of code 0, number of codes): the names in the token map, whose ids count up; else as released."""
        named = sorted(id for name, id in self.tokens.ids.items() if name.startswith(SECOND))
        if not named:
            return BASE, CODES
        if named != list(range(named[0], named[0] + len(named))):
            raise UserError(
                f"{self.tokens.where} names {len(named)} picture tokens ({SECOND}...) whose ids do not count up from "
                f"{named[0]} to {named[0] + len(named) - 1}: get the file again from the model's page"
            )
        return named[0], len(named)

    def _start(self):
        """The tokenizer's start token or, as this one has none, its end token."""

        def beside(side):  # roles of another tokenizer say nothing about this one
            return side.path is None or self._where.path is None or side.path.parent == self._where.path.parent

        for file in ROLES:
            side = self.source.side(file, fits=beside)
            told = side.json() if side else {}
            for role in ("bos_token", "eos_token"):
                name = told.get(role)
                name = name.get("content") if isinstance(name, dict) else name
                if name:
                    return name
        return START

    def _target(self):
        return SIDE

    def size(self, width=0, height=0, frames=1):
        """As `LuminaFamily.size`; beyond the listed sizes all that the authors' program can draw."""
        units = [side // UNIT for side in (width, height) if side % UNIT == 0]
        if frames == 1 and len(units) == 2 and all(n in self.units for n in units):
            rows, cols = height // self.factor, width // self.factor
            if rows * (cols + 1) < MOST:
                return Size(width, height)
        return super().size(width, height, frames)

    def _rule(self):
        return f"and a picture has {MOST} tokens at most, one for {self.factor}x{self.factor} pixels"
