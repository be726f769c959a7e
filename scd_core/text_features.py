"""Text features that were made elsewhere, such as by a host's text encoder, and what a family can read of them."""

from dataclasses import dataclass

import torch

from .errors import UserError
from .prompt import Prompt


@dataclass(frozen=True)
class FeatureReader:
    """The text features that a family reads.

    Attributes:
        width: numbers a token. tokens: most tokens that it reads. get: how users come by them, for messages.
    """

    width: int
    tokens: int
    get: str


def features_prompt(family, features, mask=None, text=""):
    """Features of a text -> `Prompt` with those of its words, fp32 [P, width] on the CPU.

    Padding is left out: tokens that the mask hides and, since hosts blank padding out, rows of zeros. When nothing is
    left the prompt has no features, which stands for the family's own unconditional ones.

    Args:
        family: `Family` of the model. features: float [P, width] or [1, P, width]. mask: [P] or [1, P], zero or
            False for padding, or None.
        text: what the user wrote beside them; it is not read, and the prompt's notes say so.

    Raises:
        UserError: the family reads no features; another width or number of prompts; numbers that are not finite.
    """
    reader = family.reads
    if reader is None:
        raise UserError(
            f"{family.title} reads words and no CONDITIONING: disconnect conditioning and write the prompt into the "
            "text box"
        )
    rows = _one(family, features, 3)
    if rows.shape[1] != reader.width:
        raise UserError(
            f"the CONDITIONING holds text features {rows.shape[1]} wide, {family.name} reads {reader.width}: "
            f"{reader.get}"
        )
    rows = rows.detach().to("cpu", torch.float32)
    if not rows.isfinite().all():
        raise UserError(
            "the CONDITIONING holds numbers that are not finite: its text encoder ran over, load it in bf16 or fp32"
        )
    shown = rows.ne(0).any(1)
    if mask is not None:
        visible = _one(family, mask, 2).to("cpu").ne(0)
        if visible.shape != shown.shape:
            raise UserError(
                f"the CONDITIONING holds {len(shown)} tokens and an attention mask for {len(visible)}: make it again "
                "with CLIP Text Encode alone"
            )
        shown &= visible
    rows, notes = rows[shown], []
    if text.strip():
        notes.append("the prompt is that of the CONDITIONING; the words in the text box were not read")
    if len(rows) > reader.tokens:
        notes.append(
            f"the model reads {reader.tokens} tokens of text; the last {len(rows) - reader.tokens} were left out"
        )
    kept = rows[: reader.tokens].clone()
    return Prompt(text=text, encoder=family.text, features=kept if len(kept) else None, notes=tuple(notes))


def _one(family, batch, dims):
    """The single entry of a batch [1, ..] of `dims` dimensions; a tensor without the batch passes."""
    if batch.dim() == dims and len(batch) == 1:
        return batch[0]
    if batch.dim() != dims - 1:
        raise UserError(
            f"the CONDITIONING holds a tensor of the shape {list(batch.shape)}, {family.name} reads one prompt "
            f"[1, tokens, {family.reads.width}]: make it with CLIP Text Encode from one text"
        )
    return batch
