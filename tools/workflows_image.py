"""Workflows of the image models that users download: one road, and a note on what to put where."""

from workflow_graph import GREY, figures, road, sampler_wires, workflow

NOT_SEEN = (
    "The real weights were not at hand where this workflow was built: it was run on miniature checkpoints with the "
    "same files and names, checked against the numbers of the original code."
)
REFRESH = "Then press **R**, choose the model in **Load AR Model** and press **Run**. "


def draw_picture(graph, model, prompt, note, prefix, negative=True):
    """Loader, prompts, sampler, picture and report of one model. model: folder below models/ar_models."""
    road(graph, prompt, model=model, negative=negative)
    graph.note(f"{note}\n\n{REFRESH}What is missing is named part by part.\n\n{NOT_SEEN}", (20, 520), (740, 320))
    graph.group("Draw", 810, 0, 390, 860)
    graph.add("draw", "SCD_Sampler", (830, 50), (350, 780), wires=sampler_wires(negative), seed=1)
    graph.group("Picture", 1230, 0, 770, 480)
    graph.add("decode", "SCD_VQDecode", (1250, 50), (300, 60), wires={"tokens": ("draw", 0), "vq": ("load", 2)})
    graph.add("save", "SaveImage", (1580, 50), (400, 410), wires={"images": ("decode", 0)},
              filename_prefix=f"SCD/{prefix}")
    graph.group("How it went", 1230, 530, 770, 400, GREY)
    figures(graph, 1250, 580)


@workflow("SCD Janus-Pro text to image")
def janus_pro(graph):
    draw_picture(
        graph, "Janus-Pro-1B", "A red fox sitting in fresh snow at sunrise, close-up, sharp fur", (
            "**Janus-Pro** draws 384x384 pixels in 576 tokens.\n\n"
            "Put the folder **deepseek-ai/Janus-Pro-1B** from the model hub as it is into "
            "`ComfyUI/models/ar_models/Janus-Pro-1B` (config.json, pytorch_model.bin, tokenizer.json and the other "
            "small .json files; about 4 GB). Janus-Pro-7B, fine-tunes and the transformers form "
            "(deepseek-community/Janus-Pro-1B, safetensors) work the same way."
        ), "Janus-Pro",
    )  # fmt: skip


@workflow("SCD Lumina-mGPT text to image")
def lumina_mgpt(graph):
    draw_picture(
        graph, "Lumina-mGPT-7B-768", "A lighthouse on a cliff above a stormy sea, oil painting, warm evening light", (
            "**Lumina-mGPT** draws 768x768 in 2304 tokens, and any other shape of that area in steps of 32 pixels: set "
            "width and height in the sampler.\n\n"
            "1. Put the folder **Alpha-VLLM/Lumina-mGPT-7B-768** into `ComfyUI/models/ar_models/Lumina-mGPT-7B-768` "
            "(about 14 GB). The 512 and 1024 models need its tokenizer.json, too.\n"
            "2. Put **vqgan.ckpt** and **vqgan.yaml** into the same folder, or a folder beside it. They lie in the "
            "folder tokenizer of GAIR/Anole-7b-v0.1; its licence allows research only."
        ), "Lumina-mGPT",
    )  # fmt: skip


@workflow("SCD Anole text to image")
def anole(graph):
    draw_picture(
        graph, "Anole-7b-v0.1-hf", "Draw an image of a lake with mountains behind it on a clear morning", (
            "**Anole** draws 512x512 pixels in 1024 tokens.\n\n"
            "Put the folder **leloy/Anole-7b-v0.1-hf** from the model hub as it is into "
            "`ComfyUI/models/ar_models/Anole-7b-v0.1-hf` (three safetensors shards, tokenizer.json and the other small "
            ".json files; about 14 GB). It holds everything. The release GAIR/Anole-7b-v0.1 works as well: keep its "
            "folders models and tokenizer as they are. Chameleon-7B looks alike and cannot draw."
        ), "Anole",
    )  # fmt: skip


@workflow("SCD LlamaGen class to image")
def llamagen_class(graph):
    draw_picture(
        graph, "LlamaGen-c2i-XL-384", "golden retriever", (
            "**LlamaGen class to image** draws one of the 1000 ImageNet classes, given by name or number, as 384x384 "
            "pixels in 576 tokens.\n\n"
            "Make a folder `ComfyUI/models/ar_models/LlamaGen-c2i-XL-384` and put two files of "
            "**FoundationVision/LlamaGen** into it: **c2i_XL_384.pt** (3.1 GB) and **vq_ds16_c2i.pt** (0.3 GB). The B, "
            "L, XXL and 3B models and those for 256 pixels work the same way."
        ), "LlamaGen class", negative=False,
    )  # fmt: skip


@workflow("SCD LlamaGen text to image")
def llamagen_text(graph):
    draw_picture(
        graph, "LlamaGen-t2i-XL-512", "A bowl of ripe oranges on a blue wooden table, studio photograph", (
            "**LlamaGen text to image** draws 512x512 pixels in 1024 tokens.\n\n"
            "1. Make a folder `ComfyUI/models/ar_models/LlamaGen-t2i-XL-512` and put two files of "
            "**peizesun/llamagen_t2i** into it: **t2i_XL_stage2_512.pt** (3.1 GB) and **vq_ds16_t2i.pt** (0.3 GB).\n"
            "2. Put the folder **google/flan-t5-xl** into `ComfyUI/models/ar_models/flan-t5-xl`: config.json, "
            "tokenizer.json and the safetensors files with their index. If another node of yours encodes with "
            "flan-t5-xl, connect its CONDITIONING to both Text Encode nodes instead."
        ), "LlamaGen text",
    )  # fmt: skip


@workflow("SCD SimpleAR text to image")
def simplear(graph):
    draw_picture(
        graph, "SimpleAR-1.5B-RL", "A wooden sailing boat on a calm lake in the morning mist, mountains behind it", (
            "**SimpleAR** draws 1024x1024 pixels in 4096 tokens; set width and height to 512 for a quarter of them.\n\n"
            "1. Put the folder **Daniel0724/SimpleAR-1.5B-RL** from the model hub as it is into "
            "`ComfyUI/models/ar_models/SimpleAR-1.5B-RL` (about 3.3 GB). The 0.5B and the other 1.5B models work the "
            "same way.\n"
            "2. Put **decoder.jit** (and **encoder.jit**, for VQ Encode) of **nvidia/Cosmos-1.0-Tokenizer-DV8x16x16** "
            "into `ComfyUI/models/ar_models/Cosmos-1.0-Tokenizer-DV8x16x16`."
        ), "SimpleAR",
    )  # fmt: skip


@workflow("SCD Lumina-mGPT 2.0 text to image")
def lumina_mgpt_2(graph):
    draw_picture(
        graph, "Lumina-mGPT-2.0", "A glass teapot on a windowsill, blooming tea inside, soft light from the left", (
            "**Lumina-mGPT 2.0** draws 768x768 in 9312 tokens, and other shapes in steps of 32 pixels: set width and "
            "height in the sampler.\n\n"
            "1. Put the folder **Alpha-VLLM/Lumina-mGPT-2.0** into `ComfyUI/models/ar_models/Lumina-mGPT-2.0` (about "
            "16 GB; a picture needs another 10 GB).\n"
            "2. Put **movqgan_270M.ckpt** of **ai-forever/MoVQGAN** into the same folder, or a folder beside it."
        ), "Lumina-mGPT 2",
    )  # fmt: skip


@workflow("SCD Emu3 text to image")
def emu3(graph):
    draw_picture(
        graph, "Emu3-Gen-hf", "A portrait of a young girl with freckles and a straw hat, film photograph", (
            "**Emu3-Gen** draws 720x720 pixels in 8193 tokens, and other shapes of that area in steps of 8 pixels: set "
            "width and height in the sampler. The authors' words for quality are added to the prompt.\n\n"
            "Put the folder **BAAI/Emu3-Gen-hf** from the model hub as it is into "
            "`ComfyUI/models/ar_models/Emu3-Gen-hf` (about 17 GB). It holds everything. The original release "
            "BAAI/Emu3-Gen works as well, with the folder **Emu3-VisionTokenizer** beside it."
        ), "Emu3",
    )  # fmt: skip
