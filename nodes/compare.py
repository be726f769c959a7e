"""Compare Methods: one prompt, one seed, several methods; pictures, figures and a plot beside one another."""

import numpy as np
import torch
from comfy_api.latest import io, ui

from ..scd_core.compare import DEFAULT, compare, method_names, picture_sheet, plot, rows_of, table
from ..scd_core.generate import OWN, Request
from . import host
from .sampler import memory_needed, read_prompt
from .sampler_inputs import law_inputs, method_inputs, size_inputs
from .sockets import MODEL, PROMPT


class CompareMethods(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        seed, window = method_inputs()[1:]
        *size, _ = size_inputs()  # one picture a method
        return io.Schema(
            node_id="SCD_Compare",
            display_name="Compare Methods",
            category="SCD",
            description="Draws one prompt with several methods in one run and shows pictures, passes and seconds side "
            "by side. Ratios and \"same tokens\" are against the method that is named first.",
            inputs=[
                MODEL.Input("model", tooltip="AR_MODEL of Load AR Model."),
                PROMPT.Input("positive", tooltip="What to draw, from Text Encode."),
                io.String.Input(
                    "methods", default=DEFAULT,
                    tooltip="Methods to run, with commas between. The first one is the yardstick.",
                ),
                seed, window, *law_inputs(), *size,
                PROMPT.Input("negative", optional=True, tooltip="What to avoid, from a second Text Encode."),
            ],
            outputs=[
                io.Image.Output(display_name="pictures", tooltip="The pictures with captions; one sheet a frame."),
                io.Image.Output(display_name="plot", tooltip="Passes of each method, and how they decided the tokens."),
                io.String.Output(display_name="report", tooltip="The figures as a table."),
            ],
            **host.newer(search_aliases=["benchmark", "xy plot", "speculative decoding"]),
        )  # fmt: skip

    @classmethod
    def execute(cls, model, positive, methods=DEFAULT, seed=0, window=0, temperature=OWN, top_k=OWN, top_p=OWN,
                cfg=OWN, width=0, height=0, frames=1, negative=None):
        names = method_names(methods)
        request = Request(
            seed=seed, window=window, temperature=temperature, top_k=top_k, top_p=top_p, cfg=cfg, width=width,
            height=height, frames=frames,
        )
        prompts = [read_prompt(positive, model, "positive"), read_prompt(negative, model, "negative")]
        plan = model.family.plan(model.family.size(width, height, frames))
        host.load([model.patcher, model.codec.patcher], memory_needed(model, request, plan, prompts))
        bar = host.Progress(len(names))

        def tell(number, progress):
            host.check_interrupt()
            bar(number * progress.total + progress.done, len(names) * progress.total)

        device = model.patcher.load_device
        drawn = compare(model.net, model.family, *prompts, request, names, device, tell)
        codec, place = model.codec.net, model.codec.patcher.load_device
        frames = [codec.decode_clip(d.codes[0].to(place)).float().cpu().numpy() for d in drawn]
        reports = [d.report for d in drawn]
        rows = rows_of(reports)
        pictures = torch.from_numpy(picture_sheet(frames, rows).astype(np.float32) / 255)
        shown = torch.from_numpy(plot(reports).astype(np.float32)[None] / 255)
        text = table(rows)
        markdown = "```\n" + text + "\n```"  # columns need one width for all letters
        return io.NodeOutput(
            pictures.to(host.output_device()), shown.to(host.output_device()), text, ui=ui.PreviewText(markdown)
        )
