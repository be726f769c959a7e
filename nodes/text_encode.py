"""Text Encode: words become a prompt."""

import logging

from comfy_api.latest import io, ui

from . import host
from .sockets import PROMPT, TEXT, PromptHandle

log = logging.getLogger(__name__)


class TextEncode(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="SCD_TextEncode",
            display_name="Text Encode",
            category="SCD",
            description="Turns words into a prompt for the sampler. A second one, wired to negative, says what to "
            "avoid.",
            inputs=[
                TEXT.Input("ar_text", tooltip="AR_TEXT of Load AR Model."),
                io.String.Input(
                    "text",
                    multiline=True,
                    dynamic_prompts=True,
                    default="",
                    tooltip="What to draw. {a|b} takes one of the choices for each run. Words that the model does "
                    "not know are left out and named in the report.",
                ),
            ],
            outputs=[PROMPT.Output(display_name="AR_PROMPT", tooltip="The prompt, for positive or negative.")],
            **host.newer(search_aliases=["prompt", "clip text encode"]),
        )

    @classmethod
    def execute(cls, ar_text, text=""):
        prompt = ar_text.family.text.encode(text)
        for note in prompt.notes:
            log.warning("%s", note)
        shown = ui.PreviewText("\n".join(prompt.notes)) if prompt.notes else None
        return io.NodeOutput(PromptHandle(prompt, ar_text.family.title), ui=shown)
