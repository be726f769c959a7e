"""Vectors over the vocabulary for the few positions that are alive at a time."""

import numpy as np
import torch

EASY = 1 << 21  # numbers a sample (8 MB): so much a ring may take to be turned over less often than it must


class Ring:
    """Per-position vectors [B, capacity+1, V] addressed by position modulo capacity; one spare place for none.

    Where one sample's places follow each other, they are read and written without an index.
    """

    def __init__(self, batch, capacity, width, device, fill=0.0):
        self.store = torch.full((batch, capacity + 1, width), fill, device=device)
        self._resize(capacity)

    def _resize(self, capacity):
        self.capacity = capacity
        self._asked = None, None, None  # positions, and where they are

    @staticmethod
    def roomy(least, length, width):
        """Capacity for `length` positions of vectors `width` where `least` must be alive at a time."""
        return min(length, max(least, EASY // width))

    def _fold(self, positions):
        return positions % self.capacity

    def _place(self, positions, valid=None):
        """(slice of places or None, flat places [B*M] on the device or None) of positions [B, M].

        A pass asks for the same positions more than once.
        """
        if valid is not None and valid.all():
            valid = None
        if valid is None and positions is self._asked[0]:
            return self._asked[1:]
        place, run, flat = self._fold(positions), None, None
        if valid is not None:
            place = np.where(valid, place, self.capacity)
        elif len(place) == 1:
            first = int(place[0, 0])
            if (place[0] == np.arange(first, first + place.size)).all():
                run = slice(first, first + place.size)
        if run is None:
            flat = place + np.arange(len(place))[:, None] * (self.capacity + 1)
            flat = torch.from_numpy(flat.reshape(-1)).to(self.store.device)
        if valid is None:
            self._asked = positions, run, flat
        return run, flat

    def read(self, positions):
        """Positions [B, M] -> [B, M, V], not to be changed: a view of what the next `write` may change, or a copy."""
        run, flat = self._place(positions)
        if run is not None:
            return self.store[:1, run]
        return self.store.flatten(0, 1).index_select(0, flat).view(*positions.shape, -1)

    def pick(self, rows, positions):
        """Vectors [K, V] of K positions in the given rows, both host arrays [K]."""
        flat = torch.from_numpy(rows * (self.capacity + 1) + self._fold(positions))
        return self.store.flatten(0, 1).index_select(0, flat.to(self.store.device))

    def write(self, positions, values, valid=None):
        """Store values [B, M, V]; where `valid` [B, M] is False they are dropped."""
        run, flat = self._place(positions, valid)
        if run is not None:
            self.store[:1, run] = values
        else:
            self.store.flatten(0, 1).index_copy_(0, flat, values.flatten(0, 1))

    def move(self, source, target):
        self.store[target] = self.store[source]
