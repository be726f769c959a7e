"""Proactive drafting for the coupled methods (SJD-PAC, arXiv 2603.18599): more candidates for the next token.

The first undecided position is where most drafts fail. Beside its draft a pass looks at further candidates, drawn
from the same law without replacement; each has one row, which holds the law of the position behind it. They are
tried one after the other by the exact multi-candidate rule, so the committed token keeps its law; when one of them
stands, the token behind it is committed from that row and the pass has won a position.
"""

from dataclasses import dataclass

import numpy as np
import torch

from . import noise as streams
from .coupling import inverse_cdf, residual
from .tree import Beside


def without(weights, token):
    """A law's weights [A, V] without `token` [A]: what is left to draw from."""
    return weights.scatter(-1, token[:, None], 0.0)


@dataclass
class Guesses(Beside):
    """The candidates of one pass.

    Attributes:
        lane: int [A] lane of the first free position, where the draft lies that they stand beside.
        columns: int64 [A, M] on the device, in the order of their drawing.
        there: bool [A, M] on the device: the candidate could be drawn, and its row lies in the window.
        base: id of column 0.
    """

    lane: np.ndarray
    columns: torch.Tensor
    there: torch.Tensor
    base: int

    @classmethod
    def draw(cls, count, state, ids, positions, sizes, passes):
        """Draw `count` candidates for every sample from the law of the draft that it has at its front.

        Args:
            state: `WindowState`. ids: int64 [A, 1+W] the last committed token and the drafts, on the device.
            positions: int [A, W]. sizes: int [A, 1] positions of each window. passes: number of the pass.
        """
        rows, device = np.arange(len(positions)), ids.device
        free = state.fixed[rows[:, None], positions] < 0
        lane = free.argmax(1)
        after = np.minimum(lane + 1, positions.shape[1] - 1)
        live = (lane + 1 < sizes[:, 0]) & free[rows, after]  # a given token behind the front needs no row
        front = positions[rows, lane][:, None]
        draft = ids.gather(1, torch.from_numpy(lane[:, None] + 1).to(device))[:, 0] - state.base
        weights = without(state.laws.read(front)[:, 0], draft)
        chances = torch.from_numpy(state.noise.uniform(streams.further(0, count), front, passes)).to(device)
        columns, there = [], []
        for chance in chances:
            guess = inverse_cdf(weights, chance[:, 0])
            columns.append(guess)
            there.append(weights.gather(1, guess[:, None])[:, 0] > 0)
            weights = without(weights, guess)
        there = torch.stack(there, 1) & torch.from_numpy(live).to(device)[:, None]
        place = np.broadcast_to(front, (len(rows), count))
        sees = np.broadcast_to(np.eye(count, dtype=bool), (len(rows), count, count))
        live = np.broadcast_to(live[:, None], place.shape)
        return cls(place, live, place, sees, lane, torch.stack(columns, 1), there, state.base)

    def fed(self, device):
        """Token ids int64 [A, M] on the device."""
        return self.columns + self.base

    def behind(self, ids, base):
        """Drafts int64 [A, M] of the position behind the front, which the law of every row will judge."""
        after = torch.from_numpy(np.minimum(self.lane + 1, ids.shape[1] - 1)).to(ids.device)
        return ids.gather(1, after[:, None]).expand(self.columns.shape)

    def judge(self, view, token, kept):
        """Try the candidates where the draft at the front has failed: the exact multi-candidate rule.

        s = p; for each candidate: accept y with min(1, s(y) / q_k(y)), else s = norm(max(s - q_k, 0)), q_k being the
        draft's law without all that was drawn before; where all fail, s is drawn.

        Args:
            view: `Verdict` of the windows and, behind them, of the candidates' rows.
            token, kept: int64, bool [A, W+M] of the method's own rule; changed in place.

        Returns:
            int64 [A]: number of the candidate that stands, -1 for none.
        """
        device, count = token.device, self.columns.shape[1]
        rows, lane = torch.arange(len(token), device=device), torch.from_numpy(self.lane).to(device)
        law = view.q[rows, lane]
        left, weights = residual(view.p[rows, lane], law), without(law, view.draft[rows, lane])
        uses = [*streams.further(1, count), streams.LAST]
        *chances, last = torch.from_numpy(view.noise.uniform(uses, self.position[:, :1], view.passes)).to(device)
        hit = torch.full_like(lane, -1)
        for k, chance in enumerate(chances):
            guess = self.columns[:, k]
            left, own = (w / w.sum(-1, keepdim=True).clamp(min=1e-30) for w in (left, weights))
            fits = chance[:, 0] * own.gather(1, guess[:, None])[:, 0] < left.gather(1, guess[:, None])[:, 0]
            tried = (hit < 0) & self.there[:, k]
            hit = torch.where(tried & fits, k, hit)
            left = torch.where((tried & ~fits)[:, None], residual(left, own), left)
            weights = without(weights, guess)
        lost = ~kept[rows, lane] & self.there[:, 0]
        hit = torch.where(lost, hit, -1)
        found = self.columns.gather(1, hit.clamp(min=0)[:, None])[:, 0]
        found = torch.where(hit >= 0, found, inverse_cdf(left, last[:, 0]))
        token[rows, lane] = torch.where(lost, found, token[rows, lane])
        kept[rows, lane] |= hit >= 0
        # the row's own law has judged the draft behind the front; what comes after it was seen beside the failed draft
        behind = (lane + 1).clamp(max=token.shape[1] - 1)
        answer = token[rows, token.shape[1] - count + hit.clamp(min=0)]
        token[rows, behind] = torch.where(hit >= 0, answer, token[rows, behind])
        kept[rows, behind] &= hit < 0
        return hit

    def follow(self, counts, front, new, hit, fixed):
        """As `Nodes.follow`; hit: int [A] what `judge` returned. The tokens are in their places already."""
        who = np.flatnonzero(hit >= 0)
        return counts, (who, hit[who], self.position[who, 0]) if len(who) else None
