"""Checks inside the host: pictures to tokens, and what the sampler makes of kept ones."""

import dataclasses

import torch
from checks_common import drawn, ready, refused, replaced

STILL = {"width": 0, "height": 0, "frames": 1, "window": 48}
CLIP = {"width": 0, "height": 0, "frames": 4, "window": 48}


def encode(inside, vq, image, **inputs):
    """(tokens, image, mask) of VQ Encode."""
    return inside.call("SCD_VQEncode", vq=vq, image=image, **inputs).args


def decode(inside, vq, tokens):
    return inside.call("SCD_VQDecode", tokens=tokens, vq=vq).args[0]


def pictures(inside, model, positive, vq, **widgets):
    """Frames that the model drew: [B * frames, H, W, 3]."""
    return decode(inside, vq, drawn(inside, model, positive, **widgets)[0])


def check_encode_and_decode_give_the_picture_back(inside):
    model, positive, vq = ready(inside)
    image = pictures(inside, model, positive, vq, **STILL, batch_size=2)
    tokens, fitted, mask = encode(inside, vq, image)
    assert tokens.codes.shape == (2, 1, 16, 16) and tokens.codes.dtype == torch.int64 and tokens.kept is None
    assert (tokens.width, tokens.height, tokens.vocab) == (64, 64, 1024) and tokens.family == model.family.title
    assert torch.equal(fitted, image) and mask.shape == (2, 64, 64) and not mask.any()
    back = decode(inside, vq, tokens)
    spread = (back - back.mean()).abs().mean()
    assert (back - image).abs().mean() < 0.3 * spread, "the codec does not know its own pictures"
    again = encode(inside, vq, image)[0]
    assert torch.equal(again.codes, tokens.codes)


def check_kept_tokens_come_out_bit_for_bit_and_seed_exact_is_exact_around_them(inside):
    model, positive, vq = ready(inside)
    image = pictures(inside, model, positive, vq, **STILL)
    hole = torch.zeros(1, 64, 64)
    hole[0, 20:40, 8:50], hole[0, 0, 63] = 1, 1
    for inputs in ({"redraw": "lower half"}, {"mask": hole}):
        tokens, _, mask = encode(inside, vq, image, **inputs)
        slow, fast = (drawn(inside, model, positive, **STILL, kept=tokens, seed=9, method=method)[0].codes
                      for method in ("autoregressive", "seed-exact"))
        assert torch.equal(slow, fast)
        kept = tokens.kept.expand_as(slow)
        assert torch.equal(slow[kept], tokens.codes[kept]) and (slow[~kept] != tokens.codes[~kept]).any()
        assert torch.equal(mask[0, ::4, ::4].bool(), ~kept[0, 0]), "the mask shows other cells"
        assert torch.isfinite(decode(inside, vq, drawn(inside, model, positive, **STILL, kept=tokens)[0])).all()


def check_one_kept_picture_serves_a_batch_and_a_batch_serves_itself(inside):
    model, positive, vq = ready(inside)
    image = pictures(inside, model, positive, vq, **STILL, batch_size=2)
    one = encode(inside, vq, image[:1], redraw="middle")[0]
    four = drawn(inside, model, positive, **STILL, kept=one, batch_size=4)[0].codes
    kept = one.kept.expand_as(four)
    assert torch.equal(four[kept], one.codes.expand_as(four)[kept]) and not torch.equal(four[0], four[1])
    two = encode(inside, vq, image, redraw="middle")[0]
    both = drawn(inside, model, positive, **STILL, kept=two, batch_size=2)[0].codes
    assert torch.equal(both[two.kept.expand_as(both)], two.codes[two.kept.expand_as(both)])
    with refused("batch"):
        drawn(inside, model, positive, **STILL, kept=two, batch_size=3)


def check_a_clip_goes_on_from_kept_frames(inside):
    model, positive, vq = ready(inside)
    frames = pictures(inside, model, positive, vq, frames=3)
    tokens, fitted, mask = encode(inside, vq, frames, images_are="clip", frames=2, frames_from="end")
    assert tokens.codes.shape == (1, 2, 8, 8) and (tokens.width, tokens.height) == (32, 32)
    assert torch.equal(fitted, frames[1:]) and mask.shape == (2, 32, 32) and not mask.any()
    longer = drawn(inside, model, positive, **CLIP, kept=tokens)[0].codes
    assert longer.shape == (1, 4, 8, 8) and torch.equal(longer[:, :2], tokens.codes)
    start = encode(inside, vq, frames[:1], images_are="clip")[0]  # one picture starts a clip, too
    assert torch.equal(drawn(inside, model, positive, **CLIP, kept=start)[0].codes[:, :1], start.codes)
    part = encode(inside, vq, frames, images_are="clip", redraw="lower half")[0]
    mixed = drawn(inside, model, positive, **{**CLIP, "frames": 3}, kept=part)[0].codes
    assert torch.equal(mixed[:, :, :4], part.codes[:, :, :4]) and (mixed != part.codes).any()


def check_pictures_of_any_size_and_kind_are_fitted(inside):
    _, _, vq = ready(inside)
    for shape in ((1, 1), (100, 37), (64, 64), (480, 853)):
        for fit in ("crop", "stretch", "pad"):
            tokens, fitted, mask = encode(inside, vq, torch.rand(1, *shape, 3), fit=fit)
            assert tokens.codes.shape == (1, 1, 16, 16) and fitted.shape == (1, 64, 64, 3)
            bordered = fit == "pad" and shape[0] != shape[1]
            assert (tokens.kept is not None) is bordered and bool(mask.any()) is bordered
    # what Load Image gives as the mask of a picture without alpha
    assert encode(inside, vq, torch.rand(1, 300, 200, 3), mask=torch.zeros(1, 64, 64))[0].kept is None
    assert encode(inside, vq, torch.rand(1, 64, 64, 4), mask=torch.ones(64, 64))[0].kept.sum() == 0


def check_what_cannot_be_kept_is_refused(inside):
    model, positive, vq = ready(inside)
    image = torch.rand(2, 64, 64, 3)
    for words, inputs in {
        "cannot draw 100x100": {"width": 100, "height": 100}, "3 masks": {"mask": torch.zeros(3, 8, 8)},
        "squeeze": {"fit": "squeeze"}, "sky": {"redraw": "sky"}, "film": {"images_are": "film"},
        "1 to 8 frames": {"images_are": "clip", "frames": 9},
    }.items():
        with refused(words):
            encode(inside, vq, image, **inputs)
    still = encode(inside, vq, image[:1], redraw="lower half")[0]
    with refused("still to be drawn"):
        decode(inside, vq, still)
    for words, kept, widgets in (
        ("other model", dataclasses.replace(still, family="other model"), STILL),
        ("64x64 pixels", still, {**STILL, "width": 32, "height": 32}),
        ("64x64 pixels", still, CLIP),
        ("raise frames", encode(inside, vq, image[:1].expand(5, -1, -1, -1), images_are="clip")[0], CLIP),
    ):
        with refused(words):
            drawn(inside, model, positive, **widgets, kept=kept)


def check_a_codec_that_can_only_draw_names_its_file(inside):
    _, _, vq = ready(inside)
    blind = dataclasses.replace(vq.net.cfg, encoder=False)
    with replaced(vq.net, "cfg", blind), refused(r"model\.safetensors.*encoder"):
        encode(inside, vq, torch.rand(1, 64, 64, 3))


def check_nothing_to_draw_is_told(inside):
    model, positive, vq = ready(inside)
    tokens = encode(inside, vq, torch.rand(1, 64, 64, 3))[0]
    again, report, _ = drawn(inside, model, positive, **STILL, kept=tokens)
    assert torch.equal(again.codes, tokens.codes) and "0 tokens in 0 passes" in report and "VQ Encode" in report


def check_encoding_in_parts_changes_nothing_and_copes_with_short_memory(inside):
    _, _, vq = ready(inside)
    module, net, frames = inside.module("nodes.vq_encode"), vq.net, torch.rand(6, 32, 32, 3)
    with torch.inference_mode():
        whole, asked, done = net.encode(frames), [], []

        def short(part):
            asked.append(len(part))
            if len(part) > 2:
                raise torch.OutOfMemoryError("no room")
            return type(net).encode(net, part)

        with replaced(net, "encode", short):
            parts = module.encode(net, frames, 6, "cpu", done.append)
        assert torch.equal(parts, whole) and asked == [6, 3, 1, 1, 1, 1, 1, 1] and done == [1, 2, 3, 4, 5, 6]
        with replaced(net, "encode", lambda part: (_ for _ in ()).throw(torch.OutOfMemoryError("no room"))), refused(
                "no room", torch.OutOfMemoryError):
            module.encode(net, frames, 6, "cpu", done.append)
