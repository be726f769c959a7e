"""How tokens enter the decoder: one table, a codebook with an adapter, or a table beside a class or caption."""

import torch
import torch.nn.functional as F
from torch import nn

from .. import operations as plain_operations


class TableEmbedding(nn.Module):
    """One table for prompt and image tokens (Chameleon, Cosmos, Emu3, SimpleAR, the bundled model)."""

    def __init__(self, cfg, ops, **kw):
        super().__init__()
        self.scale = cfg.embed_scale
        self.embed_tokens = ops.Embedding(cfg.vocab, cfg.dim, **kw)

    def image(self, ids, dtype):
        """Token ids [..] -> vectors [.., dim] in `dtype`."""
        x = self.embed_tokens(ids, out_dtype=dtype)
        return x if self.scale == 1.0 else x * self.scale

    def prompt(self, stream, dtype):
        """Vectors [P, dim] of a prompt stream."""
        return self.image(stream.ids, dtype)

    def project(self, hidden):
        """Logits through the tied table."""
        return F.linear(hidden, plain_operations.cast_to(self.embed_tokens.weight, hidden))


class CodebookEmbedding(nn.Module):
    """Janus: image tokens are short codebook rows lifted by a small network; text has its own table.

    `cfg.embed_args` = (image codes, code dim, layers of the network).
    """

    def __init__(self, cfg, ops, **kw):
        super().__init__()
        codes, code_dim, depth = cfg.embed_args
        self.embed_tokens = ops.Embedding(cfg.vocab, cfg.dim, **kw)
        self.gen_embed = ops.Embedding(codes, code_dim, **kw)
        widths = [code_dim] + [cfg.dim] * depth
        self.aligner = nn.ModuleList(ops.Linear(a, b, **kw) for a, b in zip(widths, widths[1:]))

    def image(self, ids, dtype):
        x = self.aligner[0](self.gen_embed(ids, out_dtype=dtype))
        for layer in self.aligner[1:]:
            x = layer(F.gelu(x))
        return x

    def prompt(self, stream, dtype):
        return self.embed_tokens(stream.ids, out_dtype=dtype)


class ConditionEmbedding(nn.Module):
    """LlamaGen: an image table; the prompt is one class row or projected text features.

    `cfg.embed_args` = (class rows,) or (feature width, feature tokens).
    """

    device = None  # where features go; None: to the table. A host that keeps weights elsewhere sets it

    def __init__(self, cfg, ops, **kw):
        super().__init__()
        self.embed_tokens = ops.Embedding(cfg.vocab, cfg.dim, **kw)
        if cfg.in_embed == "class":
            self.class_table = ops.Embedding(cfg.embed_args[0], cfg.dim, **kw)
        else:
            width, tokens = cfg.embed_args
            self.caption_in = ops.Linear(width, cfg.dim, bias=False, **kw)
            self.caption_out = ops.Linear(cfg.dim, cfg.dim, bias=False, **kw)
            self.uncond = plain_operations.empty_parameter(tokens, width, **kw)

    def image(self, ids, dtype):
        return self.embed_tokens(ids, out_dtype=dtype)

    def prompt(self, stream, dtype):
        if stream.ids is not None:
            return self.class_table(stream.ids, out_dtype=dtype)
        features = self.uncond if stream.features is None else stream.features
        like = torch.empty(0, device=self.device or self.embed_tokens.weight.device, dtype=dtype)
        features = plain_operations.cast_to(features, like)
        return self.caption_out(F.gelu(self.caption_in(features), approximate="tanh"))


def build_embedding(cfg, ops, **kw):
    """The input side named by `cfg.in_embed`."""
    kinds = {
        "table": TableEmbedding,
        "codebook": CodebookEmbedding,
        "class": ConditionEmbedding,
        "caption": ConditionEmbedding,
    }
    return kinds[cfg.in_embed](cfg, ops, **kw)
