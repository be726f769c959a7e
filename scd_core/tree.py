"""Draft trees for seed-exact decoding (our addition): one-row nodes for the runner-up candidates of log p + G.

Beside the chain of drafts, a pass also looks at nodes: another candidate for a position, seen under the chain (or
node) left of it. Where the chain's draft proves wrong, a node with the right token already holds the answer of the
next position, and the pass goes on. Acceptance is by match, so the tokens stay those of one-at-a-time sampling
whatever is drafted. SJD-PAC (arXiv 2603.18599) lays a tree at the first rejected position only; here nodes go
wherever a candidate is likely to be needed, best first, and their children come from the trajectory memory.
"""

from dataclasses import dataclass, fields

import numpy as np
import torch
import torch.nn.functional as F

from .memory import flat
from .models.kv_cache import Visible

GAP_SCALE = 4096.0  # gaps travel to the host as whole numbers
RUNNERS = 12  # next best candidates kept of every answer
DEPTH = 3  # nodes on a path; a fourth gains less than a hundredth
ASKING = 2  # of them ask the bank, which costs a question to the device each; the later ones hardly gain by it
REACH = 24  # chain positions that nodes may branch from
# Chances, fitted to runs of the bundled model, by how well the memory knows a position's neighbours: all of them, the
# left one, or none that counts; and where the bank stands in for it. The draft is right, given that all left of it is,
# with chance STAY; a runner-up whose score lies `gap` below the best one's is right instead with chance
# HIT * exp(-gap / WIDTH).
STAY = np.array([0.97, 0.79, 0.25, 0.40])
HIT = np.array([0.10, 0.20, 0.12, 0.20])
WIDTH = np.array([0.2, 0.55, 1.8, 1.1])
BANK = 3
STAY_GIVEN = 0.99  # a token that the plan gives; below 1, so that a child stays less likely than its parent


@dataclass
class Beside:
    """Rows that a pass has beside its windows, host arrays [A, M].

    Attributes:
        position: place of the token that a row guesses. live: False for padding.
        root: first position at which what a row sees may differ from the chain.
        sees: bool [A, M, M] rows that a row sees, itself included.
    """

    position: np.ndarray
    live: np.ndarray
    root: np.ndarray
    sees: np.ndarray

    def visible(self, before, length, device):
        """`Visible` of a pass that feeds the chain at `before` [A, W] and then these rows (-> device tensors)."""
        batch, count = self.live.shape
        lanes = before.shape[1]
        top = np.concatenate([before, np.where(self.live, self.root - 1, length)], 1)
        sees = np.zeros((batch, lanes + count, count), dtype=bool)
        sees[:, lanes:] = self.sees
        nodes = np.full((batch, lanes + count), -1)
        nodes[:, lanes:] = np.where(self.live, np.arange(count), -1)
        top, sees, nodes = (torch.from_numpy(a).to(device, non_blocking=True) for a in (top, sees, nodes))
        return Visible(top, sees=sees, nodes=nodes)


@dataclass
class Nodes(Beside):
    """The nodes of one pass; a parent comes before its children.

    Attributes:
        parent: int [A, M] row that answers the node's position: lane of the chain, or W + node.
        token: int [A, M] what the node guesses.
        context: int32 [A, M, C] neighbours of the position behind the node, for the memory.
    """

    parent: np.ndarray
    token: np.ndarray
    context: np.ndarray

    def padded(self, count):
        """The same followed by dead nodes, `count` in all."""
        extra, arrays = count - self.token.shape[1], []
        for field in fields(self):
            array = getattr(self, field.name)
            grows = (1, 2) if field.name == "sees" else (1,)
            ends = [(0, extra if axis in grows else 0) for axis in range(array.ndim)]
            arrays.append(np.pad(array, ends))
        return Nodes(*arrays)

    def fed(self, device):
        """Token ids int64 [A, M] on the device."""
        return torch.from_numpy(self.token).to(device, non_blocking=True)

    def behind(self, ids, base):
        """Drafts int64 [A, M] of the positions behind the nodes: none, since acceptance is by match."""
        return ids.new_full(self.token.shape, base)

    def judge(self, view, token, kept):
        """The answers of all rows stand as they are: acceptance is by match."""

    def follow(self, counts, front, new, answers, fixed):
        """Walk from the chain's last committed token into the nodes.

        Args:
            counts: int [A] positions that the chain commits. front: int [A] first position of the window.
            new: int64 [A, W] tokens of the window; the path's tokens are written into it.
            answers: int64 [A, M] token that each node's row gives to the position behind it.
            fixed: int64 [A, N+1] given tokens, -1 elsewhere.

        Returns:
            (positions committed with the path int [A], samples, nodes, positions: int64 [K] of accepted nodes).
        """
        rows, counts = np.arange(len(new)), counts.copy()
        row, walking, taken = counts - 1, np.ones(len(new), dtype=bool), []
        for _ in range(DEPTH):
            want = new[rows, counts - 1]
            hits = self.live & (self.parent == row[:, None]) & (self.token == want[:, None]) & walking[:, None]
            walking = hits.any(1)
            if not walking.any():
                break
            node = hits.argmax(1)
            who = np.flatnonzero(walking)
            at, position = node[who], front[who] + counts[who]
            taken.append((who, at, position - 1))
            given = fixed[who, position]
            new[who, counts[who]] = np.where(given >= 0, given, answers[who, at])
            counts[who] += 1
            row = np.where(walking, new.shape[1] + node, -1)
        if not taken:
            return counts, None
        return counts, tuple(np.concatenate(part) for part in zip(*taken))


def best_of(scores):
    """The best `RUNNERS` + 1 of scores [..., V]: columns and gaps to the very best, int64 [..., RUNNERS + 1]."""
    count = min(RUNNERS + 1, scores.shape[-1])
    values, columns = scores.topk(count, -1)
    gaps = ((values[..., :1] - values) * GAP_SCALE).clamp_(max=2.0**30).nan_to_num_(2.0**30).long()
    missing = RUNNERS + 1 - count  # a vocabulary smaller than the list
    if missing:
        columns, gaps = F.pad(columns, (0, missing)), F.pad(gaps, (0, missing), value=1 << 30)
    return columns, gaps


def runners_of(scores):
    """Runners-up of log p + G [A, R, V] as 2 * `RUNNERS` int64 tensors [A, R]: columns, then gaps to the best score."""
    columns, gaps = best_of(scores)
    return [*columns[..., 1:].unbind(-1), *gaps[..., 1:].unbind(-1)]


def runners_in(packed):
    """(columns int64, gaps float) [A, R, `RUNNERS`] of what `runners_of` gave, stacked on the host."""
    columns, gaps = np.moveaxis(packed[: 2 * RUNNERS].reshape(2, RUNNERS, *packed.shape[1:]), 1, -1)
    return columns, gaps / GAP_SCALE


def others(tokens, gaps, taken):
    """Lists [K, n] without the token `taken` [K], or without the last one: both [K, n - 1]."""
    out = tokens == taken[:, None]
    out[:, -1] |= ~out.any(1)
    rest = ~(out & (np.cumsum(out, 1) == 1))  # padding may repeat a token
    return tokens[rest].reshape(len(tokens), -1), gaps[rest].reshape(len(gaps), -1)


class _View:
    """What `DraftTree.grow` looks at: tokens and given tokens [A, N+1], ends of the windows [A]."""

    def __init__(self, tokens, fixed, ends):
        self.tokens, self.fixed, self.ends = tokens, fixed, ends
        self.rows, self.last = np.arange(len(tokens))[:, None], tokens.shape[1] - 1

    def inside(self, position, alive=True):
        """(positions, inside): a node's answer must lie in the window; what does not goes to the spare column."""
        inside = (position < self.ends[:, None] - 1) & alive
        return np.where(inside, position, self.last), inside


@dataclass
class Candidates:
    """Possible nodes, arrays [A, n]; `parent` counts lanes of the chain or candidates of the level above."""

    chance: np.ndarray
    parent: np.ndarray
    position: np.ndarray
    root: np.ndarray
    token: np.ndarray
    path: np.ndarray  # [A, n, 3]: the token, and those at the two places left of it

    @classmethod
    def of(cls, chance, parent, position, root, token, context, nodes):
        """The best of candidates given as chance, token [A, P, K] for P places with neighbours context [A, P, C]."""
        batch, _, count = chance.shape
        pick = _largest(chance.reshape(batch, -1), nodes)
        rows, place = np.arange(batch)[:, None], pick // max(count, 1)
        token = token.reshape(batch, -1)[rows, pick]
        path = np.concatenate([token[..., None], context[rows, place, :2]], -1)
        parts = (a[rows, place] for a in (parent, position, root))
        return cls(chance.reshape(batch, -1)[rows, pick], *parts, token, path)

    def arrays(self):
        return [getattr(self, field.name) for field in fields(self)]

    def best(self, count):
        return _largest(self.chance, count)

    def take(self, pick):
        return Candidates(*(a[np.arange(len(pick))[:, None], pick] for a in self.arrays()))

    def where(self, pick):
        """Index among `pick` of every candidate, -1 for those left out: int [A, n]."""
        out = np.full(self.chance.shape, -1)
        out[np.arange(len(pick))[:, None], pick] = np.arange(pick.shape[1])
        return out


def _largest(chance, count):
    """Indices of the `count` largest chances of each row [A, n], ascending."""
    count = min(count, chance.shape[1])
    if count == chance.shape[1]:
        return np.broadcast_to(np.arange(count), chance.shape)
    return np.sort(np.argpartition(-chance, count, axis=1)[:, :count], 1)


class DraftTree:
    """Chooses the nodes of every pass.

    Args:
        nodes: rows a pass has for them.
        memory: `TrajectoryMemory` with runners, whose first neighbours are those at the distances 1, 2 and 3.
        bank: `LawBank`.
        full: every pass gets all its rows, dead nodes included (passes of one shape).
    """

    def __init__(self, nodes, memory, bank, full=False):
        self.nodes, self.memory, self.bank, self.full = nodes, memory, bank, full

    def grow(self, tokens, fixed, fronts, ends, lanes):
        """The best `Nodes` for windows from `fronts` [A] to `ends` [A]; None where there are none, unless `full`.

        A child is less likely than its parent, so the best nodes of all levels always include their parents.

        Args:
            tokens: int64 [A, N+1] decided tokens and drafts. fixed: int64 [A, N+1] given tokens, -1 elsewhere.
            lanes: rows of the chain in this pass.
        """
        view = _View(tokens, fixed, ends)
        levels = [self._trunk(view, fronts)]
        while len(levels) < DEPTH and levels[-1].chance.size:
            levels.append(self._children(view, levels[-1], len(levels) < ASKING))
        sizes = np.array([level.chance.shape[1] for level in levels])
        if not self.full and not sizes.sum():
            return None
        level = np.repeat(np.arange(len(levels)), sizes)
        total = Candidates(*(np.concatenate(part, 1) for part in zip(*(level.arrays() for level in levels))))
        pick = total.best(self.nodes)
        chosen = total.take(pick)
        if not self.full and not (chosen.chance > 0).any():
            return None
        above = (np.cumsum(sizes) - sizes)[level[pick] - 1] + chosen.parent  # a parent's index among all candidates
        # where it went among the chosen; -1 for those that hang on the chain
        up = np.where(level[pick] > 0, (total.where(pick))[view.rows, np.where(level[pick] > 0, above, 0)], -1)
        grown = self._nodes(view, chosen, up, lanes)
        return grown.padded(self.nodes) if self.full else grown

    def _trunk(self, view, fronts):
        """Alternatives to the drafts of the chain itself."""
        lane = np.arange(max(min(REACH, int((view.ends - fronts).max()) - 1), 0))
        position, inside = view.inside(fronts[:, None] + lane)
        context = self.memory.context(view.tokens, position)
        drafts = view.tokens[view.rows, position]
        stay, _, hits, runners = self._chances(view, position, inside, context, drafts)
        reached = np.cumprod(np.concatenate([np.ones_like(stay[:, :1]), stay[:, :-1]], 1), 1) * inside
        parent = np.broadcast_to(lane, position.shape)
        return Candidates.of(reached[..., None] * hits, parent, position, position, runners, context, self.nodes)

    def _children(self, view, level, ask):
        """Continuations of a level's nodes: the answer that the memory knows under their context, and its runners.

        ask: where the memory does not know the left neighbour, let the bank answer."""
        position, inside = view.inside(level.position + 1, level.chance > 0)
        context = self.memory.context(view.tokens, position)
        context[..., :3] = level.path
        stay, answer, hits, runners = self._chances(view, position, inside, context, ask=ask)
        token = np.concatenate([answer[..., None], runners], -1)
        chance = np.concatenate([stay[..., None], hits], -1) * (level.chance * inside)[..., None]
        parent = np.broadcast_to(np.arange(position.shape[1]), position.shape)
        return Candidates.of(chance, parent, position, level.root, token, context, self.nodes)

    def _chances(self, view, position, inside, context, drafts=None, ask=True):
        """(chance of the best known answer [A, P], that answer, chances [A, P, K] of its runners, the runners).

        drafts: int64 [A, P] what the chain takes for the answer, if it is asked about the chain. ask: see `_children`.
        """
        memory = self.memory
        entry, agreement = memory.best(memory.place(position, inside), context)
        left = flat(memory.contexts, 3)[entry][..., 0] == context[..., 0]
        known = np.where(agreement >= memory.full, 0, np.where(left, 1, 2))
        answers = memory.answers.reshape(-1)[entry]
        runners, gaps = flat(memory.runners, 3)[entry], flat(memory.gaps, 3)[entry]
        asked = self.bank.knows(position, context[..., 0], inside & (known == 2) & ask)
        if asked.any():
            ranked = torch.stack(best_of(self.bank.scores(position, context[..., 0], asked))).cpu().numpy()
            tokens, distance = ranked[0] + self.bank.base, ranked[1] / GAP_SCALE
            known[asked] = BANK
            answers[asked] = tokens[:, 0] if drafts is None else drafts[asked]
            runners[asked], gaps[asked] = others(tokens, distance, answers[asked])
        hits = HIT[known][..., None] * np.exp(-gaps / WIDTH[known][..., None])
        given = view.fixed[view.rows, position]
        hits[given >= 0] = 0
        stay = np.where(given >= 0, STAY_GIVEN, STAY[known])
        return stay, np.where(given >= 0, given, answers), hits, runners

    def _nodes(self, view, chosen, up, lanes):
        """`Nodes` from chosen `Candidates`; `up` is each one's parent among them, -1 for the chain."""
        live = chosen.chance > 0
        count = up.shape[1]
        sees = np.zeros((len(up), count, count), dtype=bool)
        node = np.arange(count)
        step = np.broadcast_to(node, up.shape)
        for _ in range(DEPTH):
            row, col = np.nonzero(step >= 0)
            sees[row, col, step[row, col]] = True
            step = np.where(step >= 0, up[view.rows, np.maximum(step, 0)], -1)
        position = np.where(live, chosen.position, view.last)
        context = self.memory.context(view.tokens, np.minimum(position + 1, view.last))
        context[..., :3] = chosen.path
        parent = np.where(up >= 0, lanes + up, chosen.parent)
        return Nodes(position, live, chosen.root, sees, parent, chosen.token, context)
