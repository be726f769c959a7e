"""The small model that ships with the pack: word prompts, 64x64 pictures and 32x32 clips of eight frames."""

import re

import torch

from ..codecs.conv2d import ConvCodecConfig
from ..plan import TokenPlan
from ..prompt import Prompt, Stream
from .family import Defaults, Family, Size
from .parts import Ref
from .rope import rope_1d
from .transformer import DecoderConfig, Positions

SLOTS = 12  # words of a prompt
FRAMES = 8
PICTURE, CLIP = Size(64, 64), Size(32, 32, FRAMES)
IGNORED = {"a", "an", "the", "of", "in", "and", "is", "with", "at", "to"}


class WordEncoder:
    """Lower-case words of a closed vocabulary -> `SLOTS` token ids, padded behind the words."""

    def __init__(self, words, first_id, pad_id):
        self.words = list(words)
        self.ids = {word: first_id + i for i, word in enumerate(self.words)}
        self.pad_id = pad_id

    def encode(self, text):
        """Text -> `Prompt`; unknown words are left out and named in its notes."""
        words = [w for w in re.findall(r"[^\W_]+", text.lower()) if w not in IGNORED]
        unknown = [w for w in words if w not in self.ids]
        known = [w for w in words if w in self.ids]
        notes = []
        if unknown:
            notes.append(
                f"the bundled model does not know {', '.join(map(repr, dict.fromkeys(unknown)))} and left it out; "
                f"it knows: {', '.join(self.words)}"
            )
        if len(known) > SLOTS:
            notes.append(f"the bundled model reads {SLOTS} words; the last {len(known) - SLOTS} were left out")
        return Prompt(text=text, encoder=self, notes=tuple(notes))

    def ids_of(self, text):
        """Text -> int64 [SLOTS]."""
        known = [self.ids[w] for w in re.findall(r"[^\W_]+", text.lower()) if w in self.ids][:SLOTS]
        return torch.tensor(known + [self.pad_id] * (SLOTS - len(known)))


class BundledFamily(Family):
    """Description of the bundled model, read from the metadata of its one file.

    Token ids: 0 .. codes-1 image codes, then pad, start of picture, start of clip, then the words.
    """

    name = "the bundled model"
    title = "the bundled model"
    defaults = Defaults(temperature=0.8, top_k=20, top_p=1.0, cfg=2.0)
    sizes = (PICTURE, *(Size(32, 32, n) for n in range(FRAMES, 1, -1)))
    frame_rate = 8

    @staticmethod
    def detect(source):
        return source.config.get("family") == "bundled"

    def __init__(self, source):
        self.source, config = source, source.config
        self.codec_config = ConvCodecConfig(**{k: _tuple(v) for k, v in config["codec"].items()})
        self.decoder_config = DecoderConfig(**{k: _tuple(v) for k, v in config["decoder"].items()})
        codes = self.codec_config.codes
        self.pad, self.start_picture, self.start_clip = codes, codes + 1, codes + 2
        self.text = WordEncoder(config["words"], codes + 3, self.pad)

    def refs(self, part):
        dot = part + "."
        return {key.removeprefix(dot): Ref(self.source, key) for key in self.source.keys() if key.startswith(dot)}

    def plan(self, size):
        f = self.codec_config.factor
        return TokenPlan(
            frames=size.frames,
            rows=size.height // f,
            cols=size.width // f,
            vocab=self.codec_config.codes,
            width=size.width,
            height=size.height,
        )

    def streams(self, prompt, negative, plan):
        start = torch.tensor([self.start_clip if plan.frames > 1 else self.start_picture])
        texts = (prompt.text, negative.text if negative is not None else "")
        return tuple(Stream(ids=torch.cat([self.text.ids_of(text), start])) for text in texts)

    def positions(self, decoder, plan, prompt_length, device):
        """Rotary by slot; on top, every token is told which cell comes next."""
        total = prompt_length + plan.length
        cos, sin = rope_1d(total, decoder.cfg.head_dim, device=device)
        first = 1 if plan.frames > 1 else 0  # table row 0 belongs to stills
        grid = decoder.grid_vectors(range(first, first + plan.frames), range(plan.rows), range(plan.cols), device)
        absolute = grid.new_zeros(total, grid.shape[1])
        absolute[prompt_length - 1 : total - 1] = grid
        return Positions(cos, sin, absolute.to(device))


def _tuple(value):
    return tuple(value) if isinstance(value, list) else value

