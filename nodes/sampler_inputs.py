"""Widgets and sockets of the sampler. Saved graphs hold widget values by place: only ever append."""

from comfy_api.latest import io

from ..scd_core.acceptance import DEFAULT_METHOD, METHODS
from ..scd_core.drafting import STARTS
from ..scd_core.generate import MOST_NODES, MOST_ROUNDS, MOST_ROWS
from .sockets import MODEL, PROMPT, TOKENS

SEEDS = 0xFFFFFFFFFFFFFFFF

PREVIEWS = ("auto", "off")
ON_CANCEL = ("discard", "keep")


def seed_input():
    return io.Int.Input(
        "seed", default=0, min=0, max=SEEDS, control_after_generate=True,
        tooltip="Chooses the picture. Picture 3 of a batch has its own noise: batch size changes nothing.",
    )


def on_cancel_input():
    return io.Combo.Input(
        "on_cancel", display_name="on cancel", options=list(ON_CANCEL), default=ON_CANCEL[0], optional=True,
        tooltip="keep: Cancel ends the drawing here and hands on what there is. The rest of a picture is guessed, a "
        "clip ends with its last whole frame. Press Cancel again to end the whole run.",
    )


def method_inputs():
    """How to draw."""
    return [
        io.Combo.Input(
            "method",
            options=list(METHODS),
            default=DEFAULT_METHOD,
            tooltip="seed-exact: the very tokens that autoregressive gives for this seed, in far fewer passes. sjd and "
            "scd: other tokens of the same law. jacobi: always the likeliest token. autoregressive: one token a pass. "
            "csd, gsd, cool-sd: fewer passes still, but the picture only resembles the model's (lossy). pjd, pjd-c, "
            "zipar: several rows at once (lossy). row-block: row by row in a few corrections (lossy). "
            "ssd: the same with trained heads (lossy).",
        ),
        seed_input(),
        io.Int.Input(
            "window", default=0, min=0, max=4096,
            tooltip="Tokens looked at in one pass. 0: chosen for you; the report names it. Changes the speed; with sjd "
            "and scd also which picture a seed gives.",
        ),
    ]


def law_inputs():
    """What may be drawn."""
    return [
        io.Float.Input(
            "temperature", default=-1.0, min=-1.0, max=10.0, step=0.05, round=0.001,
            tooltip="Lower is calmer, 0 takes the likeliest token always. -1: the model's own.",
        ),
        io.Int.Input(
            "top_k", default=-1, min=-1, max=1_000_000,
            tooltip="Only the k likeliest tokens may be drawn; 0 is off. -1: the model's own.",
        ),
        io.Float.Input(
            "top_p", default=-1.0, min=-1.0, max=1.0, step=0.01, round=0.0001,
            tooltip="Only the likeliest tokens that make up this share may be drawn; 1 is off. -1: the model's own.",
        ),
        io.Float.Input(
            "cfg", default=-1.0, min=-1.0, max=100.0, step=0.1, round=0.001,
            tooltip="How strongly the prompt pulls. 1 is off: no negative, twice as fast. -1: the model's own.",
        ),
    ]


def size_inputs():
    """How much to draw."""
    return [
        io.Int.Input(
            "width", default=0, min=0, max=8192, step=8, tooltip="Pixels. 0: the model's own size.",
        ),
        io.Int.Input(
            "height", default=0, min=0, max=8192, step=8, tooltip="Pixels. 0: the model's own size.",
        ),
        io.Int.Input(
            "frames", default=1, min=1, max=1024,
            tooltip="1 draws a picture, more a clip. The bundled model draws clips of 2 to 8 frames.",
        ),
        io.Int.Input(
            "batch_size", default=1, min=1, max=64, tooltip="Pictures or clips drawn at the same time.",
        ),
    ]


def _run():
    """How to guess, and what to show."""
    return [
        io.Combo.Input(
            "draft_start",
            options=["auto", *STARTS],
            default="auto",
            tooltip="First guess for a token that enters the window: any, or copied from a neighbour. Changes the "
            "speed; with sjd and scd also which picture a seed gives.",
        ),
        io.Combo.Input(
            "preview",
            options=list(PREVIEWS),
            default="auto",
            tooltip="auto: shows the picture growing, decided parts sharp, guessed parts pale. Changes no token.",
        ),
        io.Boolean.Input(
            "memory",
            display_name="trajectory memory",
            default=True,
            label_on="on",
            label_off="off",
            tooltip="seed-exact and jacobi: remember what a token answered under which neighbours, for better guesses. "
            "Changes the number of passes, no token.",
        ),
    ]


def _later():
    """What came after the first graphs were saved: optional, so that those still run, and behind all else."""
    return [
        io.Int.Input(
            "tree_nodes", display_name="tree nodes", default=-1, optional=True, min=-1, max=MOST_NODES,
            tooltip="seed-exact and jacobi: second-best guesses looked at beside the window; -1: chosen for you, 0: "
            "none. They need trajectory memory and change the speed, no token. sjd and scd: further candidates for the "
            "next token; 3 to 7 save passes, -1 and 0: none.",
        ),
        io.Float.Input(
            "relax", default=-1.0, optional=True, min=-1.0, max=1.0, step=0.05, round=0.001,
            tooltip="csd, gsd and cool-sd: how much they may bend the model's law. 0: not at all, 1: as published. -1: "
            "the method's own.",
        ),
        io.Int.Input(
            "relax_budget", display_name="relax budget", default=-1, optional=True, min=-1, max=1_000_000,
            tooltip="csd, gsd and cool-sd: at most so many tokens of a picture are taken against the law. -1: any "
            "number.",
        ),
        io.Int.Input(
            "row_context", display_name="row context", default=-1, optional=True, min=-1, max=4096,
            tooltip="pjd, pjd-c and zipar: tokens that a row must have before the next one begins. Fewer is faster and "
            "rougher; with all of them pjd-c and zipar are lossless. -1: a quarter of the columns.",
        ),
        io.Int.Input(
            "rounds", default=2, optional=True, min=0, max=MOST_ROUNDS,
            tooltip="row-block and ssd: how often a row is corrected at most. More is slower and better. 0: until it "
            "is exact (lossless).",
        ),
        on_cancel_input(),
        io.Int.Input(
            "block_rows", display_name="rows at once", default=1, optional=True, min=1, max=MOST_ROWS,
            tooltip="row-block and ssd: rows that are guessed together. With 2 the second is corrected along with the "
            "first: fewer passes, rougher.",
        ),
    ]


def sampler_inputs():
    """All inputs, in the order that saved graphs rely on."""
    return [
        MODEL.Input("model", tooltip="AR_MODEL of Load AR Model."),
        PROMPT.Input("positive", tooltip="What to draw, from Text Encode."),
        *method_inputs(),
        *law_inputs(),
        *size_inputs(),
        *_run(),
        PROMPT.Input("negative", optional=True, tooltip="What to avoid, from a second Text Encode. Needs cfg above 1."),
        TOKENS.Input(
            "kept", optional=True,
            tooltip="Tokens that stay as they are and cost no pass, from VQ Encode: a part of a picture, the first "
            "frames of a clip. Width and height 0 take their size.",
        ),
        *_later(),
    ]


def sampler_outputs():
    """All outputs, in the order that saved graphs rely on."""
    return [
        TOKENS.Output(display_name="AR_TOKENS", tooltip="The drawn tokens, for VQ Decode."),
        io.String.Output(display_name="report", tooltip="Passes, tokens a pass, seconds, and whether it was lossless."),
        io.Image.Output(
            display_name="acceptance map",
            tooltip="How many passes looked at each token: blue few, red many, grey given.",
        ),
    ]
