"""Speculative Coupled Sampler: prompt to tokens, several tokens a pass."""

import torch
from comfy_api.latest import io, ui

from ..scd_core.acceptance import DEFAULT_METHOD, METHODS
from ..scd_core.budget import codec_bytes, sampler_bytes
from ..scd_core.errors import UserError
from ..scd_core.generate import OWN, Request, check_request, generate, law_settings
from . import host
from .acceptance_map import acceptance_map
from .preview import TILES, Preview
from .sampler_inputs import PREVIEWS, sampler_inputs, sampler_outputs
from .sockets import Tokens


class SpeculativeCoupledSampler(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="SCD_Sampler",
            display_name="Speculative Coupled Sampler",
            category="SCD",
            description="Draws pictures or a clip with an autoregressive model in a fraction of the usual passes. "
            "Every method here keeps the model's law: the result is not approximated.",
            inputs=sampler_inputs(),
            outputs=sampler_outputs(),
            **host.newer(search_aliases=["ksampler", "autoregressive", "jacobi", "speculative decoding"]),
        )

    @classmethod
    def execute(cls, model, positive, method=DEFAULT_METHOD, seed=0, window=0, temperature=OWN, top_k=OWN, top_p=OWN,
                cfg=OWN, width=0, height=0, frames=1, batch_size=1, draft_start="auto", preview="auto", memory=True,
                negative=None, kept=None):
        request = Request(
            method=method, seed=seed, window=window, temperature=temperature, top_k=top_k, top_p=top_p, cfg=cfg,
            width=width, height=height, frames=frames, batch=batch_size, start=draft_start, memory=memory,
        )
        prompts = [read_prompt(positive, model, "positive"), read_prompt(negative, model, "negative")]
        check_request(request)
        if preview not in PREVIEWS:
            raise UserError(f"unknown preview {preview!r}: choose one of {', '.join(PREVIEWS)}")
        plan = model.family.plan(model.family.size(width, height, frames))
        given = None if kept is None else kept.given(plan)
        plan.fixed(batch_size, given)  # refuses kept tokens that do not fit, before anything is loaded
        needed = memory_needed(model, request, plan, prompts)
        show = preview == "auto"
        if show:
            needed += codec_bytes(model.codec.net.cfg, plan.width, plan.height, min(TILES, batch_size * plan.frames))
        host.load([model.patcher, model.codec.patcher] if show else [model.patcher], needed)
        device = model.patcher.load_device
        drawn = generate(
            model.net, model.family, *prompts, request=request, kept=given, device=device,
            callback=watch(model, plan, given, show),
        )
        report = drawn.report.text().replace("\n", "  \n")  # the page reads it as Markdown, where this ends a line
        heat = torch.from_numpy(acceptance_map(drawn.report.visits)).to(host.output_device()).float() / 255
        tokens = Tokens(drawn.codes, plan.width, plan.height, plan.vocab, model.name, model.family.title)
        return io.NodeOutput(tokens, report, heat, ui=ui.PreviewText(report))


def read_prompt(handle, model, name):
    """The `Prompt` of a wire, None where there is none.

    Raises:
        UserError: encoded for another family.
    """
    if handle is None:
        return None
    if handle.family != model.family.title:
        raise UserError(
            f"{name} was encoded for {handle.family}, the model is {model.family.title}: wire AR_TEXT of the same "
            "Load AR Model into Text Encode"
        )
    return handle.prompt


def memory_needed(model, request, plan, prompts):
    """Bytes beside the weights; the settings are checked on the way."""
    law = law_settings(request, model.family)
    streams = model.family.streams(*prompts, plan)[: 1 if law.cfg == 1 else 2]
    window = 1 if METHODS[request.method].sequential else request.window
    longest = max(stream.length for stream in streams)
    item_size = torch.empty(0, dtype=model.net.dtype).element_size()
    return sampler_bytes(model.net.cfg, item_size, plan, longest, len(streams), request.batch, window)


def watch(model, plan, given, show):
    """The run's callback: interrupt, progress in tokens, live preview."""
    codec, place = model.codec.net, model.codec.patcher.load_device
    picture = Preview(plan, lambda codes: codec.decode(codes.to(place)), given, fatal=host.Interrupted)
    bar = host.Progress(1)

    def callback(progress):
        host.check_interrupt()
        bar(progress.done, progress.total, picture(progress) if show else None)

    return callback
