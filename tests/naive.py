"""The decoder once more, slowly: float64 matrix products, explicit softmax, one loop over heads, no cache, no SDPA."""

import torch


def norm_rms(x, weight, eps):
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def norm_layer(x, weight, bias, eps):
    mean = x.mean(-1, keepdim=True)
    return (x - mean) / ((x - mean).pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight + bias


def gelu_tanh(x):
    return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))


def gelu(x):
    return 0.5 * x * (1 + torch.erf(x / 2**0.5))


def rotate(x, cos, sin, pairing):
    """x [S, D] of one head: pair j of the first 2*R entries turns by its angle."""
    out, half = x.clone(), cos.shape[1]
    for j in range(half):
        a, b = (j, j + half) if pairing == "half" else (2 * j, 2 * j + 1)
        out[:, a] = x[:, a] * cos[:, j] - x[:, b] * sin[:, j]
        out[:, b] = x[:, b] * cos[:, j] + x[:, a] * sin[:, j]
    return out


class Naive:
    """One sequence at a time through a `Decoder`'s weights."""

    def __init__(self, decoder):
        self.cfg = decoder.cfg
        self.w = {name: t.double() for name, t in decoder.state_dict().items()}

    def linear(self, x, name):
        y = x @ self.w[name + ".weight"].t()
        return y + self.w[name + ".bias"] if name + ".bias" in self.w else y

    def rms(self, x, name):
        return norm_rms(x, self.cfg.norm_offset + self.w[name + ".weight"], self.cfg.eps)

    def head_norm(self, x, name, head, heads):
        if self.cfg.qk_norm is None:
            return x
        weight = self.w[name + ".weight"]
        if self.cfg.qk_norm == "rms":
            return norm_rms(x, weight, self.cfg.qk_eps)
        row = head // (heads // len(weight))
        return norm_layer(x, weight[row], self.w[name + ".bias"][row], self.cfg.qk_eps)

    def attention(self, x, source, name, cos, sin, visible):
        """visible: bool [S, T]. cos None: no rotation."""
        cfg, out = self.cfg, []
        q = self.linear(x, name + ".q_proj")
        k, v = self.linear(source, name + ".k_proj"), self.linear(source, name + ".v_proj")
        for head in range(cfg.heads):
            group, d = head // (cfg.heads // cfg.kv_heads), cfg.head_dim
            qh = self.head_norm(q[:, head * d : (head + 1) * d], name + ".q_norm", head, cfg.heads)
            kh = self.head_norm(k[:, group * d : (group + 1) * d], name + ".k_norm", group, cfg.kv_heads)
            if cos is not None:
                qh, kh = (rotate(t, cos, sin, cfg.rope_pairing) for t in (qh, kh))
            score = qh @ kh.t() / d**0.5
            weight = torch.where(visible, score.exp(), 0.0)
            out.append(weight / weight.sum(1, keepdim=True) @ v[:, group * d : (group + 1) * d])
        return self.linear(torch.cat(out, 1), name + ".o_proj")

    def mlp(self, x, name):
        gate = self.linear(x, name + ".gate_proj")
        gate = gate * torch.sigmoid(gate) if self.cfg.act == "silu" else gelu_tanh(gate)
        return self.linear(gate * self.linear(x, name + ".up_proj"), name + ".down_proj")

    def block(self, x, i, cos, sin, visible, context):
        name, place = f"layers.{i}", self.cfg.norm_place
        first, second = name + ".input_layernorm", name + ".post_attention_layernorm"

        def attend(h):
            return self.attention(h, h, name + ".self_attn", cos, sin, visible)

        if place == "post":
            x = x + self.rms(attend(x), first)
        elif place == "sandwich":
            x = x + self.rms(attend(self.rms(x, first)), name + ".post_self_attn_layernorm")
        else:
            x = x + attend(self.rms(x, first))
        if context is not None:
            everything = torch.ones(len(x), len(context), dtype=torch.bool)
            h = self.rms(x, name + ".cross_attn_layernorm")
            x = x + self.attention(h, context, name + ".cross_attn", None, None, everything)
        if place == "post":
            return x + self.rms(self.mlp(x, name + ".mlp"), second)
        h = self.mlp(self.rms(x, second), name + ".mlp")
        return x + (self.rms(h, name + ".post_mlp_layernorm") if place == "sandwich" else h)

    def logits(self, x, cos, sin, absolute=None, context=None, hidden=None, visible=None):
        """Embedded sequence [S, dim] -> logits float64 [S, head_rows].

        Args:
            hidden: bool [S] of tokens that only they themselves may see.
            visible: bool [S, S] of what each token sees, instead of all tokens up to itself.
        """
        cfg, steps = self.cfg, torch.arange(len(x))
        x, cos, sin = x.double(), cos.double(), sin.double()
        visible = steps[None] <= steps[:, None] if visible is None else visible
        if hidden is not None:
            visible = visible & ~hidden[None] | torch.eye(len(x), dtype=torch.bool)
        context = None if context is None else context.double()
        if absolute is not None and cfg.abs_pos == "input":
            x = x + absolute
        for i in range(cfg.layers):
            if absolute is not None and cfg.abs_pos == "every_layer":
                x = x + absolute
            x = self.block(x, i, cos, sin, visible, context)
        x = self.rms(x, "norm")
        if cfg.out_head == "mlp":
            x = gelu(self.linear(x, "head_proj"))
        if cfg.tied_head:
            return x @ self.w["embed.embed_tokens.weight"].t()
        return self.linear(x, "lm_head")
