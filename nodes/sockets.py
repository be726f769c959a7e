"""The pack's own socket types and what travels through them. All of it is immutable: runs leave no traces here."""

from dataclasses import dataclass, field

import torch
from comfy_api.latest import io

from ..scd_core.given import for_plan
from ..scd_core.prompt import Prompt

MODEL = io.Custom("SCD_MODEL")
TEXT = io.Custom("SCD_TEXT")
VQ = io.Custom("SCD_VQ")
PROMPT = io.Custom("SCD_PROMPT")
TOKENS = io.Custom("SCD_TOKENS")
LATENTS = io.Custom("SCD_LATENTS")


@dataclass(frozen=True, eq=False)
class CodecHandle:
    """AR_VQ: a codec in the host's care. `files` can build another copy of it, `book` is what `book_of` tells of it."""

    name: str
    family: object = field(repr=False)
    patcher: object = field(repr=False)
    files: object = field(repr=False)
    book: torch.Tensor | None = field(default=None, repr=False)

    @property
    def net(self):
        """The `ConvCodec`; it is where the host last put it."""
        return self.patcher.model

    def get_ram_usage(self):
        """Bytes, asked for by the host's cache."""
        return self.patcher.get_ram_usage()


@dataclass(frozen=True, eq=False)
class ModelHandle:
    """AR_MODEL: a decoder in the host's care, and the codec that its live preview needs."""

    name: str
    family: object = field(repr=False)
    patcher: object = field(repr=False)
    codec: CodecHandle = field(repr=False)

    @property
    def net(self):
        """The `Decoder`; it is where the host last put it."""
        return self.patcher.model

    def get_ram_usage(self):
        """Bytes, asked for by the host's cache; the codec counts where its own handle is."""
        return self.patcher.get_ram_usage()


@dataclass(frozen=True, eq=False)
class TextHandle:
    """AR_TEXT: how a family reads prompts. Holds no weights."""

    name: str
    family: object = field(repr=False)

    def get_ram_usage(self):
        """Bytes, asked for by the host's cache."""
        return 0


@dataclass(frozen=True)
class PromptHandle:
    """AR_PROMPT: a `Prompt` and the family that encoded it."""

    prompt: Prompt
    family: str

    def get_ram_usage(self):
        """Bytes, asked for by the host's cache."""
        features = self.prompt.features
        return 0 if features is None else features.nbytes


@dataclass(frozen=True, eq=False)
class Tokens:
    """AR_TOKENS: codes int64 [B, frames, rows, cols] on the CPU.

    Attributes:
        width, height: pixels of one frame. vocab: size of the codebook. model, family: who drew them.
        kept: bool, shape of codes or [1, ...]: cells that a sampler must keep; None: all of them.
        book: the codebook that the codes count in (`book_of`), None: not known.
    """

    codes: torch.Tensor = field(repr=False)
    width: int
    height: int
    vocab: int
    model: str
    family: str
    kept: torch.Tensor | None = field(default=None, repr=False)
    book: torch.Tensor | None = field(default=None, repr=False)

    def given(self, plan):
        """What a run over `plan` gets as given cells, see `for_plan`."""
        return for_plan(self.codes, self.kept, plan)

    def get_ram_usage(self):
        """Bytes, asked for by the host's cache."""
        return self.codes.nbytes


@dataclass(frozen=True, eq=False)
class Latents:
    """AR_LATENTS: tokens of a continuous model, one picture each, on the CPU.

    Attributes:
        codes: fp32 [B, 1, channels, rows, cols], as the model drew them (scaled). width, height: pixels of a picture.
        model, family: who drew them.
    """

    codes: torch.Tensor = field(repr=False)
    width: int
    height: int
    model: str
    family: str

    def get_ram_usage(self):
        """Bytes, asked for by the host's cache."""
        return self.codes.nbytes
