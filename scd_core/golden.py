"""What a model makes of the inputs of a golden fixture: ids, embeddings, logits, tokens and pixels, by the usual road.

A fixture is a folder with `model/` (what a user has on disk), `expected.safetensors` (inputs, and the numbers that the
family's own code computed from these files) and `meta.json` (what every tensor means).
"""

import hashlib
import re
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
import torch.nn.functional as F

from . import golden_dv, golden_format, golden_video
from .checkpoint import Source, header
from .checkpoint.files import choose, scan
from .codecs.layouts import codec_layout, find_codec
from .errors import UserError
from .generate import Request, generate
from .law import LawSettings, guide, token_law
from .models.families import FAMILIES
from .models.load import PARTS, ModelFiles, open_model
from .models.session import Session
from .models.tokenizer import HubTokenizer
from .prompt import Prompt


class Fixture:
    """The files of one fixture.

    Attributes:
        folder: `Path`. model: folder of the model. meta: dict. tensors: {name: expected tensor}.

    Raises:
        UserError: something is missing or damaged.
    """

    def __init__(self, folder):
        self.folder = Path(folder)
        self.model = self.folder / "model"
        self.meta = header.read_json(self.folder / "meta.json")
        numbers = self.folder / "expected.safetensors"
        with Source.open(numbers) as source:
            self.tensors = {key: source.read(key).clone() for key in source.keys()}
        listed = [f for f in self.meta.get("files") or () if isinstance(f, dict)]
        told = next((f.get("sha256") for f in listed if f.get("path") == numbers.name), None)
        self.as_listed = told is None or told == hashlib.sha256(numbers.read_bytes()).hexdigest()

    def get(self, name):
        """An expected tensor, or None."""
        return self.tensors.get(name)

    def what(self, name):
        """The fixture's own words about a tensor."""
        told = self.meta.get("tensors")
        told = told.get(name) if isinstance(told, dict) else None
        return str(told.get("what", "")) if isinstance(told, dict) else ""


@dataclass
class Forced:
    """One teacher-forced evaluation of both streams.

    Attributes:
        hidden: per stream [P + R - 1, dim], all positions. logits: fp32 [S, R, V] of the picture codes;
            row n belongs to the position n. full: the same for the whole vocabulary, or None.
    """

    hidden: list
    logits: torch.Tensor
    full: torch.Tensor | None


class CodecAlone:
    """Stands where a family would when a folder holds an image tokenizer and nothing else."""

    ignored = (r".*",)  # what trainers and other networks left beside it is not this check's business

    def __init__(self, source):
        prefix, layout = find_codec(source), golden_dv.layout(source)
        if prefix is None and layout is None:
            raise UserError(f"'{source.root}' holds neither a language model nor an image tokenizer that is known")
        if layout is None:
            # VQ-16's names mark the lineage whose codebooks are used at unit length
            vq16 = any(key.startswith(prefix + "decoder.conv_blocks.") for key in source.keys())
            layout = codec_layout(source, prefix, l2_codebook=vq16)
        self.codec_config, self._refs = layout.config, layout.refs

    def refs(self, part):
        return self._refs


def model_path(folder, alone):
    """What a user would select: the folder, or in a folder of unrelated files the one that is the model.

    Args:
        alone: an image tokenizer is looked for, not a language model.
    """
    kind, names = choose(scan(folder)[0])
    if alone and (found := golden_dv.decoder_file(folder)):
        return found
    if kind != "many":
        return folder
    wanted = []
    for name in names:
        with suppress(UserError), Source.open(folder / name) as source:
            if (find_codec(source) is not None) if alone else any(family.detect(source) for family in FAMILIES):
                wanted.append(folder / name)
    return wanted[0] if len(wanted) == 1 else folder


class Subject:
    """A model under test. Everything is computed when it is first asked for.

    Args:
        fixture: `Fixture`. need: parts of the model that the comparisons need, of "decoder", "codec" and "text".

    Raises:
        UserError: the road ends before the model is loaded.
    """

    def __init__(self, fixture, need):
        self.fixture, self.meta = fixture, fixture.meta
        self.alone = "decoder" not in need
        path = model_path(fixture.model, self.alone)
        if self.alone:
            source = Source.open(path)
            self.files = ModelFiles(source, CodecAlone(source), fixture.folder.name)
        else:
            # a width that was never released does not tell its number of heads: a user would write a config.json
            dims = self.meta.get("dims")
            told = {"num_attention_heads": dims["H"]} if isinstance(dims, dict) and "H" in dims else {}
            told |= golden_video.told(self.meta)
            self.files = open_model(path, tuple(part for part in PARTS if part in need), told)
        self.family = self.files.family
        self._forced = {}

    # --- parts ----------------------------------------------------------------------------------------------------

    @cached_property
    def decoder(self):
        return self._decoder(torch.float32)

    def _decoder(self, dtype):
        return self.files.build("decoder", dtype=dtype)

    @cached_property
    def codec(self):
        return self.files.build("codec", dtype=torch.float32)

    @cached_property
    def tokenizer(self):
        """`HubTokenizer` that the model reads prompts with, or None."""
        if self.alone:
            side = self.files.source.side("tokenizer.json", "text_tokenizer.json")
        else:
            side = next((s for name, s in self.files.source.sides.items() if name.endswith("tokenizer.json")), None)
        return HubTokenizer(side) if side else golden_format.tokenizer(self)

    # --- inputs ---------------------------------------------------------------------------------------------------

    @property
    def grid(self):
        """(rows, columns) of the picture, as the fixture tells."""
        return tuple(int(n) for n in self.meta["grid"][-2:])

    @cached_property
    def plan(self):
        """The plan of the fixture's size, with what the format puts behind the picture (`family.ending`)."""
        factor = self._factor()
        rows, cols = self.grid
        grids = golden_video.token_grids(self.meta)
        plan = self.family.plan(self.family.size(cols * factor, rows * factor, self._frames(grids)))
        if (plan.frames, plan.rows, plan.cols) != (grids, rows, cols):
            raise UserError(
                f"the model draws a grid of {plan.frames} x {plan.rows} x {plan.cols}, the fixture has {grids} x "
                f"{rows} x {cols}"
            )
        ending = torch.tensor(self.family.ending, dtype=torch.int64)
        return replace(
            plan,
            forced=torch.cat([plan.forced, ending]),
            cells=torch.cat([plan.cells, torch.full_like(ending, -1)]),
        )

    def _factor(self):
        """Pixels a code: what the codec says, or without one the family."""
        config = self.family.codec_config
        return config.factor if config is not None else getattr(self.family, "factor", None) or 16

    def _frames(self, grids):
        """Frames that so many token grids stand for."""
        return 1 + (grids - 1) * getattr(self.family, "compression", 1)

    @cached_property
    def prompt(self):
        """The fixture's prompt: words, a class, or text features of which only the valid rows count."""
        if golden_video.reads_all(self):
            return golden_video.attended(self)
        features, mask = self.fixture.get("text_features"), self.fixture.get("text_mask")
        if features is not None:
            return Prompt(text="", features=features[0][mask[0].bool()])
        text = self.meta.get("prompt", self.meta.get("class_id"))
        if text is None:
            raise UserError("meta.json has neither a prompt nor a class_id")
        return self.family.text.encode(str(text))

    @cached_property
    def streams(self):
        """(conditional, unconditional) `Stream`."""
        return self.family.streams(self.prompt, None, self.plan)

    @cached_property
    def positions(self):
        """The family's position tables, one row a slot of the longer stream."""
        return self.family.positions(self.decoder, self.plan, max(s.length for s in self.streams), "cpu")

    @property
    def cfg(self):
        """Guidance of the fixture's numbers."""
        told = self.meta.get("cfg_scale", self.meta.get("cfg_scale_text"))
        return float(self.family.defaults.cfg if told is None else told)

    def sequence(self, codes):
        """Codes [frames * rows * cols] -> token ids [N], line ends and ending included."""
        grid = codes.reshape(1, self.plan.frames, self.plan.rows, self.plan.cols)
        return self.plan.fixed(1, grid)[0]

    # --- the language model -----------------------------------------------------------------------------------------

    def forced(self, codes, dtype=torch.float32):
        """Feed given codes through prompt, cache and window -> `Forced`."""
        key = (tuple(codes.tolist()), dtype)
        if key not in self._forced:
            decoder = self.decoder if dtype == torch.float32 else self._decoder(dtype)
            self._forced[key] = self._feed(decoder, self.sequence(codes))
        return self._forced[key]

    @torch.inference_mode()
    def _feed(self, decoder, ids):
        """One prefill, then one window over the whole picture; the hidden states are caught behind the last norm."""
        plan, caught = self.plan, []
        hook = decoder.norm.register_forward_hook(lambda module, inputs, output: caught.append(output))
        try:
            free = torch.full((1, plan.length), -1)
            session = Session(decoder, self.family, plan, list(self.streams), free, 0, "cpu")
            # the first input gives way to the prompt's last one; what follows the last token is not always asked for
            rows = golden_video.reads_all(self)
            count = plan.length + (rows is not None)
            inputs = torch.cat([ids[:1], ids])[None, :count]
            before = torch.arange(-1, count - 1)[None]
            logits = session.window(inputs, before, count - 1, opening=True)[0][:, -(rows or count) :]
        finally:
            hook.remove()
        window, prefill = caught[-1][:, -(rows or count) :], caught[0] if len(caught) > 1 else None
        hidden = []
        for row, stream in enumerate(self.streams):
            first = window[row][:0] if prefill is None else prefill[row, : stream.length - 1]
            hidden.append(torch.cat([first, window[row]]).float())
        return Forced(hidden, logits.float(), self._full(decoder, window))

    def _full(self, decoder, hidden):
        """Logits of the whole vocabulary, where the head was cut to the picture codes."""
        if decoder.cfg.out_head != "linear":
            return None
        name = "embed.embed_tokens.weight" if decoder.cfg.tied_head else "lm_head.weight"
        head = replace(self.files.family.refs("decoder")[name], rows=None).read(hidden.dtype)
        return F.linear(hidden, head).float()

    def guided(self, codes, wide=False):
        """Guided scores [R, V] of the picture codes along given codes, or of the whole vocabulary (`wide`)."""
        forced, form = self.forced(codes), self.family.guidance
        if not wide and (form == "logits" or forced.full is None):
            return guide(forced.logits[None], self.cfg, form)[0]
        # the original normalises over all words
        scores = guide(forced.full[None], self.cfg, form)[0]
        return scores if wide else scores[:, self.plan.base : self.plan.base + self.plan.vocab]

    def law(self, codes, name):
        """Probabilities [R, V] with the settings that the fixture tells for the tensor `name`."""
        told, own = self.fixture.what(name), self.family.defaults

        def setting(field, pattern, kind):
            found = re.search(pattern, told)
            return kind(found[1]) if found else kind(self.meta.get(field, getattr(own, field)))

        settings = LawSettings(
            temperature=setting("temperature", r"temperature (\d+(?:\.\d+)?)", float),
            top_k=setting("top_k", r"top[-_]k (\d+)", int),
            top_p=setting("top_p", r"top[-_]p (\d+(?:\.\d+)?)", float),
            cfg=self.cfg,
        )
        logits = self.forced(codes).logits
        return token_law(logits[None], settings, self.family.guidance, self.plan.allowed)[0].exp()

    def greedy(self, method="autoregressive"):
        """Codes [rows * cols] of the real decode loop at temperature 0; the fixture may give the first ones."""
        if ("greedy", method) not in self._forced:
            given = int(self.meta.get("greedy_given", 0))
            kept = None
            if given:
                kept = torch.full((1, self.plan.frames, self.plan.rows, self.plan.cols), -1)
                kept.view(-1)[:given] = self.fixture.tensors["codes"][:given]
            request = Request(
                method=method, temperature=0.0, top_k=0, top_p=1.0, cfg=self.cfg, window=8,
                width=self.plan.width, height=self.plan.height, frames=self._frames(self.plan.frames),
            )  # fmt: skip
            drawn = generate(self.decoder, self.family, self.prompt, None, request, kept)
            self._forced["greedy", method] = drawn.codes.reshape(-1)
        return self._forced["greedy", method]

    # --- the codec --------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def pixels(self, codes):
        """Codes [rows * cols] -> [1, 3, H, W], not clamped."""
        return self.codec.decode_raw(codes.reshape(1, *self.grid))

    @torch.inference_mode()
    def encoded(self, picture):
        """Picture [1, 3, H, W] in the codec's own range -> codes [h * w]."""
        low, high = self._with_encoder().range
        frames = ((picture - low) / (high - low)).permute(0, 2, 3, 1)
        return self.codec.encode(frames).reshape(-1)

    @torch.inference_mode()
    def latent(self, picture):
        """Picture [1, 3, H, W] -> features before quantisation [1, D, h, w]."""
        self._with_encoder()
        return self.codec.features(picture)

    def _with_encoder(self):
        if not self.codec.cfg.encoder:
            raise UserError("the files hold no complete encoder")
        return self.codec.cfg
