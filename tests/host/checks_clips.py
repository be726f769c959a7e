"""Checks inside the host: clips of a codec whose token grids stand for several frames."""

import torch
from checks_common import refused


def small(inside):
    """(tokens of two clips of 17 frames, a codec of its own kind for them), 16x16 pixels."""
    dv, host, sockets = (inside.module(name) for name in ("scd_core.codecs.dv3d", "nodes.host", "nodes.sockets"))
    half = dv.DVHalf((4, 8), z=4, blocks=1, entry=8, space=(1,), time=(1,))
    generator = torch.Generator().manual_seed(1)
    devices = host.codec_devices()
    ops = host.operations(torch.float32, torch.float32, devices[0])
    net = dv.DVCodec(dv.DVConfig(half), operations=ops, dtype=torch.float32).requires_grad_(False)
    for parameter in net.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    codes = torch.randint(0, net.cfg.codes, (2, 3, 2, 2), generator=generator)
    family = type("Small", (inside.module("scd_core.models.family").Family,), {"name": "small", "title": "small"})
    vq = sockets.CodecHandle("small", family(), host.patcher(net, devices), None)
    return sockets.Tokens(codes, 16, 16, net.cfg.codes, "small", "small"), vq


def check_clips_come_out_as_their_frames(inside):
    tokens, vq = small(inside)
    net, seen = vq.net, len(inside.progress)
    frames = inside.call("SCD_VQDecode", tokens=tokens, vq=vq).args[0]
    assert frames.shape == (34, 16, 16, 3) and frames.dtype == torch.float32
    with torch.inference_mode():
        want = torch.cat([net.decode_clip(codes) for codes in tokens.codes])
    assert torch.allclose(frames, want, atol=1e-5)
    assert [(value, total) for value, total, _ in inside.progress[seen:]] == [(17, 34), (34, 34)]


def check_short_memory_halves_the_steps_of_a_clip(inside):
    tokens, vq = small(inside)
    net, asked = vq.net, []
    whole = inside.call("SCD_VQDecode", tokens=tokens, vq=vq).args[0]

    def short(codes, grids):
        for number, part in enumerate(type(net).decode_steps(net, codes, grids)):
            asked.append((grids, number))
            if grids > 1 and number == 0:
                raise torch.OutOfMemoryError("no room")
            yield part

    net.decode_steps = short
    try:
        frames = inside.call("SCD_VQDecode", tokens=tokens, vq=vq).args[0]
    finally:
        del net.decode_steps
    assert torch.allclose(frames, whole, atol=1e-5)
    assert asked == [(3, 0)] + [(1, number) for _ in range(2) for number in range(3)]


def check_a_model_may_use_a_part_of_its_codebook(inside):
    tokens, vq = small(inside)
    part = {"codes": tokens.codes % 100, "width": 16, "height": 16, "vocab": 100, "model": "small"}
    made = inside.call("SCD_VQDecode", tokens=type(tokens)(**part, family="small"), vq=vq).args[0]
    assert made.shape == (34, 16, 16, 3)
    with refused("codebook of 100"):
        inside.call("SCD_VQDecode", tokens=type(tokens)(**part, family="another"), vq=vq)
