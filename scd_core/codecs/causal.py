"""Layers of codecs that are causal in time: a frame depends on earlier frames only.

So a clip can be worked on in steps. What a layer needs of the frames before a step is kept in a `Past`, and the result
is that of the whole clip at once. Names inside the layers are those of Cosmos' tokenizers (arXiv 2501.03575).
"""

import torch
import torch.nn.functional as F
from torch import nn


class Past:
    """What causal layers keep of the frames before a step.

    Attributes:
        start: the coming step is the first of its clip. more: another one follows, so layers must keep what it needs.
    """

    def __init__(self):
        self.kept, self.start, self.more = {}, True, False

    def steps(self, items):
        """The items of a list of steps, telling the layers where in the clip each of them is."""
        for number, item in enumerate(items):
            self.start, self.more = number == 0, number < len(items) - 1
            yield item

    def before(self, layer, x, count):
        """x [B,C,T,H,W] behind the `count` frames that came before it; a clip begins with its first frame repeated."""
        front = x[:, :, :1].expand(-1, -1, count, -1, -1) if self.start else self.kept.pop(layer)
        x = torch.cat([front, x], 2)
        if self.more:
            self.kept[layer] = x[:, :, -count:].clone()  # a view would hold the whole map
        return x

    def all(self, layer, *tensors):
        """Tensors [B,N,T,C] behind all that the layer has had before."""
        if not self.start:
            tensors = tuple(torch.cat(pair, 2) for pair in zip(self.kept.pop(layer), tensors))
        if self.more:
            self.kept[layer] = tensors
        return tensors


class CausalConv(nn.Module):
    """3-D convolution that sees no later frame: same size in space, and `stride` frames become one."""

    def __init__(self, cin, cout, kernel, ops, stride=(1, 1, 1), **kw):
        super().__init__()
        side = kernel[1] // 2 if stride[1] == 1 else 0
        self.front = kernel[0] - stride[0]  # frames that the first output needs from before
        self.conv3d = ops.Conv3d(cin, cout, kernel, stride=stride, padding=(0, side, side), **kw)

    def forward(self, x, past):
        return self.conv3d(past.before(self, x, self.front) if self.front else x)


class Chain(nn.ModuleList):
    """Layers in a row."""

    def forward(self, x, past):
        for layer in self:
            x = layer(x, past)
        return x


def conv(cin, cout, ops, **kw):
    """A 3x3x3 convolution in two factors: space, then time."""
    return Chain([CausalConv(cin, cout, (1, 3, 3), ops, **kw), CausalConv(cout, cout, (3, 1, 1), ops, **kw)])


class FrameNorm(nn.Module):
    """Group norm of one group over each frame by itself."""

    def __init__(self, channels, ops, **kw):
        super().__init__()
        self.norm = ops.GroupNorm(1, channels, eps=1e-6, **kw)

    def forward(self, x):
        frames = x.transpose(1, 2)
        return self.norm(frames.flatten(0, 1)).unflatten(0, frames.shape[:2]).transpose(1, 2)


class ResBlock(nn.Module):
    """norm, swish, convolution, twice, around a shortcut."""

    def __init__(self, cin, cout, ops, **kw):
        super().__init__()
        self.norm1, self.conv1 = FrameNorm(cin, ops, **kw), conv(cin, cout, ops, **kw)
        self.norm2, self.conv2 = FrameNorm(cout, ops, **kw), conv(cout, cout, ops, **kw)
        if cin != cout:
            self.nin_shortcut = CausalConv(cin, cout, (1, 1, 1), ops, **kw)

    def forward(self, x, past):
        h = self.conv1(F.silu(self.norm1(x)), past)
        h = self.conv2(F.silu(self.norm2(h)), past)
        return h + (self.nin_shortcut(x, past) if hasattr(self, "nin_shortcut") else x)


class Attention(nn.Module):
    """Single-head attention of the cells of a frame among themselves, or of each cell to its own past (`time`)."""

    def __init__(self, channels, time, ops, **kw):
        super().__init__()
        self.time, self.norm = time, FrameNorm(channels, ops, **kw)
        for name in ("q", "k", "v", "proj_out"):
            setattr(self, name, CausalConv(channels, channels, (1, 1, 1), ops, **kw))

    def forward(self, x, past):
        # sequences: [B,T,H*W,C] of cells, or [B,H*W,T,C] of frames
        order, cells = ((0, 3, 4, 2, 1), 1) if self.time else ((0, 2, 3, 4, 1), 2)
        h = self.norm(x)
        q, k, v = (layer(h, past).permute(order).flatten(cells, cells + 1) for layer in (self.q, self.k, self.v))
        mask = None
        if self.time:
            k, v = past.all(self, k, v)
            new, seen = q.shape[2], k.shape[2]
            mask = torch.ones(new, seen, dtype=torch.bool, device=q.device).tril(seen - new) if new > 1 else None
        h = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).unflatten(cells, x.shape[3:])
        return x + self.proj_out(h.permute([order.index(axis) for axis in range(5)]), past)


def _attention(channels, ops, kw):
    return Chain([Attention(channels, False, ops, **kw), Attention(channels, True, ops, **kw)])


def middle(channels, ops, kw):
    return nn.ModuleDict(
        {
            "block_1": ResBlock(channels, channels, ops, **kw),
            "attn_1": _attention(channels, ops, kw),
            "block_2": ResBlock(channels, channels, ops, **kw),
        }
    )


class Level(nn.Module):
    """One resolution: residual blocks, each followed by attention where the level has it, then a change of size."""

    def __init__(self, half, level, cin, ops, kw):
        super().__init__()
        cout = half.channels[level]
        sizes = [cin] + [cout] * half.blocks
        self.block = nn.ModuleList(ResBlock(a, b, ops, **kw) for a, b in zip(sizes, sizes[1:]))
        self.attn = nn.ModuleList(_attention(cout, ops, kw) for _ in self.block if level in half.attn)

    def forward(self, x, past):
        for i, block in enumerate(self.block):
            x = block(x, past)
            if len(self.attn):
                x = self.attn[i](x, past)
        for name in ("downsample", "upsample"):
            if hasattr(self, name):
                x = getattr(self, name)(x, past)
        return x


class Downsample(nn.Module):
    """Half the pixels, then half the frames: a strided convolution beside a mean."""

    def __init__(self, channels, space, time, ops, **kw):
        super().__init__()
        if space:
            self.conv1 = CausalConv(channels, channels, (1, 3, 3), ops, stride=(1, 2, 2), **kw)
        if time:
            self.conv2 = CausalConv(channels, channels, (3, 1, 1), ops, stride=(2, 1, 1), **kw)
        self.conv3 = CausalConv(channels, channels, (1, 1, 1), ops, **kw)

    def forward(self, x, past):
        if hasattr(self, "conv1"):
            x = F.pad(x, (0, 1, 0, 1))
            x = self.conv1(x, past) + F.avg_pool3d(x, (1, 2, 2))
        if hasattr(self, "conv2"):
            x = torch.cat([x[:, :, :1], x], 2) if past.start else x
            x = self.conv2(x, past) + F.avg_pool3d(x, (2, 1, 1))
        return self.conv3(x, past)


class Upsample(nn.Module):
    """Twice the frames (but the first of a clip, which stays one), then twice the pixels."""

    def __init__(self, channels, space, time, ops, **kw):
        super().__init__()
        if time:
            self.conv1 = CausalConv(channels, channels, (3, 1, 1), ops, **kw)
        if space:
            self.conv2 = CausalConv(channels, channels, (1, 3, 3), ops, **kw)
        self.conv3 = CausalConv(channels, channels, (1, 1, 1), ops, **kw)

    def forward(self, x, past):
        if hasattr(self, "conv1"):
            x = x.repeat_interleave(2, 2)[:, :, int(past.start) :]
            x = x + self.conv1(x, past)
        if hasattr(self, "conv2"):
            x = x.repeat_interleave(2, 3).repeat_interleave(2, 4)
            x = x + self.conv2(x, past)
        return self.conv3(x, past)


def haar(x):
    """Wavelet transform [B,C,T,H,W] -> [B,8C,T/2,H/2,W/2]: means of cells, then their differences by t, h and w."""
    for axis in (4, 3, 2):
        even, odd = x.unflatten(axis, (-1, 2)).unbind(axis + 1)
        x = torch.cat([even + odd, even - odd], 1) / 2
    return x


def unhaar(x):
    """The inverse of `haar`."""
    for axis in (2, 3, 4):
        mean, difference = x.chunk(2, 1)
        x = torch.stack([mean + difference, mean - difference], axis + 1).flatten(axis, axis + 1)
    return x
