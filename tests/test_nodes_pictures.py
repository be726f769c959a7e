"""Pictures and estimates of the nodes that need no host: acceptance map, live preview, bytes of a run."""

import gc
import importlib
import importlib.machinery
import importlib.util
import pathlib
import sys

import numpy as np
import pytest
import torch

ROOT = pathlib.Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def nodes():
    """Modules of nodes/ by name, without running nodes/__init__.py, which asks for the host."""
    name = "scd_pack.nodes"
    before = sys.modules.get(name)
    package = importlib.util.module_from_spec(importlib.machinery.ModuleSpec(name, None, is_package=True))
    package.__path__ = [str(ROOT / "nodes")]
    sys.modules[name] = package
    yield lambda module: importlib.import_module(f"{name}.{module}")
    for loaded in [key for key in sys.modules if key.startswith(name)]:
        del sys.modules[loaded]
    if before is not None:
        sys.modules[name] = before


@pytest.fixture
def plan():
    """Two frames of 2x3 cells whose rows end with a format token: 16 positions."""
    from scd_pack.scd_core.plan import TokenPlan

    cells, forced = [], []
    for row in range(4):
        cells += [3 * row, 3 * row + 1, 3 * row + 2, -1]
        forced += [-1, -1, -1, 99]
    return TokenPlan(frames=2, rows=2, cols=3, vocab=8, base=10, cells=torch.tensor(cells),
                     forced=torch.tensor(forced), width=6, height=4)


class Progress:
    settled = None

    def __init__(self, tokens, frontier, done=1, total=12):
        self.tokens, self.frontier, self.done, self.total = tokens, frontier, done, total


def test_map_is_cold_where_one_pass_was_enough_and_hot_where_many_were(nodes):
    module = nodes("acceptance_map")
    visits = np.ones((2, 1, 4, 4), int)
    visits[0, 0, 0, 0], visits[1, 0, 3, 3] = 9, 0
    maps = module.acceptance_map(visits)
    assert maps.dtype == np.uint8 and maps.shape[0] == 2 and min(maps.shape[1:3]) >= 256
    assert tuple(maps[0, 5, 5]) == tuple(module.ANCHORS[-1].astype(int))
    assert tuple(maps[1, 5, 5]) == tuple(module.ANCHORS[0].astype(int))
    assert tuple(maps[1, 250, 250]) == module.GIVEN
    bar = maps[0, 256:]
    assert (bar == np.array(module.INK)).all(-1).any(), "the colour bar has no words"


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (1, 1, 16, 16), (3, 8, 8, 8), (1, 7, 5, 9), (1, 1, 45, 80)])
def test_map_has_one_picture_a_sample_and_a_least_size(nodes, shape):
    maps = nodes("acceptance_map").acceptance_map(np.random.default_rng(0).integers(0, 30, shape))
    assert maps.shape[0] == shape[0] and min(maps.shape[1:3]) >= 256


def test_colours_run_from_end_to_end(nodes):
    module = nodes("acceptance_map")
    ends = module.heat(np.array([-1.0, 0.0, 1.0, 2.0]))
    assert (ends[0] == ends[1]).all() and (ends[2] == ends[3]).all() and (ends[1] != ends[2]).any()


@pytest.mark.parametrize("count, columns", [(1, 1), (2, 2), (4, 2), (5, 5), (6, 3), (8, 4), (9, 3), (16, 4)])
def test_sheets_are_full_where_that_is_possible(nodes, count, columns):
    assert nodes("acceptance_map").columns_for(count) == columns


def test_decided_cells_follow_each_samples_frontier(nodes, plan):
    decided = nodes("preview").decided_cells(plan, [0, 6, 16], None)
    assert decided.shape == (3, 2, 2, 3)
    assert [int(row.sum()) for row in decided] == [0, 5, 12]
    given = torch.full((1, 2, 2, 3), -1)
    given[0, 1] = 3
    assert [int(row.sum()) for row in nodes("preview").decided_cells(plan, [0, 6, 16], given)] == [6, 11, 12]


def test_guesses_are_pale_and_decided_parts_untouched(nodes):
    frames = torch.rand(1, 4, 6, 3)
    decided = torch.zeros(1, 2, 3, dtype=torch.bool)
    decided[0, 0, 0] = True
    shown = nodes("preview").pale(frames, decided)
    assert (shown[0, :2, :2] == frames[0, :2, :2].mul(255).round().byte().numpy()).all()
    assert shown[0, 2:].std(-1).max() == 0, "guesses keep their colour"


def test_the_place_where_it_grows_is_marked_and_what_nobody_guessed_is_empty(nodes, plan):
    module = nodes("preview")
    tokens = torch.zeros(1, 16, dtype=torch.int64)
    tokens[0, :10] = 13  # the window reaches into the first row of the second frame
    decided, drafted = (module.decided_cells(plan, [5], None), module.drafted_cells(plan, tokens, None))
    coming = module.next_cells(decided)
    assert [int(cells.sum()) for cells in (decided, drafted, coming)] == [4, 8, 1] and coming[0, 0, 1, 1]
    shown = module.pale(torch.rand(2, 4, 6, 3), decided[0], drafted[0], coming[0])
    mark, empty = np.array(module.MARK) * 255, module.EMPTY * 255
    assert np.abs(shown[0, 2:, 2:4] - mark).max() <= 1 and (shown[0, 2:, 4:].std(-1) == 0).all()
    assert np.abs(shown[1, 2:] - empty).max() <= 1 and shown[1, :2, :4].min() > empty


def test_given_cells_are_sharp_and_no_guess_of_anybody(nodes, plan):
    module = nodes("preview")
    given = torch.full((1, 2, 2, 3), -1)
    given[0, 0, 0], given[0, 1, 1, 2] = 5, 3
    tokens = torch.where(plan.forced >= 0, plan.forced, 0)[None].clone()
    tokens[0, [0, 1, 2, 14]] = torch.tensor([15, 15, 15, 13])
    assert not module.drafted_cells(plan, tokens, given).any()
    coming = module.next_cells(module.decided_cells(plan, [4], given))
    assert coming.nonzero().tolist() == [[0, 0, 1, 0]]


def test_rows_that_run_side_by_side_each_have_their_mark(nodes, plan):
    module = nodes("preview")
    settled = torch.zeros(2, 16, dtype=torch.bool)
    settled[0, :3], settled[0, 4:6], settled[0, 8:9] = True, True, True  # the first row whole, two begun
    decided = module.decided_cells(plan, None, None, settled)
    coming = module.next_cells(decided, decided)
    assert coming.nonzero().tolist() == [[0, 0, 1, 2], [0, 1, 0, 1], [1, 0, 0, 0]]
    given = torch.full((2, 2, 2, 3), -1)
    given[:, 1, 1, 0] = 4  # a row that starts with a given cell has not begun for that
    decided = module.decided_cells(plan, None, given, settled)
    assert int(module.next_cells(decided, module.decided_cells(plan, None, None, settled))[:, 1, 1].sum()) == 0


def previewed(module, plan, each, steps=400, pace=0.05, cost=None):
    """Times of the previews of a run whose passes take `pace` seconds, and the whole time.

    Args:
        each: () -> seconds that a token grid takes; there are two. cost: `Cost` that is known before.
    """
    now = [0.0]

    def decode(codes):
        assert codes.shape[1:] == (2, 3) and codes.min() >= 0 and codes.max() < 8
        now[0] += len(codes) * each()
        return torch.zeros(len(codes), 4, 6, 3)

    preview, tokens = module.Preview(plan, decode, clock=lambda: now[0], cost=cost), torch.full((1, 16), 10)
    shown = []
    for step in range(1, steps + 1):
        now[0] += pace
        before, last = now[0], step == steps
        if preview(Progress(tokens, [16 if last else 4], done=12 if last else 1)) is not None:
            shown.append(before)
    return shown, now[0]


@pytest.mark.parametrize("each, first, least", [(0.0, 0.5, 38), (0.002, 0.5, 38), (0.025, 2.5, 8), (0.1, 10.0, 3)])
def test_previews_keep_their_distance_and_their_share(nodes, plan, each, first, least):
    """20 seconds of passes: two previews a second at most, a twentieth of the time, the last picture is the whole."""
    for known in (True, False):
        cost = nodes("preview").Cost(each, 2) if known else None
        shown, whole = previewed(nodes("preview"), plan, lambda: each, cost=cost)
        assert len(shown) >= least and min(b - a for a, b in zip(shown[:-1], shown[1:-1])) >= 0.5 - 1e-6
        assert shown[0] == pytest.approx(first if known else 1.0, abs=0.06), "early"
        assert shown[-1] > whole - 2 * each - 0.01
        assert 2 * each * len(shown) <= 0.05 * whole


def test_no_run_pays_more_than_its_share_once_the_cost_is_known(nodes, plan):
    """Runs of any length, from a few milliseconds to minutes, with pictures of any cost: a twentieth at most."""
    module, draw, some = nodes("preview"), np.random.default_rng(3), 0
    for _ in range(150):
        each, pace, steps = 10 ** draw.uniform(-4, 0), 10 ** draw.uniform(-3, -0.5), int(draw.integers(1, 400))
        shown, whole = previewed(module, plan, lambda each=each: each, steps, pace, module.Cost(each, 2))
        assert 2 * each * len(shown) <= 0.05 * whole, (each, pace, steps)
        some += bool(shown)
        if 2 * each <= module.SHARE * steps * pace:
            assert shown and shown[-1] > whole - 2 * each - 1e-6, "what there is time for is shown, the end above all"
    assert 50 < some < 145


def test_costs_that_jump_are_paid_back(nodes, plan):
    """A busy moment may make a picture three times as dear: the next ones wait for it."""
    module, draw = nodes("preview"), np.random.default_rng(4)
    shown, whole = previewed(module, plan, lambda: 0.02 * draw.choice((1, 1, 1, 3)), 2000, cost=module.Cost(0.02, 2))
    assert len(shown) > 40 and whole - 2000 * 0.05 <= 0.05 * whole


def test_the_first_two_pictures_of_a_codec_tell_what_they_take(nodes, plan):
    """However short the run; the first one may be dear by far, as a device warms up with it."""
    module, cost, prices = nodes("preview"), nodes("preview").Cost(), iter([2.0, *[0.01] * 99])
    runs = [len(previewed(module, plan, lambda: next(prices), 4, 0.05, cost)[0]) for _ in range(4)]
    assert runs == [1, 1, 0, 0] and cost.each == pytest.approx(0.01)
    assert len(previewed(module, plan, lambda: next(prices), 25, 0.05, cost)[0]) == 2, "1.25 seconds: a half, and all"


def test_what_a_picture_takes_is_known_as_long_as_its_codec(nodes):
    from scd_pack.scd_core.plan import TokenPlan

    module, codec, plan = nodes("preview"), Codec(), TokenPlan(2, 2, 3, 8)
    cost = module.decoder(codec, "cpu", plan)["cost"]
    assert module.decoder(codec, "cpu", TokenPlan(4, 2, 3, 8))["cost"] is cost
    for other in ((codec, "cuda:0", plan), (codec, "cpu", TokenPlan(2, 4, 6, 8)), (Codec(), "cpu", plan)):
        assert module.decoder(*other)["cost"] is not cost
    del codec, other
    gc.collect()
    assert not len(module._costs)


def test_pictures_of_which_nothing_is_begun_are_not_decoded(nodes, plan):
    asked = []

    def decode(codes):
        asked.append(len(codes))
        return torch.ones(len(codes), 4, 6, 3)

    preview = nodes("preview").Preview(plan, decode, clock=lambda: 0.0, cost=nodes("preview").Cost(0.0, 2))
    tokens = torch.zeros(3, 16, dtype=torch.int64)
    for reach in (0, 3, 8, 9, 16):
        tokens[:, :reach] = 12
        preview(Progress(tokens, [0, 0, 0], done=12))
    assert asked == [1, 3, 3, 6, 6], "frame by frame"


def test_a_preview_that_fails_is_switched_off_and_an_interrupt_is_not(nodes, plan):
    class Stop(Exception):
        pass

    calls = []

    def fail(codes):
        calls.append(1)
        raise RuntimeError("no")

    def stop(codes):
        raise Stop

    preview = nodes("preview").Preview(plan, fail, fatal=Stop)
    progress = Progress(torch.full((1, 16), 10), [16], done=12)
    assert preview(progress) is None and preview(progress) is None and len(calls) == 1
    with pytest.raises(Stop):
        nodes("preview").Preview(plan, stop, fatal=Stop)(progress)


class Codec:
    """Two frames a token grid but the first, of the brightness of its codes; `asked`: grids that were decoded."""

    def __init__(self):
        self.asked = []

        class Config:
            compression = 2

            def frames(self, grids):
                return 2 * grids - 1

        self.cfg = Config()

    def decode_clip(self, codes):
        self.asked.append(len(codes))
        frames = codes.repeat_interleave(2, 0)[1:]
        return frames.repeat_interleave(2, 1).repeat_interleave(2, 2)[..., None].expand(-1, -1, -1, 3) / 8


def test_a_preview_of_a_clip_shows_the_last_frame_of_each_grid_that_is_begun(nodes, plan):
    module, codec = nodes("preview"), Codec()
    how = {**module.decoder(codec, "cpu", plan), "cost": module.Cost(0.0, 2)}
    preview = module.Preview(plan, **how, clock=lambda: 0.0)
    tokens = torch.full((1, 16), 18).clamp(max=17)
    tokens[0, 8:] = 14
    empty = np.array(preview(Progress(tokens, [0], done=12)))
    one = np.array(preview(Progress(tokens, [5], done=12)))
    both = np.array(preview(Progress(tokens, [16], done=12)))
    assert codec.asked == [1, 1, 2]
    half = one.shape[1] // 2
    left, right = both[:, :half], both[:, half:]
    assert abs(int(left[20, 20, 0]) - 255 * 7 / 8) < 2 and abs(int(right[20, -20, 0]) - 255 * 4 / 8) < 2
    assert one[20, 20, 0] == left[20, 20, 0] and one[20, -20, 0] != right[20, -20, 0]
    assert empty[20, 20, 0] != left[20, 20, 0]


def test_stills_of_such_a_codec_are_previewed_one_by_one(nodes):
    from scd_pack.scd_core.plan import TokenPlan

    module, codec = nodes("preview"), Codec()
    codec.decode = codec.decode_clip
    assert set(module.decoder(codec, "cpu", TokenPlan(1, 2, 3, 8))) == {"decode", "cost"}


def test_bytes_grow_with_everything_that_costs(plan):
    from scd_pack.scd_core.budget import sampler_bytes
    from scd_pack.scd_core.models.transformer import DecoderConfig

    cfg = DecoderConfig(dim=8, layers=2, heads=2, kv_heads=2, head_dim=4, ffn=16, vocab=8, head_rows=8)
    base = {"item_size": 2, "prompt": 5, "streams": 1, "batch": 1, "window": 4}

    def needed(**changes):
        return sampler_bytes(cfg, plan=plan, **{**base, **changes})

    assert needed() > 2 * 2 * 2 * 4 * (5 + plan.length) * 2  # keys and values alone
    for name, value in {"item_size": 4, "prompt": 50, "streams": 2, "batch": 2, "window": 8}.items():
        assert needed(**{name: value}) > needed(), name
    assert needed(window=0) == needed(window=4096) == needed(window=plan.length)
