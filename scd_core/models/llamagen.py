"""LlamaGen (Sun et al. 2024, arXiv 2406.06525): class or text to picture, raster tokens under a 2-D rotary."""

import logging
import math
import re

import torch

from ..checkpoint import check_keys
from ..codecs.layouts import codec_layout, find_codec
from ..errors import UserError
from ..plan import TokenPlan
from ..prompt import Stream
from ..text_features import FeatureReader
from .family import Defaults, Family, Size
from .imagenet import ClassEncoder
from .llamagen_layouts import CAPTION, CLASS, FUSED, NATIVE, find_layout
from .parts import Part, Ref, layer_count, require
from .rope import rope_2d_grid
from .t5 import T5Text, t5_refs
from .transformer import DecoderConfig, Positions

log = logging.getLogger(__name__)

# Attention heads of the published widths (B, L, XL, XXL, 1B, XXXL, 3B, 7B): no tensor tells them.
HEADS = {768: 12, 1024: 16, 1280: 20, 1536: 24, 2048: 32, 2560: 40, 3200: 32, 4096: 32}
GRIDS = (16, 24, 32)  # 256, 384 and 512 pixels
LARGEST = 64  # tokens a side
ENDINGS = ("safetensors", "pt", "pth", "ckpt", "bin")
T5_FILES = ("model.safetensors.index.json", "model.safetensors", "pytorch_model.bin.index.json", "pytorch_model.bin")
T5_FOLDERS = ("flan-t5-xl", "text_encoder")
RELEASE = "github.com/FoundationVision/LlamaGen lists the downloads"
FEATURES = (
    "it was trained on those of flan-t5-xl, so take a loader that knows this encoder, or put its folder beside the "
    "model, disconnect conditioning and write the prompt into the text box"
)


class LlamaGenFamily(Family):
    """Class-to-image or text-to-image, told apart by the conditioning that the file holds."""

    title = "LlamaGen (class or text to image)"
    ignored = (
        r".*freqs_cis$", r".*causal_mask$", r".*rotary_emb\.inv_freq$",  # buffers that are computed here
    )  # fmt: skip

    @staticmethod
    def detect(source):
        return find_layout(source) is not None

    def __init__(self, source):
        self.source = source
        self.layout, self.prefix = find_layout(source)
        self.classes = self._has(CLASS["class_table.weight"])
        self.name = f"LlamaGen {'class' if self.classes else 'text'}-to-image"
        self.defaults = Defaults(1.0, 2000, 1.0, 4.0) if self.classes else Defaults(1.0, 1000, 1.0, 7.5)
        self._decoder_refs = self._find_refs()
        self.decoder_config = self._read_config()
        self.parts = [Part("language model", source.files[0])]
        self._find_codec()
        self._find_text()
        self.factor = self.codec_config.factor if self.codec_config else 16
        self.marks = {"grid": self._own_grid()}
        grids = dict.fromkeys((self.marks["grid"], *GRIDS))
        self.sizes = tuple(Size(grid * self.factor, grid * self.factor) for grid in grids)

    # --- the language model ---------------------------------------------------------------------------------------

    def _has(self, name):
        return self.prefix + name in self.source.keys()

    def _shape(self, name):
        return self._decoder_refs[name].shape

    def _key(self, name):
        """Key of a name that may lie inside or, as transformers' heads do, outside of the prefix."""
        outside = self.prefix.removesuffix("model.") + name
        return outside if outside in self.source.keys() else self.prefix + name

    def _find_refs(self):
        """{name inside the network: `Ref`}; fused projections are cut into rows.

        Raises:
            UserError: names missing or left over, as the file spells them.
        """
        layout, inputs = self.layout, CLASS if self.classes else CAPTION
        names = {"embed.embed_tokens.weight": layout.embed, "norm.weight": "norm.weight"}
        names |= {f"embed.{ours}": theirs for ours, theirs in inputs.items()}
        self.layers = layer_count(self.source.keys(), self.prefix)
        for i in range(self.layers):
            names |= {f"layers.{i}.{a}.weight": f"layers.{i}.{b}.weight" for a, b in layout.layer.items()}
        keys = {ours: self.prefix + theirs for ours, theirs in names.items()}
        keys["lm_head.weight"] = self._key(layout.head)
        fused = [f"{self.prefix}layers.{i}.{FUSED}" for i in range(self.layers)] if layout is NATIVE else []
        check_keys(self.source.keys(), [*keys.values(), *fused], self.ignored, f"'{self.source.files[0]}'")
        refs = {ours: Ref(self.source, key) for ours, key in keys.items()}
        return refs | {name: ref for i, key in enumerate(fused) for name, ref in self._cut(i, key)}

    def _cut(self, layer, key):
        """q, k and v as rows of a layer's wqkv; what q leaves is shared evenly by k and v."""
        rows, dim = self.source.shape(key)
        cuts = (0, dim, dim + (rows - dim) // 2, rows)
        for name, part in zip("qkv", zip(cuts, cuts[1:])):
            yield f"layers.{layer}.self_attn.{name}_proj.weight", Ref(self.source, key, rows=part)

    def _read_config(self):
        """`DecoderConfig` from the shapes; head count, eps and rotary base from the configuration, or known ones."""
        vocab, dim = self._shape("embed.embed_tokens.weight")
        config = self.source.config
        stated = config.get("hidden_size", config.get("dim", dim))
        if stated != dim:
            raise UserError(
                f"{self.name}: the configuration in '{self.source.root}' is for a model {stated} wide, the weights are "
                f"{dim} wide: they belong to different models, keep each in a folder of its own"
            )
        heads = self._heads(config, dim)
        first = "embed.class_table.weight" if self.classes else "embed.uncond"
        shape = self._shape(first)
        self.condition = 1 if self.classes else shape[0]  # tokens in front of the picture
        self.theta = float(config.get("rope_base", config.get("rope_theta", 10000)))
        return DecoderConfig(
            dim=dim,
            layers=self.layers,
            heads=heads,
            kv_heads=self._shape("layers.0.self_attn.k_proj.weight")[0] // (dim // heads),
            head_dim=dim // heads,
            ffn=self._shape("layers.0.mlp.gate_proj.weight")[0],
            vocab=vocab,
            head_rows=self._shape("lm_head.weight")[0],
            eps=float(config.get("rms_norm_eps", config.get("norm_eps", self.layout.eps))),
            rope_pairing="pair",
            in_embed="class" if self.classes else "caption",
            embed_args=(shape[0],) if self.classes else (shape[1], shape[0]),
        )

    def _heads(self, config, dim):
        """Number of attention heads. Raises UserError when the configuration's number does not fit the width."""
        stated = config.get("num_attention_heads", config.get("n_head"))
        heads = stated or HEADS.get(dim)
        if heads is None:
            # no released width, nothing stated: heads of 64 as in most of the releases, at least four
            heads = next((n for n in (max(4, dim // 64), 4, 2, 1) if dim % (4 * n) == 0), 1)
            log.warning(
                "%s: nothing tells the number of attention heads of a model %d wide; %d is assumed. A config.json "
                "with num_attention_heads beside the weights settles it.", self.name, dim, heads,
            )  # fmt: skip
        if dim % (4 * heads):  # two axes of adjacent pairs
            raise UserError(
                f"{self.name}: a width of {dim} does not divide into {heads} attention heads with a 2-D rotary: "
                "num_attention_heads in the configuration belongs to another model"
            )
        return heads

    def _own_grid(self):
        """Tokens a side that the model was trained for: from its configuration, its tables or its file's name."""
        noted = (self.source.config.get("scd") or {}).get("grid")
        if noted:
            return noted
        table = next((key for key in self.source.keys() if key.endswith("freqs_cis")), None)
        told = [self.source.config.get("block_size")]
        told += [self.source.shape(table)[0] - self.condition] if table else []
        for area in told:
            if isinstance(area, int) and area > 0 and math.isqrt(area) ** 2 == area:
                return math.isqrt(area)
        pixels = 8 if self.factor == 8 else 16  # a token; miniatures have smaller codecs and the release's numbers
        names = (self.source.files[0].stem, self.source.root.name)
        numbers = [int(n) for name in names for n in re.findall(r"(?<!\d)\d{2,4}(?!\d)", name)[-1:]]
        fitting = (n // pixels for n in numbers if n % pixels == 0 and 0 < n // pixels <= LARGEST)
        return next(fitting, GRIDS[0])

    # --- the other parts ------------------------------------------------------------------------------------------

    def _find_codec(self):
        """VQ-16 or VQ-8 packed into the file, beside it or around it."""
        kind = "c2i" if self.classes else "t2i"
        stems = [f"vq_ds{n}_{kind}" for n in (16, 8)] + ["vq_ds16", "vq_ds8"]
        names = [f"{stem}.{ending}" for stem in stems for ending in ENDINGS]
        names += [f"{stem.replace('_', '-')}/*.safetensors" for stem in stems]
        found = self.source.part("vq", *names, fits=self._codec_fits)
        looked = f"vq_ds16_{kind}.pt or .safetensors in '{self.source.root}' and the folders around it"
        self.parts.append(Part("image tokenizer", found and found.files[0], looked, RELEASE))
        self.codec_config, self._codec_refs = None, {}
        if found:
            # the codebook of these codecs is used at unit length; no tensor tells
            layout = codec_layout(found, find_codec(found), l2_codebook=True)
            self.codec_config, self._codec_refs = layout.config, layout.refs

    def _codec_fits(self, source):
        prefix, wanted = find_codec(source), self.decoder_config.head_rows
        if prefix is None:
            raise UserError(f"'{source.files[0]}' holds no image tokenizer: {RELEASE}")
        codes = source.shape(prefix + "quantize.embedding.weight")[0]
        if codes != wanted:
            raise UserError(
                f"{self.name}: the image tokenizer '{source.files[0]}' has {codes} codes, the language model draws "
                f"{wanted}: they belong to different models; {RELEASE}"
            )
        return True

    def _find_text(self):
        """How this model reads prompts. A missing T5 is told when a text is encoded: a host may bring features."""
        if self.classes:
            self.text = ClassEncoder(self.decoder_config.embed_args[0] - 1)
            return
        names = [f"{folder}/{file}" for folder in T5_FOLDERS for file in T5_FILES]
        found = self.source.part("t5", *names, fits=self._t5_fits)
        self.networks = (*self.networks, "text")
        self.text = T5Text(found, self.condition, self._no_text)
        self.reads = FeatureReader(self.decoder_config.embed_args[0], self.condition, FEATURES)

    def _t5_fits(self, source):
        width, wanted = source.config.get("d_model"), self.decoder_config.embed_args[0]
        if source.config.get("model_type") != "t5":
            return False
        if width != wanted:
            raise UserError(
                f"{self.name}: the text encoder in '{source.root}' gives features {width} wide, the model reads "
                f"{wanted}: use google/flan-t5-xl"
            )
        return True

    def _no_text(self):
        looked = f"a folder {' or '.join(T5_FOLDERS)} in '{self.source.root}' and the folders around it"
        get = (
            "google/flan-t5-xl: config.json, tokenizer.json and the safetensors files; or connect its text features "
            "to conditioning of Text Encode"
        )
        require([*self.parts, Part("text encoder", None, looked, get)], self.name)

    def refs(self, part):
        if part == "codec":
            require(self.parts, self.name)
            return self._codec_refs
        if part == "text":  # none, when a host brings the features
            return t5_refs(self.text.source) if self.text.source else {}
        return self._decoder_refs

    # --- drawing --------------------------------------------------------------------------------------------------

    def size(self, width=0, height=0, frames=1):
        """Any square of up to `LARGEST` tokens a side; 0 takes the other side, or the trained size.

        Raises:
            UserError: another shape.
        """
        side = width or height or self.sizes[0].width
        square = side == (height or side) and side % self.factor == 0
        if frames == 1 and square and 0 < side <= LARGEST * self.factor:
            return Size(side, side)
        return super().size(width, height, frames)

    def plan(self, size):
        side = size.width // self.factor
        vocab = self.decoder_config.head_rows
        return TokenPlan(1, side, side, vocab=vocab, width=size.width, height=size.height)

    def streams(self, prompt, negative, plan):
        """One class row, or the caption at the right end of its slots; the unconditional twin sees the same slots."""
        if self.classes:
            rows = [None if p is None else self.text.number(p.text) for p in (prompt, negative)]
            last = self.decoder_config.embed_args[0] - 1  # the row trained for "any class"
            return tuple(Stream(ids=torch.tensor([last if row is None else row])) for row in rows)
        cond = self._caption(prompt, torch.ones(self.condition, dtype=torch.bool))
        return cond, self._caption(negative, cond.mask)

    def _caption(self, prompt, mask):
        """`Stream` of a prompt's features; without any, of the model's own unconditional ones under `mask`."""
        if prompt is None or prompt.features is None:
            return Stream(mask=mask)
        features, (width, slots) = prompt.features, self.decoder_config.embed_args
        if features.dim() != 2 or features.shape[1] != width or len(features) == 0:
            raise UserError(
                f"{self.name} reads text features [tokens, {width}], these are {list(features.shape)}: make them with "
                "google/flan-t5-xl"
            )
        features = features[:slots]
        padded = features.new_zeros(slots, width)
        padded[slots - len(features) :] = features
        return Stream(features=padded, mask=torch.arange(slots) >= slots - len(features))

    def positions(self, decoder, plan, prompt_length, device):
        cfg = self.decoder_config
        return Positions(*rope_2d_grid(plan.rows, plan.cols, cfg.head_dim, prompt_length, self.theta, device))
