"""Pictures, masks and clips on their way to the encoder: sizes, fitting, cells that are drawn anew, context frames."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from scd_pack.scd_core.checkpoint import Source
from scd_pack.scd_core.errors import UserError
from scd_pack.scd_core.given import (
    Reading,
    by_grid,
    cells,
    context_frames,
    drawing_size,
    fit_mask,
    fit_pictures,
    pick,
    prepare,
    region,
)
from scd_pack.scd_core.models.dv_parts import video_codec
from scd_pack.scd_core.models.family import Family, Size
from scd_pack.scd_core.models.load import ModelFiles

GOLDEN = Path(__file__).parent / "data" / "golden"


def family(*sizes, contexts=(), name="the painter"):
    made = Family()
    made.name, made.sizes, made.contexts = name, tuple(Size(*size) for size in sizes), contexts
    return made


def codec(factor=8, compression=1):
    return SimpleNamespace(factor=factor, compression=compression)


SMALL = family((64, 64), (32, 32, 8), (32, 32, 4))
VIDEO = family((1024, 640, 33), contexts=(1, 9))
# any shape up to an area, the largest first, as Lumina-mGPT lists them
SHAPES = family((512, 512), (768, 320), (320, 768), (640, 384), (384, 640), (256, 256), (320, 192), (64, 32))


# size ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape, wanted", [
    ((100, 100), (512, 512)), ((300, 500), (640, 384)), ((500, 300), (384, 640)), ((100, 1000), (768, 320)),
    ((3000, 3100), (512, 512)), ((1, 5000), (768, 320)), ((16, 30), (640, 384)),
])
def test_nearest_proportions_among_the_largest_sizes(shape, wanted):
    size = drawing_size(SHAPES, shape)
    assert (size.width, size.height) == wanted


def test_stills_and_clips_have_sizes_of_their_own():
    assert drawing_size(SMALL, (9, 9)) == Size(64, 64)
    assert drawing_size(SMALL, (9, 9), clip=True) == Size(32, 32, 8)
    assert drawing_size(SMALL, (9, 9), 32, 32) == Size(32, 32, 8)  # a picture as the start of a clip
    assert drawing_size(VIDEO, (9, 9)) == Size(1024, 640, 33)  # each picture starts a clip
    assert drawing_size(SHAPES, (9, 9), 640) == Size(640, 384)
    assert drawing_size(SHAPES, (9, 9), 0, 768) == Size(320, 768)
    assert drawing_size(SHAPES, (9, 9), 256, 256) == Size(256, 256)


def test_a_family_may_draw_more_sizes_than_it_lists():
    class Squares(Family):
        name, sizes = "squares", (Size(256, 256),)

        def size(self, width=0, height=0, frames=1):
            side = width or height
            return Size(side, side) if side % 16 == 0 and height in (0, side) else super().size(width, height, frames)

    assert drawing_size(Squares(), (5, 5), 384) == Size(384, 384)
    with pytest.raises(UserError, match="256x256"):
        drawing_size(Squares(), (5, 5), 384, 400)


@pytest.mark.parametrize("ask, words", [
    ({"width": 100}, "cannot draw 100xany"),
    ({"width": 64, "height": 48}, "cannot draw 64x48"),
    ({"width": 64, "clip": True}, "cannot draw 64xany with 8 frames"),
    ({"width": 64, "height": 64, "clip": True}, "cannot draw 64x64 with 8 frames"),
])
def test_sizes_that_cannot_be_drawn(ask, words):
    with pytest.raises(UserError) as refused:
        prepare(torch.rand(2, 8, 8, 3), None, SMALL, codec(), Reading(**ask))
    assert words in str(refused.value) and "\n" not in str(refused.value)


def test_clips_are_refused_by_models_of_stills():
    with pytest.raises(UserError, match="pictures, not clips"):
        prepare(torch.rand(2, 8, 8, 3), None, SHAPES, codec(), Reading(clip=True))


# fitting --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fit", ["crop", "stretch", "pad"])
def test_a_picture_of_the_right_size_is_not_touched(fit):
    frames = torch.rand(2, 16, 24, 3)
    assert torch.equal(fit_pictures(frames, 24, 16, fit), frames)
    assert not fit_mask(torch.zeros(1, 16, 24), (16, 24), 24, 16, fit).any()


def ramp(height, width):
    """Red grows to the right, green downwards: 0 at one edge, 1 at the other."""
    red = ((torch.arange(width) + 0.5) / width).expand(height, width)
    green = ((torch.arange(height)[:, None] + 0.5) / height).expand(height, width)
    return torch.stack([red, green, torch.zeros_like(red)], -1)[None]


def test_crop_takes_the_middle_undistorted():
    out = fit_pictures(ramp(40, 80), 20, 20, "crop")
    assert out.shape == (1, 20, 20, 3)
    assert 0.25 < float(out[0, 10, 0, 0]) < 0.3 and 0.7 < float(out[0, 10, -1, 0]) < 0.75
    assert float(out[0, 0, 10, 1]) < 0.05 and float(out[0, -1, 10, 1]) > 0.95


def test_stretch_takes_all_of_it():
    out = fit_pictures(ramp(40, 80), 20, 20, "stretch")
    for channel, edge in ((0, out[0, 10]), (1, out[0, :, 10])):
        assert float(edge[0, channel]) < 0.05 and float(edge[-1, channel]) > 0.95


def test_pad_keeps_all_of_it_repeats_the_edge_and_draws_the_border_anew():
    out = fit_pictures(ramp(40, 80), 40, 40, "pad")
    assert torch.equal(out[0, 0], out[0, 10]) and not torch.equal(out[0, 10], out[0, 15])
    assert float(out[0, 20, 0, 0]) < 0.05 and float(out[0, 20, -1, 0]) > 0.95
    border = fit_mask(torch.zeros(1, 1, 1), (40, 80), 40, 40, "pad")[0]
    assert border[:10].all() and border[30:].all() and not border[10:30].any()


@pytest.mark.parametrize("shape", [(1, 1), (1, 400), (400, 1), (3, 2), (97, 63), (1, 2)])
@pytest.mark.parametrize("fit", ["crop", "stretch", "pad"])
def test_odd_shapes_come_out_in_the_right_size(shape, fit):
    out = fit_pictures(torch.rand(1, *shape, 3), 48, 32, fit)
    assert out.shape == (1, 32, 48, 3) and 0 <= float(out.min()) <= float(out.max()) <= 1
    assert fit_mask(torch.zeros(1, *shape), shape, 48, 32, fit).shape == (1, 32, 48)


# cells ----------------------------------------------------------------------------------------------------------------


def test_one_masked_pixel_is_enough_and_only_its_token_goes():
    for row, col in ((0, 0), (7, 8), (15, 31)):
        mask = torch.zeros(1, 16, 32)
        mask[0, row, col] = 1
        found = cells(fit_mask(mask, (16, 32), 32, 16, "crop"), 8)[0]
        assert found.nonzero().tolist() == [[row // 8, col // 8]]


def test_a_small_spot_on_a_large_picture_is_not_lost_when_it_shrinks():
    mask = torch.zeros(1, 800, 800)
    mask[0, 410, 610] = 1
    assert cells(fit_mask(mask, (800, 800), 64, 64, "crop"), 8)[0].nonzero().tolist() == [[4, 6]]


def test_soft_masks_count_from_the_half():
    mask = torch.tensor([[[0.49, 0.5], [0.0, 0.51]]])
    assert fit_mask(mask, (2, 2), 2, 2, "crop")[0].tolist() == [[False, True], [False, True]]


def test_a_mask_of_another_size_is_stretched_over_the_picture_and_cropped_with_it():
    left = torch.zeros(1, 4, 4)
    left[..., :2] = 1  # the left half
    found = cells(fit_mask(left, (40, 80), 32, 32, "crop"), 8)[0]
    assert found[:, :2].all() and not found[:, 2:].any()
    outside = torch.zeros(1, 4, 8)
    outside[..., :2] = 1  # the left quarter is cropped away
    assert not fit_mask(outside, (40, 80), 32, 32, "crop").any()
    assert fit_mask(outside, (40, 80), 32, 32, "stretch")[0, :, :8].all()


def test_regions():
    assert not region("nothing", 4, 6).any()
    assert region("lower half", 4, 6).nonzero()[:, 0].tolist() == [2] * 6 + [3] * 6
    assert region("lower half", 5, 1).flatten().tolist() == [False, False, False, True, True]
    assert region("right half", 3, 4)[1].tolist() == [False, False, True, True]
    assert region("middle", 8, 8).nonzero().tolist() == [[r, c] for r in range(2, 6) for c in range(2, 6)]


def test_mask_and_region_add_up_and_the_shown_mask_has_whole_cells():
    mask = torch.zeros(1, 64, 64)
    mask[0, 3, 3] = 1
    given = prepare(torch.rand(3, 64, 64, 3), mask, SMALL, codec(), Reading(redraw="lower half"))
    assert given.frames.shape == (3, 64, 64, 3) and given.redraw.shape == (1, 1, 8, 8)
    assert given.redraw.sum() == 33 and torch.equal(given.kept, ~given.redraw)
    shown = given.pixels(codec())
    assert shown.shape == (3, 64, 64) and shown.sum() == 3 * 33 * 64
    assert shown[2, :8, :8].all() and not shown[2, :8, 8:].any() and shown[2, 32:].all()


def test_each_picture_may_have_a_mask_of_its_own():
    masks = torch.zeros(2, 64, 64)
    masks[1] = 1
    given = prepare(torch.rand(2, 64, 64, 3), masks, SMALL, codec(), Reading())
    assert given.redraw.shape == (2, 1, 8, 8) and not given.redraw[0].any() and given.redraw[1].all()


def test_nothing_to_draw_is_no_mask():
    assert prepare(torch.rand(1, 64, 64, 3), torch.zeros(1, 64, 64), SMALL, codec(), Reading()).kept is None


@pytest.mark.parametrize("image, mask, how, words", [
    (torch.rand(0, 8, 8, 3), None, {}, "no picture"),
    (torch.rand(8, 8, 3), None, {}, "no picture"),
    (torch.full((1, 8, 8, 3), torch.nan), None, {}, "no numbers"),
    (torch.rand(4, 8, 8, 3), torch.zeros(3, 8, 8), {}, "3 masks for 4 pictures"),
    (torch.rand(1, 8, 8, 3), torch.zeros(0, 8, 8), {}, "mask is empty"),
    (torch.rand(1, 8, 8, 3), None, {"fit": "squeeze"}, "squeeze"),
    (torch.rand(1, 8, 8, 3), None, {"redraw": "everything"}, "lower half"),
    (torch.rand(1, 8, 8, 3), None, {"end": "middle"}, "start, end"),
    (torch.rand(1, 8, 8, 3), None, {"frames": -1}, "from 0"),
])
def test_what_makes_no_sense_is_refused_in_a_sentence(image, mask, how, words):
    with pytest.raises(UserError) as refused:
        prepare(image, mask, SMALL, codec(), Reading(**how))
    assert words in str(refused.value) and "\n" not in str(refused.value)


def test_grey_and_transparent_pictures_and_values_outside_of_the_range():
    for channels in (1, 3, 4):
        frames = prepare(3 * torch.rand(1, 64, 64, channels) - 1, None, SMALL, codec(), Reading()).frames
        assert frames.shape == (1, 64, 64, 3) and frames.min() == 0 and frames.max() == 1
        assert frames.dtype == torch.float32


# clips ----------------------------------------------------------------------------------------------------------------


def frames_of(how, count, painter=SMALL, cfg=None, mask=None):
    """prepare() on frames that are told apart by their brightness; (levels, `Given`)."""
    image = (torch.arange(count) / 100).view(-1, 1, 1, 1).expand(-1, 8, 8, 3)
    given = prepare(image, mask, painter, cfg or codec(), Reading(clip=True, **how))
    return [round(100 * float(frame.mean())) for frame in given.frames], given


@pytest.mark.parametrize("how, count, wanted", [
    ({}, 3, [0, 1, 2]), ({}, 8, list(range(8))), ({}, 12, list(range(8))), ({"end": "end"}, 12, list(range(4, 12))),
    ({"frames": 2}, 5, [0, 1]), ({"frames": 2, "end": "end"}, 5, [3, 4]), ({"frames": 4}, 2, [0, 1, 1, 1]),
    ({}, 1, [0]),
])
def test_frames_of_a_clip_that_are_kept(how, count, wanted):
    levels, given = frames_of(how, count)
    assert levels == wanted and given.redraw.shape == (1, len(wanted), 4, 4) and given.kept is None


@pytest.mark.parametrize("how, count, wanted", [
    ({}, 1, [0]), ({}, 2, [0] + [1] * 8), ({}, 9, list(range(9))), ({}, 40, list(range(9))),
    ({"end": "end"}, 40, list(range(31, 40))), ({"frames": 1}, 40, [0]), ({"frames": 9}, 1, [0] * 9),
])
def test_context_of_a_codec_that_compresses_time(how, count, wanted):
    levels, given = frames_of(how, count, VIDEO, codec(16, 8))
    assert levels == wanted and given.redraw.shape == (1, 1 + (len(wanted) - 1) // 8, 40, 64)


def test_a_compressing_codec_without_fixed_contexts_takes_every_number_that_it_can_hold():
    free = family((64, 64, 33))
    counts = [context_frames(free, codec(8, 8), Size(64, 64, 33), n) for n in (1, 2, 9, 10, 17, 33, 50)]
    assert counts == [1, 9, 9, 17, 17, 33, 33]


@pytest.mark.parametrize("painter, cfg, frames, words", [
    (VIDEO, codec(16, 8), 5, "1 or 9 frames"), (SMALL, codec(), 9, "1 to 8 frames"),
    (family((64, 64, 65)), codec(8, 8), 10, "1 to 65 in steps of 8 frames"),
])
def test_numbers_of_frames_that_cannot_be_kept(painter, cfg, frames, words):
    with pytest.raises(UserError, match=words):
        frames_of({"frames": frames}, 3, painter, cfg)


def test_pick_from_either_end():
    assert pick(5, 3, "start") == [0, 1, 2] and pick(5, 3, "end") == [2, 3, 4]
    assert pick(2, 4, "start") == pick(2, 4, "end") == [0, 1, 1, 1]


def test_a_grid_goes_when_one_of_its_frames_does():
    anew = torch.zeros(9, 2, 2, dtype=torch.bool)
    anew[5, 1, 0] = True
    assert by_grid(anew, 8).tolist() == [[[False, False], [False, False]], [[False, False], [True, False]]]
    assert torch.equal(by_grid(anew, 1), anew)
    assert by_grid(anew[:1], 8).shape == (1, 2, 2)


def test_masks_of_a_clip_follow_its_frames_and_come_back_as_pixels():
    masks = torch.zeros(40, 8, 8)
    masks[0], masks[33] = 1, 1  # only the second of them is among the last nine
    _, given = frames_of({"end": "end"}, 40, VIDEO, codec(16, 8), masks)
    assert not given.redraw[0, 0].any() and given.redraw[0, 1].all()
    shown = given.pixels(codec(16, 8))
    assert shown.shape == (9, 640, 1024) and not shown[0].any() and shown[1:].all()


@pytest.mark.parametrize("count, grids", [(1, 1), (4, 2), (20, 2)])
def test_context_is_that_of_the_cosmos_pipeline(count, grids):
    """It takes the first 9 frames or the only one, repeats the last up to a whole clip, and keeps the first grids."""
    file = Source.open(GOLDEN / "cosmos-dv8x16x16" / "model" / "decoder.safetensors")
    layout = video_codec(file, file)
    alone = SimpleNamespace(codec_config=layout.config, refs=lambda part: layout.refs)
    net = ModelFiles(None, alone, "the codec").build("codec", dtype=torch.float32)
    clip = torch.rand(count, 16, 32, 3, generator=torch.Generator().manual_seed(count))
    given = prepare(clip, None, family((32, 16, 33), contexts=(1, 9)), net.cfg, Reading(clip=True))
    whole = torch.cat([clip[:9], clip[:9][-1:].expand(33 - min(count, 9), -1, -1, -1)])
    with torch.inference_mode():
        codes, wanted = net.encode_clip(given.frames), net.encode_clip(whole)
    assert len(whole) == 33 and torch.equal(codes, wanted[:grids]) and len(codes) == grids
