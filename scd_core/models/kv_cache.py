"""Keys and values of all layers, allocated once and written at absolute slots.

A rollback costs nothing: slots right of the frontier are never visible (a query sees slots <= its own) and the
next pass overwrites them.
"""

from dataclasses import dataclass

import torch


@dataclass
class Step:
    """Where one pass writes and what it may read (made once a pass, shared by all layers)."""

    rows: int  # cache rows in use (a prefix)
    length: int  # keys that can be visible to any query of the pass
    index: torch.Tensor  # [rows*W] flat slots to write
    mask: torch.Tensor | None  # additive [rows, 1, W, length] in the model's dtype; None: all keys visible
    slots: torch.Tensor  # [rows, W]


class KVCache:
    """Cache of `rows` independent sequences (samples x guidance streams) of at most `slots` tokens.

    Memory: 2 * layers * rows * (slots + 1) * kv_heads * head_dim entries of `dtype`; the extra slot takes the
    writes of padding rows.
    """

    def __init__(self, layers, rows, slots, kv_heads, head_dim, device, dtype):
        shape = (rows, slots + 1, kv_heads, head_dim)
        # zeros, not empty: a masked key has weight 0, and 0 * NaN would still spoil the sum
        self.k = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(layers)]
        self.v = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(layers)]
        self.slots = slots
        self.base = torch.arange(rows, device=device)[:, None] * (slots + 1)
        self.columns = torch.arange(slots + 1, device=device)
        self.hidden = None  # [rows, slots+1] bool: prompt slots that nothing may see (padding of a caption)

    @property
    def bytes(self):
        return 2 * len(self.k) * self.k[0].numel() * self.k[0].element_size()

    def hide(self, row, visible):
        """Mark prompt slots of `row` as never visible where `visible` [P] is False."""
        if self.hidden is None:
            self.hidden = torch.zeros(len(self.base), self.slots + 1, dtype=torch.bool, device=visible.device)
        self.hidden[row, : len(visible)] = ~visible

    def step(self, slots, length, dtype):
        """Plan a pass that writes `slots` [rows, W] (the padding slot is `self.slots`) and reads `length` keys."""
        rows = len(slots)
        blocked = self.columns[:length] > slots[:, :, None]
        if self.hidden is not None:
            own = self.columns[:length] == slots[:, :, None]  # a hidden token still sees itself
            blocked = blocked | (self.hidden[:rows, None, :length] & ~own)
        shut, open_ = (torch.tensor(x, dtype=dtype, device=slots.device) for x in (float("-inf"), 0.0))
        mask = torch.where(blocked, shut, open_)
        index = (self.base[:rows] + slots).reshape(-1)
        return Step(rows, length, index, mask[:, None], slots)

    def write(self, layer, k, v, step):
        """Store k, v [rows, W, H, D] and return all visible keys and values [rows, length, H, D] (views)."""
        out = []
        for store, new in ((self.k[layer], k), (self.v[layer], v)):
            store.view(-1, store.shape[2] * store.shape[3]).index_copy_(0, step.index, new.reshape(len(step.index), -1))
            out.append(store[: step.rows, : step.length])
        return out

    def move(self, source, target):
        """Copy the sequence of row `source` over row `target` (a finished sample leaves the batch)."""
        for store in (*self.k, *self.v):
            store[target].copy_(store[source])
        if self.hidden is not None:
            self.hidden[target] = self.hidden[source]
