"""The law bank: what it remembers of positions and tokens, against a plain dictionary, and what a tree gains by it."""

import numpy as np
import pytest
import torch
from scd_pack.scd_core import bank
from scd_pack.scd_core.bank import FLOOR, NEWEST, LawBank
from scd_pack.scd_core.generate import Request, generate
from scd_pack.scd_core.models.load import load_model
from scd_pack.scd_core.ring import Ring
from scd_pack.scd_core.tree import others

VOCAB, BASE, SPAN = 7, 100, 6


def gumbels(batch):
    ring = Ring(batch, SPAN, VOCAB, "cpu")
    ring.store.normal_(generator=torch.Generator().manual_seed(3))
    return ring


@pytest.mark.parametrize("entries", [1000, 4 * VOCAB], ids=["a place for every token", "tokens share places"])
def test_it_is_a_dictionary_of_laws(entries, monkeypatch):
    monkeypatch.setattr(bank, "ENTRIES", entries)
    rng, batch, noise = np.random.default_rng(1), 2, gumbels(2)
    places = bank.token_places(VOCAB)
    laws, at, behind, told = LawBank(batch, VOCAB, BASE, SPAN, noise, "cpu"), [{}, {}], [{}, {}], 0
    for front in range(12):
        lanes, rows = 4, 9
        chain = np.tile(front + np.arange(lanes), (batch, 1))
        positions = np.concatenate([chain, rng.integers(front, front + lanes, (batch, rows - lanes))], 1)
        left = BASE + rng.integers(-1, VOCAB + 1, (batch, rows))  # some are tokens of the format
        valid = rng.random((batch, rows)) < 0.8
        scores = torch.from_numpy(5 * rng.standard_normal((batch, rows, VOCAB)).astype(np.float32))
        scores[:, 0, 3] = -np.inf  # a filter's
        laws.record(scores, positions, left, valid, lanes)
        for b in range(batch):
            newest, at[b] = {}, {}
            for r in np.flatnonzero(valid[b]):
                law = scores[b, r].clamp(min=scores[b, r].max() + FLOOR)
                if r < lanes:
                    at[b][positions[b, r]] = law
                token = left[b, r] - BASE
                if 0 <= token < VOCAB:
                    newest[token % places] = token, law
            for place, (token, law) in newest.items():
                old = behind[b].get(place, (None, None))
                behind[b][place] = token, torch.lerp(old[1], law, NEWEST) if old[0] == token else law
        asked = rng.random((batch, rows)) < 0.9
        known = laws.knows(positions, left, asked)
        got = iter(laws.scores(positions, left, known))
        for b, r in np.argwhere(asked):
            token = left[b, r] - BASE
            kept = behind[b].get(token % places, (None,)) if 0 <= token < VOCAB else (None,)
            assert known[b, r] == (positions[b, r] in at[b] and kept[0] is not None and kept[0] == token)
            if known[b, r]:
                want = (at[b][positions[b, r]] + kept[1]) / 2 + noise.store[b, positions[b, r] % SPAN]
                assert torch.allclose(next(got), want, atol=1e-5)
                told += 1
        assert not (known & ~asked).any()
    assert told > 40


def test_rows_that_do_not_count_change_nothing():
    """Tokens that follow each other lie side by side in the bank of a single sample."""
    laws, where = LawBank(1, VOCAB, BASE, SPAN, gumbels(1), "cpu"), np.array([[0, 1, 2]])
    left = BASE + where
    before, after = torch.randn(2, 1, 3, VOCAB)
    laws.record(before, where, left, np.array([[True, True, True]]), 3)
    kept = laws.behind.store.clone()
    laws.record(after, where, left, np.array([[True, False, True]]), 3)
    same = (laws.behind.store == kept).all(-1)[0, :3]
    assert same.tolist() == [False, True, False]


def test_a_finished_sample_takes_its_laws_along():
    laws, where = LawBank(2, VOCAB, BASE, SPAN, gumbels(2), "cpu"), np.array([[2], [2]])
    valid, left = np.array([[True], [True]]), np.array([[BASE + 1], [BASE + 2]])
    laws.record(torch.arange(2.0 * VOCAB).view(2, 1, VOCAB).sin(), where, left, valid, 1)
    assert not laws.knows(where[:1], left[1:], valid[:1])
    laws.move(1, 0)
    laws.gumbels.move(1, 0)
    assert laws.knows(where[:1], left[1:], valid[:1])
    got = laws.scores(np.repeat(where[:1], 2, 0), np.repeat(left[1:], 2, 0), np.ones((2, 1), dtype=bool))
    assert torch.equal(got[0], got[1])


def test_others_leave_out_the_token_once():
    tokens, gaps = np.array([[5, 6, 7], [5, 6, 7], [4, 0, 0]]), np.arange(9.0).reshape(3, 3)
    rest, distance = others(tokens, gaps, np.array([6, 9, 0]))
    assert rest.tolist() == [[5, 7], [5, 6], [4, 0]]
    assert distance.tolist() == [[0, 2], [3, 4], [6, 8]]


@pytest.mark.slow
def test_a_tree_needs_fewer_passes_with_it(monkeypatch):
    """Six pictures of the bundled model: the same tokens either way."""
    model = load_model(dtype="fp32")
    words = "fox on snow", "rocket on night", "birthday cake on wood", "panda on grass", "car on sand", "rose on plain"

    def drawn():
        """(passes of all, hashes of the tokens)"""
        reports = []
        for k, prompt in enumerate(words):
            request = Request(method="seed-exact", seed=k, temperature=1, top_k=0, cfg=1, window=64, nodes=32)
            encoded = model.family.text.encode(prompt)
            reports.append(generate(model.decoder, model.family, encoded, request=request).report)
        return sum(r.passes for r in reports), [r.sha256_tokens for r in reports]

    count, tokens = drawn()
    monkeypatch.setattr(LawBank, "knows", lambda self, positions, left, asked: asked & False)
    without, same = drawn()
    assert tokens == same
    assert count < 0.98 * without, (count, without)
