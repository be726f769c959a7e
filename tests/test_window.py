"""The automatic window: measured where the tokens do not depend on it, a fixed table elsewhere."""

import pytest
import torch
from scd_pack.scd_core import window as module
from scd_pack.scd_core.acceptance import METHODS
from scd_pack.scd_core.law import LawSettings
from scd_pack.scd_core.plan import TokenPlan
from scd_pack.scd_core.window import COMMITS, GAIN, LENGTHS, NODES, choose_shape, measure_shape
from scd_tests.toys import ToyFamily, tiny_decoder, word_streams

STILL, CLIP = TokenPlan(1, 20, 20, 12), TokenPlan(4, 10, 10, 12)


@pytest.fixture
def decoder(monkeypatch):
    monkeypatch.setattr(module, "_measured", {})
    return tiny_decoder()


class Speedometer:
    """A clock under which a pass of `length` rows takes seconds(length), and a session that keeps it running."""

    def __init__(self, monkeypatch, seconds):
        self.now, self.rows, clock = 0.0, [], self

        class Session:
            def __init__(self, *args):
                self.args = args

            def window(self, tokens, before, length, opening, visible=None):
                assert int(before.max()) + 1 == length <= STILL.length
                assert torch.equal(before[0].diff(), torch.ones(tokens.shape[1] - 1, dtype=torch.int64))
                clock.rows.append(tokens.shape[1])
                clock.now += seconds(tokens.shape[1])
                return torch.zeros(1, 1, 1, 1)

        monkeypatch.setattr(module, "Session", Session)

    def __call__(self):
        return self.now


def shapes(clip, nodes=(0,), longest=LENGTHS[-1]):
    """{(window, nodes): commits} as the module would offer them."""
    gains = dict(zip(NODES, GAIN[clip]))
    return {(w, m): c * gains[m] for w, c in zip(LENGTHS, COMMITS[clip]) for m in nodes if m <= w <= longest}


@pytest.mark.parametrize(
    ("seconds", "clip", "want"),
    [
        (lambda n: 1.0, True, (256, 32)),  # rows are free
        (lambda n: float(n), False, (8, 0)),  # a row costs as much as a pass
        (lambda n: 1.0 if n <= 32 else 9.0, False, (32, 0)),
        (lambda n: 1.0 if n <= 96 else 9.0, False, (64, 32)),
        (lambda n: 1.0 if n <= 64 else 9.0, True, (64, 0)),
        (lambda n: 0.1 if n <= 96 else 9.0, False, (64, 32)),  # a tree's own time is little beside such a pass
        (lambda n: 0.01 if n <= 96 else 9.0, False, (64, 0)),  # and too much beside this one
    ],
)
def test_most_commits_a_second(monkeypatch, seconds, clip, want):
    clock = Speedometer(monkeypatch, seconds)
    got = measure_shape(None, None, STILL, [None], 2, "cpu", shapes(clip, NODES), clock)
    assert got == want


def test_search_ends_when_longer_has_clearly_lost(monkeypatch):
    clock = Speedometer(monkeypatch, lambda n: 1.0 if n <= 8 else 100.0)
    measure_shape(None, None, STILL, [None], 1, "cpu", shapes(False), clock)
    assert max(clock.rows) == 16


def test_no_longer_than_the_sequence(decoder):
    got = choose_shape(
        decoder, ToyFamily(), TokenPlan(1, 5, 5, 12), word_streams(), "seed-exact", 1, LawSettings(), "cpu"
    )
    assert got in {(8, 0), (16, 0)}


def test_what_the_user_gave_stays(decoder):
    def ask(window, nodes, method="seed-exact"):
        return choose_shape(
            decoder, ToyFamily(), STILL, word_streams(), method, 1, LawSettings(), "cpu", window, nodes
        )

    assert ask(20, 7) == (20, 7) and ask(20, 0) == (20, 0)
    assert ask(20, -1) == (20, 0)  # a tree is no longer than its window
    assert ask(40, -1) in {(40, 0), (40, 32)}
    assert ask(0, 64)[1] == 64
    assert ask(20, 7, "scd-maximal") == (20, 7) and ask(20, -1, "scd-maximal") == (20, 0)
    assert ask(20, 7, "csd") == (20, 0)  # has no use for them


def test_tables_fit():
    assert all(len(row) == len(LENGTHS) and list(row) == sorted(row) for row in COMMITS.values())
    assert all(len(row) == len(NODES) and row[0] == 1.0 and list(row) == sorted(row) for row in GAIN.values())


@pytest.mark.parametrize("method", METHODS)
def test_which_methods_are_measured(decoder, method, monkeypatch):
    """Only those whose tokens do not depend on the window; for the others a seed must mean one picture."""
    measured = []
    monkeypatch.setattr(module, "measure_shape", lambda *args: measured.append(args) or (17, 0))
    still, clip = (
        choose_shape(decoder, ToyFamily(), plan, word_streams(), method, 1, LawSettings(cfg=2.0), "cpu")
        for plan in (STILL, CLIP)
    )
    if METHODS[method].sequential:
        assert (still, clip, measured) == ((1, 0), (1, 0), [])
    elif METHODS[method].memory:
        assert (still, clip, len(measured)) == ((17, 0), (17, 0), 2)
    else:
        own = METHODS[method].window
        assert (still, clip, measured) == ((own or 32, 0), (own or 64, 0), [])
        small = TokenPlan(1, 2, 3, 12)
        got = choose_shape(decoder, ToyFamily(), small, word_streams(), method, 1, LawSettings(), "cpu")
        assert got == (6, 0)


def test_measured_once_a_situation(decoder, monkeypatch):
    calls = []
    monkeypatch.setattr(module, "measure_shape", lambda *args: calls.append(len(args[3])) or (8, 0))

    def ask(plan=STILL, batch=1, cfg=2.0, model=decoder):
        return choose_shape(model, ToyFamily(), plan, word_streams(), "seed-exact", batch, LawSettings(cfg=cfg), "cpu")

    for _ in range(2):
        ask()
    assert calls == [2]
    ask(batch=2)
    ask(cfg=1.0)
    assert calls == [2, 2, 1]  # without guidance one stream is timed
    ask(plan=CLIP)
    ask(model=tiny_decoder(seed=5))
    assert len(calls) == 5
    ask(model=tiny_decoder())  # the same model, loaded again
    assert len(calls) == 5


@pytest.mark.parametrize("most", [8, 40, 4])
def test_what_does_not_fit_is_no_choice(decoder, monkeypatch, most):
    """Lengths that run out of memory while they are timed are passed over; where none fits, that is said."""

    def seconds(session, plan, batch, length, device, clock):
        if length > most:
            raise torch.OutOfMemoryError("no room")
        return 1.0

    monkeypatch.setattr(module, "_pass_seconds", seconds)
    place = (decoder, ToyFamily(), STILL, word_streams(), "seed-exact", 1, LawSettings(cfg=2.0), "cpu")
    if most < LENGTHS[0]:
        with pytest.raises(torch.OutOfMemoryError):
            choose_shape(*place)
    else:
        assert choose_shape(*place) == {8: (8, 0), 40: (32, 0)}[most]


def test_real_measurement(decoder):
    """On a real session: a length of the list, at every batch and guidance."""
    for batch in (1, 3):
        got = measure_shape(decoder, ToyFamily(), STILL, word_streams(), batch, "cpu", shapes(False, NODES))
        assert got in shapes(False, NODES)
