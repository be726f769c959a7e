"""Keys and values of all layers, allocated once and written at absolute slots.

A rollback costs nothing: slots right of the frontier are never visible (a query sees slots <= its own) and the
next pass overwrites them. Rows of a draft tree have scratch slots in front of all others; only their own
descendants see them.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Visible:
    """What the inputs of a pass see, where it is not simply "everything up to one's own place". On the device.

    Positions are those of the sequence; the prompt is always visible. Shapes are [A, I] for I inputs a sample.

    Attributes:
        top: int64, last position that an input sees.
        floor: int64 or None; below it only positions in `settled` are seen (layouts by rows).
        settled: bool [A, N] committed positions, needed with `floor`.
        sees: bool [A, I, nodes] scratch slots that an input sees, or None: none.
        nodes: int64 [A, I] scratch slot that an input is written to, -1: its position's own slot; or None.
    """

    top: torch.Tensor
    floor: torch.Tensor | None = None
    settled: torch.Tensor | None = None
    sees: torch.Tensor | None = None
    nodes: torch.Tensor | None = None


@dataclass
class Step:
    """Where one pass writes and what it may read (made once a pass, shared by all layers)."""

    rows: int  # cache rows in use (a prefix)
    length: int  # keys that can be visible to any query of the pass, scratch slots included
    index: torch.Tensor  # [rows*W] flat slots to write
    mask: torch.Tensor  # additive [rows, 1, W, length] in the model's dtype
    slots: torch.Tensor  # [rows, W]


class KVCache:
    """Cache of `rows` independent sequences (samples x guidance streams) of at most `slots` tokens.

    Memory: 2 * layers * rows * (scratch + slots + 1) * kv_heads * head_dim entries of `dtype`; the extra slot takes
    the writes of padding rows.
    """

    def __init__(self, layers, rows, slots, kv_heads, head_dim, device, dtype, scratch=0):
        shape = (layers, 2, rows, scratch + slots + 1, kv_heads, head_dim)
        # zeros, not empty: a masked key has weight 0, and 0 * NaN would still spoil the sum
        self.store = torch.zeros(shape, device=device, dtype=dtype)
        self.k, self.v = (list(part) for part in self.store.unbind(1))
        self.slots, self.scratch = slots, scratch
        self.base = torch.arange(rows, device=device)[:, None] * (scratch + slots + 1) + scratch
        self.columns = torch.arange(-scratch, slots + 1, device=device)
        self.hidden = None  # [rows, slots+1] bool: prompt slots that nothing may see (padding of a caption)

    @property
    def bytes(self):
        return self.store.nbytes

    def hide(self, row, visible):
        """Mark prompt slots of `row` as never visible where `visible` [P] is False."""
        if self.hidden is None:
            shape = (len(self.base), len(self.columns))
            self.hidden = torch.zeros(shape, dtype=torch.bool, device=visible.device)
        self.hidden[row, self.scratch : self.scratch + len(visible)] = ~visible

    def step(self, slots, length, dtype, blocked=None, nodes=None):
        """Plan a pass.

        Args:
            slots: int64 [rows, W] to write to (the padding slot is `self.slots`).
            length: slots that can be visible, counted without the scratch ones.
            blocked: bool [rows, W, scratch + length] of what the inputs may not see; None: later slots and scratch.
            nodes: int64 [rows, W] scratch slots to write to instead, -1 for none.
        """
        rows, length = slots.shape[0], self.scratch + length
        if blocked is None:
            columns = self.columns[:length]
            blocked = columns > slots[:, :, None]
            if self.scratch:
                blocked |= columns < 0
        if self.hidden is not None:
            own = self.columns[:length] == slots[:, :, None]  # a hidden token still sees itself
            blocked = blocked | (self.hidden[:rows, None, :length] & ~own)
        shut, open_ = (torch.tensor(x, dtype=dtype, device=slots.device) for x in (float("-inf"), 0.0))
        mask = torch.where(blocked, shut, open_)
        written = slots if nodes is None else torch.where(nodes >= 0, nodes - self.scratch, slots)
        index = (self.base[:rows] + written).reshape(-1)
        return Step(rows, length, index, mask[:, None], slots)

    def write(self, layer, k, v, step):
        """Store k, v [rows, W, H, D] and return all visible keys and values [rows, length, H, D] (views)."""
        out, count = [], step.index.shape[0]
        for store, new in ((self.k[layer], k), (self.v[layer], v)):
            store.view(-1, store.shape[2] * store.shape[3]).index_copy_(0, step.index, new.reshape(count, -1))
            out.append(store[: step.rows, : step.length])
        return out

    def settle(self, rows, nodes, slots):
        """Copy scratch slots `nodes` to their sequence slots: a path of the draft tree was accepted. All int64 [K]."""
        self.store[:, :, rows, slots + self.scratch] = self.store[:, :, rows, nodes]

    def move(self, source, target):
        """Copy the sequence of row `source` over row `target` (a finished sample leaves the batch)."""
        self.store[:, :, target].copy_(self.store[:, :, source])
        if self.hidden is not None:
            self.hidden[target] = self.hidden[source]
