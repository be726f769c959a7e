"""First drafts from a model's trained heads: SSD, spatial speculation (arXiv 2606.20543).

Every row but a frame's first is drafted as a whole by vertical heads from the hidden states of the row above. In a
first row, positions that enter the window are drafted by horizontal heads from the last one that was looked at; the
very first ones know of nothing and are drawn from a uniform law. What becomes of the drafts is the business of
`layout`: some rounds of correction (lossy), or as many as it takes (lossless whatever the heads say, because the law
recorded for a draft is the one it was drawn from).

A position's hidden state is that of the last pass that looked at it, so no pass is spent on it; the paper spends one a
row.
"""

import numpy as np
import torch

from .drafting import draft_laws
from .errors import UserError
from .law import token_scores
from .layout_state import LineRing


def check_spatial(method, block_rows, family, decoder):
    """Refuse early what cannot be drawn with heads.

    Args:
        method: `Method`. decoder: `Decoder` of the `family`.

    Raises:
        UserError: a model without heads or with another model's; more rows at a time than the heads reach.
    """
    if not method.heads:
        return
    if family.heads is None:
        raise UserError(f"{family.name} was not read from a file, so it has no SSD heads: choose row-block")
    down = family.heads.reach(decoder)[1]
    if block_rows > down:
        raise UserError(f"rows at once {block_rows}: the heads of {family.name} reach {down} down, use that at most")


class Forecast:
    """Laws for first drafts, made from hidden states by heads.

    Args:
        heads: `SpatialHeads`. law: `LawSettings`. guidance, allowed: see `law.token_scores`.
    """

    def __init__(self, heads, law, guidance, allowed):
        self.heads, self.law, self.guidance, self.allowed = heads, law, guidance, allowed
        self.ring = None  # hidden states of the rows under way and those above them

    def attach(self, state):
        """Serve a `LineState`."""
        self.state, self.lines = state, state.lines
        state.forecast = self

    def note(self, look, states):
        """Keep the hidden states [A*S, I, dim] of what a pass decides."""
        states = states.unflatten(0, (len(look.asked), -1)).transpose(1, 2)
        if self.ring is None:
            batch, span = len(self.state.fixed), int(self.lines.size.max())
            width = states[0, 0].numel()
            self.ring = LineRing(batch, self.lines, 2, span, width, states.device)
            self.streams = states.shape[2]
        self.ring.write(look.positions, states.flatten(2).float(), look.asked)

    def move(self, source, target):
        """Copy row `source` over row `target`."""
        self.ring.move(source, target)

    def sources(self, positions, known):
        """Where first drafts come from: above the block, or the last position of the row that had a draft.

        Args:
            positions: int [A, M]. known: int [A, M] positions of the row that had one.

        Returns:
            int [A, M], -1 where no head reaches.
        """
        last = self.lines.start[self.lines.line[positions]] + known - 1
        near = (known > 0) & (positions - last <= self.heads.right)
        return np.where(self.lines.down[positions] > 0, self.lines.above[positions], np.where(near, last, -1))

    def draft(self, positions, valid, source):
        """First drafts where `valid`, and their laws; returns as `WindowState.draft`."""
        columns, law = draft_laws(self.state, positions, source, self.laws)
        self.state.laws.write(positions, law, valid)
        return positions, valid, columns

    def laws(self, positions, source):
        """What is expected at `positions` by those at `source`, int [A, M] each: laws fp32 [A, M, V]."""
        state, down = self.state, self.lines.down[positions]
        token = torch.from_numpy(state.tokens[np.arange(len(source))[:, None], source]).to(state.device)
        hidden = self.ring.read(source).unflatten(-1, (self.streams, -1))
        logits = self.heads.logits(hidden, token, np.where(down > 0, 0, positions - source), down)
        return token_scores(logits, self.law, self.guidance, self.allowed).softmax(-1)
