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
        """Index arrays (rows [B, 1], places [B, W]) of positions in the ring."""
        rows = np.arange(len(positions))[:, None]
        return rows, np.where(valid, positions % self.capacity, self.capacity)

    def enter(self, positions, valid):
        """Forget what the ring places of newly entered positions served before."""
        self.contexts[self.place(positions, valid)] = -2

    def context(self, tokens, positions):
        """Neighbour tokens int32 [B, W, C] of positions [B, W]; -1 left of the sequence."""
        return self._look(tokens, *self._where(positions))

    def _where(self, positions):
        where = positions[..., None] - self.offsets
        return np.arange(len(positions))[:, None, None], np.maximum(where, 0), where < 0

    def _look(self, tokens, rows, where, outside):
        found = tokens[rows, where]
        found[outside] = -1
        return found

    def record(self, context, answers, positions, valid, runners=None, gaps=None):
        """Remember the answers [B, W] of a pass under the context [B, W, C] that was fed.

        Args:
            positions, valid: [B, W]; with runners a position may occur more than once.
            runners, gaps: next best candidates [B, W, K] and how far their scores lie below the answer's.
        """
        rows, places = place = self.place(positions, valid)
        turn = self.turn[place]
        if runners is not None:  # a window's positions differ; those of a tree's nodes need not
            turn = (turn + _rank(places)) % self.records
        self.contexts[rows, places, turn] = context
        self.answers[rows, places, turn] = answers
        if runners is not None:
            self.runners[rows, places, turn] = runners
            self.gaps[rows, places, turn] = gaps
        self.turn[place] = (turn + 1) % self.records

    def agreement(self, contexts, recency, now):
        """How well records [B, W, R, C] agree with the neighbours `now` [B, W, C]; recent ones win ties."""
        same = (contexts == now[:, :, None]).astype(np.float32)
        return (same.reshape(-1, same.shape[-1]) @ self.weights).reshape(same.shape[:-1]) + recency

    def best(self, place, now):
        """(record int [B, W], its agreement [B, W]) that fits the neighbours `now` best."""
        score = self.agreement(self.contexts[place], self.recency[self.turn[place]], now)
        record = score.argmax(-1)
        return record, score.max(-1)

    def recall(self, tokens, positions, valid):
        """Refine the drafts of `positions`, whose left neighbours may have changed in this pass.

        Args:
            tokens: int64 [B, N+1] holding the newest drafts; refined in place.
            valid: bool [B, W]; other positions are left alone.
        """
        place = self.place(positions, valid)
        contexts, answers, recency = self.contexts[place], self.answers[place], self.recency[self.turn[place]]
        # surplus lanes repeat the last position: the spare column keeps them from undoing its own lane
        target = (place[0], np.where(valid, positions, tokens.shape[1] - 1))
        look, old = self._where(positions), tokens[target]
        rows, lanes = place[0], np.arange(old.shape[1])
        for _ in range(ROUNDS):
            record = self.agreement(contexts, recency, self._look(tokens, *look)).argmax(-1)
            new = np.where(valid, answers[rows, lanes, record], old)
            if (new == old).all():
                break
            tokens[target] = old = new


def _rank(places):
    """How many earlier entries of a row [B, W] name the same place."""
    if places.shape[1] < 2 or (np.diff(places, axis=1) > 0).all():
        return np.zeros_like(places)
    same = places[:, :, None] == places[:, None, :]
    return np.tril(same, -1).sum(-1)
