"""Trajectory memory: what each position answered under which neighbours (our addition to the seed-exact mode).

When drafts are refreshed, the answer of a position was computed under the neighbours it HAD. If a neighbour has
just changed, an older answer that was given under the neighbours it now HAS is the better draft. In seed-exact
decoding any draft is legal, so this costs no model row, needs no law and cannot change the tokens.
"""

import torch

RECORDS = 24  # answers remembered a position
ROUNDS = 4  # how far a change may travel to the right within one refresh


class TrajectoryMemory:
    """Records of (neighbour tokens, answer) for the positions of a window.

    Args:
        capacity: positions that can be alive at a time (a ring by position).
        offsets: distances to the neighbours that make up a context, with their weights.
    """

    def __init__(self, batch, capacity, offsets, device):
        self.offsets = torch.tensor([distance for distance, _ in offsets], device=device)
        self.weights = torch.tensor([weight for _, weight in offsets], device=device)
        shape = (batch, capacity + 1, RECORDS)  # the last place takes what belongs to no position
        self.contexts = torch.full((*shape, len(offsets)), -2, dtype=torch.int32, device=device)
        self.answers = torch.zeros(shape, dtype=torch.int32, device=device)
        self.recency = 1e-3 * torch.arange(RECORDS, device=device) / RECORDS
        self.capacity = capacity
        self.next = 0  # record that the coming pass writes

    @staticmethod
    def neighbours(row_stride, frame_stride):
        """(distance, weight) of the context tokens; weights as measured in spec/beyond 1.1."""
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
        rows = torch.arange(len(positions), device=positions.device)[:, None]
        return rows, torch.where(valid, positions % self.capacity, self.capacity)

    def enter(self, positions, valid):
        """Forget what the ring places of newly entered positions served before."""
        self.contexts[self._place(positions, valid)] = -2

    def context(self, tokens, positions):
        """Neighbour tokens int32 [B, W, C]; -1 left of the sequence."""
        where = positions[..., None] - self.offsets
        seen = tokens.gather(1, where.clamp(min=0).flatten(1)).view(where.shape)
        return torch.where(where >= 0, seen, -1).to(torch.int32)

    def record(self, context, answers, positions, valid):
        """Remember the answers int64 [B, W] of a pass under the context that was fed."""
        rows, place = self._place(positions, valid)
        self.contexts[rows, place, self.next] = context
        self.answers[rows, place, self.next] = answers.to(torch.int32)

    def recall(self, tokens, positions, valid):
        """Refine the drafts of `positions`, whose left neighbours may have changed in this pass.

        Args:
            tokens: int64 [B, N+1] holding the newest drafts; refined in place.
            valid: bool [B, W]; other positions are left alone.
        """
        place = self._place(positions, valid)
        contexts, answers = self.contexts[place], self.answers[place].long()
        recency = self.recency.roll(self.next + 1)  # highest for the record just written
        target = torch.where(valid, positions, tokens.shape[1] - 1)  # the spare column takes the rest
        for _ in range(ROUNDS):
            now = self.context(tokens, positions)
            score = ((contexts == now[:, :, None]) * self.weights).sum(-1) + recency
            best = answers.gather(-1, score.argmax(-1, keepdim=True)).squeeze(-1)
            tokens.scatter_(1, target, best)
        self.next = (self.next + 1) % RECORDS
