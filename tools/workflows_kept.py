"""Workflows that keep a part of a picture or clip. With the bundled model each draws its own input first, so that no
file is needed."""

from workflow_graph import GREY, enlarged, figures, road, sampler_wires, workflow
from workflows_image import NOT_SEEN, REFRESH

OWN = "To use a picture of your own, put **Load Image** in the place of the nodes in the first frame."


def picture_to_start_from(graph, title, seed=1, **widgets):
    """Sampler "first" and its decoder "given", in the first column behind the road."""
    graph.group(title, 810, 0, 390, 960)
    graph.add("first", "SCD_Sampler", (830, 50), (350, 780), "First sampler", wires=sampler_wires(), seed=seed,
              **widgets)
    graph.add("given", "SCD_VQDecode", (830, 870), (350, 60), wires={"tokens": ("first", 0), "vq": ("load", 2)})


def redraw(graph, title, mask=None, kept=None, prompt="positive", **widgets):
    """VQ Encode "encode", sampler "draw" and decoder "decode", in the third column."""
    graph.group(title, 1620, 0, 780, 960)
    wires = {"vq": ("load", 2), "image": ("given", 0), **({"mask": mask} if mask else {})}
    graph.add("encode", "SCD_VQEncode", (1640, 50), (350, 330), wires=wires, **(kept or {}))
    wires = {**sampler_wires(), "positive": (prompt, 0), "kept": ("encode", 0)}
    graph.add("draw", "SCD_Sampler", (2030, 50), (350, 780), "Second sampler", wires=wires, seed=2, **widgets)
    graph.add("decode", "SCD_VQDecode", (2030, 870), (350, 60), wires={"tokens": ("draw", 0), "vq": ("load", 2)})


def shown(graph, name, title, at, image, side=512):
    """An enlarged picture in a preview below its node."""
    enlarged(graph, f"{name} large", image, at, side)
    graph.add(name, "PreviewImage", (at[0], at[1] + 210), (350, 400), title, wires={"images": (f"{name} large", 0)})


@workflow("SCD image completion")
def image_completion(graph):
    road(graph, "lion on sand")
    graph.note("The first sampler draws a picture. **VQ Encode** keeps the tokens of its upper half, and the second "
               "sampler draws the lower half anew, four times: kept tokens cost no pass and do not change.\n\n" + OWN,
               (20, 230), (330, 230))
    picture_to_start_from(graph, "A picture to start from", seed=2)
    graph.group("What is given", 1230, 0, 360, 960)
    shown(graph, "before", "Picture", (1235, 50), ("given", 0))
    redraw(graph, "Keep the upper half, draw the lower half", kept={"redraw": "lower half"}, batch_size=4)
    graph.group("Four completions", 2430, 0, 450, 700)
    enlarged(graph, "scale", ("decode", 0), (2450, 50))
    graph.add("save", "SaveImage", (2450, 260), (410, 410), wires={"images": ("scale", 0)},
              filename_prefix="SCD/completion")
    graph.group("How it went", 1620, 1010, 770, 400, GREY)
    figures(graph, 1640, 1060)


@workflow("SCD inpaint by tokens")
def inpaint(graph):
    road(graph, "tiger on grass")
    graph.note("A mask says what is drawn anew (white), the second prompt what it shall become. A token goes as soon "
               "as one of its pixels is masked.\n\nThe model looks at what is above and to the left, never at what "
               "comes later: a part that reaches down to the lower edge joins best.\n\n" + OWN +
               " Its MASK comes from the mask editor.", (20, 520), (740, 210))
    graph.add("other", "SCD_TextEncode", (20, 230), (330, 180), "Prompt of the masked part", ("#232", "#353"),
              {"ar_text": ("load", 1)}, text="sunflower on grass")
    picture_to_start_from(graph, "A picture to start from")
    graph.group("What is given", 1230, 0, 360, 1010)
    shown(graph, "before", "Picture", (1235, 50), ("given", 0))
    graph.add("nothing", "SolidMask", (1250, 690), (150, 110), "Keep", value=0.0, width=64, height=64)
    graph.add("part", "SolidMask", (1420, 690), (150, 110), "Redraw", value=1.0, width=56, height=52)
    graph.add("mask", "MaskComposite", (1250, 840), (320, 150), "Mask", wires={
        "destination": ("nothing", 0), "source": ("part", 0)}, x=4, y=6, operation="add")
    redraw(graph, "Draw the masked part anew", mask=("mask", 0), prompt="other")
    graph.add("cells", "MaskToImage", (1640, 430), (350, 30), "What is drawn anew", wires={"mask": ("encode", 2)})
    graph.add("anew", "PreviewImage", (1640, 510), (350, 400), "In whole tokens", wires={"images": ("cells", 0)})
    graph.group("Picture with a new part", 2430, 0, 450, 700)
    enlarged(graph, "scale", ("decode", 0), (2450, 50))
    graph.add("save", "SaveImage", (2450, 260), (410, 410), wires={"images": ("scale", 0)},
              filename_prefix="SCD/inpaint")
    graph.group("How it went", 1620, 1010, 770, 400, GREY)
    figures(graph, 1640, 1060)


@workflow("SCD continue a clip")
def continue_a_clip(graph):
    road(graph, "balloon moving up on sky")
    graph.note("The first sampler draws eight frames. **VQ Encode** takes the last three of them as the first frames "
               "of a second clip, and the second sampler draws on from there; the file holds both.\n\nFor a clip of "
               "your own, put the frames of **Load Video** in the place of the nodes in the first frame.",
               (20, 230), (330, 230))
    picture_to_start_from(graph, "A clip to start from", frames=8)
    graph.group("What is given", 1230, 0, 360, 960)
    shown(graph, "before", "Frames", (1235, 50), ("given", 0), 128)
    redraw(graph, "Keep three frames, draw five", frames=8,
           kept={"images_are": "clip", "frames": 3, "frames_from": "end"})
    graph.group("Both clips in one", 2430, 0, 770, 960)
    graph.add("new", "ImageFromBatch", (2450, 50), (350, 110), "Frames that are new", wires={"image": ("decode", 0)},
              batch_index=3, length=5)
    graph.add("both", "ImageBatch", (2450, 210), (350, 80), "One after the other", wires={
        "image1": ("given", 0), "image2": ("new", 0)})
    enlarged(graph, "scale", ("both", 0), (2450, 340), 256)
    graph.add("save", "SCD_VideoCombine", (2840, 50), (340, 640), wires={"images": ("scale", 0)}, frame_rate=8.0,
              filename_prefix="SCD/continued")
    graph.group("How it went", 1620, 1010, 770, 400, GREY)
    figures(graph, 1640, 1060)


@workflow("SCD Cosmos continue a clip")
def cosmos(graph):
    road(graph, "", model="Cosmos-1.0-Autoregressive-4B", negative=False)
    graph.note(
        "**Cosmos** goes on from a picture, or from the last 9 frames of a clip: 33 frames of 1024x640, 2560 tokens "
        "for each 8 of them. For a clip put **Load Video** and **Get Video Components** in the place of Load Image.\n\n"
        "1. Put **model.pt** and **config.json** of **nvidia/Cosmos-1.0-Autoregressive-4B** into "
        "`ComfyUI/models/ar_models/Cosmos-1.0-Autoregressive-4B` (8 GB); 12B works the same way. These read no prompt. "
        "**5B and 13B Video2World** do: connect **CLIP Text Encode** to conditioning, with oldt5_xxl and type cosmos "
        "in the CLIP loader.\n"
        "2. Put **encoder.jit** and **decoder.jit** of **nvidia/Cosmos-1.0-Tokenizer-DV8x16x16** into "
        "`ComfyUI/models/ar_models/Cosmos-1.0-Tokenizer-DV8x16x16`.\n\n"
        f"{REFRESH}{NOT_SEEN}", (20, 270), (740, 570))
    graph.group("What it goes on from", 810, 0, 390, 860)
    graph.add("given", "LoadImage", (830, 50), (350, 330), image="example.png")
    graph.add("encode", "SCD_VQEncode", (830, 430), (350, 330), images_are="clip",
              wires={"vq": ("load", 2), "image": ("given", 0)})
    graph.group("Draw", 1230, 0, 390, 860)
    graph.add("draw", "SCD_Sampler", (1250, 50), (350, 780), seed=1, frames=33,
              wires={**sampler_wires(negative=False), "kept": ("encode", 0)})
    graph.group("Clip", 1650, 0, 770, 720)
    graph.add("decode", "SCD_VQDecode", (1670, 50), (350, 60), wires={"tokens": ("draw", 0), "vq": ("load", 2)})
    graph.add("save", "SCD_VideoCombine", (2060, 50), (340, 640), wires={"images": ("decode", 0)}, frame_rate=25.0,
              filename_prefix="SCD/Cosmos")
    graph.group("How it went", 1650, 770, 770, 400, GREY)
    figures(graph, 1670, 820)
