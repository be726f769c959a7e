"""Emu3-Gen and Emu3-Stage1 (arXiv 2409.18869): a Llama that draws a still as rows of codes, 8 pixels a code.

Two layouts: the original release (names of Llama, the image tokenizer in a folder of its own) and that of transformers
(everything in one folder, under `text_model.` and `vqmodel.`). A file of transformers' in-memory names is read as well.
"""


import torch

from ..checkpoint import check_keys
from ..errors import UserError
from ..plan import TokenPlan
from ..prompt import Stream
from .codec_parts import CodecFiles, find_vq
from .emu3_text import FRAME, LINE, PICTURE_END, STOP, Emu3Text, find_text, picture_codes
from .family import Defaults, Family, Size, nearest
from .parts import Part, Ref, layer_count, require
from .rope import rope_1d
from .rope_settings import rope_settings
from .transformer import Decoder, DecoderConfig, Positions

LEADS = ("text_model.model.", "model.text_model.", "text_model.", "model.")  # in front of the language model's names
LAYER = "layers.0.self_attn.q_proj.weight"
HEAD_NORM = "layers.0.self_attn.q_norm.weight"  # Emu3.5, another model under the same name, has it
ROWS = 184622  # of the release's token embedding
HEAD_DIM, THETA = 128, 1e6  # of the release, for files without a configuration
AREA = 720 * 720  # pixels, where the configuration does not tell
CELL = 8  # pixels a code, where no image tokenizer tells
RATIOS = ((1, 1), (4, 3), (3, 4), (3, 2), (2, 3), (16, 9), (9, 16), (2, 1), (1, 2))
GET = "the weight files of BAAI/Emu3-Gen-hf, or of BAAI/Emu3-Gen"
VQ = CodecFiles(
    names=(
        "*[Vv]ision[Tt]okenizer*.safetensors",
        "*[Ee]mu3*[Vv][Qq]*.safetensors",
        "model.safetensors",
        "model.safetensors.index.json",
    ),
    mark=r"vision_?tokenizer|emu3.*vq",
    foreign=r"movq|vqgan",
    looked="model.safetensors in a folder Emu3-VisionTokenizer",
    get="the folder of BAAI/Emu3-VisionTokenizer",
)


def find_lead(source):
    """What stands in front of the language model's names, or None."""
    return next((lead for lead in LEADS if lead + LAYER in source.keys()), None)


class Emu3Family(Family):
    """Description of an Emu3 checkpoint in either layout.

    Attributes:
        base: id of picture code 0. tokens: {name: id}. parts: list of `Part`. theta, stretch: of the rotary, see
            `rope_settings`. factor: pixels a code. area: pixels of a picture at most.
    """

    name = title = "Emu3-Gen"
    defaults = Defaults(temperature=1.0, top_k=2048, top_p=1.0, cfg=3.0)
    guidance = "logprobs"
    encoder_file = VQ.get
    ignored = (r".*rotary_emb\.inv_freq$",)

    @staticmethod
    def detect(source):
        lead = find_lead(source)
        if lead is not None and lead + HEAD_NORM in source.keys():
            return False
        if str(source.config.get("model_type")).lower() == "emu3":
            return True
        embed = f"{lead}embed_tokens.weight"
        return lead is not None and embed in source.keys() and (lead != "model." or source.shape(embed)[0] == ROWS)

    def __init__(self, source):
        self.source = source
        self.settings = source.config.get("text_config") or source.config
        self.lead = find_lead(source) or LEADS[0]
        self.embed = f"{self.lead}embed_tokens.weight"
        self.tokens, tokenizer, text_part = find_text(source, self.name)
        there = source.root if self.embed in source.keys() and find_lead(source) else None
        self.base, codes = picture_codes(self.tokens, self.name) if self.tokens else (0, None)
        codec, where, vq_part = find_vq(source, VQ, codes, None, self.name)
        looked = f"{self.embed} in {', '.join(file.name for file in source.files[:3])}"
        self.parts = [Part("language model", there, looked, GET), vq_part, text_part]
        if not (there and tokenizer):
            require(self.parts, self.name)
        told = {**self.settings, "rope_theta": self.settings.get("rope_theta") or THETA}
        self.theta, self.stretch = rope_settings(told, source.root, self.name)
        self.decoder_config = self._read_config(codes)
        self._refs = {"decoder": self._find_decoder()}
        self.codec_config = codec and codec.config
        if codec:
            self._refs["codec"] = codec.refs
            self.ignored += codec.ignored if where is source else ()
        self.text = Emu3Text(tokenizer, self.tokens)
        self.line, self.ending = self.tokens[LINE], tuple(self.tokens[name] for name in (FRAME, PICTURE_END, STOP))
        self.factor = codec.config.factor if codec else CELL
        self.area = int(source.config.get("image_area") or AREA)
        grids = (self._grid(*ratio) for ratio in RATIOS)
        self.sizes = tuple(dict.fromkeys(Size(cols * self.factor, rows * self.factor) for cols, rows in grids))

    # --- the network --------------------------------------------------------------------------------------------------

    def _read_config(self, codes):
        """`DecoderConfig` from the shapes and what no shape tells; the settings must not contradict the shapes.

        Raises:
            UserError: weights and settings of different models.
        """
        told, rows = self.settings, {name: self._shape(name) for name in ("q", "k")}
        vocab, dim = self.source.shape(self.embed)
        if self.base + codes > vocab:
            raise UserError(
                f"{self.name}: the tokenizer numbers picture tokens up to {self.base + codes - 1}, the language model "
                f"has {vocab} tokens: they belong to different models"
            )
        heads = told.get("num_attention_heads") or rows["q"] // HEAD_DIM
        head_dim = told.get("head_dim") or rows["q"] // heads
        found = {"hidden_size": dim, "vocab_size": vocab, "num_key_value_heads": rows["k"] // head_dim}
        found["num_attention_heads"] = rows["q"] // head_dim
        wrong = next((key for key, value in found.items() if (told.get(key) or value) != value), None)
        if wrong:
            raise UserError(
                f"{self.name}: the configuration in '{self.source.root}' says {wrong} {told[wrong]}, the weights say "
                f"{found[wrong]}: they belong to different models, keep each in a folder of its own"
            )
        return DecoderConfig(
            dim=dim,
            layers=told.get("num_hidden_layers") or layer_count(self.source.keys(), self.lead),
            heads=heads,
            kv_heads=found["num_key_value_heads"],
            head_dim=head_dim,
            ffn=self.source.shape(f"{self.lead}layers.0.mlp.gate_proj.weight")[0],
            vocab=vocab,
            head_rows=codes,
            eps=float(told.get("rms_norm_eps") or 1e-5),
        )

    def _shape(self, part):
        return self.source.shape(f"{self.lead}layers.0.self_attn.{part}_proj.weight")[0]

    def _key(self, name):
        """Name inside the network -> name in the file."""
        if name == "lm_head.weight":
            places = [f"{lead}{name}" for lead in ("", "text_model.", "model.")]
            if self.settings.get("tie_word_embeddings"):
                places.append(self.embed)
            return next((key for key in places if key in self.source.keys()), places[0])
        return self.lead + name.removeprefix("embed.")

    def _find_decoder(self):
        """{name inside the network: `Ref`}; of the head only the rows of picture codes.

        Raises:
            UserError: weights are missing, by their names in the file.
        """
        with torch.device("meta"):
            names = list(Decoder(self.decoder_config).state_dict())
        keys = {name: self._key(name) for name in names}
        present = [key for key in keys.values() if key in self.source.keys()]
        check_keys(present, keys.values(), where=f"the language model '{self.source.root}'")
        refs = {name: Ref(self.source, key) for name, key in keys.items()}
        rows = (self.base, self.base + self.decoder_config.head_rows)
        return refs | {"lm_head.weight": Ref(self.source, keys["lm_head.weight"], rows=rows)}

    def refs(self, part):
        if part not in self._refs:
            require(self.parts, self.name)
        return self._refs[part]

    # --- drawing ------------------------------------------------------------------------------------------------------

    def _grid(self, width, height):
        """(columns, rows) that the authors' program makes of proportions; halves go to the even number, as there."""
        scale = (self.area / (width * height)) ** 0.5 / self.factor
        return round(width * scale), round(height * scale)

    def size(self, width=0, height=0, frames=1):
        """Any shape up to the area that the authors' program gives its proportions; 0 as in `Family.size`.

        Raises:
            UserError: another size, with the rule and the nearest one.
        """
        if frames != 1:
            raise UserError(f"{self.name} draws pictures, not clips: set frames to 1")
        cols, rows = width // self.factor, height // self.factor
        if cols > 0 and rows > 0 and (cols * self.factor, rows * self.factor) == (width, height):
            most = self._grid(cols, rows)
            if cols <= most[0] and rows <= most[1]:
                return Size(width, height)
        matching = (size for size in self.sizes if width in (0, size.width) and height in (0, size.height))
        found = next(matching, None)
        if found is None:
            raise UserError(
                f"{self.name} cannot draw {width or 'any'}x{height or 'any'}: sides are multiples of {self.factor} "
                f"pixels, the area is that of {self.sizes[0]} at most; a size near to it is "
                f"{nearest(self.sizes, width, height)}"
            )
        return found

    def plan(self, size):
        return TokenPlan.by_lines(
            size.height // self.factor,
            size.width // self.factor,
            self.line,
            vocab=self.decoder_config.head_rows,
            base=self.base,
            width=size.width,
            height=size.height,
        )

    def streams(self, prompt, negative, plan):
        """The prompt and the negative prompt, each with the picture's size; every one at positions of its own."""
        refused = "" if negative is None else negative.text
        return (
            Stream(ids=self.text.wanted(prompt.text, plan.rows, plan.cols)),
            Stream(ids=self.text.unwanted(refused, plan.rows, plan.cols)),
        )

    def positions(self, decoder, plan, prompt_length, device):
        length = prompt_length + plan.length
        return Positions(*rope_1d(length, self.decoder_config.head_dim, self.theta, device, self.stretch))
