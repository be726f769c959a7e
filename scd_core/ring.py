"""Vectors over the vocabulary for the few positions that are alive at a time."""

import numpy as np
import torch


class Ring:
    """Per-position vectors [B, capacity+1, V] addressed by position modulo capacity; one spare place for none."""

    def __init__(self, batch, capacity, width, device, fill=0.0):
        self.store = torch.full((batch, capacity + 1, width), fill, device=device)
        self.capacity = capacity
        self._asked = None, None

    def _place(self, positions, valid=None):
        """Flat places [B*M] of positions [B, M] on the device. A pass asks for the same positions more than once."""
        if valid is not None and valid.all():
            valid = None
        if valid is None and positions is self._asked[0]:
            return self._asked[1]
        place = positions % self.capacity
        if valid is not None:
            place = np.where(valid, place, self.capacity)
        flat = place + np.arange(len(place))[:, None] * (self.capacity + 1)
        flat = torch.from_numpy(flat.reshape(-1)).to(self.store.device)
        if valid is None:
            self._asked = positions, flat
        return flat

    def read(self, positions):
        """Positions [B, M] -> [B, M, V] (a copy)."""
        rows = self.store.flatten(0, 1).index_select(0, self._place(positions))
        return rows.view(*positions.shape, -1)

    def pick(self, rows, positions):
        """Vectors [K, V] of K positions in the given rows, both host arrays [K]."""
        flat = torch.from_numpy(rows * (self.capacity + 1) + positions % self.capacity)
        return self.store.flatten(0, 1).index_select(0, flat.to(self.store.device))

    def write(self, positions, values, valid=None):
        """Store values [B, M, V]; where `valid` [B, M] is False they are dropped."""
        self.store.flatten(0, 1).index_copy_(0, self._place(positions, valid), values.flatten(0, 1))

    def move(self, source, target):
        self.store[target] = self.store[source]
