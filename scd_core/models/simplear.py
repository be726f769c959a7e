"""SimpleAR 0.5B and 1.5B (arXiv 2504.11455): a Qwen2 that draws a picture's codes row by row, without any mark between.

Picture codes stand behind the words in one vocabulary. Cosmos' video tokenizer makes a picture of them: one token grid
is one frame.
"""

import math
import re
from functools import cached_property

import torch

from ..checkpoint import check_keys
from ..codecs.dv3d import DVConfig
from ..errors import UserError
from ..plan import TokenPlan
from ..prompt import Prompt, Stream
from .dv_parts import FACTOR, find_video_codec
from .family import Defaults, Family, Size
from .parts import Part, Ref, layer_count, require
from .rope import rope_1d
from .rope_settings import rope_settings
from .tokenizer import HubTokenizer
from .transformer import Decoder, DecoderConfig, Positions

TASK, PICTURE = "<|t2i|>", "<|soi|>"  # draw a picture of these words; the picture begins
WANTED = "A highly realistic image of {}"
UNWANTED = "An image of {}"
NEVER = (
    "aerial view, overexposed, low quality, deformation, a poor composition, bad hands, bad teeth, bad eyes, "
    "bad limbs, distortion"
)  # what the authors always steer away from
SIDES = (1024, 512, 768, 256)  # the releases draw 1024; the others are stages of their training
LAYER = "model.layers.0.self_attn.q_proj.bias"
HEADS = {896: 14, 1536: 12}  # of the released widths, where a file comes without config.json
THETA = 1e6  # where the configuration tells no base of the rotary
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
GET = "download the complete folder of a SimpleAR release, such as Daniel0724/SimpleAR-1.5B-RL"
USELESS = (r".*rotary_emb\.inv_freq$",)


class SimpleARText:
    """Words -> ids of a guidance stream. No start token: the models were trained without.

    Args:
        tokenizer: `HubTokenizer`.
    """

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        for name in (TASK, PICTURE):
            tokenizer.id(name)  # refuses another model's tokenizer

    def encode(self, text):
        """Text -> `Prompt`."""
        return Prompt(text=text, encoder=self)

    def ids(self, template, text):
        """Text in a template, between the two marks: int64 [P]."""
        words = template.format(self.tokenizer.plain(text.strip()))
        return torch.tensor(self.tokenizer.marked(f"{TASK}{words}{PICTURE}"))


class SimpleARFamily(Family):
    """Description of a SimpleAR checkpoint in transformers' Qwen2 layout.

    Attributes:
        base: id of picture code 0.
    """

    name = title = "SimpleAR"
    defaults = Defaults(temperature=1.0, top_k=64000, top_p=1.0, cfg=6.0)
    sizes = tuple(Size(side, side) for side in SIDES)
    guidance = "logprobs"
    encoder_file = "encoder.jit or encoder.safetensors of the same video tokenizer"
    factor = FACTOR
    ignored = USELESS

    @staticmethod
    def detect(source):
        if "SimpAR" in str(source.config.get("architectures")):
            return True
        if LAYER not in source.keys() or source.config.get("model_type", "qwen2") != "qwen2":
            return False
        # other Qwen2 models have no token that begins a picture
        side = source.side("tokenizer.json")
        return side is not None and PICTURE in side.text()

    def __init__(self, source):
        self.source, self.settings = source, source.config
        tokenizer = self._read_tokenizer()
        there = all(name in source.keys() for name in (EMBED, "model.norm.weight")) and LAYER in source.keys()
        looked = f"tensors named {EMBED}, {LAYER} in {source.root}"
        self.parts = [
            Part("language model", source.root if there else None, looked, GET),
            Part("text tokenizer", tokenizer and tokenizer.where, f"tokenizer.json around {source.root}", GET),
        ]
        if not (there and tokenizer):
            require(self.parts, self.name)
        self.text = SimpleARText(tokenizer)
        self.base = len(tokenizer.vocabulary())
        rows = source.shape(EMBED)[0]
        codes = min(rows - self.base, math.prod(DVConfig.levels))
        codec, part = find_video_codec(source, codes, self.name)
        self.parts.append(part)
        self.codec_config, self._codec = (codec.config, codec.refs) if codec else (None, None)
        self.tied = bool(self.settings.get("tie_word_embeddings")) or HEAD not in source.keys()
        if self.tied:
            self.ignored = (*USELESS, re.escape(HEAD))
        self.decoder_config = self._read_decoder_config(rows, codes)
        self._rope = rope_settings({"rope_theta": THETA, **self.settings}, source.root, self.name)

    def _read_tokenizer(self):
        """The `HubTokenizer` from the model's folder or a neighbour's, or None.

        Raises:
            UserError: the one in the model's folder is another model's.
        """
        rows = self.source.shape(EMBED)[0] if EMBED in self.source.keys() else None
        seen = []

        def fits(side):
            seen.append(HubTokenizer(side))
            seen[-1].id(PICTURE)
            if rows is not None and len(seen[-1].vocabulary()) >= rows:
                raise UserError(
                    f"{side.where} knows {len(seen[-1].vocabulary())} tokens, the language model in {self.source.root} "
                    f"{rows} with those of pictures: the tokenizer belongs to another model"
                )

        side = self.source.side("tokenizer.json", fits=fits)
        if side is None:
            return None
        return seen[-1] if seen else HubTokenizer(side)

    def _read_decoder_config(self, rows, codes):
        told, source = self.settings, self.source
        dim = source.shape(EMBED)[1]
        heads = told.get("num_attention_heads") or HEADS.get(dim)
        if not heads:
            raise UserError(
                f"{source.root} has no config.json, and a model of width {dim} was never released, so its number of "
                f"attention heads is unknown: {GET}"
            )
        head_dim = told.get("head_dim") or source.shape(LAYER)[0] // heads
        return DecoderConfig(
            dim=dim,
            layers=told.get("num_hidden_layers") or layer_count(source.keys(), "model."),
            heads=heads,
            kv_heads=source.shape(LAYER.replace("q_proj", "k_proj"))[0] // head_dim,
            head_dim=head_dim,
            ffn=source.shape("model.layers.0.mlp.gate_proj.weight")[0],
            vocab=rows,
            head_rows=codes,
            eps=told.get("rms_norm_eps", 1e-6),
            qkv_bias=True,
        )

    def refs(self, part):
        if part == "codec":
            if self._codec is None:
                require(self.parts, self.name)
            return self._codec
        return self._decoder

    @cached_property
    def _decoder(self):
        """References of the language model; of the head only the rows of picture codes.

        Raises:
            UserError: weights are missing, by their names in the file.
        """
        with torch.device("meta"):
            wanted = Decoder(self.decoder_config).state_dict()
        head = Ref(self.source, EMBED if self.tied else HEAD, (self.base, self.base + self.decoder_config.head_rows))
        refs = {name: Ref(self.source, "model." + name.removeprefix("embed.")) for name in wanted} | {HEAD: head}
        keys = [ref.key for ref in refs.values()]
        check_keys([key for key in keys if key in self.source.keys()], keys, where=str(self.source.root))
        return refs

    def size(self, width=0, height=0, frames=1):
        """Any grid that fits the model's places, its own squares by default.

        The models count cells, they are not told of rows: a picture that is no square of their training is a part of
        one, or worse.
        """
        if frames != 1:
            raise UserError(f"{self.name} draws pictures, not clips: set frames to 1")
        width, height = width or height or SIDES[0], height or width or SIDES[0]
        places = self.settings.get("max_position_embeddings") or (SIDES[0] // FACTOR) ** 2
        cells = (width // FACTOR) * (height // FACTOR)
        if width % FACTOR or height % FACTOR or not 0 < cells <= places:
            raise UserError(
                f"{self.name} cannot draw {width}x{height}: sides are multiples of {FACTOR} pixels, with {places} "
                f"cells of that size at most; it was trained on {', '.join(str(size) for size in self.sizes)}"
            )
        return Size(width, height)

    def plan(self, size):
        return TokenPlan(
            frames=1,
            rows=size.height // FACTOR,
            cols=size.width // FACTOR,
            vocab=self.decoder_config.head_rows,
            base=self.base,
            width=size.width,
            height=size.height,
        )

    def streams(self, prompt, negative, plan):
        """The words wanted, and those unwanted: without a negative prompt the authors' own."""
        unwanted = negative.text.strip() if negative is not None else ""
        return tuple(
            Stream(ids=self.text.ids(template, text))
            for template, text in ((WANTED, prompt.text), (UNWANTED, unwanted or NEVER))
        )

    def positions(self, decoder, plan, prompt_length, device):
        theta, factor = self._rope
        return Positions(*rope_1d(prompt_length + plan.length, decoder.cfg.head_dim, theta, device, factor))
