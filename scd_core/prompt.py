"""Prompts: what Text Encode hands on, and the token streams that go into the backbone."""

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Prompt:
    """A text as the user wrote it, with the encoder that will turn it into a stream.

    The stream is built when the size is known, because some families write the size into the prompt.

    Attributes:
        text: the user's words (or a class name or number for class-conditional models).
        encoder: the family's text encoder.
        features: [P, width] text features made elsewhere (a host's text encoder), or None.
        notes: sentences for the user (unknown words, cut prompts).
    """

    text: str
    encoder: object = field(repr=False, default=None)
    features: torch.Tensor | None = field(repr=False, default=None)
    notes: tuple = ()


@dataclass(frozen=True)
class Stream:
    """One guidance stream before the first image token.

    Attributes:
        ids: int64 [P] prompt token ids, or None for families that take text features.
        features: [P, width] text features, or None for the model's own unconditional ones.
        mask: bool [P], False for tokens that nothing may see; None: all are visible.
        context: [C, width] cross-attended text, or None.
    """

    ids: torch.Tensor | None = None
    features: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    context: torch.Tensor | None = None

    @property
    def length(self):
        return next(len(t) for t in (self.ids, self.features, self.mask) if t is not None)
