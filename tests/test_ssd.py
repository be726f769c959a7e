"""SSD: rows drafted by heads on hidden states. The file of heads, the laws they give, passes, exactness."""

import shutil

import numpy as np
import pytest
import torch
from scd_pack.scd_core import spatial
from scd_pack.scd_core.acceptance import METHODS
from scd_pack.scd_core.checkpoint import list_models, save_safetensors
from scd_pack.scd_core.errors import UserError
from scd_pack.scd_core.generate import Request, check_request
from scd_pack.scd_core.law import LawSettings, token_law
from scd_pack.scd_core.layout_state import Lines
from scd_pack.scd_core.models.load import load_model
from scd_pack.scd_core.models.spatial_heads import HeadFile, SpatialHeads, pack_heads
from scd_pack.scd_core.plan import TokenPlan
from scd_pack.scd_core.state import Frontier
from scd_tests.biased import rule
from scd_tests.janus_models import GOLDEN
from scd_tests.row_spy import from_scratch, row_counts, watch
from scd_tests.sentences import is_one_sentence
from scd_tests.statistics import law_test
from scd_tests.test_identity import GUIDED, PLANS, kept_cells
from scd_tests.toys import (
    Toy,
    ToyFamily,
    ToyHeads,
    draw,
    initialise,
    pairs_in_rows,
    position_rows,
    prefix_tables,
    row_end_plan,
    run,
    tiny_decoder,
    word_streams,
)

CHAINS = 20_000
STILLS = {name: plan for name, plan in PLANS.items() if plan.frames == 1}


@pytest.fixture(scope="module")
def decoder():
    return tiny_decoder()


def random_heads(decoder, horizontal=2, vertical=2, width=24):
    return initialise(SpatialHeads(decoder, width, horizontal, vertical), seed=4)


def serve(monkeypatch, heads):
    """Let the toy family have these heads."""
    monkeypatch.setattr(ToyFamily, "heads", type("Fixed", (ToyHeads,), {"load": lambda *_: heads})())


def save_heads(heads, path, change=None, **config):
    """Write heads; change: (tensors) -> None spoils them, config: values of the metadata to replace."""
    tensors, metadata = pack_heads(heads, "the toy")
    if change is not None:
        change(tensors)
    metadata["config"] = {**metadata["config"], **config}
    return save_safetensors(tensors, path, metadata, overwrite=True)


# the file -----------------------------------------------------------------------------------------------------------


def test_heads_come_back(decoder, tmp_path):
    heads, model = random_heads(decoder), tmp_path / "toy.safetensors"
    for place in ("ssd_heads.safetensors", "toy.ssd.safetensors"):
        save_heads(heads, tmp_path / place)
    again = HeadFile(model, "toy").load(decoder, "cpu")
    hidden, token = torch.randn(2, 5, 1, 32), torch.arange(10).view(2, 5)
    right, down = np.array([[1, 2, 0, 0, 0]] * 2), np.array([[0, 0, 1, 2, 3]] * 2)
    want, got = heads.logits(hidden, token, right, down), again.logits(hidden, token, right, down)
    assert torch.allclose(got, want, atol=0.05) and not torch.equal(got, want)  # stored in bf16
    assert heads.states(hidden, token, right, down)[:, 4].abs().max() == 0  # no head reaches so far
    assert HeadFile(model, "toy").reach(decoder) == (2, 2)


@pytest.mark.parametrize(
    ("change", "config", "words"),
    [
        (None, {"format": "other"}, "no SSD heads"),
        (None, {"vertical": 0}, "no SSD heads"),
        (None, {"width": "24"}, "no SSD heads"),
        (None, {"model": 3}, "no SSD heads"),
        (None, {"model": {"dim": 64, "layers": 2, "head_rows": 12}}, "hidden states 64 wide, this one has hidden"),
        (None, {"model": {"dim": 32, "layers": 2, "head_rows": 99}}, "a vocabulary of 99, this one has a vocabulary"),
        (lambda t: t.pop("vertical.1.w3.weight"), {}, "vertical.1.w3.weight is missing"),
        (lambda t: t.update({"vertical.0.w0.weight": torch.zeros(32, 63)}), {}, r"\[32, 63\] instead of \[32, 64\]"),
    ],
)
def test_wrong_files_are_refused(decoder, tmp_path, change, config, words):
    save_heads(random_heads(decoder), tmp_path / "ssd_heads.safetensors", change, **config)
    file = HeadFile(tmp_path, "the toy")
    for ask in (lambda: file.load(decoder, "cpu"), lambda: file.reach(decoder)):
        with pytest.raises(UserError, match=words) as caught:
            ask()
        assert is_one_sentence(str(caught.value)) and "ssd_heads.safetensors" in str(caught.value)


def test_what_cannot_be_drawn_is_refused(decoder, tmp_path, monkeypatch):
    plan = TokenPlan(1, 3, 4, 12)
    monkeypatch.setattr(ToyFamily, "heads", HeadFile(tmp_path / "toy.safetensors", "the toy"))
    with pytest.raises(UserError, match="has no SSD heads") as caught:
        draw(decoder, plan, method="ssd")
    assert is_one_sentence(str(caught.value)) and "toy.ssd.safetensors" in str(caught.value)
    save_heads(random_heads(decoder), tmp_path / "toy.ssd.safetensors")
    with pytest.raises(UserError, match="reach 2 down") as caught:
        draw(decoder, plan, method="ssd", block_rows=3)
    assert is_one_sentence(str(caught.value))
    monkeypatch.setattr(ToyFamily, "heads", None)
    with pytest.raises(UserError, match="row-block"):
        draw(decoder, plan, method="ssd")
    for rows in (0, 5):
        with pytest.raises(UserError, match=f"rows at once {rows}"):
            check_request(Request(block_rows=rows))


def test_heads_are_no_model(tmp_path):
    """They lie among the models and are none: not listed, and a folder with one model stays one."""
    folder = tmp_path / "models" / "janus"
    shutil.copytree(GOLDEN / "janus-pro-hf" / "model", folder)
    before = list_models([tmp_path / "models"])
    model = load_model(folder, "fp32")
    for place in model.family.heads.places():
        save_heads(random_heads(model.decoder), place)
    assert list_models([tmp_path / "models"]) == before and load_model(folder, "fp32").family.heads.reach(model.decoder)


# laws ---------------------------------------------------------------------------------------------------------------


def teacher_states(decoder, plan, tokens, streams):
    """Hidden states [B, N, S, dim] that tokens were drawn from, by a causal forward for each stream."""
    out, longest = [], max(stream.length for stream in streams)
    table = ToyFamily().positions(decoder, plan, longest, "cpu")
    for stream in streams:
        prompt = decoder.embed.prompt(stream, torch.float32).expand(len(tokens), -1, -1)
        x = torch.cat([prompt, decoder.embed.image(tokens, torch.float32)], 1)[:, :-1]
        out.append(decoder.states(x, position_rows(decoder, table, x.shape[1]))[:, stream.length - 1 :])
    return torch.stack(out, 2)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("plan", STILLS.values(), ids=STILLS)
@torch.inference_mode()
def test_drafts_have_the_heads_laws(decoder, monkeypatch, plan, rows):
    """In exact rounds the state of a finished position is that of a causal forward; each stream has its own."""
    asked, heads, real = [], random_heads(decoder), spatial.Forecast.laws

    def laws(self, positions, source):
        law = real(self, positions, source)
        asked.append((positions.copy(), source.copy(), law))
        return law

    monkeypatch.setattr(spatial.Forecast, "laws", laws)
    serve(monkeypatch, heads)
    tokens, report = draw(decoder, plan, method="ssd", rounds=0, block_rows=rows, window=3, seed=1, law=GUIDED)
    states, lines = teacher_states(decoder, plan, tokens, word_streams(plan.vocab)), Lines(plan)
    seen = set()
    for positions, source, law in asked:
        for position, at, got in zip(positions[0].tolist(), source[0].tolist(), law[0]):
            rows_down = int(lines.line[position] - lines.line[at]) if at >= 0 else 0
            if not 0 < rows_down <= 2 or plan.cells[position] < 0:
                continue
            seen.add(rows_down)
            assert lines.offset[position] == lines.offset[at]
            z = torch.cat([states[0, at], decoder.embed.image(tokens[0, at], torch.float32).expand(2, -1)], -1)
            logits = decoder.logits(decoder.norm(heads.vertical[rows_down - 1](z)))[None, :, None]
            assert torch.allclose(got, token_law(logits, GUIDED)[0, 0].exp(), atol=1e-4), position
    assert seen == set(range(1, rows + 1)) and report.lossless


def test_horizontal_heads_serve_the_first_row(decoder, monkeypatch):
    asked, real = [], spatial.Forecast.sources

    def sources(self, positions, known):
        found = real(self, positions, known)
        asked.extend(zip(positions.flatten().tolist(), found.flatten().tolist()))
        return found

    monkeypatch.setattr(spatial.Forecast, "sources", sources)
    plan = TokenPlan(1, 2, 12, 12)
    draw(decoder, plan, method="ssd", window=3, seed=1, rounds=1)
    first = {position: at for position, at in asked if position < 12}
    assert [first[p] for p in range(3)] == [-1] * 3  # nothing is known yet
    assert all(at < 0 or 1 <= p - at <= 2 for p, at in first.items()) and any(at >= 0 for at in first.values())
    assert {p: at for p, at in asked if p >= 12} == {p: p - 12 for p in range(12, 24)}


def neighbour_toy(rows, cols, vocab=6):
    """A cell's law depends on the cell above alone, so that a vertical head can know it."""
    table = 2 * torch.randn(vocab + 1, vocab, generator=torch.Generator().manual_seed(3))

    def logits(known, positions):
        above = torch.where(positions >= cols, known.gather(1, (positions - cols).clamp(min=0)), vocab)
        return table[above]

    return Toy(TokenPlan(1, rows, cols, vocab), logits), table


class KnowingHeads(ToyHeads):
    """Heads that know what follows below."""

    table = None

    def logits(self, hidden, token, right, down):
        return self.table[token][:, None]


def test_good_heads_make_a_row_one_pass(monkeypatch):
    toy, table = neighbour_toy(8, 10)
    wrong, _ = run(toy, "ssd", window=10, seed=1, rounds=0)[1], None
    monkeypatch.setattr(KnowingHeads, "table", table)
    monkeypatch.setattr(ToyFamily, "heads", KnowingHeads())
    right = run(toy, "ssd", window=10, seed=1, rounds=0)[1]
    first = 1  # the first row does not depend on anything either
    assert right.passes <= first + 1 + 7 < wrong.passes


# exactness ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "rows", "rounds"), [((1, 2, 3), 1, 0), ((1, 3, 2), 2, 0), ((1, 3, 2), 2, 3), ((2, 2, 2), 1, 0)], ids=str
)
def test_exact_rounds_have_the_law(shape, rows, rounds):
    """Whatever the heads say."""
    toy = pairs_in_rows(shape=shape) if shape[0] == 1 else prefix_tables(2, 8, seed=5, shape=shape)
    codes, report = run(toy, "ssd", batch=CHAINS, window=20, seed=1, rounds=rounds, block_rows=rows)
    result = law_test(toy.index(codes), toy.joint())
    assert result.exact and report.lossless, result


@pytest.mark.slow
def test_wrong_bookkeeping_is_seen():
    """The heads' law kept in all rounds is biased, as are few rounds."""
    toy = pairs_in_rows(shape=(1, 3, 2))
    kept = rule(METHODS["ssd"], remember=lambda view, token, kept: view.q)
    for variant, rounds in ((kept, 0), (None, 1)):
        codes, _ = run(toy, "ssd", variant, batch=CHAINS, window=20, seed=1, rounds=rounds)
        assert law_test(toy.index(codes), toy.joint()).clearly_biased, rounds


def clip_to_blocks(monkeypatch, plan, rows):
    """Let the raster window end with the block of its first free position."""
    real, lines = Frontier.window_end, Lines(plan, rows)

    def window_end(self, window):
        inside = lines.line[self.free] == lines.line[self.free[self.decided]]
        return min(real(self, window), int(self.free[inside][-1]) + 1)

    monkeypatch.setattr(Frontier, "window_end", window_end)


@pytest.mark.parametrize("start", ["above", "above_law", "uniform"])
@pytest.mark.parametrize("plan", STILLS.values(), ids=STILLS)
def test_exact_blocks_are_scd_with_blocks_for_windows(decoder, monkeypatch, plan, start):
    settings = {"window": 2 * plan.row_stride, "batch": 3, "seed": 6, "law": GUIDED, "start": start}
    got, report = draw(decoder, plan, method="row-block", rounds=0, block_rows=2, **settings)
    clip_to_blocks(monkeypatch, plan, 2)
    want, raster = draw(decoder, plan, method="scd-maximal", **settings)
    assert torch.equal(got, want) and report.accepted == raster.accepted and report.lossless


# passes, cache ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["ssd", "row-block"])
@pytest.mark.parametrize("plan", [TokenPlan(1, 6, 12, 12), row_end_plan(7, 12)], ids=["plain", "row ends"])
def test_passes(decoder, plan, method):
    """First row + (R - 1) * r exactly; two rows together: r for the first and r - 1 more for the second."""
    for rounds, block in ((1, 1), (2, 1), (1, 2), (2, 2)):
        settings = {"window": 4, "seed": 2, "rounds": rounds, "block_rows": block}
        _, report, _, settled = watch(decoder, plan, method=method, **settings)
        ends = [
            next(t for t, decided in enumerate(settled) if row_counts(plan, decided)[0, row] == plan.cols)
            for row in range(plan.rows)
        ]
        staged = [rounds if block == 1 or row % 2 else rounds - 1 for row in range(1, plan.rows)]
        assert [after - before for before, after in zip(ends, ends[1:])] == staged, (rounds, block)
        assert report.per_sample == [ends[-1]] and not report.lossless


@pytest.mark.parametrize("rounds", [0, 2])
@pytest.mark.parametrize("plan", [TokenPlan(1, 5, 5, 12), row_end_plan(5, 5)], ids=["plain", "row ends"])
@torch.inference_mode()
def test_cache_is_a_masked_forward(decoder, plan, rounds):
    settings = {"window": 3, "seed": 4, "batch": 2, "law": LawSettings(cfg=2.0), "rounds": rounds, "block_rows": 2}
    _, _, passes, _ = watch(decoder, plan, method="ssd", **settings)
    alive = [one for one in passes if len(one.tokens) == 2]
    assert len(alive) > 5
    for sample in range(2):
        assert from_scratch(decoder, plan, alive, sample) < 1e-5


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_row_of_a_batch_is_the_single_run(decoder, monkeypatch, plan, rows):
    heads = random_heads(decoder)
    serve(monkeypatch, heads)
    kept = kept_cells(plan)
    settings = {"method": "ssd", "window": 3, "seed": 8, "block_rows": rows, "law": GUIDED}
    batch, whole = draw(decoder, plan, batch=3, kept=kept, **settings)
    for k in range(3):
        own = kept if len(kept) == 1 else kept[k : k + 1]
        alone, report = draw(decoder, plan, kept=own, first_sample=k, **settings)
        assert torch.equal(alone[0], batch[k]) and report.accepted[0] == whole.accepted[k]


def test_heads_start_clips_too(decoder):
    """Copied tokens and laws of the previous frame are starts of methods without heads."""
    assert draw(decoder, TokenPlan(2, 3, 4, 12), method="ssd")[1].settings["start"] == "uniform"


def test_the_report_tells(decoder):
    plan = TokenPlan(1, 5, 6, 12)
    text = draw(decoder, plan, method="ssd", window=3, rounds=3, block_rows=2)[1].text()
    assert "lossy" in text and "2 at once in 3 rounds" in text and "after 2 more" in text
    assert "lossless" in draw(decoder, plan, method="ssd", window=3, rounds=0)[1].text()
