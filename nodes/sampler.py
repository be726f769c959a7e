"""Speculative Coupled Sampler: prompt to tokens, several tokens a pass."""

import torch
from comfy_api.latest import io, ui

from ..scd_core.acceptance import DEFAULT_METHOD, METHODS
from ..scd_core.budget import sampler_bytes
from ..scd_core.errors import UserError
from ..scd_core.generate import OWN, Request, check_request, generate, law_settings
from ..scd_core.layout import inputs_of_pass
from ..scd_core.window import AUTO
from . import host
from .acceptance_map import acceptance_map
from .preview import Preview, decoder, preview_bytes
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
            "The report says whether a method keeps the model's law (lossless) or only comes near it (lossy).",
            inputs=sampler_inputs(),
            outputs=sampler_outputs(),
            **host.newer(search_aliases=["ksampler", "autoregressive", "jacobi", "speculative decoding"]),
        )

    @classmethod
    def execute(cls, model, positive, method=DEFAULT_METHOD, seed=0, window=0, temperature=OWN, top_k=OWN, top_p=OWN,
                cfg=OWN, width=0, height=0, frames=1, batch_size=1, draft_start="auto", preview="auto", memory=True,
                tree_nodes=AUTO, relax=OWN, relax_budget=-1, row_context=OWN, rounds=2, negative=None, kept=None):
        request = Request(
            method=method, seed=seed, window=window, temperature=temperature, top_k=top_k, top_p=top_p, cfg=cfg,
            width=width, height=height, frames=frames, batch=batch_size, start=draft_start, memory=memory,
            nodes=tree_nodes, relax=relax, relax_budget=relax_budget, row_context=row_context, rounds=rounds,
        )
        prompts = [read_prompt(positive, model, "positive"), read_prompt(negative, model, "negative")]
        check_request(request)
        if preview not in PREVIEWS:
            raise UserError(f"unknown preview {preview!r}: choose one of {', '.join(PREVIEWS)}")
        plan = model.family.plan(size_of_run(model.family, width, height, frames, kept))
        given = None if kept is None else kept.given(plan)
        plan.fixed(batch_size, given)  # refuses kept tokens that do not fit, before anything is loaded
        needed = memory_needed(model, request, plan, prompts)
        show = preview == "auto"
        if show:
            needed += preview_bytes(model.codec.net.cfg, plan, batch_size)
        host.load([model.patcher, model.codec.patcher] if show else [model.patcher], needed)
        device = model.patcher.load_device
        drawn = generate(
            model.net, model.family, *prompts, request=request, kept=given, device=device,
            callback=watch(model, plan, given, show),
        )
        if not drawn.report.tokens:
            drawn.report.notes.append("every token was kept, nothing was drawn: choose what to redraw in VQ Encode")
        report = drawn.report.text().replace("\n", "  \n")  # the page reads it as Markdown, where this ends a line
        heat = torch.from_numpy(acceptance_map(drawn.report.visits)).to(host.output_device()).float() / 255
        # the codebook may be larger than what the model draws of it
        book = model.codec.net.cfg.codes
        tokens = Tokens(drawn.codes, plan.width, plan.height, book, model.name, model.family.title)
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


def size_of_run(family, width, height, frames, kept):
    """The `Size` to draw; with kept tokens 0 stands for theirs.

    Raises:
        UserError: no size of this model, or kept tokens of another model or size.
    """
    if kept is None:
        return family.size(width, height, frames)
    if kept.family != family.title:
        raise UserError(
            f"the kept tokens come from {kept.family}, the model is {family.title}: wire AR_VQ of the same Load AR "
            "Model into VQ Encode"
        )
    if width not in (0, kept.width) or height not in (0, kept.height):
        raise UserError(
            f"the kept tokens stand for {kept.width}x{kept.height} pixels, width and height here ask for "
            f"{width or 'any'}x{height or 'any'}: set both to 0, or VQ Encode to the same size"
        )
    try:
        return family.size(kept.width, kept.height, frames)
    except UserError as error:
        raise UserError(f"the kept tokens stand for {kept.width}x{kept.height} pixels, but {error}") from error


def memory_needed(model, request, plan, prompts):
    """Bytes beside the weights; the settings are checked on the way."""
    law = law_settings(request, model.family)
    streams = model.family.streams(*prompts, plan)[: 1 if law.cfg == 1 else 2]
    rule = METHODS[request.method]
    window = 1 if rule.sequential else request.window
    if rule.layout != "window":
        window = inputs_of_pass(rule, plan, window, request.row_context)
    longest = max(stream.length for stream in streams)
    item_size = torch.empty(0, dtype=model.net.dtype).element_size()
    grows = rule.memory and request.memory
    nodes = request.nodes if grows else 0
    return sampler_bytes(model.net.cfg, item_size, plan, longest, len(streams), request.batch, window, nodes)


def watch(model, plan, given, show):
    """The run's callback: interrupt, progress in tokens, live preview."""
    codec, place = model.codec.net, model.codec.patcher.load_device
    picture = Preview(plan, given=given, fatal=host.Interrupted, **decoder(codec, place, plan))
    bar = host.Progress(1)

    def callback(progress):
        host.check_interrupt()
        bar(progress.done, progress.total, picture(progress) if show else None)

    return callback
