"""Names of LlamaGen's weights in files.

Two layouts of the same network: the release's .pt (fused wqkv) and the transformers-style safetensors of the
conversions (Llama's names). Both rotate adjacent pairs, whatever their names suggest.
"""

from dataclasses import dataclass

FUSED = "attention.wqkv.weight"


@dataclass(frozen=True)
class Layout:
    """Names of one layout; `layer` stands behind "layers.N.", the rest behind the prefix.

    Attributes:
        mark: a name that this layout alone has. head: may lie outside of the prefix. eps: without a configuration.
    """

    mark: str
    embed: str
    head: str
    layer: dict
    eps: float


NATIVE = Layout(
    mark=f"layers.0.{FUSED}",
    embed="tok_embeddings.weight",
    head="output.weight",
    layer={
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.o_proj": "attention.wo",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
    },
    eps=1e-5,
)
LLAMA = Layout(
    mark="layers.0.self_attn.q_proj.weight",
    embed="embed_tokens.weight",
    head="lm_head.weight",
    layer={
        name: name
        for name in (
            "input_layernorm",
            "post_attention_layernorm",
            *(f"self_attn.{p}_proj" for p in "qkvo"),
            *(f"mlp.{p}_proj" for p in ("gate", "up", "down")),
        )
    },
    eps=1e-6,
)
CLASS = {"class_table.weight": "cls_embedding.embedding_table.weight"}
CAPTION = {
    "caption_in.weight": "cls_embedding.cap_proj.fc1.weight",
    "caption_out.weight": "cls_embedding.cap_proj.fc2.weight",
    "uncond": "cls_embedding.uncond_embedding",
}


def find_layout(source):
    """(`Layout`, prefix of its names) of a `Source`, or None when it is no LlamaGen."""
    for layout in (NATIVE, LLAMA):
        for key in source.keys():
            if key.endswith(layout.mark):
                prefix = key.removesuffix(layout.mark)
                inputs = (CLASS["class_table.weight"], CAPTION["uncond"])
                return (layout, prefix) if any(prefix + name in source.keys() for name in inputs) else None
    return None
