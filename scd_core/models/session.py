"""One run's use of a decoder: prompt prefill, window passes, and the cache that both write."""

import torch

from .kv_cache import KVCache

PREFILL = 512  # tokens a pass
KEYS = 256  # keys that a pass of fixed shape looks at, in steps of


def fixed_shapes(device):
    """Shall all window passes have one shape (few shapes of the keys, and of the inputs by rows)?

    An accelerator then chooses its kernels once, and a pass can be captured as a CUDA graph; a CPU would pay for
    every row that fills a shape up.
    """
    return torch.device(device).type != "cpu"


class Session:
    """Evaluates a decoder for a batch of samples under one or two guidance streams.

    Cache rows are sample-major: row b*S + s holds stream s of sample b, so that the active samples are always a
    prefix. The token of sequence position j sits in slot `prompt length of the row + j`.

    Args:
        decoder: `Decoder`. family: its `Family`. plan: `TokenPlan`.
        streams: list of S `Stream`s (1: no guidance), the same for every sample.
        fixed: int64 [B, N] given token ids, -1 elsewhere; the given prefix is prefilled.
        prefix: positions 0 .. prefix-1 are given for every sample.
        scratch: cache slots for the rows of a draft tree.

    Attributes:
        states: hidden states [A*S, W, dim] of the last pass, before the decoder's last norm.
    """

    def __init__(self, decoder, family, plan, streams, fixed, prefix, device, scratch=0):
        self.decoder, self.device, self.dtype = decoder, device, decoder.dtype
        self.keys = KEYS if fixed_shapes(device) else 1
        self.streams = len(streams)
        cfg, batch = decoder.cfg, len(fixed)
        lengths = [stream.length for stream in streams]
        self.offset = torch.tensor(lengths * batch, device=device)[:, None]  # [R, 1] slot of position 0
        self.longest = max(lengths)
        slots = self.longest + plan.length
        self.cache = KVCache(
            cfg.layers, batch * len(streams), slots, cfg.kv_heads, cfg.head_dim, device, self.dtype, scratch
        )
        positions = family.positions(decoder, plan, self.longest, device)
        self.positions = positions.ready(cfg.rope_pairing, self.dtype)
        self.context = None
        if streams[0].context is not None:
            text = torch.stack([s.context for s in streams]).to(device, self.dtype)
            self.context = [
                kv and tuple(t.repeat(batch, 1, 1, 1) for t in kv) for kv in decoder.cross_states(text)
            ]
        self._prefill(streams, fixed, prefix)

    def _prefill(self, streams, fixed, prefix):
        """Write all tokens but the last given one; that one starts the first window."""
        batch, prompts = len(fixed), []
        for row, stream in enumerate(streams):
            ids = None if stream.ids is None else stream.ids.to(self.device)
            stream = stream if ids is None else type(stream)(ids=ids)
            prompts.append(self.decoder.embed.prompt(stream, self.dtype))
            if streams[row].mask is not None:
                for b in range(batch):
                    self.cache.hide(b * self.streams + row, streams[row].mask.to(self.device))
        self.last = torch.stack([p[-1] for p in prompts]).repeat(batch, 1)  # [R, dim]
        given = self.decoder.embed.image(fixed[:, :prefix].clamp(min=0).to(self.device), self.dtype)
        rows = [torch.cat([p, given[b]])[:-1] for b in range(batch) for p in prompts]
        width = max(len(r) for r in rows)
        if width == 0:
            return
        x = torch.stack([torch.cat([r, r.new_zeros(width - len(r), r.shape[1])]) for r in rows])
        slots = torch.arange(width, device=self.device).repeat(len(rows), 1)
        ends = torch.tensor([[len(r)] for r in rows], device=self.device)
        slots = torch.where(slots < ends, slots, self.cache.slots)
        for part in range(0, width, PREFILL):  # the mask of a long prefix at once would outgrow the cache
            stop = min(part + PREFILL, width)
            self._forward(x[:, part:stop], slots[:, part:stop], stop)

    def _forward(self, x, slots, length, blocked=None, nodes=None):
        step = self.cache.step(slots, length, self.dtype, blocked, nodes)
        # the padding slot has no position of its own; any will do
        rows = self.positions.rows(slots.clamp(max=len(self.positions.cos) - 1))
        context = self.context and [kv and tuple(t[: len(x)] for t in kv) for kv in self.context]
        self.states = self.decoder.states(x, rows, self.cache, step, context)
        return self.decoder.norm(self.states)

    def window(self, tokens, before, length, opening, visible=None):
        """Laws' raw material for one pass.

        Args:
            tokens: int64 [A, W] input ids: the last committed token and the drafts after it.
            before: int64 [A, W] sequence position of each input (-1: the last prompt token; plan.length: padding).
            length: positions from the start that can be visible (largest `before` + 1).
            opening: some input is the last prompt token.
            visible: `Visible`; None: an input sees everything up to its own position.

        Returns:
            logits [A, S, W, V]; row i belongs to the position after `before[:, i]`.
        """
        s = self.streams
        if s > 1:
            tokens, before = tokens.repeat_interleave(s, 0), before.repeat_interleave(s, 0)
        x = self.decoder.embed.image(tokens, self.dtype)
        if opening:
            x = torch.where((before < 0)[..., None], self.last[: len(x), None], x)
        # padding lands in the slot behind the row's last one, which nothing reads
        slots = before + self.offset[: len(x)]
        length = min(-(-(self.longest + length) // self.keys) * self.keys, self.cache.slots + 1)
        blocked, nodes = (None, None) if visible is None else self._blocked(visible, length)
        hidden = self._forward(x, slots, length, blocked, nodes)
        return self.decoder.logits(hidden).unflatten(0, (-1, s))

    def _blocked(self, visible, length):
        """`Visible` of samples -> (blocked bool [R, W, scratch + length], nodes int64 [R, W] or None) of cache rows."""
        scratch, each = self.cache.scratch, lambda t: t.repeat_interleave(self.streams, 0)
        top = each(visible.top)
        offset = self.offset[: len(top)]
        columns = self.cache.columns[: scratch + length]
        blocked = columns > (top + offset)[:, :, None]
        if visible.floor is not None:
            # where a sequence position lies in the row's slots; the prompt is settled
            place = columns - offset
            inside = (place >= 0) & (place < visible.settled.shape[1])
            known = each(visible.settled).gather(1, place.clamp(0, visible.settled.shape[1] - 1))
            settled = torch.where(inside, known, place < 0)
            blocked |= ~settled[:, None] & (columns < (each(visible.floor) + offset)[:, :, None])
        if scratch:
            blocked[:, :, :scratch] = True if visible.sees is None else ~each(visible.sees)
        return blocked, None if visible.nodes is None else each(visible.nodes)

    def settle(self, samples, nodes, positions):
        """The tokens of scratch slots `nodes` were accepted at `positions`: int64 [K] each, on the device."""
        streams = torch.arange(self.streams, device=self.device)
        rows = (samples[:, None] * self.streams + streams).flatten()
        slots = positions.repeat_interleave(self.streams) + self.offset[rows, 0]
        self.cache.settle(rows, nodes.repeat_interleave(self.streams), slots)

    def move(self, source, target):
        """Sample `source` takes the place of the finished sample `target`."""
        for s in range(self.streams):
            self.cache.move(source * self.streams + s, target * self.streams + s)
            a, b = source * self.streams + s, target * self.streams + s
            self.last[b], self.offset[b] = self.last[a], self.offset[a]
