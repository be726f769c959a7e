"""Trajectory memory: what each position answered under which neighbours (our addition to the seed-exact mode).

When drafts are refreshed, the answer of a position was computed under the neighbours it HAD. If a neighbour has
just changed, an older answer that was given under the neighbours it now HAS is the better draft. In seed-exact
decoding any draft is legal, so this costs no model row, needs no law and cannot change the tokens.
"""

import numpy as np

RECORDS = 12, 16  # answers remembered a position; with those that a tree's nodes give it
ROUNDS = 8  # how far to the right a change may travel within one refresh


class TrajectoryMemory:
    """Records of (neighbour tokens, answer) for the positions of a window, on the host.

    Args:
        capacity: positions that can be alive at a time (a ring by position).
        offsets: (distance, weight) of the neighbours that make up a context.
        runners: next best candidates remembered beside each answer (for draft trees).
    """

    def __init__(self, batch, capacity, offsets, runners=0):
        self.offsets = np.array([distance for distance, _ in offsets])
        self.weights = np.array([weight for _, weight in offsets], dtype=np.float32)
        self.full = float(self.weights.sum())  # agreement of a context that was seen before
        self.records = RECORDS[runners > 0]
        shape = (batch, capacity + 1, self.records)  # the last place takes what belongs to no position
        self.contexts = np.full((*shape, len(offsets)), -2, dtype=np.int32)
        self.answers = np.zeros(shape, dtype=np.int32)
        self.runners = np.zeros((*shape, runners), dtype=np.int32)
        self.gaps = np.full((*shape, runners), np.inf, dtype=np.float32)
        self.turn = np.zeros((batch, capacity + 1), dtype=np.int64)  # record that is written next
        record = np.arange(self.records)
        age = (record[:, None] - 1 - record) % self.records  # [turn, record]
        self.recency = 1e-3 * (1 - age / self.records).astype(np.float32)
        self.capacity = capacity
        self._asked = None, None

    @staticmethod
    def neighbours(row_stride, frame_stride):
        """(distance, weight) of the context tokens; weights as measured on the bundled model's prototype."""
        offsets = [(1, 4.0), (2, 1.5), (3, 0.7)]
        if row_stride > 3:
            offsets += [(row_stride, 1.5), (row_stride + 1, 0.5), (row_stride - 1, 0.5)]
        if frame_stride:
            offsets.append((frame_stride, 2.0))
        return offsets

    def move(self, source, target):
        for store in (self.contexts, self.answers, self.runners, self.gaps, self.turn):
            store[target] = store[source]

    def place(self, positions, valid):
        """Ring places int [B, W] of positions: indices into the stores, their first two axes taken as one."""
        places = np.where(valid, positions % self.capacity, self.capacity)
        return places + np.arange(len(positions))[:, None] * (self.capacity + 1)

    def enter(self, positions, valid):
        """Forget what the ring places of newly entered positions served before."""
        flat(self.contexts)[self.place(positions, valid)] = -2

    def context(self, tokens, positions):
        """Neighbour tokens int32 [B, W, C] of positions [B, W]; -1 left of the sequence."""
        return self._look(tokens, *self._where(tokens, positions))

    def _where(self, tokens, positions):
        """(indices of the neighbours in flat `tokens`, bool of those left of the sequence or None), both [B, W, C]."""
        asked, answer = self._asked
        if asked is not positions:  # a pass asks about its window when it records and again when it recalls
            where = positions[..., None] - self.offsets
            outside = where < 0
            where = np.maximum(where, 0) + np.arange(len(positions))[:, None, None] * tokens.shape[1]
            answer = where, outside if outside.any() else None
            self._asked = positions, answer
        return answer

    def _look(self, tokens, where, outside):
        found = tokens.reshape(-1).take(where)
        if outside is not None:
            found[outside] = -1
        return found

    def record(self, context, answers, positions, valid, runners=None, gaps=None):
        """Remember the answers [B, W] of a pass under the context [B, W, C] that was fed.

        Args:
            positions, valid: [B, W]; with runners a position may occur more than once.
            runners, gaps: next best candidates [B, W, K] and how far their scores lie below the answer's.
        """
        place = self.place(positions, valid)
        turn = self.turn.reshape(-1)[place]
        if runners is not None:  # a window's positions differ; those of a tree's nodes need not
            turn = (turn + _rank(place)) % self.records
        entry = place * self.records + turn
        flat(self.contexts, 3)[entry] = context
        self.answers.reshape(-1)[entry] = answers
        if runners is not None:
            flat(self.runners, 3)[entry] = runners
            flat(self.gaps, 3)[entry] = gaps
        self.turn.reshape(-1)[place] = (turn + 1) % self.records

    def agreement(self, contexts, recency, now):
        """How well records [B, W, R, C] agree with the neighbours `now` [B, W, C]; recent ones win ties."""
        same = (contexts == now[:, :, None]).astype(np.float32)
        return (same.reshape(-1, same.shape[-1]) @ self.weights).reshape(same.shape[:-1]) + recency

    def best(self, place, now):
        """(entry int [B, W], its agreement [B, W]) of the records at `place` that fits the neighbours `now` best.

        An entry is an index into the stores, their first three axes taken as one.
        """
        score = self.agreement(flat(self.contexts)[place], self.recency[self.turn.reshape(-1)[place]], now)
        record = score.argmax(-1)
        return place * self.records + record, score.max(-1)

    def recall(self, tokens, positions, valid):
        """Refine the drafts of `positions`, whose left neighbours may have changed in this pass.

        Args:
            tokens: int64 [B, N+1] holding the newest drafts; refined in place.
            valid: bool [B, W]; other positions are left alone.
        """
        place, row = self.place(positions, valid), tokens.shape[1]
        contexts, answers = flat(self.contexts)[place], flat(self.answers)[place].reshape(-1)
        recency = self.recency[self.turn.reshape(-1)[place]]
        # surplus lanes repeat the last position: the spare column keeps them from undoing its own lane
        target = np.where(valid, positions, row - 1) + np.arange(len(positions))[:, None] * row
        drafts, look = tokens.reshape(-1), self._where(tokens, positions)
        old, first = drafts[target], np.arange(place.size).reshape(place.shape) * self.records
        for _ in range(ROUNDS):
            record = self.agreement(contexts, recency, self._look(tokens, *look)).argmax(-1)
            new = np.where(valid, answers.take(first + record), old)
            if (new == old).all():
                break
            drafts[target] = old = new


def flat(store, axes=2):
    """A view of `store` with its first axes taken as one: a single index array is much the fastest way in."""
    return store.reshape(-1, *store.shape[axes:])


def _rank(places):
    """How many earlier entries of a row [B, W] name the same place."""
    if places.shape[1] < 2 or (np.diff(places, axis=1) > 0).all():
        return np.zeros_like(places)
    same = places[:, :, None] == places[:, None, :]
    return np.tril(same, -1).sum(-1)
