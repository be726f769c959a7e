"""Workflow of the continuous models: the bundled MAR pair, whose files are as a user's MAR folders are."""

from workflow_graph import enlarged, road, workflow

TARGET, DRAFT = "bundled MAR (one subject)", "bundled MAR draft (one subject)"


@workflow("SCD continuous speculative")
def continuous_speculative(graph):
    road(graph, "penguin", model=TARGET, negative=False)
    graph.add("draft", "SCD_LoadARModel", (20, 230), (330, 130), "Load AR Model (draft)", model=DRAFT)
    graph.note("A **MAR** draws vectors instead of entries of a codebook, each by a short diffusion, in random order. "
               "A smaller MAR runs ahead, and the model judges what it drew.\n\nThe same seed is drawn twice: by the "
               "model alone, and with the draft. The reports say how many drafts were taken, and at what price: "
               "**block** and **prefix** are lossy, **exact** keeps the model's law and is slower than the model "
               "alone. **tau** is 42 here, as in the published code; with the 1 of the paper hardly a draft is taken."
               "\n\nThe bundled pair knows a dozen subjects: fox, panda, penguin, frog, lion, apple, burger, "
               "donut, sunflower, sailboat, rocket, earth. For ImageNet put the folders **mar-large** and **mar-base** "
               "with `kl16.ckpt` into `ComfyUI/models/ar_models`, choose them in the two loaders and type a class by "
               "name or number.", (20, 410), (740, 420))
    graph.group("One seed for both", 0, 890, 780, 170)
    graph.add("seed", "PrimitiveInt", (20, 940), (330, 90), "Seed", value=1)
    # tau as in the published code: with the formula's 1 no draft is taken
    both = (("with a draft", {"draft_model": ("draft", 0)}, {"tau": 42.0}), ("alone", {}, {}))
    for row, (name, wires, widgets) in enumerate(both):
        top = row * 640
        graph.group(name, 810, top, 1560, 600)
        graph.add(name, "SCD_ContinuousSampler", (830, top + 50), (350, 520), f"Sampler, {name}", batch_size=4,
                  diffusion_steps=25, **widgets,
                  wires={"model": ("load", 0), "positive": ("positive", 0), "seed": ("seed", 0), **wires})
        decoded, large = f"decode {name}", f"scale {name}"
        graph.add(decoded, "SCD_VQDecode", (1210, top + 50), (300, 60),
                  wires={"tokens": (name, 0), "vq": ("load", 2)})
        enlarged(graph, large, (decoded, 0), (1210, top + 170), 256)
        graph.add(f"save {name}", "SaveImage", (1540, top + 50), (400, 520), f"Pictures, {name}",
                  wires={"images": (large, 0)}, filename_prefix=f"SCD/continuous {name}")
        graph.add(f"report {name}", "PreviewAny", (1960, top + 50), (390, 520), f"Report, {name}",
                  wires={"source": (name, 1)})
