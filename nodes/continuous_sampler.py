"""Continuous Speculative Sampler: class to latents with a MAR, alone or with a smaller one that runs ahead."""

import torch
from comfy_api.latest import io, ui
from PIL import Image

from ..scd_core.budget import codec_bytes
from ..scd_core.continuous.cspd import MODES
from ..scd_core.continuous.room import working_bytes
from ..scd_core.continuous.sampler import OWN, Settings, as_latents, check_pair, resolve, sample
from . import host
from .acceptance_map import sheet
from .preview import SIDE, TILES, Preview, cost_of, pale
from .sampler import check_choice, kept_on, read_prompt, watch
from .sampler_inputs import ON_CANCEL, PREVIEWS, on_cancel_input, seed_input
from .sockets import LATENTS, MODEL, PROMPT, Latents


def _speculation():
    """How the draft is used."""
    own = Settings()
    return [
        io.Combo.Input(
            "mode", options=list(MODES), default=own.mode,
            tooltip="With a draft model. block: as the published code, keeps every drafted place; lossy. prefix: as "
            "the paper's text, stops behind the first refused token; lossy. exact: keeps the model's law, gains no "
            "speed.",
        ),
        seed_input(),
        io.Int.Input(
            "gamma", default=own.gamma, min=1, max=256,
            tooltip="Steps that the draft model runs ahead before the model looks. 4 to 32 are usual.",
        ),
        io.Float.Input(
            "prefill", default=own.prefill, min=0.0, max=1.0, step=0.01, round=0.0001,
            tooltip="Share of the steps that the model draws alone at the start, where drafts are poor. The paper has "
            "0.05, the published code 0.15.",
        ),
        io.Float.Input(
            "tau", default=own.tau, min=0.001, max=1000.0, step=1.0, round=0.001,
            tooltip="block and prefix: flattens the test of a draft. 1 is the paper's formula, which takes hardly any "
            "draft. The published code has 42 without saying so: more drafts stay, further from the model's law.",
        ),
    ]


def _law():
    """How much work a picture is, and what may be drawn."""
    return [
        io.Int.Input(
            "steps", default=0, min=0, max=4096,
            tooltip="Passes of the model over the picture. Fewer are faster, and the first thing to try before any "
            "draft. 256 is best for 256 tokens. 0: 64, or one for each token of a smaller picture.",
        ),
        io.Int.Input(
            "diffusion_steps", default=0, min=0, max=1000,
            tooltip="Denoising steps of a token. 0: 100, the published number.",
        ),
        io.Float.Input(
            "temperature", default=-1.0, min=-1.0, max=10.0, step=0.05, round=0.001,
            tooltip="Scales the noise of the denoising steps; lower is calmer. -1: the model's own.",
        ),
        io.Float.Input(
            "cfg", default=-1.0, min=-1.0, max=100.0, step=0.1, round=0.001,
            tooltip="How strongly the class pulls at the end; it grows from 1. 1 is off, and twice as fast. -1: the "
            "model's own.",
        ),
        io.Int.Input("batch_size", default=1, min=1, max=64, tooltip="Pictures drawn at the same time."),
    ]


class CanvasPreview(Preview):
    """Live preview of a canvas of vectors: what is drawn, sharp, the rest grey.

    Args:
        codec: `CodecHandle` of the model. side: tokens a row.
    """

    def __init__(self, codec, side):
        net, place = codec.net, codec.patcher.load_device
        cost = cost_of(net, place, side, side)
        super().__init__(None, lambda latents: net.decode(latents.to(place)), fatal=host.Interrupted, cost=cost)

    def _grids(self, progress):
        return min(TILES, len(progress.canvas))

    def _picture(self, progress):
        canvas = as_latents(progress.canvas[:TILES])
        known = progress.known[:TILES].unflatten(1, canvas.shape[-2:])
        picture = sheet(pale(self._decoded(canvas).float().cpu(), known))
        grown = max(1, SIDE // max(picture.shape[:2]))
        return Image.fromarray(picture.repeat(grown, 0).repeat(grown, 1))


class ContinuousSpeculativeSampler(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="SCD_ContinuousSampler",
            display_name="Continuous Speculative Sampler",
            category="SCD",
            description="Draws pictures of a class with a MAR, whose tokens are vectors. A smaller MAR may run ahead; "
            "the report says what that cost and whether it was lossless.",
            inputs=[
                MODEL.Input("model", tooltip="AR_MODEL of a Load AR Model with a MAR."),
                PROMPT.Input("positive", tooltip="The class to draw, by name or number, from Text Encode."),
                *_speculation(),
                *_law(),
                MODEL.Input(
                    "draft_model", optional=True,
                    tooltip="AR_MODEL of a second Load AR Model with a smaller MAR. Without one the model draws alone.",
                ),
                on_cancel_input(),
                io.Combo.Input(
                    "preview", options=list(PREVIEWS), default="auto", optional=True,
                    tooltip="auto: shows the picture growing; what is not drawn yet is grey. Changes no token.",
                ),
            ],
            outputs=[
                LATENTS.Output(display_name="AR_LATENTS", tooltip="The drawn vectors, for VQ Decode."),
                io.String.Output(
                    display_name="report",
                    tooltip="Passes, share of drafts taken, seconds, and whether it was lossless.",
                ),
            ],
            **host.newer(search_aliases=["mar", "cspd", "masked autoregressive", "speculative decoding"]),
        )

    @classmethod
    def execute(cls, model, positive, mode="block", seed=0, gamma=8, prefill=0.05, tau=1.0, steps=0, diffusion_steps=0,
                temperature=OWN, cfg=OWN, batch_size=1, draft_model=None, on_cancel=ON_CANCEL[0],
                preview=PREVIEWS[0]):
        keep_on = kept_on(on_cancel)
        check_choice("preview", preview, PREVIEWS)
        family, other = model.family, draft_model and draft_model.family
        check_pair(family, other)
        prompt = read_prompt(positive, model, "positive")
        settings = resolve(
            Settings(
                mode=mode, gamma=gamma, prefill=prefill, tau=tau, steps=steps, diffusion_steps=diffusion_steps,
                temperature=temperature, cfg=cfg, seed=seed, batch=batch_size,
            ),
            family,
        )
        show, codec, size = preview == "auto", model.codec, family.sizes[0]
        models = [model] if draft_model is None else [model, draft_model]
        models += [codec] if show else []
        item_size = torch.empty(0, dtype=model.net.dtype).element_size()
        needed = working_bytes(family.decoder_config, settings, item_size, drafted=other is not None)
        if show:
            needed += codec_bytes(codec.net.cfg, size.width, size.height, min(TILES, batch_size))
        less = "a smaller batch, cfg 1, a smaller gamma or no draft model" if other else "a smaller batch or cfg 1"
        host.load([each.patcher for each in models], needed, less)
        draft = draft_model and (draft_model.net, other)
        picture = CanvasPreview(codec, family.decoder_config.side) if show else None
        drawn = sample(
            model.net, family, prompt, settings, draft, model.patcher.load_device, watch(picture),
            host.check_interrupt, keep_on
        )  # fmt: skip
        report = drawn.report.text().replace("\n", "  \n")  # the page reads it as Markdown, where this ends a line
        latents = Latents(drawn.latents[:, None], size.width, size.height, model.name, family.title)
        return io.NodeOutput(latents, report, ui=ui.PreviewText(report))
