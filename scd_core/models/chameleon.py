"""Chameleon's architecture (Chameleon team 2024, arXiv 2405.09818): Lumina-mGPT (arXiv 2408.02657) and Anole."""

import logging
import re
from contextlib import suppress

import torch

from ..codecs.layouts import find_codec
from ..errors import UserError
from ..plan import TokenPlan
from ..prompt import Stream
from .chameleon_network import META, Network, find_layout
from .chameleon_parts import VQGAN, find_text, resolution
from .chameleon_text import END, LINE, PICTURE, START, UNIT, TextReader
from .codec_parts import find_vq
from .family import Defaults, Family, Size, nearest
from .parts import Part, require
from .rope import rope_1d
from .transformer import Positions

log = logging.getLogger(__name__)

CELL = 16  # pixels a code where size tokens count in pixels
LONGEST = 4  # times the shorter side
TARGETS = (1024, 768, 512)  # Lumina-mGPT's releases: sides of their square picture
SECOND = "<MOVQGAN"  # how names of picture tokens begin in Lumina-mGPT 2.0
SECOND_NAME = "Lumina-mGPT 2.0"
SECOND_ROWS = 150000  # fewer than its token embedding has, more than Chameleon's


def is_chameleon(source):
    return source.config.get("model_type") == "chameleon" or find_layout(source) is not None


def marks(source):
    """What the converter noted: conclusions from the names of files that are no more."""
    found = source.config.get("scd")
    return found if isinstance(found, dict) else {}


def is_anole(source):
    """Anole, or Lumina-mGPT? Their weights have the same names and shapes, so the first of these decides:

    0. What the converter noted in its one file.
    1. Meta's layout is Anole's: Lumina-mGPT was never published in it.
    2. Settings of Lumina-mGPT's own modelling code (the class name with XLLMX, mask_image_logits, z_loss_weight).
    3. The names that the model goes by: "lumina" or "mgpt", "anole".
    4. An image tokenizer inside the weights is Anole's: Lumina-mGPT was published without.
    """
    config, layout = source.config, find_layout(source)
    if marks(source).get("family"):
        return marks(source)["family"] == AnoleFamily.name
    if layout is not None and layout[0] is META:
        return True
    if "XLLMX" in str(config.get("architectures")) or "mask_image_logits" in config or "z_loss_weight" in config:
        return False
    names = names_of(source)
    if "anole" in names or "lumina" in names or "mgpt" in names:
        return "anole" in names
    return any(key.startswith("model.vqmodel.") for key in source.keys())


def is_second(source):
    """Lumina-mGPT 2.0, which has this architecture, its own vocabulary and another image tokenizer?

    By what the converter noted, by the names of its picture tokens, by the size of its vocabulary.
    """
    layout = find_layout(source)
    if marks(source).get("family"):
        return marks(source)["family"] == SECOND_NAME
    if any(name.startswith(SECOND) for name in source.config.get("vocabulary_map") or ()):
        return True
    embed = f"{layout[1]}{layout[0].embed}.weight" if layout else ""
    return embed in source.keys() and source.shape(embed)[0] > SECOND_ROWS


def names_of(source):
    """Names that a model goes by, in lower case: its folder's, its file's, that of Meta's release folder."""
    root, layout = source.root, find_layout(source)
    meta = layout is not None and layout[0] is META and root.parent.name == "models"
    return f"{root.name} {source.files[0].name} {root.parent.parent.name if meta else ''}".lower()


def refuse_plain(source):
    """Refuse Chameleon itself, which has the vocabulary of pictures and was published unable to draw them.

    Its weights have Anole's names and shapes. Where no name tells, a warning has to do, unless an image tokenizer
    with a decoder lies inside: in transformers' layout Chameleon was published without one.

    Raises:
        UserError: the model goes by the name of Chameleon and by no other.
    """
    names = names_of(source)
    told = f"{names} {source.config.get('_name_or_path', '')}".lower()
    if marks(source).get("family") or "anole" in told or "lumina" in told:
        return
    if "chameleon" in names:
        raise UserError(
            f"'{source.root}' is called Chameleon, which reads pictures and was published unable to draw them: use "
            "Anole 7B or Lumina-mGPT, which were trained from it; if this is one of those, name the folder so"
        )
    if is_anole(source) and find_codec(source) is None:
        log.warning(
            "No name tells whether '%s' is Anole or Chameleon, whose files look alike: it is taken for Anole. If it "
            "draws noise it is Chameleon, which was published unable to draw.", source.root,
        )  # fmt: skip


class ChameleonFamily(Family):
    """What Lumina-mGPT and Anole share: the network, the vocabulary, the parts.

    Attributes:
        tokens: `TokenMap`. base: id of picture code 0. side: pixels of the image tokenizer's own pictures.
        parts: list of `Part`.
    """

    ignored = (r"rope\.freqs$", r".*rotary_emb\.inv_freq$")
    factor = None  # pixels a code that the image tokenizer must have
    codec_files = VQGAN

    def __init__(self, source):
        self.source = source
        self._refuse_others()
        self.network = Network(source, self.name)
        self.tokens, tokenizer, text_parts = self._find_text()
        self.base, codes = self._picture_codes() if self.tokens else (0, None)
        codec, where, vq_part = find_vq(source, self.codec_files, codes, self.factor, self.name)
        there = source.root if self.network.there else None
        looked = f"{self.network.embed} in {', '.join(file.name for file in source.files[:3])}"
        self.parts = [Part("language model", there, looked, "the release's weight files"), vq_part, *text_parts]
        if not (there and self.tokens and tokenizer):
            require(self.parts, self.name)
        if self.base + codes > self.network.rows:
            raise UserError(
                f"{self.name}: {self.tokens.where} numbers picture tokens up to {self.base + codes - 1}, the language "
                f"model has {self.network.rows} tokens: they belong to different models"
            )
        self.text = TextReader(tokenizer, self.tokens, self._start())
        self.decoder_config = self.network.config(codes)
        self._refs = {"decoder": self.network.refs(self.decoder_config, self.base)}
        self.codec_config = codec and codec.config
        self.side = (codec and resolution(source, where)) or 32 * (codec.config.factor if codec else CELL)
        if codec:
            self._refs["codec"] = codec.refs
        # an image tokenizer inside that is not used has no decoder, as transformers writes it
        self.ignored += codec.ignored if where is source else (r"model\.vqmodel\.",)

    def _refuse_others(self):
        refuse_plain(self.source)

    def _find_text(self):
        return find_text(self.source, self.network.rows, self.name)

    def _picture_codes(self):
        return self.tokens.picture_codes()

    def _start(self):
        """Name of the token that every text begins with."""
        return START

    def refs(self, part):
        if part not in self._refs:
            require(self.parts, self.name)
        return self._refs[part]

    def positions(self, decoder, plan, prompt_length, device):
        length = prompt_length + plan.length
        network = self.network
        return Positions(*rope_1d(length, self.decoder_config.head_dim, network.theta, device, network.factor))


class LuminaFamily(ChameleonFamily):
    """Lumina-mGPT 7B and 34B: any shape up to an area; size tokens before the picture, a line token after each row."""

    name = "Lumina-mGPT"
    title = "Lumina-mGPT 7B and 34B"
    defaults = Defaults(temperature=1.0, top_k=2000, top_p=1.0, cfg=3.0)
    factor = CELL

    @staticmethod
    def detect(source):
        return is_chameleon(source) and not is_second(source) and not is_anole(source)

    def __init__(self, source):
        super().__init__(source)
        self.line, self.ending = self.tokens[LINE], (self.tokens[END],)
        self.units = self.tokens.sizes()
        self.target = self._target() // UNIT
        self.marks = {"family": self.name, "side": self.target * UNIT}
        self.sizes = self._crops()
        if not self.sizes:
            raise UserError(f"{self.tokens.where} has no tokens for picture sizes: it belongs to another model")

    def _target(self):
        """Side of the release's square picture: in its name, else the larger of the usual ones that fits."""
        noted = marks(self.source).get("side")
        if isinstance(noted, int) and noted >= UNIT:
            return noted
        names = (self.source.files[0].stem, self.source.root.name, str(self.source.config.get("_name_or_path", "")))
        for name in names:
            for found in re.findall(r"(?<!\d)\d{3,4}(?!\d)", name):
                if int(found) in TARGETS:
                    return int(found)
        places = self.source.config.get("max_position_embeddings") or 4096
        fitting = (side for side in TARGETS[1:] if (side // CELL) * (side // CELL + 1) <= places)
        return next(fitting, TARGETS[-1])

    def _crops(self):
        """All (width, height) in units with the target's area at most and no side over LONGEST times the other.

        The target's square comes first, then larger pictures before smaller ones.
        """
        area = self.target**2
        square = (self.target, self.target)
        pairs = [(w, h) for w in self.units for h in self.units if w * h <= area and max(w, h) <= LONGEST * min(w, h)]
        pairs.sort(key=lambda pair: (pair != square, -pair[0] * pair[1], abs(pair[0] - pair[1]), pair))
        return tuple(Size(w * UNIT, h * UNIT) for w, h in pairs)

    def size(self, width=0, height=0, frames=1):
        """As `Family.size`; the sentence tells the rule and the nearest size instead of hundreds of sizes."""
        with suppress(UserError):
            return super().size(width, height, frames)
        if frames != 1:
            raise UserError(f"{self.name} draws pictures, not clips: set frames to 1")
        raise UserError(
            f"{self.name} cannot draw {width or 'any'}x{height or 'any'}: sides are multiples of {UNIT} pixels, "
            f"{self._rule()}; the nearest size is {nearest(self.sizes, width, height)}"
        )

    def _rule(self):
        return f"the area is that of {self.sizes[0]} at most, and no side is over {LONGEST} times the other"

    def plan(self, size):
        rows, cols = size.height // self.factor, size.width // self.factor
        vocab = self.decoder_config.head_rows
        return TokenPlan.by_lines(
            rows, cols, self.line, vocab=vocab, base=self.base, width=size.width, height=size.height
        )

    def streams(self, prompt, negative, plan):
        """The request and the picture's head; without a request the head alone, at positions of its own."""
        head = [self.tokens[PICTURE], *(self.units[side // UNIT] for side in (plan.height, plan.width))]

        def stream(text):
            request = f"Generate an image of {plan.width}x{plan.height} according to the following prompt:\n{text}"
            return Stream(ids=torch.tensor([*self.text.ids(request), *head]))

        refused = negative is not None and negative.text.strip()
        return stream(prompt.text), stream(negative.text) if refused else Stream(ids=torch.tensor(head))


class AnoleFamily(ChameleonFamily):
    """Anole 7B: one square size, neither size nor line tokens."""

    name = "Anole"
    title = "Anole 7B"
    defaults = Defaults(temperature=0.7, top_k=0, top_p=0.9, cfg=3.0)

    @staticmethod
    def detect(source):
        return is_chameleon(source) and not is_second(source) and is_anole(source)

    def __init__(self, source):
        super().__init__(source)
        self.marks = {"family": self.name}
        self.sizes = (Size(self.side, self.side),)

    def plan(self, size):
        cells = size.width // (self.codec_config.factor if self.codec_config else CELL)
        vocab = self.decoder_config.head_rows
        return TokenPlan(1, cells, cells, vocab, base=self.base, width=size.width, height=size.height)

    def streams(self, prompt, negative, plan):
        """The request and the start of a picture.

        The original mixes three streams; for words alone its picture-only stream equals the unconditional one, so
        its formula u + 1.2 (i - u) + 3 (c - i) is u + 3 (c - u).
        """

        def stream(ids):
            return Stream(ids=torch.tensor([*ids, self.tokens[PICTURE]]))

        refused = negative is not None and negative.text.strip()
        uncond = self.text.ids(negative.text) if refused else [self.tokens[START]]
        return stream(self.text.ids(prompt.text)), stream(uncond)
