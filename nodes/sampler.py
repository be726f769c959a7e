"""Speculative Coupled Sampler: prompt to tokens, several tokens a pass."""

import torch
from comfy_api.latest import io, ui

from ..scd_core.acceptance import DEFAULT_METHOD, METHODS
from ..scd_core.codecs.book import same_book
from ..scd_core.errors import UserError
from ..scd_core.generate import OWN, Request, check_request, generate, law_settings, needed_bytes
from ..scd_core.spatial import check_spatial
from ..scd_core.window import AUTO
from . import host
from .acceptance_map import acceptance_map
from .preview import Preview, decoder, preview_bytes
from .sampler_inputs import ON_CANCEL, PREVIEWS, sampler_inputs, sampler_outputs
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
                tree_nodes=AUTO, relax=OWN, relax_budget=-1, row_context=OWN, rounds=2, on_cancel=ON_CANCEL[0],
                block_rows=1, negative=None, kept=None):
        request = Request(
            method=method, seed=seed, window=window, temperature=temperature, top_k=top_k, top_p=top_p, cfg=cfg,
            width=width, height=height, frames=frames, batch=batch_size, start=draft_start, memory=memory,
            nodes=tree_nodes, relax=relax, relax_budget=relax_budget, row_context=row_context, rounds=rounds,
            block_rows=block_rows,
        )
        prompts = [read_prompt(positive, model, "positive"), read_prompt(negative, model, "negative")]
        check_request(request)
        check_spatial(METHODS[method], block_rows, model.family, model.net)
        check_choice("preview", preview, PREVIEWS)
        keep_on = kept_on(on_cancel)
        plan = model.family.plan(size_of_run(model.family, width, height, frames, kept))
        if kept is not None and not same_book(kept.book, model.codec.book):
            raise UserError(
                f"the kept tokens come from the image tokenizer of {kept.model}, {model.name} has another one: wire "
                "AR_VQ of the same Load AR Model into VQ Encode"
            )
        given = None if kept is None else kept.given(plan)
        plan.fixed(batch_size, given)  # refuses kept tokens that do not fit, before anything is loaded
        needed = memory_needed(model, request, plan, prompts)
        show = preview == "auto"
        if show:
            needed += preview_bytes(model.codec.net.cfg, plan, batch_size)
        host.load([model.patcher, model.codec.patcher] if show else [model.patcher], needed)
        device = model.patcher.load_device
        picture = live_preview(model, plan, given) if show else None
        drawn = generate(
            model.net, model.family, *prompts, request=request, kept=given, device=device, callback=watch(picture),
            keep_on=keep_on,
        )
        if not drawn.report.tokens:
            drawn.report.notes.append("every token was kept, nothing was drawn: choose what to redraw in VQ Encode")
        report = drawn.report.text().replace("\n", "  \n")  # the page reads it as Markdown, where this ends a line
        heat = torch.from_numpy(acceptance_map(drawn.report.visits)).to(host.output_device()).float() / 255
        # the codebook may be larger than what the model draws of it
        codec = model.codec
        tokens = Tokens(
            drawn.codes, plan.width, plan.height, codec.net.cfg.codes, model.name, model.family.title, book=codec.book
        )
        return io.NodeOutput(tokens, report, heat, ui=ui.PreviewText(report))


def check_choice(name, value, known):
    """Refuse a value that no list of a widget has. Raises UserError."""
    if value not in known:
        raise UserError(f"unknown {name} {value!r}: choose one of {', '.join(known)}")


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
    return needed_bytes(model.net, model.family, plan, model.family.streams(*prompts, plan), request, law)


def live_preview(model, plan, given):
    """`Preview` of a run."""
    codec, place = model.codec.net, model.codec.patcher.load_device
    return Preview(plan, given=given, fatal=host.Interrupted, **decoder(codec, place, plan))


def watch(picture=None):
    """The run's callback: interrupt, progress in tokens, live preview. picture: `Preview` or None."""
    bar = host.Progress(1)

    def callback(progress):
        host.check_interrupt()
        bar(progress.done, progress.total, picture(progress) if picture else None)

    return callback


def kept_on(on_cancel):
    """Exceptions after which a sampler hands on what it has, for a value of its widget. Raises UserError."""
    check_choice("on_cancel", on_cancel, ON_CANCEL)
    return (host.Interrupted,) if on_cancel == "keep" else ()
