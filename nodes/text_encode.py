"""Text Encode: words become a prompt."""

import logging

from comfy_api.latest import io, ui

from ..scd_core.errors import UserError
from ..scd_core.text_features import features_prompt
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
                io.Conditioning.Input(
                    "conditioning",
                    optional=True,
                    tooltip="The prompt as text features from another text encoder, for models that read such features "
                    "(LlamaGen text to image: flan-t5-xl; Cosmos video2world: oldt5_xxl with type cosmos in the CLIP "
                    "loader). The text box is not read then.",
                ),
            ],
            outputs=[PROMPT.Output(display_name="AR_PROMPT", tooltip="The prompt, for positive or negative.")],
            **host.newer(search_aliases=["prompt", "clip text encode"]),
        )

    @classmethod
    def execute(cls, ar_text, text="", conditioning=None):
        family = ar_text.family
        if conditioning is None:
            prompt = family.text.encode(text)
        else:
            features, extra = read_conditioning(conditioning)
            prompt = features_prompt(family, features, extra.get("attention_mask"), text)
        for note in prompt.notes:
            log.warning("%s", note)
        shown = ui.PreviewText("\n".join(prompt.notes)) if prompt.notes else None
        return io.NodeOutput(PromptHandle(prompt, family.title), ui=shown)


def read_conditioning(conditioning):
    """(features [1, P, width], what comes with them) of the single text of a CONDITIONING.

    Raises:
        UserError: several texts, or none.
    """
    if len(conditioning) != 1:
        raise UserError(
            f"the CONDITIONING holds {len(conditioning)} texts, a prompt is one: connect CLIP Text Encode itself, "
            "without combining or scheduling"
        )
    return conditioning[0]
