"""Clips that Cosmos goes on with, run over HTTP on miniatures of it that know all codes of the video tokenizer."""

import io
import json
from fractions import Fraction

import numpy as np
import pytest
import torch
from PIL import Image
from scd_pack.scd_core.video import read_video, write_frames
from scd_tests.host.miniatures import COSMOS
from scd_tests.host.test_image_models import finished, of_type, report
from scd_tests.host.test_kept_workflows import node_of, probed

pytestmark = [pytest.mark.host, pytest.mark.slow]

NAME = "SCD Cosmos continue a clip"
BASE, WORLD = COSMOS
GRID = 4  # tokens of a token grid
GRIDS, FRAMES, SIDE = 5, 33, 32
QUICK = {"window": 4, "preview": "off", "seed": 3}


def graph(host, model=BASE, text="", **sampler):
    """API prompt of the workflow, in fp32."""
    prompt = host.prompt(NAME, **{**QUICK, **sampler})
    prompt[node_of(prompt, "SCD_LoadARModel")]["inputs"] |= {"model": model, "weight_dtype": "fp32"}
    prompt[node_of(prompt, "SCD_TextEncode")]["inputs"]["text"] = text
    return prompt


def from_clip(host, prompt, file):
    """The workflow with the frames of a clip in the input folder in the place of its picture."""
    prompt["video"] = {"class_type": "LoadVideo", "inputs": {"file": file}}
    prompt["parts"] = {"class_type": "GetVideoComponents", "inputs": {"video": ["video", 0]}}
    prompt[node_of(prompt, "SCD_VQEncode")]["inputs"]["image"] = ["parts", 0]
    del prompt[node_of(prompt, "LoadImage")]
    return prompt


def frames_of(host, prompt):
    """Frames that the workflow's VQ Decode makes: uint8 [N, H, W, 3]."""
    prompt = {number: node for number, node in prompt.items() if node["class_type"] != "SCD_VideoCombine"}
    return probed(host, prompt, [node_of(prompt, "SCD_VQDecode"), 0])


@pytest.fixture(scope="module")
def clip(host):
    """(name in the input folder, frames as they are read) of a clip of 20 frames of 64x48."""
    down, right = (torch.arange(n) / n for n in (48, 64))
    times = torch.arange(20)[:, None, None] / 20
    frames = torch.stack([(down[None, :, None] + times) % 1 + 0 * right, (right - times) % 1 + 0 * down[None, :, None],
                          times.expand(-1, 48, 64)], -1)
    path = write_frames(frames, host.base / "input" / "twenty.mp4", rate=25, fmt="mp4 (h264)", quality=95)
    return path.name, read_video(path)[0]


def test_both_kinds_of_models_are_offered(host):
    offered = host.object_info["SCD_LoadARModel"]["input"]["required"]["model"][1]["options"]
    assert set(COSMOS) <= set(offered)
    loader = host.object_info["CLIPLoader"]["input"]["required"]["type"]
    assert "cosmos" in (loader[0] if isinstance(loader[0], list) else loader[1]["options"]), "as our tooltip says"


def test_workflow_names_its_model_and_says_what_to_download(host):
    nodes = host.workflow(NAME)["nodes"]
    assert next(n for n in nodes if n["type"] == "SCD_LoadARModel")["widgets_values"][0] == BASE
    note = next(n["widgets_values"][0] for n in nodes if n["type"] == "MarkdownNote")
    for said in (f"models/ar_models/{BASE}", "Cosmos-1.0-Tokenizer-DV8x16x16", "type cosmos", "were not at hand"):
        assert said in note


def test_a_picture_becomes_a_clip_with_a_bar_of_tokens_and_a_preview(host):
    prompt, workflow = graph(host, window=1, preview="auto"), host.workflow(NAME)
    host.free()  # a codec's first picture is shown however short the run
    result = finished(host.run(prompt, workflow=workflow))
    draw = of_type(prompt, "SCD_Sampler")[0]
    drawn = (GRIDS - 1) * GRID
    assert f"{drawn} tokens in" in report(result, prompt) and "lossless" in report(result, prompt)
    steps = result.progress(draw)
    assert steps[-1] == (drawn, drawn) and [value for value, _ in steps] == list(range(1, drawn + 1))
    begun = [tiles_begun(Image.open(io.BytesIO(data))) for data in result.previews(draw)]
    # where the run is over before a first preview is due, there is the last one alone
    assert begun and begun == sorted(begun) and begun[-1] == GRIDS, begun
    item = next(item for _, item in result.files() if item["filename"].endswith(".mp4"))
    import av

    with av.open(io.BytesIO(host.view(item))) as container:
        stream = container.streams.video[0]
        assert stream.average_rate == Fraction(25) and (stream.width, stream.height) == (SIDE, SIDE)
        assert len(list(container.decode(stream))) == FRAMES
        assert json.loads(container.metadata["workflow"]) == workflow


def tiles_begun(preview):
    """Token grids of a preview that show something: those that are not begun are flat."""
    picture = np.asarray(preview.convert("RGB")).astype(float)
    tiles = np.array_split(picture, GRIDS, axis=1)  # five tiles lie in one row
    return sum(float(tile[8:-8, 8:-8].std(axis=(0, 1)).max()) > 8 for tile in tiles)


def test_the_picture_itself_is_what_the_clip_begins_with(host):
    prompt = graph(host)
    encode, decode = node_of(prompt, "SCD_VQEncode"), node_of(prompt, "SCD_VQDecode")
    frames = frames_of(host, prompt)
    prompt[decode]["inputs"]["tokens"] = [encode, 0]
    kept = frames_of(host, prompt)
    assert len(frames) == FRAMES and len(kept) == 1
    assert np.abs(frames[0].astype(int) - kept[0]).max() <= 1, "no later token changes it"
    assert np.abs(frames[1:].astype(int) - frames[:1]).mean(axis=(1, 2, 3)).min() > 2


@pytest.mark.parametrize("model, text", [(BASE, ""), (WORLD, "a bowl of ripe oranges")])
def test_the_last_nine_frames_of_a_clip_go_on_exactly(host, clip, model, text):
    name, given = clip
    prompt = from_clip(host, graph(host, model, text), name)
    kept = probed(host, prompt, [node_of(prompt, "SCD_VQEncode"), 1])
    assert kept.shape == (9, SIDE, SIDE, 3)
    want = given[-9:, :, 8:56].permute(0, 3, 1, 2)  # the middle, as square as the model's clips are
    want = torch.nn.functional.interpolate(want, (SIDE, SIDE), mode="bicubic", antialias=True).permute(0, 2, 3, 1)
    assert np.abs(kept - 255 * want.clamp(0, 1).numpy()).mean() < 5, "a frame away all is 12 brighter or darker"
    clips = []
    for method in ("autoregressive", "seed-exact"):
        prompt[host.sampler(prompt)]["inputs"]["method"] = method
        clips.append(frames_of(host, prompt))
    assert clips[0].shape == (FRAMES, SIDE, SIDE, 3) and (clips[0] == clips[1]).all()


def test_a_text_acts_on_video2world_and_is_left_out_by_base(host):
    first, other = (frames_of(host, graph(host, WORLD, text)) for text in ("a bowl", "ripe oranges"))
    assert (first[9:] != other[9:]).any()
    result = finished(host.run(graph(host, BASE, "a bowl")))
    notes = [text for output in result.outputs.values() for text in output.get("text", [])]
    assert any("reads no prompts" in text for text in notes)


def test_a_base_model_without_frames_says_what_to_wire(host):
    prompt = graph(host)
    del prompt[host.sampler(prompt)]["inputs"]["kept"]
    result = host.run(prompt)
    assert result.status == "error" and result.error["node_type"] == "SCD_Sampler"
    assert "through VQ Encode into kept" in result.error["exception_message"]


def test_a_clip_of_the_wrong_length_is_refused(host):
    result = host.run(graph(host, frames=16))
    assert result.status == "error" and "set frames to 33" in result.error["exception_message"]
