"""Further candidates at the front of the coupled methods: the exact multi-candidate rule and what it wins."""

import numpy as np
import pytest
import torch
from scd_pack.scd_core import proactive
from scd_pack.scd_core.acceptance import METHODS, Verdict
from scd_pack.scd_core.law import LawSettings
from scd_pack.scd_core.noise import Noise
from scd_pack.scd_core.proactive import Guesses
from scd_tests.statistics import law_test
from scd_tests.toys import draw, prefix_tables, row_end_plan, run, tiny_decoder

PROACTIVE = [name for name, method in METHODS.items() if method.proactive]
CHAINS = 20_000
CUT = LawSettings(top_k=2)


@pytest.fixture(scope="module")
def cut():
    return prefix_tables(3, 7, seed=11, scale=2.0)


@pytest.fixture(scope="module")
def wide():
    """Five tokens of five, nothing cut off."""
    return prefix_tables(5, 5, seed=3, scale=1.5)


def test_methods():
    assert set(PROACTIVE) == {"sjd", "scd-maximal", "scd-gumbel"}


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 2, 4])
@pytest.mark.parametrize("method", PROACTIVE)
def test_the_law_stays(wide, method, nodes):
    """Few and all possible candidates, ragged batch."""
    codes, report = run(wide, method=method, batch=CHAINS, seed=1, window=3, nodes=nodes)
    result = law_test(wide.index(codes), wide.joint())
    assert result.exact, result
    assert report.lossless and report.settings["nodes"] == nodes


@pytest.mark.slow
@pytest.mark.parametrize("start", ["uniform", "left_law", "random"])
def test_cut_laws(cut, start):
    """Fewer tokens have a chance than candidates are asked for."""
    codes, _ = run(cut, method="scd-maximal", batch=CHAINS, law=CUT, seed=1, window=4, nodes=2, start=start)
    result = law_test(cut.index(codes), cut.joint(CUT))
    assert result.exact, result


@pytest.mark.slow
@pytest.mark.parametrize("slip", ["drawn with replacement", "tested by the draft's own law", "residual forgotten"])
def test_slips_are_seen(wide, slip, monkeypatch):
    """Power: errors that are easily made fail the same test."""
    if slip == "drawn with replacement":  # but judged as if without
        real = proactive.without
        calls = iter(range(10**9))
        monkeypatch.setattr(proactive, "without", lambda w, t: w if next(calls) % 6 < 3 else real(w, t))
    elif slip == "tested by the draft's own law":
        real = proactive.without
        calls = iter(range(10**9))
        monkeypatch.setattr(proactive, "without", lambda w, t: real(w, t) if next(calls) % 6 < 3 else w)
    else:
        monkeypatch.setattr(proactive, "residual", lambda p, q: p)
    codes, _ = run(wide, method="scd-maximal", batch=CHAINS, seed=1, window=3, nodes=2)
    assert not law_test(wide.index(codes), wide.joint()).exact


@pytest.mark.parametrize("count", [1, 3, 7])
def test_one_position_in_closed_form(count):
    """Draft and candidates from q, judged by p: the token has law p, and more candidates fail less often."""
    torch.manual_seed(count)
    batch, vocab = 200_000, 8
    q, p = torch.randn(vocab).softmax(-1), (1.5 * torch.randn(vocab)).softmax(-1)
    noise, state = Noise(3, range(batch)), _State(q, batch)
    draft = torch.multinomial(q, batch, replacement=True)
    ids = torch.stack([torch.zeros_like(draft), draft, draft], 1)
    positions, state.noise = np.tile([5, 6], (batch, 1)), noise
    guesses = Guesses.draw(count, state, ids, positions, np.full((batch, 1), 2), passes=1)
    assert all((guesses.columns[:, k] != draft).all() for k in range(count))
    rows = 2 + count
    scores = p.log().expand(batch, rows, vocab)
    looked = np.concatenate([positions, guesses.position + 1], 1)
    drafts = torch.cat([ids[:, 1:], guesses.behind(ids[:, 1:], 0)], 1)
    view = Verdict(scores, drafts, q.expand(batch, rows, vocab), None, noise, looked, 1)
    token, kept = METHODS["scd-maximal"].accept(view)
    before = float(kept[:, 0].float().mean())
    hit = guesses.judge(view, token, kept)
    counts = torch.bincount(token[:, 0], minlength=vocab).float()
    error = (counts / batch - p).abs() / (p * (1 - p) / batch).sqrt()
    assert float(error.max()) < 4.5
    assert float(kept[:, 0].float().mean()) > before + 0.01
    if count == vocab - 1:  # every token is a candidate: nothing can fail
        assert kept[:, 0].all()
    assert torch.equal(hit >= 0, kept[:, 0] & (token[:, 0] != draft)), "a candidate differs from the draft"


class _State:
    """What `Guesses.draw` asks of a `WindowState`."""

    base = 0

    def __init__(self, q, batch):
        self.fixed, self.laws = np.full((batch, 9), -1), self
        self.q = q

    def read(self, positions):
        return self.q.expand(*positions.shape, -1)


@pytest.mark.parametrize("method", PROACTIVE)
def test_fewer_passes(method):
    """On a real decoder, with two streams; the report counts what was committed."""
    passes = []
    for nodes in (0, 7):
        _, report = draw(
            tiny_decoder(), row_end_plan(6, 6), method=method, nodes=nodes, window=12, batch=40, seed=4,
            law=LawSettings(cfg=2.0),
        )  # fmt: skip
        assert sum(map(sum, report.accepted)) == report.tokens == 40 * 36
        passes.append(sum(report.per_sample))
    assert passes[1] < passes[0]


@pytest.mark.parametrize("method", PROACTIVE)
def test_a_sample_alone_equals_the_batch(method):
    kept = torch.full((1, 1, 4, 5), -1)
    kept[..., 1, 1:4], kept[..., 3, 0] = 2, 7
    settings = {"method": method, "nodes": 2, "window": 6, "seed": 9, "kept": kept}
    together, _ = draw(tiny_decoder(), row_end_plan(), batch=3, **settings)
    for k in range(3):
        alone, _ = draw(tiny_decoder(), row_end_plan(), first_sample=k, **settings)
        assert torch.equal(alone[0], together[k])


def test_accepted_rows_are_what_the_cache_would_hold():
    """After every pass the next one sees the candidate's own keys: the tokens are those of a law computed anew."""
    from scd_tests.toys import ToyFamily, teacher_log_law, word_streams

    decoder, plan, law = tiny_decoder(gain=6.0), row_end_plan(), LawSettings(top_k=1)
    tokens, report = draw(decoder, plan, method="scd-maximal", nodes=3, window=6, law=law, start="uniform")
    want = teacher_log_law(decoder, ToyFamily(), plan, word_streams(), tokens, law).argmax(-1)
    free = plan.cells >= 0
    assert torch.equal(tokens[0, free], want[0, free]) and report.passes < report.tokens
