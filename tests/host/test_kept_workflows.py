"""The workflows that keep a part of a picture or clip, run in the server: what was given comes out again."""

import io

import numpy as np
import pytest
from host_api import to_api

pytestmark = [pytest.mark.host, pytest.mark.slow]


def ran(host, name):
    """(API prompt, result) of a shipped workflow."""
    prompt = to_api(host.workflow(name), host.object_info)
    result = host.run(prompt)
    assert result.status == "success", result.error
    return prompt, result


def node_of(prompt, kind, **inputs):
    """Id of the node of a kind (with these input values) in an API prompt."""
    return next(number for number, node in prompt.items() if node["class_type"] == kind and all(
        node["inputs"].get(name) == value for name, value in inputs.items()))


def probed(host, prompt, picture):
    """Frames of an output [node id, slot] of the prompt, not enlarged: uint8 [N, H, W, 3]."""
    from PIL import Image

    probe = {"class_type": "SaveImage", "inputs": {"images": picture, "filename_prefix": "probe"}}
    result = host.run({**prompt, "probe": probe})
    assert result.status == "success", result.error
    files = [item for number, item in result.files() if number == "probe"]
    return np.stack([np.asarray(Image.open(io.BytesIO(host.view(item))).convert("RGB")) for item in files])


def test_completion_keeps_the_upper_half_and_draws_four_lower_ones(host):
    prompt, result = ran(host, "SCD image completion")
    assert len(host.pictures(result)) == 4
    encode = node_of(prompt, "SCD_VQEncode")
    draw = node_of(prompt, "SCD_Sampler", kept=[encode, 0])
    frames = probed(host, prompt, [node_of(prompt, "SCD_VQDecode", tokens=[draw, 0]), 0])
    assert frames.shape == (4, 64, 64, 3)
    # the codec's decoder looks at all tokens, a little: equal tokens give nearly equal pixels
    apart = np.abs(frames[1:].astype(int) - frames[:1]).mean(axis=(0, 2, 3))
    assert apart[:24].mean() < 2 and apart[40:].mean() > 3 * apart[:24].mean()


def test_inpainting_changes_the_masked_part_alone(host):
    prompt, _ = ran(host, "SCD inpaint by tokens")
    encode = node_of(prompt, "SCD_VQEncode")
    draw = node_of(prompt, "SCD_Sampler", kept=[encode, 0])
    before = probed(host, prompt, [encode, 1])[0].astype(int)
    after = probed(host, prompt, [node_of(prompt, "SCD_VQDecode", tokens=[draw, 0]), 0])[0]
    mask = probed(host, prompt, [node_of(prompt, "MaskToImage"), 0])[0]
    assert before.shape == after.shape == mask.shape == (64, 64, 3) and set(mask.flatten()) == {0, 255}
    apart = np.abs(before - after)
    assert apart[mask == 255].mean() > 3 * apart[mask == 0].mean()


def test_the_continued_clip_holds_both_parts(host):
    import av

    prompt, result = ran(host, "SCD continue a clip")
    item = next(item for _, item in result.files() if item["filename"].endswith(".mp4"))
    with av.open(io.BytesIO(host.view(item))) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert len(frames) == 13
    encode = node_of(prompt, "SCD_VQEncode")
    assert len(probed(host, prompt, [encode, 1])) == 3
    assert all((a != b).any() for a, b in zip(frames[7:], frames[8:], strict=False))
