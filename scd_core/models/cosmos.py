"""Cosmos-1.0-Autoregressive (NVIDIA 2025, arXiv 2501.03575): clips that go on from 1 or 9 frames.

Base models (4B, 12B) read frames alone; video2world models (5B, 13B) read a text beside them.
"""

import torch

from ..errors import UserError
from ..plan import TokenPlan
from ..prompt import Stream
from .cosmos_network import IGNORED, MARK_TEXT, Network, absolute_3d_grid, find_prefix
from .cosmos_text import TOKENS, FramesOnly, find_text
from .dv_parts import COMPRESSION, FACTOR, find_video_codec
from .family import Defaults, Family, Size
from .parts import Part, require
from .rope import rope_3d_grid
from .t5 import t5_refs
from .transformer import Positions

TOP_P = {(5120, False): 0.9, (4096, True): 0.7}  # (width, reads a text) of 12B and 5B; 4B and 13B have 0.8


class CosmosFamily(Family):
    """Base or video2world, told apart by the cross-attention in the file.

    A clip of 1 + 8 (T - 1) frames is T token grids in raster order. The start token of video2world models is all of
    their prompt. Base models have none: a place-holder that nothing sees stands for it, and the first token must be
    given.

    Attributes:
        network: `Network`. text_slots: rows of the text that is attended to, zeros behind its own.
    """

    title = "Cosmos-1.0 Autoregressive (video)"
    ignored = IGNORED
    frame_rate = 25
    factor, compression = FACTOR, COMPRESSION
    contexts, context_end = (1, 1 + COMPRESSION), "end"
    encoder_file = "encoder.jit or encoder.safetensors of the same video tokenizer"

    @staticmethod
    def detect(source):
        return find_prefix(source) is not None

    def __init__(self, source):
        self.source = source
        reads_text = any(key.endswith(MARK_TEXT) for key in source.keys())
        self.name = f"Cosmos {'video2world' if reads_text else 'base'}"
        self.network = Network(source, self.name)
        self.decoder_config = cfg = self.network.config
        self.defaults = Defaults(temperature=1.0, top_k=0, top_p=TOP_P.get((cfg.dim, reads_text), 0.8), cfg=1.0)
        codec, part = find_video_codec(source, cfg.head_rows, self.name)
        self.codec_config, self._codec_refs = (codec.config, codec.refs) if codec else (None, None)
        self.parts = [Part("language model", source.files[0]), part]
        self.text, self.text_slots = FramesOnly(self.name), TOKENS
        if reads_text:
            self.text, self.reads = find_text(source, cfg.context_dim, self.name, self.parts)
            self.networks = (*self.networks, "text")
        self.sizes = self._clips()

    def refs(self, part):
        if part == "codec":
            require(self.parts, self.name)
            return self._codec_refs
        if part == "text":  # none, when a host brings the features
            return t5_refs(self.text.source) if self.text.source else {}
        return self.network.refs

    # --- drawing --------------------------------------------------------------------------------------------------

    def _clips(self):
        """The clip that the model was trained on, then its beginnings: their tokens have the same law."""
        grids, rows, cols = self.network.latent
        counts = range(grids, min(grids, 2) - 1, -1)  # one grid is a start and no clip
        return tuple(Size(cols * FACTOR, rows * FACTOR, 1 + (t - 1) * COMPRESSION) for t in counts)

    def size(self, width=0, height=0, frames=1):
        counts = sorted(size.frames for size in self.sizes)
        if frames not in counts:
            raise UserError(
                f"{self.name} draws clips of {' or '.join(map(str, counts))} frames, the given ones included, not of "
                f"{frames}: set frames to {counts[-1]}"
            )
        return super().size(width, height, frames)

    def plan(self, size):
        return TokenPlan(
            frames=1 + (size.frames - 1) // COMPRESSION,
            rows=size.height // FACTOR,
            cols=size.width // FACTOR,
            vocab=self.decoder_config.head_rows,
            width=size.width,
            height=size.height,
            given=0 if self.network.start is not None else 1,
        )

    def streams(self, prompt, negative, plan):
        """The start token, or what stands for it, and the texts that the layers attend to."""
        start = self.network.start
        ids, mask = (torch.tensor([0]), torch.tensor([False])) if start is None else (torch.tensor([start]), None)
        return tuple(Stream(ids=ids, mask=mask, context=self._context(p)) for p in (prompt, negative))

    def _context(self, prompt):
        """Features of a prompt [text_slots, width] with rows of zeros behind its words; without a text, zeros alone.

        Raises:
            UserError: features of another width, or a text that nobody made features of.
        """
        width = self.decoder_config.context_dim
        if width is None:
            return None
        features = None if prompt is None else prompt.features
        if features is None and prompt is not None and prompt.text.strip():
            raise UserError(
                f"the prompt was encoded for a model that reads no text, {self.name} does: wire AR_TEXT of the Load AR "
                "Model that loads it into Text Encode"
            )
        if features is None:
            return torch.zeros(self.text_slots, width)
        if features.dim() != 2 or features.shape[1] != width:
            raise UserError(
                f"{self.name} reads text features [tokens, {width}], these are {list(features.shape)}: {self.reads.get}"
            )
        features = features[: self.text_slots]
        return torch.cat([features, features.new_zeros(self.text_slots - len(features), width)])

    def positions(self, decoder, plan, prompt_length, device):
        cfg, net = self.decoder_config, self.network
        grid = (plan.frames, plan.rows, plan.cols)
        cos, sin = rope_3d_grid(*grid, cfg.head_dim, net.theta, net.yarn, start_token=True, device=device)
        if cfg.abs_pos is None:
            return Positions(cos, sin)
        absolute = absolute_3d_grid(*grid, cfg.dim)
        return Positions(cos, sin, torch.cat([absolute.new_zeros(1, cfg.dim), absolute]).to(device))
