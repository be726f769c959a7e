"""The pack inside a real ComfyUI, driven over HTTP and websocket as an API client would."""

import io
import json
import threading

import numpy as np
import pytest
from host_api import ROOT, HostError, problems
from PIL import Image
from workflow_json import input_specs

pytestmark = pytest.mark.host

PACK = "speculative-coupled-decoding"
NODES = (
    "SCD_LoadARModel", "SCD_TextEncode", "SCD_Sampler", "SCD_VQDecode", "SCD_VQEncode", "SCD_VideoCombine",
    "SCD_ContinuousSampler", "SCD_Compare",
)  # fmt: skip
PICTURE, CLIP = "SCD text to image", "SCD text to video"
WORKFLOWS = sorted(path.stem for path in (ROOT / "workflows").glob("*.json"))


def succeeded(result):
    assert result.status == "success", result.error
    return result


def types_of(prompt, numbers):
    return {prompt[number]["class_type"] for number in numbers}


def saved(result):
    """(node, file) of what a run wrote into the output folder, previews aside."""
    return sorted((number, item["filename"]) for number, item in result.files() if item["type"] == "output")


def output_files(host):
    return sorted(path for path in (host.base / "output").rglob("*") if path.is_file())


def test_pack_loads_without_a_complaint(host):
    log = host.startup_log
    assert "(IMPORT FAILED)" not in log.split("Import times")[1].split("\n\n")[0]
    # the host has troubles of its own at times (its database, say); ours would name our folders
    troubles = log.split("Traceback (most recent call last)")[1:]
    assert [t for t in troubles if PACK in t or "scd_core" in t] == []
    assert [line for line in log.splitlines() if PACK in line and "warn" in line.lower()] == []
    for name in NODES:
        info = host.object_info[name]
        assert info["category"] == "SCD"
        assert info["description"]
        bare = [i for i, (_, options) in input_specs(info).items() if not options.get("tooltip")]
        assert bare == [], f"{name}: inputs without a tooltip"
        assert len([t for t in info.get("output_tooltips") or [] if t]) == len(info["output"]), name


def test_every_node_has_its_help_page(host):
    for name in NODES:
        page = host.fetch(f"/extensions/{PACK}/docs/{name}.md").decode()
        assert host.object_info[name]["display_name"] in page


def test_names_are_there_in_english_and_chinese(host):
    words = host.json("/i18n")
    for language in ("en", "zh"):
        for name in NODES:
            translated = words[language]["nodeDefs"][name]
            assert translated["display_name"]
            assert set(input_specs(host.object_info[name])) == set(translated["inputs"]), (language, name)


def test_the_three_workflows_are_shipped():
    assert {PICTURE, CLIP, "SCD compare methods"} <= set(WORKFLOWS)


@pytest.mark.parametrize("name", WORKFLOWS)
def test_workflow_fits_the_nodes_and_is_offered_with_a_thumbnail(host, name):
    assert problems(host.workflow(name), host.object_info) == []
    assert name in host.json("/workflow_templates")[PACK]
    thumbnail = host.fetch(f"/api/workflow_templates/{PACK}/{name.replace(' ', '%20')}.jpg")
    picture = Image.open(io.BytesIO(thumbnail))
    assert picture.width == picture.height and np.asarray(picture).std() > 5


@pytest.mark.slow
@pytest.mark.parametrize("name", WORKFLOWS)
def test_workflow_runs_and_draws_something(host, name):
    result = succeeded(host.run(host.prompt(name), workflow=host.workflow(name)))
    assert result.files()
    for picture in host.pictures(result):
        assert picture.std() > 5
    for _, item in result.files():
        assert len(host.view(item)) > 100


@pytest.mark.slow
def test_picture_and_clip_carry_their_workflow(host):
    """Dropping the file on the page brings the graph back."""
    import av

    for name in (PICTURE, CLIP):
        workflow = host.workflow(name)
        result = succeeded(host.run(host.prompt(name, seed=21), workflow=workflow))
        item = result.files()[-1][1]
        data = io.BytesIO(host.view(item))
        if item["filename"].endswith(".png"):
            stored = Image.open(data).text["workflow"]
        else:
            with av.open(data) as container:
                stored = container.metadata["workflow"]
                frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
            assert len(frames) > 1 and min(frame.std() for frame in frames) > 5
            assert any((frame != frames[0]).any() for frame in frames[1:])
        assert json.loads(stored) == workflow


@pytest.mark.slow
def test_clip_is_listed_where_clients_look(host):
    result = succeeded(host.run(host.prompt(CLIP, seed=22)))
    outputs = [output for output in result.outputs.values() if "animated" in output]
    assert outputs and all(item["type"] == "output" for output in outputs for item in output["images"])


@pytest.mark.slow
@pytest.mark.parametrize("name", [PICTURE, CLIP])
def test_progress_counts_tokens_and_shows_the_picture(host, name):
    prompt = host.prompt(name, seed=31)
    sampler = host.sampler(prompt)
    host.free()  # a codec's first picture is shown however short the run
    result = succeeded(host.run(prompt))
    steps = result.progress(sampler)
    values = [value for value, _ in steps]
    assert values == sorted(values)
    assert len(set(values)) > 3
    assert {maximum for _, maximum in steps} == {values[-1]}
    previews = [Image.open(io.BytesIO(data)) for data in result.previews(sampler)]
    assert previews and all(min(picture.size) >= 16 for picture in previews)


@pytest.mark.slow
def test_preview_off_sends_no_picture(host):
    prompt = host.prompt(PICTURE, seed=32, preview="off")
    assert succeeded(host.run(prompt)).previews() == []


@pytest.mark.slow
def test_cancel_stops_the_run_and_leaves_nothing_behind(host):
    prompt = host.prompt(PICTURE, seed=41, method="autoregressive", batch_size=4)
    sampler, asked = host.sampler(prompt), threading.Event()
    before = output_files(host)

    def cancel(event):
        if event.kind == "progress" and event.node == sampler and not asked.is_set():
            asked.set()
            host.interrupt()

    stopped = host.run(prompt, on_event=cancel)
    assert stopped.status == "interrupted"
    value, maximum = stopped.progress(sampler)[-1]
    assert value < maximum / 2
    assert output_files(host) == before
    # the next run is whole, and is what a run that nobody disturbed gives
    after = host.pictures(succeeded(host.run(prompt)))
    succeeded(host.run(host.prompt(PICTURE, seed=42)))
    undisturbed = host.pictures(succeeded(host.run(prompt)))
    assert len(after) == 4
    assert all((a == b).all() for a, b in zip(after, undisturbed, strict=True))


@pytest.mark.slow
def test_nothing_runs_twice_and_a_seed_gives_its_picture(host):
    first = succeeded(host.run(host.prompt(PICTURE, seed=51)))
    again = succeeded(host.run(host.prompt(PICTURE, seed=51)))
    assert again.executed() == []
    assert saved(again) == saved(first)
    other_prompt = host.prompt(PICTURE, seed=52)
    other = succeeded(host.run(other_prompt))
    assert not {"SCD_LoadARModel", "SCD_TextEncode"} & types_of(other_prompt, other.executed())
    back = succeeded(host.run(host.prompt(PICTURE, seed=51)))
    assert back.executed()
    same, different = host.pictures(back)[0], host.pictures(other)[0]
    assert (same == host.pictures(first)[0]).all()
    assert (same != different).any()


@pytest.mark.slow
def test_a_seed_over_a_wire_draws_anew_and_loads_nothing(host):
    def linked(seed):
        prompt = host.prompt(PICTURE, seed=["number", 0])
        return {**prompt, "number": {"class_type": "PrimitiveInt", "inputs": {"value": seed}}}

    first, other = succeeded(host.run(linked(53))), succeeded(host.run(linked(54)))
    assert succeeded(host.run(linked(54))).executed() == []
    ran = types_of(linked(54), other.executed())
    assert "SCD_Sampler" in ran and not {"SCD_LoadARModel", "SCD_TextEncode"} & ran
    again, sampler = succeeded(host.run(linked(53))), host.sampler(linked(53))
    assert (host.pictures(again)[0] == host.pictures(first)[0]).all()
    passes = [run.outputs[sampler]["text"][0].split(" passes")[0] for run in (first, again)]
    assert passes[0] == passes[1], "nothing of a run is left for the next one"


@pytest.mark.slow
def test_seeds_up_to_64_bits_are_taken_whole(host):
    pictures = [host.pictures(succeeded(host.run(host.prompt(PICTURE, seed=seed))))[0]
                for seed in (2**64 - 1, 2**64 - 2, 2**32 - 1)]
    assert (pictures[0] != pictures[1]).any() and (pictures[0] != pictures[2]).any()
    with pytest.raises(HostError, match="bigger than max"):
        host.run(host.prompt(PICTURE, seed=2**64))


@pytest.mark.slow
def test_freed_models_come_back(host):
    first = host.pictures(succeeded(host.run(host.prompt(PICTURE, seed=61))))
    host.free()
    succeeded(host.run(host.prompt(PICTURE, seed=62)))
    host.free()
    again = host.pictures(succeeded(host.run(host.prompt(PICTURE, seed=61))))
    assert (first[0] == again[0]).all()


@pytest.mark.slow
def test_pictures_go_into_stock_nodes(host):
    prompt = host.prompt(PICTURE, seed=71)
    decode = next(number for number, node in prompt.items() if node["class_type"] == "SCD_VQDecode")
    prompt |= {
        "scale": {"class_type": "ImageScale", "inputs": {
            "image": [decode, 0], "upscale_method": "nearest-exact", "width": 96, "height": 80,
            "crop": "disabled"}},
        "show": {"class_type": "PreviewImage", "inputs": {"images": ["scale", 0]}},
        "video": {"class_type": "CreateVideo", "inputs": {"images": ["scale", 0], "fps": 8}},
        "save": {"class_type": "SaveVideo", "inputs": {
            "video": ["video", 0], "filename_prefix": "stock", "format": "auto", "codec": "auto"}},
    }
    result = succeeded(host.run(prompt))
    shown = next(item for number, item in result.files() if number == "show")
    assert Image.open(io.BytesIO(host.view(shown))).size == (96, 80)
    assert any(number == "save" for number, _ in result.files())


@pytest.mark.parametrize("node, name, wrong, made", [
    ("SCD_VQDecode", "tokens", "EmptyLatentImage", {"width": 64, "height": 64, "batch_size": 1}),
    ("SCD_Sampler", "positive", "EmptyImage", {"width": 64, "height": 64, "batch_size": 1, "color": 0}),
])
def test_foreign_wires_are_refused(host, node, name, wrong, made):
    prompt = host.prompt(PICTURE)
    target = next(number for number, entry in prompt.items() if entry["class_type"] == node)
    prompt[target]["inputs"][name] = ["wrong", 0]
    prompt["wrong"] = {"class_type": wrong, "inputs": made}
    # with another output left whole the host would run that one and only warn
    prompt = {n: entry for n, entry in prompt.items() if not entry["class_type"].startswith("Preview")}
    with pytest.raises(HostError, match="Return type mismatch"):
        host.run(prompt)


def test_widgets_out_of_range_are_refused_before_anything_runs(host):
    for name, value in (("temperature", -2), ("top_p", 1.5), ("batch_size", 0)):
        with pytest.raises(HostError, match=name):
            host.run(host.prompt(PICTURE, **{name: value}))


@pytest.mark.parametrize("name", ["method", "preview"])
def test_unknown_choices_are_refused_by_name(host, name):
    """ComfyUI 0.3.75 does not look at the choices of V3 nodes itself, so a typing error in a prompt reaches us."""
    try:
        result = host.run(host.prompt(PICTURE, **{name: "warp"}))
    except HostError as refused:
        message = str(refused)
    else:
        assert result.status == "error"
        message = result.error["exception_message"]
    assert "warp" in message
