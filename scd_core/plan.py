"""TokenPlan: how many tokens a run draws, what each position may hold, and which positions are given."""

from dataclasses import dataclass, field

import torch

from .errors import UserError


@dataclass(frozen=True)
class TokenPlan:
    """Geometry and constraints of one run. All positions are absolute indices into the generated sequence.

    Attributes:
        frames, rows, cols: grid of picture cells (after the codec's down-sampling).
        vocab: columns of the law; column v stands for token id `base + v`.
        base: first token id of the image vocabulary.
        forced: int64 [N] token id that the format imposes (row ends), -1 elsewhere.
        cells: int64 [N] raster index of the cell a position draws, -1 for format tokens.
        allowed: bool [vocab] of columns that may be drawn at all; None: all.
        width, height: pixels, for messages and decoding.
        given: leading positions that a run must be given; a model without a start token can only go on.
    """

    frames: int
    rows: int
    cols: int
    vocab: int
    base: int = 0
    forced: torch.Tensor = field(default=None, repr=False)
    cells: torch.Tensor = field(default=None, repr=False)
    allowed: torch.Tensor | None = field(default=None, repr=False)
    width: int = 0
    height: int = 0
    given: int = 0

    def __post_init__(self):
        n = self.frames * self.rows * self.cols
        if self.cells is None:
            object.__setattr__(self, "cells", torch.arange(n))
        if self.forced is None:
            object.__setattr__(self, "forced", torch.full((len(self.cells),), -1))

    @classmethod
    def by_lines(cls, rows, cols, line, **rest):
        """A still whose rows each end with the format token `line`; rest: attributes as in the class."""
        cells = torch.full((rows, cols + 1), -1)
        cells[:, :cols] = torch.arange(rows * cols).view(rows, cols)
        forced = torch.where(cells < 0, line, -1).flatten()
        return cls(1, rows, cols, forced=forced, cells=cells.flatten(), **rest)

    @property
    def length(self):
        """Positions of the sequence, format tokens included."""
        return len(self.cells)

    @property
    def row_stride(self):
        """Distance in the sequence to the same column of the row above."""
        return self._stride(self.cols)

    @property
    def frame_stride(self):
        """Distance in the sequence to the same cell of the previous frame (0 for a still)."""
        return self._stride(self.rows * self.cols) if self.frames > 1 else 0

    def _stride(self, cells):
        where = (self.cells == cells).nonzero()
        return int(where[0]) - int((self.cells == 0).nonzero()[0]) if len(where) else 0

    def fixed(self, batch, kept=None):
        """Token ids that are not drawn: forced by the format or kept by the user, int64 [batch, N], -1 if free.

        Args:
            kept: None, or codes int64 [1 or batch, frames, rows, cols], -1 where a cell is to be drawn.

        Raises:
            UserError: kept has another grid, holds codes outside the vocabulary, or lacks what must be given.
        """
        out = self.forced.clone().expand(batch, -1).clone()
        if kept is not None:
            self._keep(out, kept)
        if (out[:, : self.given] < 0).any():
            raise UserError(
                "this model only goes on from frames that it is given and cannot start by itself: wire a picture or "
                "the first frames of a clip through VQ Encode into kept"
            )
        return out

    def _keep(self, out, kept):
        """Write kept codes into the token ids `out` [batch, N]."""
        batch = len(out)
        want = (self.frames, self.rows, self.cols)
        if tuple(kept.shape[1:]) != want or kept.shape[0] not in (1, batch):
            raise UserError(
                f"kept tokens have the grid {tuple(kept.shape)} (batch, frames, rows, columns); "
                f"this run needs {(batch, *want)}: use the same size, frame count and batch"
            )
        if int(kept.max()) >= self.vocab or int(kept.min()) < -1:
            raise UserError(
                f"kept tokens reach from {int(kept.min())} to {int(kept.max())}, the model draws codes 0 to "
                f"{self.vocab - 1}: they come from another codec"
            )
        drawn = self.cells >= 0
        codes = kept.to("cpu", torch.int64).reshape(len(kept), -1)[:, self.cells[drawn]].expand(batch, -1)
        out[:, drawn] = torch.where(codes >= 0, codes + self.base, out[:, drawn])

    def codes(self, tokens):
        """Token ids [B, N] -> codes int64 [B, frames, rows, cols]."""
        order = (self.cells >= 0).nonzero()[:, 0].to(tokens.device)
        return (tokens[:, order] - self.base).reshape(-1, self.frames, self.rows, self.cols)
