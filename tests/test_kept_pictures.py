"""Pictures and clips that are read, kept in part and drawn on by the bundled model (fp32)."""

import pytest
import torch
from scd_pack.scd_core.generate import Request, generate
from scd_pack.scd_core.given import Reading, prepare
from scd_pack.scd_core.models.load import load_model

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model():
    return load_model(dtype="fp32")


@pytest.fixture(scope="module")
def picture(model):
    """Frames [1, 64, 64, 3] that the model drew."""
    with torch.inference_mode():
        return model.codec.decode(draw(model, Request(seed=3, window=64))[:, 0])


@pytest.fixture(scope="module")
def clip(model):
    """Frames [8, 32, 32, 3] that the model drew."""
    with torch.inference_mode():
        codes = draw(model, Request(seed=3, window=64, width=32, height=32, frames=8), "red car moving right on sand")
        return model.codec.decode_clip(codes[0])


def draw(model, request, text="fox on snow", kept=None):
    return generate(model.decoder, model.family, model.family.text.encode(text), request=request, kept=kept).codes


def read(model, image, mask=None, **how):
    """(codes, kept or None) of pictures, as the sampler's run gets them."""
    given = prepare(image, mask, model.family, model.codec.cfg, Reading(**how))
    codec = model.codec
    with torch.inference_mode():
        codes = codec.encode_clip(given.frames)[None] if how.get("clip") else codec.encode(given.frames)[:, None]
    return codes, given.kept


def both_ways(model, codes, kept, frames=1, batch=1, seed=5):
    """Tokens of autoregressive and of seed-exact sampling around what is kept; they must be the same."""
    missing = frames - codes.shape[1]
    known = torch.where(kept, codes, -1) if kept is not None else codes
    known = torch.cat([known, known.new_full((len(known), missing, *known.shape[2:]), -1)], 1)
    size = codes.shape[2] * model.codec.cfg.factor
    slow, fast = (
        draw(model, Request(method, seed, window, width=size, height=size, frames=frames, batch=batch), kept=known)
        for method, window in (("autoregressive", 0), ("seed-exact", 48))
    )
    assert torch.equal(slow, fast)
    stays = (known >= 0).expand_as(slow)
    assert torch.equal(slow[stays], known.expand_as(slow)[stays]) and (slow >= 0).all()
    return slow, stays


def test_reading_a_drawn_picture_gives_nearly_the_same_picture(model, picture, clip):
    for frames, how in ((picture, {}), (clip, {"clip": True})):
        codes, kept = read(model, frames, **how)
        assert kept is None
        with torch.inference_mode():
            back = model.codec.decode(codes.flatten(0, 1))
        assert float((back - frames).abs().mean()) < 0.04 < float((back - back.mean()).abs().mean())


@pytest.mark.parametrize("redraw, cells", [("lower half", 128), ("middle", 64)])
def test_a_part_is_drawn_anew_and_the_rest_stays(model, picture, redraw, cells):
    codes, kept = read(model, picture, redraw=redraw)
    drawn, stays = both_ways(model, codes, kept)
    assert int((~stays).sum()) == cells and not torch.equal(drawn, codes)


def test_a_mask_anywhere_with_several_pictures_from_one(model, picture):
    mask = torch.zeros(1, 64, 64)
    mask[0, 20:45, 9:30], mask[0, 1, 62] = 1, 1
    codes, kept = read(model, picture, mask)
    drawn, _ = both_ways(model, codes, kept, batch=3)
    assert not torch.equal(drawn[0], drawn[1]) and len(drawn) == 3


def test_each_picture_of_a_batch_keeps_its_own_part(model, picture):
    masks = torch.zeros(2, 64, 64)
    masks[0, 32:], masks[1, :, 40:] = 1, 1
    codes, kept = read(model, torch.cat([picture, picture.flip(2)]), masks)
    both_ways(model, codes, kept, batch=2)


def test_a_clip_goes_on_from_its_first_frames(model, clip):
    codes, kept = read(model, clip, clip=True, frames=2, end="end")
    assert kept is None and codes.shape == (1, 2, 8, 8)
    _, stays = both_ways(model, codes, kept, frames=4)
    assert stays[:, :2].all() and not stays[:, 2:].any()
