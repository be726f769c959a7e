"""MAR (Li et al. 2024, arXiv 2406.11838) as a family: detection, sizes off the tensors, its codec, its classes."""

import logging
import math
import re

import torch

from ..checkpoint import Source, check_keys
from ..codecs.kl import find_kl, kl_layout
from ..errors import UserError
from ..models.family import Defaults, Family, Size
from ..models.imagenet import ClassEncoder
from ..models.parts import Part, Ref, require
from .mar import MarConfig

log = logging.getLogger(__name__)

MARK, HEAD_MARK = "diffusion_pos_embed_learned", "diffloss.net.input_proj.weight"
AVERAGED = "model_ema"  # the weights to draw with, in checkpoints of the release
HEADS = {768: 12, 1024: 16, 1280: 16}  # attention heads of the published widths: no tensor tells them
# guidance of the published evaluation (linear schedule), by width
GUIDANCE = {768: 2.9, 1024: 3.0, 1280: 3.2}
STEPS = 100  # diffusion steps of the published evaluation
CODECS = ("kl16.safetensors", "kl16.ckpt", "kl*.safetensors", "kl*.ckpt", "kl*.pth", "vae*.safetensors", "vae*.ckpt")
RELEASE = "github.com/LTH14/mar lists the downloads"


def find_mar(source):
    """Prefix of a MAR's names in a `Source`, or None."""
    found = (key.removesuffix(MARK) for key in source.keys() if key.endswith(MARK))
    return next((prefix for prefix in found if prefix + HEAD_MARK in source.keys()), None)


def averaged(source):
    """The same file read for its averaged weights, which are the ones to draw with; itself where there are none."""
    try:
        found = Source.open(source.files[0], AVERAGED)
    except UserError:
        return source
    found.config = source.config
    return found


class MarFamily(Family):
    """Class-conditional MAR of any size."""

    title = "MAR (class to picture, continuous tokens)"
    continuous = True
    clip = None  # see `Diffusion`
    auto_dtype = "fp32"  # the diffusion head draws visibly worse in half precision

    @staticmethod
    def detect(source):
        return find_mar(source) is not None

    def __init__(self, source):
        self.prefix = find_mar(source)
        pickled = len(source.files) == 1 and not source.files[0].name.lower().endswith((".safetensors", ".sft"))
        self.source = averaged(source) if pickled else source
        self.decoder_config = cfg = self._read_config()
        self._decoder_refs = self._find_refs()
        self.name = f"MAR ({cfg.encoder_layers}+{cfg.decoder_layers} layers, {cfg.dim} wide)"
        self.defaults = Defaults(temperature=1.0, cfg=GUIDANCE.get(cfg.dim, 2.9))
        self.diffusion_steps = STEPS
        self.parts = [Part("network", self.source.files[0])]
        self._find_codec()
        factor = self.codec_config.factor if self.codec_config else 16
        self.sizes = (Size(cfg.side * factor, cfg.side * factor),)
        self.text = ClassEncoder(cfg.classes)

    # --- the network ----------------------------------------------------------------------------------------------

    def _shape(self, name):
        key = self.prefix + name
        check_keys([key] if key in self.source.keys() else (), [key], where=f"'{self.source.files[0]}'")
        return self.source.shape(key)

    def _count(self, stem):
        """Number of blocks called `stem`.N."""
        pattern = re.compile(re.escape(self.prefix + stem) + r"\.(\d+)\.")
        return 1 + max((int(m[1]) for key in self.source.keys() if (m := pattern.match(key))), default=-1)

    def _read_config(self):
        """`MarConfig` from the shapes; head counts from the configuration, or known ones.

        Raises:
            UserError: tensors are missing, or the grid is no square.
        """
        dim, channels = self._shape("z_proj.weight")
        tokens, decoder_dim = self._shape(MARK)[1:]
        if math.isqrt(tokens) ** 2 != tokens:
            raise UserError(f"'{self.source.files[0]}' is a MAR of {tokens} tokens, which make no square picture")
        head_width, waves = self._shape("diffloss.net.time_embed.mlp.0.weight")
        return MarConfig(
            dim=dim,
            decoder_dim=decoder_dim,
            encoder_layers=self._count("encoder_blocks"),
            decoder_layers=self._count("decoder_blocks"),
            heads=self._heads(dim, "num_attention_heads", "encoder_num_heads"),
            decoder_heads=self._heads(decoder_dim, "num_attention_heads", "decoder_num_heads"),
            ffn=self._shape("encoder_blocks.0.mlp.fc1.weight")[0],
            decoder_ffn=self._shape("decoder_blocks.0.mlp.fc1.weight")[0],
            tokens=tokens,
            channels=channels,
            buffer=self._shape("encoder_pos_embed_learned")[1] - tokens,
            classes=self._shape("class_emb.weight")[0],
            head_layers=self._count("diffloss.net.res_blocks"),
            head_width=head_width,
            waves=waves,
        )

    def _find_refs(self):
        """{name: `Ref`} of the network; the file spells the names as it does.

        Raises:
            UserError: names missing or left over.
        """
        with torch.device("meta"):
            names = list(self.decoder_config.network(self.decoder_config).state_dict())
        wanted = [self.prefix + name for name in names]
        check_keys(self.source.keys(), wanted, self.ignored, f"'{self.source.files[0]}'")
        return {name: Ref(self.source, key) for name, key in zip(names, wanted)}

    def _heads(self, dim, *names):
        """Number of attention heads of a width. Raises UserError when the configuration's number does not fit."""
        stated = next((self.source.config[name] for name in names if name in self.source.config), None)
        heads = stated or HEADS.get(dim)
        if heads is None:
            heads = next(n for n in (max(4, dim // 64), 4, 2, 1) if dim % n == 0)
            log.warning(
                "MAR: nothing tells the number of attention heads of a model %d wide; %d is assumed. A config.json "
                "with num_attention_heads beside the weights settles it.", dim, heads,
            )  # fmt: skip
        if not isinstance(heads, int) or heads < 1 or dim % heads:
            raise UserError(
                f"MAR: a width of {dim} does not divide into {heads} attention heads: the configuration in "
                f"'{self.source.root}' belongs to another model"
            )
        return heads

    # --- the codec ------------------------------------------------------------------------------------------------

    def _find_codec(self):
        """The KL codec, packed into the file, beside it or around it."""
        found = self.source.part("vq", *CODECS, fits=self._codec_fits)
        looked = f"kl16.safetensors or kl16.ckpt in '{self.source.root}' and the folders around it"
        self.parts.append(Part("picture codec", found and found.files[0], looked, RELEASE))
        self.codec_config, self._codec_refs = None, {}
        if found:
            self.codec_config, self._codec_refs = kl_layout(found, find_kl(found))

    def _codec_fits(self, source):
        prefix, channels = find_kl(source), self.decoder_config.channels
        if prefix is None:
            return False
        embed = kl_layout(source, prefix)[0].embed
        if embed != channels:
            raise UserError(
                f"{self.name}: the picture codec '{source.files[0]}' has latents of {embed} channels, the network "
                f"draws {channels}: they belong to different models; {RELEASE}"
            )
        return True

    def refs(self, part):
        if part == "codec":
            require(self.parts, self.name)
            return self._codec_refs
        return self._decoder_refs

    # --- drawing --------------------------------------------------------------------------------------------------

    def size(self, width=0, height=0, frames=1):
        raise self._continuous()

    def plan(self, size):
        raise self._continuous()

    def _continuous(self):
        """What the road of discrete tokens says to this model."""
        return UserError(
            f"{self.name} draws continuous tokens, which have no place here: use the Continuous Speculative Sampler "
            "for it, and the other nodes with models of discrete tokens"
        )
