"""Janus-Pro 1B and 7B and their fine-tunes: a Llama whose image codes have their own way in and out.

Two layouts are on disk: the original one (`model_type: multi_modality`, mostly pickled shards) and that of transformers
(`model_type: janus`, safetensors). Names and prompt follow the authors' code for generating images.
"""

import re
from dataclasses import dataclass
from functools import cached_property

import torch

from ..checkpoint import check_keys
from ..codecs.layouts import FIRST, codec_layout
from ..errors import UserError
from ..plan import TokenPlan
from ..prompt import Prompt, Stream
from .family import Defaults, Family, Size
from .parts import Part, Ref, layer_count, require
from .rope import rope_1d
from .rope_settings import rope_settings
from .tokenizer import HubTokenizer
from .transformer import Decoder, DecoderConfig, Positions

TEMPLATE = "<|User|>: {}\n\n<|Assistant|>:"
PICTURE = "<begin_of_image>"
# Names of the tokenizer's roles where its settings file is not at hand.
ROLES = {"bos_token": "<｜begin▁of▁sentence｜>", "pad_token": "<｜▁pad▁｜>"}
SETTINGS = ("tokenizer_config.json", "special_tokens_map.json")
HEADS, HEAD_DIM = 32, 128  # what a configuration leaves out; heads of all releases when there is none
IMAGE, PATCH = 384, 16  # pixels of a picture's side and of a token's, in all releases
GET = "download the complete folder of a Janus-Pro release, such as deepseek-ai/Janus-Pro-1B"
USELESS = (r"(?:.*\.)?lm_head\.", r".*\.rotary_emb\.inv_freq$")  # words are never drawn


@dataclass(frozen=True)
class Layout:
    """Names of the parts in a file; the settings of the words' model and of the picture's size in config.json."""

    words: str
    codebook: str
    aligner: str
    head_in: str
    head_out: str
    codec: str
    settings: str


ORIGINAL = Layout(
    words="language_model.model.",
    codebook="gen_embed.weight",
    aligner="gen_aligner.",
    head_in="gen_head.output_mlp_projector.",
    head_out="gen_head.vision_head.",
    codec="gen_vision_model.",
    settings="language_config",
)
TRANSFORMERS = Layout(
    words="language_model.",
    codebook="generation_embeddings.weight",
    aligner="generation_aligner.",
    head_in="generation_head.proj_out.",
    head_out="generation_head.vision_head.",
    codec="vqmodel.",
    settings="text_config",
)


class JanusText:
    """Words -> the two guidance streams' ids. The file's own rule for a start token is not used: it is put in here.

    Args:
        tokenizer: `HubTokenizer`. roles: {"bos_token": name, "pad_token": name}.
    """

    def __init__(self, tokenizer, roles):
        self.tokenizer = tokenizer
        self.bos, self.pad, self.picture = (tokenizer.id(n) for n in (roles["bos_token"], roles["pad_token"], PICTURE))

    def encode(self, text):
        """Text -> `Prompt`."""
        return Prompt(text=text, encoder=self)

    def ids(self, text):
        """Text in the chat template, start token and start of picture included: int64 [P]."""
        words = self.tokenizer.marked(TEMPLATE.format(self.tokenizer.plain(text.strip())))
        return torch.tensor([self.bos, *words, self.picture])

    def blank(self, ids):
        """The unconditional stream of a prompt: all but its first and last id becomes padding, as visible as words."""
        out = ids.clone()
        out[1:-1] = self.pad
        return out


class JanusFamily(Family):
    """Description of a Janus-Pro checkpoint in either layout."""

    name = title = "Janus-Pro"
    defaults = Defaults(temperature=1.0, top_k=0, top_p=1.0, cfg=5.0)

    @staticmethod
    def detect(source):
        if source.config.get("model_type") == "janus" or "gen_vision_config" in source.config or _is_flow(source):
            return True
        return any(_lead(source, layout) is not None for layout in (ORIGINAL, TRANSFORMERS))

    def __init__(self, source):
        if _is_flow(source):
            raise UserError(
                f"{source.root} is a JanusFlow model, which draws by rectified flow and has no image tokens to decode: "
                "use Janus-Pro instead (deepseek-ai/Janus-Pro-1B or -7B)"
            )
        self.source, self.settings = source, source.config
        self.layout, self.lead = _layout(source)
        self._tokenizer = self._read_tokenizer()
        require(self._parts(), f"{self.title} in {source.root}")
        codec = codec_layout(source, self.lead + self.layout.codec, l2_codebook=True)
        self.codec_config, self._codec = codec.config, codec.refs
        self.decoder_config = self._read_decoder_config()
        self._rope = rope_settings(source.config.get(self.layout.settings) or {}, source.root, self.title)
        self.ignored = (*USELESS, *codec.ignored, re.escape(self.lead) + r"(vision_model|aligner)\.")
        self.text = JanusText(self._tokenizer, self._read_roles())
        self.grid = self._read_grid()
        side = self.grid * self.codec_config.factor
        self.sizes = (Size(side, side),)
        self._check_codes()

    def _has(self, tail):
        return any(key.startswith(self.lead + tail) for key in self.source.keys())

    def _parts(self):
        """What image generation needs, found or missing."""
        lead, layout, root = self.lead, self.layout, self.source.root

        def part(title, *tails):
            missing = [lead + tail for tail in tails if not self._has(tail)]
            return Part(title, None if missing else root, f"tensors named {', '.join(missing)}* in {root}", GET)

        tokenizer = None if self._tokenizer is None else self._tokenizer.where
        return [
            part("language model", layout.words + "embed_tokens.", layout.words + "layers.0.", layout.words + "norm."),
            part("image token input and head", layout.codebook, layout.aligner, layout.head_in, layout.head_out),
            part("image tokenizer", layout.codec + FIRST),
            Part("text tokenizer", tokenizer, f"tokenizer.json in {root} and around it", GET),
        ]

    def _read_tokenizer(self):
        """The `HubTokenizer`, from the model's folder or a neighbour's, or None.

        Raises:
            UserError: the one in the model's folder is another model's.
        """
        table = self.lead + self.layout.words + "embed_tokens.weight"
        rows = self.source.shape(table)[0] if table in self.source.keys() else None
        seen = []

        def fits(side):
            seen.append(HubTokenizer(side))
            seen[-1].id(PICTURE)
            if rows is not None and seen[-1].size() > rows:
                raise UserError(
                    f"{side.where} knows {seen[-1].size()} tokens, the language model in {self.source.root} only "
                    f"{rows}: the tokenizer belongs to another model"
                )

        side = self.source.side("tokenizer.json", fits=fits)
        if side is None:
            return None
        return seen[-1] if seen else HubTokenizer(side)

    def _read_roles(self):
        """Names of the start and padding tokens, as the tokenizer's settings tell."""
        roles = dict(ROLES)
        for side in filter(None, (self.source.side(name) for name in reversed(SETTINGS))):
            for role, value in side.json().items():
                name = value.get("content") if isinstance(value, dict) else value
                if role in roles and isinstance(name, str):
                    roles[role] = name
        return roles

    def _shape(self, tail):
        return tuple(self.source.shape(self.lead + tail))

    def _aligner(self):
        """Names of the aligner's layers in their order: layers.0, layers.2, ... or fc1, hidden_layers.0, ..."""
        stem = self.lead + self.layout.aligner
        names = {key.rpartition(".")[0] for key in self.source.keys() if key.startswith(stem)}
        return sorted(names, key=lambda name: (len(name), name))

    def _read_decoder_config(self):
        layout, told = self.layout, self.settings.get(self.layout.settings) or {}
        rows, dim = self._shape(layout.words + "embed_tokens.weight")
        dim = told.get("hidden_size") or dim
        q_rows, k_rows = (self._shape(layout.words + f"layers.0.self_attn.{n}_proj.weight")[0] for n in "qk")
        heads = told.get("num_attention_heads") or (HEADS if told else q_rows // HEAD_DIM)
        head_dim = told.get("head_dim") or dim // heads
        return DecoderConfig(
            dim=dim,
            layers=told.get("num_hidden_layers") or layer_count(self.source.keys(), self.lead + layout.words),
            heads=heads,
            kv_heads=told.get("num_key_value_heads") or k_rows // head_dim,
            head_dim=head_dim,
            ffn=told.get("intermediate_size") or self._shape(layout.words + "layers.0.mlp.gate_proj.weight")[0],
            vocab=told.get("vocab_size") or rows,
            head_rows=self._shape(layout.head_out + "weight")[0],
            eps=told.get("rms_norm_eps", 1e-6),
            in_embed="codebook",
            embed_args=(*self._shape(layout.codebook), len(self._aligner())),
            out_head="mlp",
            head_width=self._shape(layout.head_in + "weight")[0],
        )

    def _read_grid(self):
        """Tokens a side. The pixel size is that of the understanding encoder, which pictures were trained at."""
        vision = self.settings.get("vision_config") or {}
        if self.layout is TRANSFORMERS:
            return vision.get("image_size", IMAGE) // vision.get("patch_size", PATCH)
        pixels = (vision.get("params") or {}).get("image_size")
        if pixels is None:
            side = self.source.side("preprocessor_config.json")
            pixels = IMAGE if side is None else side.json().get("image_size", IMAGE)
        patch = re.fullmatch(r"VQ-(\d+)", str((self.settings.get("gen_vision_config") or {}).get("cls")))
        return pixels // (int(patch[1]) if patch else PATCH)

    def _check_codes(self):
        """Raises UserError when the language model and the image tokenizer count different codes."""
        cfg = self.decoder_config
        counts = {"head": cfg.head_rows, "input table": cfg.embed_args[0], "image tokenizer": self.codec_config.codes}
        if len(set(counts.values())) > 1:
            told = ", ".join(f"{name} {count}" for name, count in counts.items())
            raise UserError(
                f"the parts of {self.source.root} do not count the same image codes ({told}): they are of different "
                "models"
            )

    def refs(self, part):
        return self._codec if part == "codec" else self._decoder

    @cached_property
    def _decoder(self):
        """References of the language model.

        Raises:
            UserError: weights are missing, by their names in the file.
        """
        layout, lead = self.layout, self.lead
        words = lead + layout.words
        stems = {"embed.embed_tokens.": words + "embed_tokens.", "norm.": words + "norm.", "layers.": words + "layers."}
        stems |= {f"embed.aligner.{i}.": f"{name}." for i, name in enumerate(self._aligner())}
        stems["embed.gen_embed."] = lead + layout.codebook.removesuffix("weight")
        stems |= {"head_proj.": lead + layout.head_in, "lm_head.": lead + layout.head_out}
        with torch.device("meta"):
            wanted = Decoder(self.decoder_config).state_dict()
        refs = {}
        for name in wanted:
            stem = next(stem for stem in stems if name.startswith(stem))
            refs[name] = Ref(self.source, stems[stem] + name.removeprefix(stem))
        keys = [ref.key for ref in refs.values()]
        check_keys([key for key in keys if key in self.source.keys()], keys, where=str(self.source.root))
        return refs

    def plan(self, size):
        return TokenPlan(
            frames=1,
            rows=self.grid,
            cols=self.grid,
            vocab=self.decoder_config.head_rows,
            width=size.width,
            height=size.height,
        )

    def streams(self, prompt, negative, plan):
        """Without a negative prompt the second stream is the first with its words blanked out."""
        ids = self.text.ids(prompt.text)
        other = self.text.blank(ids) if negative is None or not negative.text.strip() else self.text.ids(negative.text)
        return Stream(ids=ids), Stream(ids=other)

    def positions(self, decoder, plan, prompt_length, device):
        theta, factor = self._rope
        return Positions(*rope_1d(prompt_length + plan.length, decoder.cfg.head_dim, theta, device, factor))


def _is_flow(source):
    return "vision_gen_enc_config" in source.config or any(
        re.match(r"(.*\.)?vision_gen_(enc|dec)_model\.", key) for key in source.keys()
    )


def _lead(source, layout):
    """What stands before a layout's names ("" or such as "model."), None when the file is of another layout."""
    leads = (key.removesuffix(layout.codebook) for key in source.keys() if key.endswith(layout.codebook))
    return next((lead for lead in leads if lead == "" or lead.endswith(".")), None)


def _layout(source):
    """(layout, lead); without the layout's signature (a language model alone) by config.json."""
    for layout in (ORIGINAL, TRANSFORMERS):
        lead = _lead(source, layout)
        if lead is not None:
            return layout, lead
    if source.config.get("model_type") == "janus":
        return TRANSFORMERS, "model." if any(key.startswith("model.") for key in source.keys()) else ""
    return ORIGINAL, ""
