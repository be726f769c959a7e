"""Chameleon's network in files: transformers' names with half-split rotary, or Meta's names with adjacent pairs."""

import re
from dataclasses import dataclass

import torch

from ..checkpoint import check_keys
from ..errors import UserError
from .parts import Ref, layer_count
from .rope_settings import rope_settings
from .transformer import Decoder, DecoderConfig


@dataclass(frozen=True)
class Layout:
    """Names of one layout; `layer` stands behind "layers.N.", other names are as they are.

    Attributes:
        mark: a name that this layout alone has. pairing: of the rotary.
    """

    mark: str
    embed: str
    head: str
    layer: dict
    pairing: str


HUB = Layout("layers.0.self_attn.q_norm.bias", "embed_tokens", "lm_head", {}, "half")
META = Layout(
    mark="layers.0.attention.q_normalization.weight",
    embed="tok_embeddings",
    head="output",
    layer={
        **{f"self_attn.{p}_proj": f"attention.w{p}" for p in "qkvo"},
        **{f"self_attn.{p}_norm": f"attention.{p}_normalization" for p in "qk"},
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
    },
    pairing="pair",
)
# transformers' setting -> Meta's
SETTINGS = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "rms_norm_eps": "norm_eps",
    "swin_norm": "swin_norm",
}


def find_layout(source):
    """(`Layout`, prefix of its names) of a `Source`, or None when it holds no language model of this kind."""
    for layout in (HUB, META):
        found = next((key for key in source.keys() if key.endswith(layout.mark)), None)
        if found is not None:
            return layout, found.removesuffix(layout.mark)
    return None


class Network:
    """The language model of one `Source`.

    Attributes:
        layout: `Layout`. prefix: of its names. settings: under transformers' names; what is not told is left out.
        theta, factor: of the rotary, see `rope_settings`. embed: name of the token embedding.
        there: whether the source holds it, and with it a language model. name: of the model, for messages.

    Raises:
        UserError: the settings ask for another kind of rotary.
    """

    def __init__(self, source, name):
        self.source, self.name = source, name
        self.layout, self.prefix = find_layout(source) or (HUB, "model.")
        self.settings = self._read_settings()
        self.embed = f"{self.prefix}{self.layout.embed}.weight"
        self.there = self.embed in source.keys()

    def _read_settings(self):
        config = self.source.config
        inner = config.get("model")
        config = inner if isinstance(inner, dict) else config
        self.theta, self.factor = rope_settings(config, self.source.root, self.name)
        found = {ours: config.get(ours, config.get(theirs)) for ours, theirs in SETTINGS.items()}
        return {name: value for name, value in found.items() if value is not None}

    @property
    def rows(self):
        """Rows of the token embedding, 0 without a language model."""
        return self.source.shape(self.embed)[0] if self.there else 0

    def key(self, name):
        """Name inside the network -> name in the file."""
        stem, _, kind = name.rpartition(".")
        layer = re.fullmatch(r"layers\.(\d+)\.(.+)", stem)
        if layer:
            return f"{self.prefix}layers.{layer[1]}.{self.layout.layer.get(layer[2], layer[2])}.{kind}"
        if stem == "embed.embed_tokens":
            return self.embed
        return self._head_key() if stem == "lm_head" else f"{self.prefix}{name}"

    def _head_key(self):
        """The output head; models with a tied one keep no other than the embedding."""
        places = [f"{self.layout.head}.weight", f"{self.prefix}{self.layout.head}.weight"]
        if self.source.config.get("tie_word_embeddings"):
            places.append(self.embed)
        return next((key for key in places if key in self.source.keys()), places[0])

    def _shape(self, name):
        return self.source.shape(self.key(name))

    def _layers(self):
        return self.settings.get("num_hidden_layers", layer_count(self.source.keys(), self.prefix))

    def config(self, codes):
        """`DecoderConfig` from the shapes, for a law of `codes` picture codes; settings must not contradict it.

        Raises:
            UserError: the settings are of another model.
        """
        vocab, dim = self._shape("embed.embed_tokens.weight")
        norms = [self._shape(f"layers.0.self_attn.{p}_norm.weight") for p in "qk"]
        heads, kv_heads = (self._shape(f"layers.0.self_attn.{p}_proj.weight")[0] // norms[0][-1] for p in "qk")
        found = {"hidden_size": dim, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
        wrong = next((name for name, value in found.items() if self.settings.get(name, value) != value), None)
        if wrong:
            raise UserError(
                f"{self.name}: the configuration in '{self.source.root}' says {wrong} {self.settings[wrong]}, the "
                f"weights say {found[wrong]}: they belong to different models, keep each in a folder of its own"
            )
        return DecoderConfig(
            dim=dim,
            layers=self._layers(),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=norms[0][-1],
            ffn=self._shape("layers.0.mlp.gate_proj.weight")[0],
            vocab=vocab,
            head_rows=codes,
            eps=float(self.settings.get("rms_norm_eps", 1e-5)),
            norm_place="post" if self.settings.get("swin_norm") else "pre",
            qk_norm="layer",
            qk_norm_rows=tuple(shape[0] if len(shape) > 1 else 1 for shape in norms),
            rope_pairing=self.layout.pairing,
        )

    def refs(self, config, base):
        """{name inside the network: `Ref`}; of the head only the rows of picture codes, from id `base` on.

        Raises:
            UserError: weights are missing, by their names in the file.
        """
        with torch.device("meta"):
            shapes = {name: t.shape for name, t in Decoder(config).state_dict().items()}
        keys = {name: self.key(name) for name in shapes}
        present = [key for key in keys.values() if key in self.source.keys()]
        check_keys(present, keys.values(), where=f"the language model '{self.source.root}'")
        # front: Meta's q and k norms are vectors
        refs = {name: Ref(self.source, key, dims=len(shapes[name]), front=True) for name, key in keys.items()}
        head = keys["lm_head.weight"]
        return refs | {"lm_head.weight": Ref(self.source, head, rows=(base, base + config.head_rows))}
