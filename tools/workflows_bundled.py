"""Workflows that the bundled model runs at once."""

from workflow_graph import GREY, enlarged, figures, road, sampler_wires, workflow


@workflow("SCD text to image")
def text_to_image(graph):
    road(graph, "fox on snow")
    graph.note("Press **Run**: the bundled model draws a small picture from its own word list, nothing needs to be "
               "downloaded.\n\nThe tokens are those of one-at-a-time sampling with this seed; the report says in how "
               "many fewer passes they were drawn, the map where the model had to look more often.",
               (20, 230), (330, 230))
    graph.group("Draw", 810, 0, 390, 860)
    graph.add("draw", "SCD_Sampler", (830, 50), (350, 780), wires=sampler_wires(), seed=7)
    graph.group("Picture", 1230, 0, 770, 480)
    graph.add("decode", "SCD_VQDecode", (1250, 50), (300, 60), wires={"tokens": ("draw", 0), "vq": ("load", 2)})
    enlarged(graph, "scale", ("decode", 0), (1250, 170))
    graph.add("save", "SaveImage", (1580, 50), (400, 410), wires={"images": ("scale", 0)},
              filename_prefix="SCD/picture")
    graph.group("How it went", 1230, 530, 770, 400, GREY)
    figures(graph, 1250, 580)


@workflow("SCD text to video")
def text_to_video(graph):
    road(graph, "rocket moving up on night")
    graph.note("Eight frames, drawn as one sequence of tokens and enlarged; each frame is first guessed from the one "
               "before it, so a clip needs even fewer passes than a picture.\n\nVideo Combine writes the file and "
               "plays it; drop the file on the canvas to get this graph back.",
               (20, 230), (330, 230))
    graph.group("Draw", 810, 0, 390, 860)
    graph.add("draw", "SCD_Sampler", (830, 50), (350, 780), wires=sampler_wires(), seed=7, frames=8)
    graph.group("Clip", 1230, 0, 770, 720)
    graph.add("decode", "SCD_VQDecode", (1250, 50), (300, 60), wires={"tokens": ("draw", 0), "vq": ("load", 2)})
    enlarged(graph, "scale", ("decode", 0), (1250, 170), 256)
    graph.add("save", "SCD_VideoCombine", (1580, 50), (340, 640), wires={"images": ("scale", 0)}, frame_rate=8.0)
    graph.group("How it went", 1230, 760, 770, 400, GREY)
    figures(graph, 1250, 810)


@workflow("SCD compare methods")
def compare_methods(graph):
    road(graph, "lion on sand", weight_dtype="fp32")
    graph.note("Both samplers get the same prompt and seed, in fp32: **autoregressive** takes a pass for every token, "
               "**seed-exact** far fewer, and both draw the same tokens (compare the sha256 in the reports).\n\n"
               "Change the method of the second one to see the others: equally lawful, but other pictures.",
               (20, 230), (330, 230))
    graph.group("One seed for both", 0, 530, 780, 170)
    graph.add("seed", "PrimitiveInt", (20, 580), (330, 90), "Seed", value=1)
    for column, method in enumerate(("autoregressive", "seed-exact")):
        left = 830 + column * 1240
        graph.group(method, left - 20, 0, 1200, 900)
        graph.add(method, "SCD_Sampler", (left, 50), (350, 780), method, method=method, window=32,
                  wires={**sampler_wires(), "seed": ("seed", 0)})
        decoded, large = f"decode {method}", f"scale {method}"
        graph.add(decoded, "SCD_VQDecode", (left + 380, 50), (300, 60),
                  wires={"tokens": (method, 0), "vq": ("load", 2)})
        enlarged(graph, large, (decoded, 0), (left + 380, 170))
        graph.add(f"show {method}", "PreviewImage", (left + 710, 50), (430, 460), f"Picture, {method}",
                  wires={"images": (large, 0)})
        figures(graph, left + 380, 550, method, f", {method}")


@workflow("SCD compare all methods")
def compare_all(graph):
    road(graph, "fox on snow", weight_dtype="fp32")
    graph.note("One node runs every method that is named in it on the same prompt and seed, and shows pictures, passes "
               "and seconds side by side.\n\ncsd, gsd and cool-sd are lossy: they take tokens that the model's law "
               "rejects. All others are exact.",
               (20, 230), (330, 230))
    graph.group("Compare", 810, 0, 390, 620)
    graph.add("compare", "SCD_Compare", (830, 50), (350, 540), seed=7, window=64,
              methods="autoregressive, sjd, scd-maximal, scd-gumbel, seed-exact, csd",
              wires=sampler_wires())
    graph.group("Result", 1230, 0, 1300, 860)
    graph.add("pictures", "PreviewImage", (1250, 50), (620, 780), "Pictures", wires={"images": ("compare", 0)})
    graph.add("plot", "PreviewImage", (1890, 50), (620, 400), "Plot", wires={"images": ("compare", 1)})
    graph.add("table", "PreviewAny", (1890, 480), (620, 350), "Figures", wires={"source": ("compare", 2)})
