"""The language models of Cosmos-1.0-Autoregressive (arXiv 2501.03575): names in their files, shapes and settings.

Widths, layers and heads are read off the tensors; what no tensor tells comes from config.json, whose fields are those
of the release's own model settings, or is as published.
"""

import re

import torch

from ..checkpoint import check_keys
from ..errors import UserError
from .dv_parts import COMPRESSION, FACTOR
from .parts import Ref, layer_count
from .transformer import DecoderConfig

MARK = "layers.0.attention.q_norm.weight"
MARK_TEXT = "layers.0.cross_attention.wq.weight"
EMBED, HEAD = "tok_embeddings.weight", "output.weight"
FUSED = "attention.wqkv.weight"
QKV = {f"self_attn.{p}_proj" for p in "qkv"}
FIRST = "layers.0.self_attn."
LAYER = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{p}_proj": f"attention.w{p}" for p in "qkvo"},
    **{f"self_attn.{p}_norm": f"attention.{p}_norm" for p in "qk"},
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
}
CROSS = {
    "cross_attn_layernorm": "cross_attention_norm",
    **{f"cross_attn.{p}_proj": f"cross_attention.w{p}" for p in "qkvo"},
    **{f"cross_attn.{p}_norm": f"cross_attention.{p}_norm" for p in "qk"},
}
IGNORED = (
    r".*_extra_state$",  # notes of an accelerated library
    r".*\b(rope|pos_emb)\.", r".*(abs_pos_emb|causal_mask|cache_[kv])$",  # buffers that are computed here
)  # fmt: skip
LONGEST = 4096  # grids, rows or columns: more would not fit into any memory
LATENT = (5, 40, 64)  # token grids, rows and columns of a clip of the release
HEAD_EPS = 1e-5  # of the q and k norms, whatever norm_eps says: the release's attention is never told
RELEASED = {
    "rope_dim": ("3D",), "pytorch_rope_version": ("v2",), "norm_type": ("rmsnorm", "fused_rmsnorm", "compiled_rmsnorm"),
}  # fmt: skip
WIDE = 5120  # 12B and 13B were stretched with YaRN
YARN = {"original_latent_shape": (3, 40, 64), "yarn_scale": 2, "yarn_beta_fast": 4, "yarn_beta_slow": 1}


def find_prefix(source):
    """What stands before the names of a Cosmos language model in a `Source`, or None when it is none."""
    for key in source.keys():
        prefix = key.removesuffix(MARK)
        if prefix != key and {prefix + EMBED, prefix + HEAD} <= set(source.keys()):
            return prefix
    return None


def absolute_3d_grid(frames, rows, cols, dim):
    """Absolute position vectors [frames * rows * cols, dim] in bf16: sines and cosines of time, row and column."""
    dim_h = dim_w = dim // 6 * 2
    tables = []
    for size, d in zip((frames, rows, cols), (dim - dim_h - dim_w, dim_h, dim_w)):
        waves = 10000.0 ** -(torch.arange(d // 2, dtype=torch.float64) / (d / 2))
        angles = torch.arange(size, dtype=torch.float64)[:, None] * waves
        tables.append(torch.cat([angles.sin(), angles.cos()], 1).bfloat16())  # as the release keeps them
    t, h, w = tables
    shape = (frames, rows, cols, -1)
    grid = [t[:, None, None].expand(shape), h[None, :, None].expand(shape), w[None, None].expand(shape)]
    return torch.cat(grid, -1).flatten(0, 2)


class Network:
    """A language model in a `Source`.

    Attributes:
        config: `DecoderConfig`. refs: {name inside `Decoder`: `Ref`}. reads_text: it cross-attends to a text.
        start: id of the start token that its sequences begin with, or None.
        latent: (token grids, rows, columns) of the clips that it was trained on.
        theta, yarn: see `rope.rope_3d_grid`.

    Raises:
        UserError: names missing or left over; settings that the files contradict or that were never released.
    """

    def __init__(self, source, name):
        self.source, self.name, self.prefix = source, name, find_prefix(source)
        self.refs = self._find_refs()
        self.reads_text = "layers.0.cross_attn.q_proj.weight" in self.refs
        self.config = self._read_config()
        self._check_settings()
        rows = self.config.vocab - self.config.head_rows
        self.start = self.config.head_rows if rows else None
        self.latent = self._latent()
        self.theta = float(self._told("rope_theta", 5e5))
        self.yarn = self._yarn() if self._told("apply_yarn", self.config.dim == WIDE) else None

    def _told(self, name, otherwise=None):
        """A setting; null counts as not told."""
        told = self.source.config.get(name)
        return otherwise if told is None else told

    def _find_refs(self):
        """All weights by their names here; fused projections are cut into rows."""
        prefix, keys = self.prefix, self.source.keys()
        pattern = re.compile(re.escape(prefix) + r"layers\.(\d+)\.(\w+)")
        found = {(int(m[1]), m[2]) for key in keys if (m := pattern.match(key))}
        names = {"embed.embed_tokens.weight": EMBED, "norm.weight": "norm.weight", "lm_head.weight": HEAD}
        fused = {}
        self.layers = layer_count(keys, prefix)
        for i in range(self.layers):
            parts = LAYER | (CROSS if (i, "cross_attention") in found else {})
            if f"{prefix}layers.{i}.{FUSED}" in keys:
                fused[i] = f"{prefix}layers.{i}.{FUSED}"
                parts = {ours: theirs for ours, theirs in parts.items() if ours not in QKV}
            names |= {f"layers.{i}.{a}.weight": f"layers.{i}.{b}.weight" for a, b in parts.items()}
        wanted = {ours: prefix + theirs for ours, theirs in names.items()}
        check_keys(keys, [*wanted.values(), *fused.values()], IGNORED, f"'{self.source.files[0]}'")
        refs = {ours: Ref(self.source, key) for ours, key in wanted.items()}
        for i, key in fused.items():
            refs |= self._cut(i, key, refs[f"layers.{i}.self_attn.o_proj.weight"].shape[1])
        return refs

    def _cut(self, layer, key, q_rows):
        """q, k and v as rows of a layer's fused projection; what q leaves is shared evenly by k and v."""
        rows = self.source.shape(key)[0]
        cuts = (0, q_rows, q_rows + (rows - q_rows) // 2, rows)
        return {
            f"layers.{layer}.self_attn.{name}_proj.weight": Ref(self.source, key, rows=part)
            for name, part in zip("qkv", zip(cuts, cuts[1:]))
        }

    def _shape(self, name):
        return self.refs[name].shape

    def _read_config(self):
        (vocab, dim), head_dim = self._shape("embed.embed_tokens.weight"), self._shape(FIRST + "q_norm.weight")[0]
        crossed = [i for i in range(self.layers) if f"layers.{i}.cross_attn.q_proj.weight" in self.refs]
        return DecoderConfig(
            dim=dim,
            layers=self.layers,
            heads=self._shape(FIRST + "q_proj.weight")[0] // head_dim,
            kv_heads=self._shape(FIRST + "k_proj.weight")[0] // head_dim,
            head_dim=head_dim,
            ffn=self._shape("layers.0.mlp.gate_proj.weight")[0],
            vocab=vocab,
            head_rows=self._shape("lm_head.weight")[0],
            eps=float(self._told("norm_eps", 1e-5)),
            qk_norm="rms",
            qk_eps=HEAD_EPS,
            context_dim=self._shape("layers.0.cross_attn.k_proj.weight")[1] if crossed else None,
            context_every=crossed[1] if len(crossed) > 1 else self.layers,
            abs_pos="every_layer" if self._told("apply_abs_pos_emb", bool(crossed)) else None,
        )

    def _check_settings(self):
        """Settings beside other weights than theirs, or of networks that were never released."""
        cfg = self.config
        have = {
            "dim": cfg.dim, "n_layers": cfg.layers, "n_heads": cfg.heads, "n_kv_heads": cfg.kv_heads,
            "head_dim": cfg.head_dim, "ffn_hidden_size": cfg.ffn, "vocab_size": cfg.head_rows,
            "insert_cross_attn": self.reads_text,
        }  # fmt: skip
        if self.reads_text:
            have["context_dim"] = cfg.context_dim
        wrong = [f"{name} {self._told(name)}, not {value}" for name, value in have.items()
                 if self._told(name, value) != value]  # fmt: skip
        if wrong:
            raise UserError(
                f"{self.name}: config.json in '{self.source.root}' tells {'; '.join(wrong)} as the weights have it: "
                "they belong to different models, keep each in a folder of its own"
            )
        for name, values in RELEASED.items():
            if self._told(name, values[0]) not in values:
                raise UserError(
                    f"{self.name}: config.json in '{self.source.root}' asks for {name} {self._told(name)!r}, which no "
                    f"video model of the release has ({' or '.join(values)}): if the weights are the release's own, "
                    "take that config.json away"
                )

    def _latent(self):
        """(token grids, rows, columns) of a clip, as the settings tell."""
        told = self._told("video_latent_shape")
        if told is None:
            frames = self._told("num_video_frames", 1 + (LATENT[0] - 1) * COMPRESSION)
            sides = (self._told(f"video_{side}", n * FACTOR) for side, n in zip(("height", "width"), LATENT[1:]))
            told = (1 + (frames - 1) // COMPRESSION, *(side // FACTOR for side in sides))
        return self._grid("video_latent_shape", told)

    def _grid(self, name, told):
        whole = isinstance(told, (list, tuple)) and len(told) == 3 and all(type(n) is int for n in told)
        if not whole or not all(0 < n <= LONGEST for n in told):
            raise UserError(
                f"{self.name}: config.json in '{self.source.root}' tells {name} {told}; three whole numbers are "
                "expected (token grids, rows, columns): download it again"
            )
        return tuple(told)

    def _yarn(self):
        shape, scale, fast, slow = (self._told(name, value) for name, value in YARN.items())
        shape = self._grid("original_latent_shape", shape)
        return {"shape": shape, "scale": scale, "beta_fast": fast, "beta_slow": slow}
