"""Checks inside the host: a MAR through the nodes, with and without a draft, and who refuses whom."""

import pathlib
import shutil

import torch
from checks_common import loaded, previews_whatever_they_take, ready, refused

MINIATURE = pathlib.Path(__file__).resolve().parents[1] / "data" / "golden" / "mar" / "model"
QUICK = {"steps": 4, "diffusion_steps": 4}


def mar(inside):
    """(model, positive, vq) of the miniature, which is put into the models folder once."""
    folder = inside.base / "models" / "ar_models" / "mar"
    if not folder.exists():
        shutil.copytree(MINIATURE, folder)
        (folder / "config.json").write_text('{"num_attention_heads": 4}', encoding="utf-8")
        shutil.copy(folder / "config.json", folder / "mar_base" / "config.json")
    model, text, vq = loaded(inside, "mar/mar_base", dtype="auto")
    return model, inside.call("SCD_TextEncode", ar_text=text, text="3").args[0], vq


def sampled(inside, model, positive, **widgets):
    return inside.call("SCD_ContinuousSampler", model=model, positive=positive, **{**QUICK, **widgets}).args


def check_mar_draws_pictures(inside):
    model, positive, vq = mar(inside)
    assert next(model.net.parameters()).dtype == torch.float32, "auto is fp32 for a diffusion head"
    latents, report = sampled(inside, model, positive, batch_size=2, seed=5)
    assert latents.codes.shape == (2, 1, 16, 4, 4) and (latents.width, latents.height) == (8, 8)
    pictures = inside.call("SCD_VQDecode", tokens=latents, vq=vq).args[0]
    assert pictures.shape == (2, 8, 8, 3) and pictures.min() >= 0 and pictures.max() <= 1
    assert pictures.std() > 0.05 and "mar (lossless)" in report and "4 passes" in report
    alone, _ = sampled(inside, model, positive, seed=5)
    assert torch.allclose(alone.codes[0], latents.codes[0], atol=1e-2, rtol=1e-3)


def check_every_widget_of_the_continuous_sampler_acts(inside):
    model, positive, _ = mar(inside)
    base, _ = sampled(inside, model, positive, seed=1)
    changes = {"seed": 2, "steps": 5, "diffusion_steps": 5, "temperature": 0.5, "cfg": 1.0}
    for name, value in changes.items():
        other, _ = sampled(inside, model, positive, **{"seed": 1, name: value})
        assert not torch.equal(other.codes, base.codes), name
    _, own = sampled(inside, model, positive, temperature=1.0, cfg=2.9)
    assert own.split("sha256")[1] == sampled(inside, model, positive)[1].split("sha256")[1]


def check_draft_model_runs_ahead(inside):
    model, positive, _ = mar(inside)
    draft = loaded(inside, "mar/mar_base", dtype="bf16")[0]
    assert draft.net is not model.net
    words = {"block": "(lossy)", "prefix": "(lossy)", "exact": "(lossless)"}
    for mode, word in words.items():
        latents, report = sampled(inside, model, positive, draft_model=draft, mode=mode, gamma=2, prefill=0.25)
        assert f"cspd-{mode} {word}" in report and "of the draft" in report, report
        assert latents.codes.isfinite().all()
    far = [sampled(inside, model, positive, draft_model=draft, mode="block", gamma=gamma, prefill=prefill)[1]
           for gamma, prefill in ((1, 0.0), (3, 0.0), (1, 1.0))]
    passes = [report.split(" passes of the target")[0].rsplit("\n", 1)[-1].strip() for report in far]
    assert passes == ["4", "2", "4"] and "of the draft" not in far[2]


def check_continuous_and_discrete_refuse_one_another(inside):
    model, positive, vq = mar(inside)
    other, words, tokens_vq = ready(inside)
    latents, _ = sampled(inside, model, positive)
    with refused("Continuous Speculative Sampler"):
        inside.call("SCD_Sampler", model=model, positive=positive)
    with refused("discrete tokens.*Speculative Coupled Sampler"):
        sampled(inside, other, words)
    with refused("draft model.*discrete tokens"):
        sampled(inside, model, positive, draft_model=other)
    with refused("positive was encoded for the bundled model"):
        sampled(inside, model, words)
    with refused("wire AR_VQ of the Load AR Model that drew them"):
        inside.call("SCD_VQDecode", tokens=latents, vq=tokens_vq)
    tokens = inside.call("SCD_Sampler", model=other, positive=words, window=16, preview="off").args[0]
    with refused("wire AR_VQ of the Load AR Model that drew them"):
        inside.call("SCD_VQDecode", tokens=tokens, vq=vq)
    with refused("steps 99"):
        sampled(inside, model, positive, steps=99)


def check_continuous_progress_and_cancel(inside):
    model, positive, _ = mar(inside)
    inside.progress.clear()
    sampled(inside, model, positive)
    assert [done for done, _, _ in inside.progress][-1] == 16 and inside.progress[-1][1] == 16
    inside.mm.interrupt_current_processing()
    with refused("", inside.mm.InterruptProcessingException):
        sampled(inside, model, positive, steps=16)


def check_continuous_graph_runs(inside):
    mar(inside)
    graph = {
        "load": {"class_type": "SCD_LoadARModel", "inputs": {"model": "mar/mar_base", "weight_dtype": "auto"}},
        "text": {"class_type": "SCD_TextEncode", "inputs": {"ar_text": ["load", 1], "text": "7"}},
        "draw": {"class_type": "SCD_ContinuousSampler", "inputs": {
            "model": ["load", 0], "positive": ["text", 0], "draft_model": ["load", 0], "mode": "block", "seed": 1,
            "gamma": 2, "prefill": 0.05, "tau": 1.0, "temperature": -1.0, "cfg": -1.0, "batch_size": 1, **QUICK}},
        "decode": {"class_type": "SCD_VQDecode", "inputs": {"tokens": ["draw", 0], "vq": ["load", 2]}},
        "save": {"class_type": "PreviewImage", "inputs": {"images": ["decode", 0]}},
    }
    assert set(inside.run(graph)) == set(graph)
    assert inside.outcome()[0] == "execution_success", inside.outcome()


def check_bundled_pair_draws_and_shows_the_picture_growing(inside):
    model, text, vq = loaded(inside, "bundled MAR (one subject)", dtype="auto")
    draft = loaded(inside, "bundled MAR draft (one subject)", dtype="auto")[0]
    assert model.codec is vq and next(model.net.parameters()).dtype == torch.float32
    with refused("it knows one subject at a time"):
        inside.call("SCD_TextEncode", ar_text=text, text="brown fox")
    positive = inside.call("SCD_TextEncode", ar_text=text, text="fox").args[0]
    drawn = {}
    for preview in ("auto", "off"):
        inside.progress.clear()
        with previews_whatever_they_take(inside):
            drawn[preview], report = sampled(inside, model, positive, draft_model=draft, mode="prefix", preview=preview,
                                             batch_size=2, seed=4)
        shown = [picture for *_, picture in inside.progress if picture is not None]
        assert bool(shown) == (preview == "auto") and "of the draft" in report
        if shown:
            width, height = shown[-1][1].size
            assert width > 2 * height >= 128, "two pictures side by side"
    assert torch.equal(drawn["auto"].codes, drawn["off"].codes)
    pictures = inside.call("SCD_VQDecode", tokens=drawn["auto"], vq=vq).args[0]
    assert pictures.shape == (2, 64, 64, 3) and pictures.std() > 0.05


def check_preview_greys_what_is_not_drawn_yet(inside):
    model = loaded(inside, "bundled MAR (one subject)", dtype="auto")[0]
    module = inside.module("nodes.continuous_sampler")
    progress = inside.module("scd_core.continuous.sampler").Progress
    known = torch.zeros(1, 64, dtype=torch.bool)
    known[:, :32] = True
    canvas = 3 * torch.randn(1, 64, 12, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        picture = module.CanvasPreview(model.codec, 8)._picture(progress(1, 32, 64, canvas, known))
    pixels = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8).view(*picture.size, 3).int()
    spread = pixels.amax(-1) - pixels.amin(-1)  # grey has none
    assert (spread[128:] == 0).all() and spread[:128].float().mean() > 10
