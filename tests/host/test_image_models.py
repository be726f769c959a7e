"""The workflows of the image models that users download, run over HTTP on miniatures of them."""

import io
import json
import re

import numpy as np
import pytest
from host_api import HostError
from PIL import Image
from scd_tests.host.miniatures import MODELS, fitted

pytestmark = [pytest.mark.host, pytest.mark.slow]

# workflow: (model, pixels of a picture, tokens of one)
WORKFLOWS = {
    "SCD Janus-Pro text to image": ("Janus-Pro-1B", (8, 8), 16),
    "SCD Lumina-mGPT text to image": ("Lumina-mGPT-7B-768", (320, 320), 400),
    "SCD Anole text to image": ("Anole-7b-v0.1-hf", (8, 8), 16),
    "SCD LlamaGen class to image": ("LlamaGen-c2i-XL-384", (8, 8), 16),
    "SCD LlamaGen text to image": ("LlamaGen-t2i-XL-512", (8, 8), 16),
    "SCD SimpleAR text to image": ("SimpleAR-1.5B-RL", (64, 48), 12),
    "SCD Lumina-mGPT 2.0 text to image": ("Lumina-mGPT-2.0", (64, 32), 32),
    "SCD Emu3 text to image": ("Emu3-Gen-hf", (8, 6), 12),
}


def of_type(prompt, kind):
    """Ids of the nodes of a type."""
    return [number for number, node in prompt.items() if node["class_type"] == kind]


def finished(result):
    assert result.status == "success", result.error
    return result


def report(result, prompt):
    """The sampler's report, as the node shows it."""
    return result.outputs[of_type(prompt, "SCD_Sampler")[0]]["text"][0]


def test_every_miniature_has_its_workflow(host):
    assert {model for model, *_ in WORKFLOWS.values()} <= set(MODELS)
    offered = host.object_info["SCD_LoadARModel"]["input"]["required"]["model"][1]["options"]
    assert set(MODELS) <= set(offered), "a folder of language model and image tokenizer is one model"


@pytest.mark.parametrize("name", WORKFLOWS)
def test_workflow_names_its_model_and_says_what_to_download(host, name):
    workflow = host.workflow(name)
    loader = next(node for node in workflow["nodes"] if node["type"] == "SCD_LoadARModel")
    assert loader["widgets_values"][0] == WORKFLOWS[name][0]
    note = next(node["widgets_values"][0] for node in workflow["nodes"] if node["type"] == "MarkdownNote")
    assert f"models/ar_models/{WORKFLOWS[name][0]}" in note and "were not at hand" in note


@pytest.mark.parametrize("name", WORKFLOWS)
def test_workflow_draws_a_picture_of_the_right_size_and_counts_tokens(host, name):
    _, pixels, tokens = WORKFLOWS[name]
    prompt = host.prompt(name, seed=7)
    host.free()  # a codec's first picture is shown however short the run
    result = finished(host.run(prompt, workflow=host.workflow(name)))
    assert [picture.shape for picture in host.pictures(result)] == [(*pixels[::-1], 3)]
    assert host.pictures(result)[0].std() > 5
    steps = result.progress(of_type(prompt, "SCD_Sampler")[0])
    values = [value for value, _ in steps]
    assert values == sorted(values) and values[-1] == tokens
    assert {maximum for _, maximum in steps} == {tokens}
    told = report(result, prompt)
    assert len(steps) == int(told.split(" tokens in ")[1].split()[0]), "one event a pass"
    assert f"{tokens} tokens in" in told and "lossless" in told
    previews = [Image.open(io.BytesIO(data)) for data in result.previews(of_type(prompt, "SCD_Sampler")[0])]
    assert previews and all(np.asarray(picture).size for picture in previews)


@pytest.mark.parametrize("name", WORKFLOWS)
def test_seed_exact_draws_what_one_at_a_time_draws(host, name):
    small = {"width": 96, "height": 64} if name == "SCD Lumina-mGPT text to image" else {}
    pictures = {}
    for method in ("autoregressive", "seed-exact"):
        prompt = host.prompt(name, method=method, seed=3, window=5, preview="off", **small)
        prompt[of_type(prompt, "SCD_LoadARModel")[0]]["inputs"]["weight_dtype"] = "fp32"
        pictures[method] = host.pictures(finished(host.run(prompt)))[0]
    assert (pictures["autoregressive"] == pictures["seed-exact"]).all()


@pytest.mark.parametrize("name", WORKFLOWS)
def test_the_prompt_acts(host, name):
    small = {"width": 96, "height": 64} if name == "SCD Lumina-mGPT text to image" else {}
    prompt = host.prompt(name, seed=3, preview="off", **small)
    encode = next(n for n in of_type(prompt, "SCD_TextEncode") if prompt[n]["inputs"]["text"])
    before = host.pictures(finished(host.run(prompt)))[0]
    prompt[encode]["inputs"]["text"] = "5" if "class" in name else "a table"
    assert (host.pictures(finished(host.run(prompt)))[0] != before).any()


def test_a_class_without_a_name_is_refused_on_the_node(host):
    prompt = host.prompt("SCD LlamaGen class to image")
    prompt[of_type(prompt, "SCD_TextEncode")[0]]["inputs"]["text"] = "golden retriever"
    result = host.run(prompt)
    assert result.status == "error" and result.error["node_type"] == "SCD_TextEncode"
    assert "write a number from 0 to 9" in result.error["exception_message"]


def test_words_of_one_model_are_refused_by_another(host):
    """Two loaders, wires crossed."""
    prompt = host.prompt("SCD Janus-Pro text to image")
    prompt["other"] = {"class_type": "SCD_LoadARModel",
                       "inputs": {"model": "LlamaGen-c2i-XL-384", "weight_dtype": "auto"}}
    prompt[host.sampler(prompt)]["inputs"]["model"] = ["other", 0]
    result = host.run(prompt)
    assert result.status == "error" and "was encoded for Janus-Pro" in result.error["exception_message"]


def test_a_model_that_is_not_there_is_named_before_anything_runs(host):
    prompt = fitted(host.prompt("SCD Janus-Pro text to image"))
    prompt[of_type(prompt, "SCD_LoadARModel")[0]]["inputs"]["model"] = "Janus-Pro-70B"
    with pytest.raises(HostError, match="No model is called 'Janus-Pro-70B'"):
        host.run(prompt)


def test_the_picture_carries_its_graph(host):
    name = "SCD Anole text to image"
    workflow = host.workflow(name)
    result = finished(host.run(host.prompt(name, seed=9), workflow=workflow))
    item = next(item for _, item in result.files() if item["type"] == "output")
    assert re.match(r"Anole_\d+_\.png", item["filename"]) and item["subfolder"] == "SCD"
    assert json.loads(Image.open(io.BytesIO(host.view(item))).text["workflow"]) == workflow
