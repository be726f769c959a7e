"""The small MAR pair that ships with the pack: a dozen subjects by name, 64x64, tokens of the bundled model's codec."""

from dataclasses import replace

import torch

from ..codecs.conv2d import ConvCodecConfig
from ..codecs.features import FeatureConfig
from ..errors import UserError
from ..models.family import Defaults
from ..models.imagenet import ClassEncoder
from ..models.parts import Part, Ref
from .family import MarFamily

OWN = "codec."  # prefix of the tensors that belong to the codec, here and in the bundled model's file
SHARED = "model.safetensors"
LOST = "it comes with the pack: install the pack again"


class NamedClasses(ClassEncoder):
    """Classes by number or by the names that the checkpoint's metadata holds.

    Args:
        names: for every class its names, best first.
    """

    def __init__(self, names):
        super().__init__(len(names))
        self.names = [each[0] for each in names]
        self.spellings = {name.casefold(): number for number, each in enumerate(names) for name in each}

    def number(self, text):
        """Text -> class number, or None for an empty text. Raises UserError for what is no name, listing all."""
        words = text.casefold().split()
        plain = " ".join(words[1:] if words[:1] in (["a"], ["an"], ["the"]) else words)
        if plain in self.spellings:
            return self.spellings[plain]
        if not plain or plain.removeprefix("-").isdigit():
            return super().number(plain)
        raise UserError(
            f"{text!r} is nothing that the bundled MAR draws: it knows one subject at a time, {', '.join(self.names)}, "
            "and chooses the background itself"
        )


class BundledMarFamily(MarFamily):
    """Target or draft of the shipped pair; which one, names and defaults are told by the file's metadata."""

    title = "the bundled MAR (subject to picture, continuous tokens)"
    ignored = (OWN.replace(".", r"\."),)

    @staticmethod
    def detect(source):
        return source.config.get("family") == "bundled-mar"

    def __init__(self, source):
        super().__init__(source)
        told = source.config
        self.name = f"the bundled MAR {told['role']}"
        self.defaults = Defaults(**told["defaults"])
        self.diffusion_steps, self.clip = told["diffusion_steps"], told["clip"]
        self.text = NamedClasses(told["class_names"])

    def _find_codec(self):
        """The decoder of the bundled model's codec, from its own file, behind this file's map from tokens to cells."""
        found = self.source.part("vq", SHARED, fits=lambda source: source.config.get("family") == "bundled")
        self.parts.append(Part("picture codec", found and found.files[0], f"{SHARED} beside it", LOST))
        self.codec_config, self._codec_refs = None, {}
        if found:
            told = {k: tuple(v) if isinstance(v, list) else v for k, v in found.config["codec"].items()}
            cells = replace(ConvCodecConfig(**told), encoder=False)
            cfg = self.decoder_config
            patch = round((self.source.shape(OWN + "mean")[0] / cells.code_dim) ** 0.5)
            self.codec_config = FeatureConfig(cells, embed=cfg.channels, patch=patch)
            with torch.device("meta"):
                names = list(self.codec_config.network(self.codec_config).state_dict())
            own = ("mean", "basis")
            self._codec_refs = {
                name: Ref(self.source if name in own else found, OWN + name) for name in names
            }
