"""Trajectory memory: what each position answered under which neighbours (our addition to the seed-exact mode).

When drafts are refreshed, the answer of a position was computed under the neighbours it HAD. If a neighbour has
just changed, an older answer that was given under the neighbours it now HAS is the better draft. In seed-exact
decoding any draft is legal, so this costs no model row, needs no law and cannot change the tokens.
"""

import numpy as np

RECORDS = 24  # answers remembered a position
ROUNDS = 8  # how far to the right a change may travel within one refresh


class TrajectoryMemory:
    """Records of (neighbour tokens, answer) for the positions of a window, on the host.

    Args:
        capacity: positions that can be alive at a time (a ring by position).
        offsets: (distance, weight) of the neighbours that make up a context.
    """

    def __init__(self, batch, capacity, offsets):
        self.offsets = np.array([distance for distance, _ in offsets])
        self.weights = np.array([weight for _, weight in offsets], dtype=np.float32)
        shape = (batch, capacity + 1, RECORDS)  # the last place takes what belongs to no position
        self.contexts = np.full((*shape, len(offsets)), -2, dtype=np.int32)
        self.answers = np.zeros(shape, dtype=np.int32)
        self.recency = 1e-3 * np.arange(RECORDS, dtype=np.float32) / RECORDS
        self.capacity = capacity
        self.next = 0  # record that the coming pass writes

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
        for store in (self.contexts, self.answers):
            store[target] = store[source]

    def _place(self, positions, valid):
        rows = np.arange(len(positions))[:, None]
        return rows, np.where(valid, positions % self.capacity, self.capacity)

    def enter(self, positions, valid):
        """Forget what the ring places of newly entered positions served before."""
        self.contexts[self._place(positions, valid)] = -2

    def context(self, tokens, positions):
        """Neighbour tokens int32 [B, W, C] of positions [B, W]; -1 left of the sequence."""
        where = positions[..., None] - self.offsets
        rows = np.arange(len(positions))[:, None, None]
        return np.where(where >= 0, tokens[rows, np.maximum(where, 0)], -1).astype(np.int32)

    def record(self, context, answers, positions, valid):
        """Remember the answers [B, W] of a pass under the context that was fed."""
        rows, place = self._place(positions, valid)
        self.contexts[rows, place, self.next] = context
        self.answers[rows, place, self.next] = answers

    def recall(self, tokens, positions, valid):
        """Refine the drafts of `positions`, whose left neighbours may have changed in this pass.

        Args:
            tokens: int64 [B, N+1] holding the newest drafts; refined in place.
            valid: bool [B, W]; other positions are left alone.
        """
        rows, place = self._place(positions, valid)
        contexts, answers = self.contexts[rows, place], self.answers[rows, place]
        recency = np.roll(self.recency, self.next + 1)  # highest for the record just written
        # surplus lanes repeat the last position: the spare column keeps them from undoing its own lane
        target = np.where(valid, positions, tokens.shape[1] - 1)
        for _ in range(ROUNDS):
            now = self.context(tokens, positions)
            score = (contexts == now[:, :, None]).astype(np.float32) @ self.weights + recency
            best = np.take_along_axis(answers, score.argmax(-1)[..., None], -1)[..., 0]
            old = tokens[rows, target]
            new = np.where(valid, best, old)
            if np.array_equal(new, old):
                break
            tokens[rows, target] = new
        self.next = (self.next + 1) % RECORDS
