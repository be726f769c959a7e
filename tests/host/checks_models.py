"""Checks inside the host: image models in the models folder, their files elsewhere, and prompts as CONDITIONING."""

import os
import shutil

import miniatures
import numpy as np
import torch
from checks_common import drawn, encoded, graph, loaded, refused
from PIL import Image
from safetensors.torch import save_file

T2I, JANUS = "LlamaGen-t2i-XL-512", "Janus-Pro-1B"
SIZE = {"width": 0, "height": 0, "frames": 1}


def root(inside):
    folder = inside.base / "models" / "ar_models"
    if not (folder / T2I).exists():
        miniatures.place(folder, [T2I, JANUS])
    return folder


def tensors(inside, name):
    """All tensors of a golden file."""
    source = inside.module("scd_core.checkpoint").Source.open(miniatures.GOLDEN / name)
    return {key: source.read(key).clone() for key in source.keys()}


def check_files_outside_of_the_models_folder_count(inside):
    place = root(inside) / "elsewhere"
    for name, source in (("lm/c2i_B_64.pt", "llamagen-c2i/model/c2i_B_64.pt"),
                         ("vae/vq_ds16_c2i.pt", "llamagen-vq-ds16/model/vq_ds16_c2i.pt")):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(miniatures.GOLDEN / source, place / name)
    node = inside.nodes["SCD_LoadARModel"]

    def mark():
        return node.fingerprint_inputs("elsewhere/lm", "fp32")

    before, first = mark(), loaded(inside, "elsewhere/lm")
    assert mark() == before and loaded(inside, "elsewhere/lm")[0] is first[0]
    os.utime(place / "vae" / "vq_ds16_c2i.pt", (1, 1))
    assert mark() != before
    second = loaded(inside, "elsewhere/lm")
    assert second[0] is not first[0] and second[2] is not first[2]
    changed = mark()
    (place / "vae" / "vq_ds16_c2i.pt").rename(place / "vae" / "vq_ds16_c2i.pth")  # found again under its other name
    assert mark() not in (before, changed)
    # the text encoder of another folder is one of its files, too
    before = node.fingerprint_inputs(T2I, "fp32")
    os.utime(root(inside) / "flan-t5-xl" / "tokenizer.json", (1, 1))
    assert node.fingerprint_inputs(T2I, "fp32") != before


def check_a_model_that_was_incomplete_is_looked_at_again(inside):
    place = root(inside) / "half" / "lm"
    place.mkdir(parents=True)
    codec = tensors(inside, "llamagen-vq-ds16/model/vq_ds16_c2i.pt")
    weights = tensors(inside, "llamagen-c2i/model/c2i_B_64.pt")
    for name in ("tok_embeddings.weight", "output.weight"):  # its codebook fits no other image tokenizer here
        weights[name] = weights[name][:90].clone()
    torch.save({"model": weights}, place / "c2i_B_64.pt")
    node = inside.nodes["SCD_LoadARModel"]
    before = node.fingerprint_inputs("half/lm", "fp32")
    with refused("image tokenizer: MISSING"):
        loaded(inside, "half/lm")
    codec["quantize.embedding.weight"] = codec["quantize.embedding.weight"][:90].clone()
    beside = place.parent / "vae"
    beside.mkdir()
    torch.save({"model": codec}, beside / "vq_ds16_c2i.pt")
    assert node.fingerprint_inputs("half/lm", "fp32") != before
    assert loaded(inside, "half/lm")[2].net.cfg.codes == 90


def check_tokens_of_one_llamagen_are_refused_by_the_codec_of_another(inside):
    """Class-to-image and text-to-image have codecs that agree in every size, and in no code."""
    place = root(inside) / "other class model"
    place.mkdir()
    shutil.copy(miniatures.GOLDEN / "llamagen-c2i/model/c2i_B_64.pt", place / "c2i_B_64.pt")
    codec = tensors(inside, "llamagen-vq-ds16/model/vq_ds16_c2i.pt")
    same = {key: tensor.half() for key, tensor in codec.items()}
    codec["quantize.embedding.weight"] = codec["quantize.embedding.weight"].flip(0)
    torch.save({"model": codec}, place / "vq_ds16_c2i.pt")
    vq = loaded(inside, T2I)[2]
    other, words, other_vq = loaded(inside, "other class model")
    tokens = drawn(inside, other, encoded(inside, words, "3"), window=64, **SIZE)[0]
    assert inside.call("SCD_VQDecode", tokens=tokens, vq=other_vq).args[0].shape[0] == 1
    with refused("come from other class model, whose image tokenizer has another codebook than this AR_VQ"):
        inside.call("SCD_VQDecode", tokens=tokens, vq=vq)
    picture = torch.zeros(1, tokens.height, tokens.width, 3)
    kept = inside.call("SCD_VQEncode", vq=vq, image=picture, redraw="lower half").args[0]
    with refused(f"come from the image tokenizer of {T2I}, other class model has another one"):
        drawn(inside, other, encoded(inside, words, "3"), kept=kept, **SIZE)
    half = place.parent / "half precision"  # the same codes with other rounding
    half.mkdir()
    shutil.copy(place / "c2i_B_64.pt", half / "c2i_B_64.pt")
    torch.save({"model": same}, half / "vq_ds16_c2i.pt")
    assert inside.call("SCD_VQDecode", tokens=kept.__class__(**{**vars(kept), "kept": None}),
                       vq=loaded(inside, "half precision")[2]).args[0].shape[0] == 1


def conditioning(features, **extra):
    """As CLIP Text Encode hands it on."""
    return [[features, {"pooled_output": None, **extra}]]


def check_text_features_take_the_place_of_words(inside):
    root(inside)
    model, text, _ = loaded(inside, T2I)
    words = encoded(inside, text, "a bowl of ripe oranges")
    want = drawn(inside, model, words, seed=4, **SIZE)[0].codes
    features = words.prompt.features
    padded = torch.cat([features, torch.ones(4, features.shape[1])])[None]
    mask = torch.tensor([[1] * len(features) + [0] * 4])
    made = inside.call("SCD_TextEncode", ar_text=text, text="a fox", conditioning=conditioning(
        padded.half().float(), attention_mask=mask))
    assert "not read" in made.ui.as_dict()["text"][0]
    close = made.args[0].prompt.features
    assert close.shape == features.shape and (close - features).abs().max() < 0.01
    exact = inside.call("SCD_TextEncode", ar_text=text, text="", conditioning=conditioning(
        padded, attention_mask=mask)).args[0]
    assert (drawn(inside, model, exact, seed=4, **SIZE)[0].codes == want).all()
    nothing = inside.call("SCD_TextEncode", ar_text=text, conditioning=conditioning(torch.zeros_like(padded))).args[0]
    with_zeros = drawn(inside, model, exact, seed=4, negative=nothing, **SIZE)[0].codes
    assert (with_zeros == want).all(), "a blanked CONDITIONING is the model's own unconditional"


def check_text_features_that_do_not_fit_are_refused(inside):
    root(inside)
    for name, given, told in (
        (T2I, conditioning(torch.ones(1, 77, 768)), "features 768 wide, LlamaGen text-to-image reads 24.*flan-t5-xl"),
        (T2I, conditioning(torch.ones(2, 9, 24)), r"shape \[2, 9, 24\]"),
        (T2I, conditioning(torch.ones(1, 9, 24)) * 2, "holds 2 texts"),
        (T2I, [], "holds 0 texts"),
        (JANUS, conditioning(torch.ones(1, 9, 24)), "Janus-Pro reads words and no CONDITIONING"),
    ):
        with refused(told):
            inside.call("SCD_TextEncode", ar_text=loaded(inside, name)[1], text="a fox", conditioning=given)


def t5_base(folder):
    """A text encoder that the host's CLIP loader knows (T5 base, 12 layers), blank but for its words and one layer."""
    g = torch.Generator().manual_seed(6)
    state = {"shared.weight": torch.randn(32128, 768, generator=g), "encoder.final_layer_norm.weight": torch.ones(768)}
    for i in range(12):
        block = f"encoder.block.{i}.layer"
        shapes = {f"{block}.0.SelfAttention.{p}.weight": (768, 768) for p in "qkvo"}
        dense = f"{block}.1.DenseReluDense"
        shapes |= {f"{dense}.wi.weight": (3072, 768), f"{dense}.wo.weight": (768, 3072)}
        for key, shape in shapes.items():
            state[key] = torch.randn(shape, generator=g) * 0.05 if i == 0 else torch.zeros(shape)
        state |= {f"{block}.{n}.layer_norm.weight": torch.ones(768) for n in (0, 1)}
    state["encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"] = torch.randn(32, 12, generator=g)
    folder.mkdir(parents=True, exist_ok=True)
    save_file({key: tensor.half() for key, tensor in state.items()}, folder / "t5_base.safetensors")


def check_the_hosts_own_clip_loader_feeds_a_model_of_its_width(inside):
    """CLIP Loader and CLIP Text Encode -> conditioning, and no text encoder of the model's own anywhere."""
    t5_base(inside.base / "models" / "text_encoders")
    folder = root(inside) / "wide" / "deeper" / "alone"
    folder.mkdir(parents=True)
    weights = tensors(inside, "llamagen-t2i/model/t2i_XL_stage1_64.pt")
    g = torch.Generator().manual_seed(7)
    dim, slots = weights["cls_embedding.cap_proj.fc1.weight"].shape[0], 40
    weights["cls_embedding.cap_proj.fc1.weight"] = torch.randn(dim, 768, generator=g) * 768**-0.5
    weights["cls_embedding.uncond_embedding"] = torch.randn(slots, 768, generator=g)
    torch.save({"model": weights}, folder / "t2i_XL_64.pt")
    shutil.copy(miniatures.GOLDEN / "llamagen-vq-ds16" / "model" / "vq_ds16_c2i.pt", folder / "vq_ds16_t2i.pt")
    pictures = []
    for words in ("a red fox in the snow", "a bowl of oranges"):
        prompt = graph(seed=3, window=4, **SIZE)
        prompt["load"]["inputs"]["model"] = "wide/deeper/alone"
        prompt["text"]["inputs"] |= {"text": "", "conditioning": ["encode", 0]}
        prompt["clip"] = {"class_type": "CLIPLoader", "inputs": {
            "clip_name": "t5_base.safetensors", "type": "stable_audio"}}
        prompt["encode"] = {"class_type": "CLIPTextEncode", "inputs": {"clip": ["clip", 0], "text": words}}
        prompt["save"] = {"class_type": "SaveImage", "inputs": {"images": ["decode", 0], "filename_prefix": "wide"}}
        inside.run(prompt)
        assert inside.outcome()[0] == "execution_success", inside.outcome()
        files = sorted((inside.base / "output").glob("wide_*.png"))
        pictures.append(np.asarray(Image.open(files[-1])))
    assert len(files) == 2 and (pictures[0] != pictures[1]).any(), "the words reach the picture"
    text = loaded(inside, "wide/deeper/alone")[1]
    with refused("text encoder: MISSING"):
        encoded(inside, text, "a red fox")
