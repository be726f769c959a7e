"""Rows side by side: the mask, the cache, how many passes, and the law where rows wait for the whole row above."""

import pytest
import torch
from scd_pack.scd_core.acceptance import METHODS, Verdict
from scd_pack.scd_core.law import LawSettings
from scd_pack.scd_core.layout_state import LineRing, Lines
from scd_pack.scd_core.noise import Noise
from scd_pack.scd_core.plan import TokenPlan
from scd_pack.scd_core.state import Frontier
from scd_tests.row_spy import from_scratch, row_counts, sees, watch
from scd_tests.statistics import combined_z, entropy_z, law_test
from scd_tests.test_identity import GUIDED, PLANS, kept_cells
from scd_tests.toys import draw, grid, pairs_in_rows, prefix_tables, row_end_plan, run, tiny_decoder

ROWS = ("pjd", "pjd-c", "zipar")
STILL, ENDS = TokenPlan(1, 4, 5, 12), row_end_plan(4, 5)
FULL = 99
TWO = LawSettings(cfg=2.0)  # both streams
CHAINS = 20_000


@pytest.fixture(scope="module")
def decoder():
    return tiny_decoder()


# the limit: rows one after another ----------------------------------------------------------------------------------


def clip_windows(monkeypatch, plan, first=None):
    """Let the raster window end with the row of its first free position; `first`: all rows but the first are whole."""
    real, lines = Frontier.window_end, Lines(plan)

    def window_end(self, window):
        line = lines.line[self.free[self.decided]]
        last = self.free[lines.line[self.free] == line][-1]
        return min(real(self, window if first is None or line == 0 else plan.length), int(last) + 1)

    monkeypatch.setattr(Frontier, "window_end", window_end)


@pytest.mark.parametrize("law", [None, GUIDED], ids=["plain", "guided"])
@pytest.mark.parametrize("kept", [False, True], ids=["free", "kept"])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_full_context_is_scd_with_the_window_clipped(decoder, monkeypatch, plan, kept, law):
    settings = {"window": 4, "batch": 3, "seed": 6, "law": law, "start": "uniform"}
    settings["kept"] = kept_cells(plan) if kept else None
    got, report = draw(decoder, plan, method="pjd-c", row_context=FULL, **settings)
    slow, _ = draw(decoder, plan, method="zipar", row_context=plan.cols, **{**settings, "start": "auto"})
    want, _ = draw(decoder, plan, method="autoregressive", **{**settings, "start": "auto"})
    assert torch.equal(slow, want)
    clip_windows(monkeypatch, plan)
    want, raster = draw(decoder, plan, method="scd-maximal", **settings)
    assert torch.equal(got, want) and report.accepted == raster.accepted
    assert report.lossless and report.settings["row_context"] == plan.cols


SHAPES = [(1, 2, 3), (1, 3, 2), (2, 1, 3)]


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("method", ["pjd-c", "zipar"])
def test_law_at_full_context(method, shape):
    tables = prefix_tables(3, 6, seed=5, shape=shape)
    for toy, law in ((tables, LawSettings(top_k=2)), (pairs_in_rows(shape=shape), None)):
        codes, report = run(toy, method, batch=CHAINS, law=law, window=20, seed=1, row_context=FULL)
        result = law_test(toy.index(codes), toy.joint(law))
        assert result.exact and report.lossless, result


@pytest.mark.slow
@pytest.mark.parametrize("start", ["random", "left", "above", "left_law", "above_law", "previous_frame_law"])
def test_law_at_full_context_from_every_start(start):
    """With given tokens in two of the rows."""
    toy, given = prefix_tables(3, 6, seed=5, shape=(1, 3, 2)), {1: 2, 4: 0}
    kept = torch.tensor([given.get(j, -1) for j in range(6)]).view(1, 1, 3, 2)
    codes, _ = run(toy, "pjd-c", batch=CHAINS, window=20, seed=2, row_context=FULL, start=start, kept=kept)
    assert law_test(toy.index(codes), toy.joint(given=given)).exact


@pytest.mark.slow
def test_published_rule_is_seen():
    """PJD as published is biased even where every row waits for the whole row above; so is any shorter context."""
    toy = pairs_in_rows(shape=(1, 2, 3))
    cases = [("pjd", FULL), ("pjd", 1), ("pjd-c", 1), ("zipar", 1)]
    for method, context in cases:
        codes, report = run(toy, method, batch=CHAINS, window=20, seed=1, row_context=context, start="uniform")
        assert law_test(toy.index(codes), toy.joint()).clearly_biased and not report.lossless, (method, context)


# what a pass sees and feeds -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", [STILL, ENDS], ids=["plain", "row ends"])
@pytest.mark.parametrize("method", ROWS)
def test_mask_against_brute_force(decoder, method, plan):
    _, report, passes, settled = watch(decoder, plan, method=method, window=3, seed=2, row_context=1, law=TWO)
    overlapped = False
    for one, decided in zip(passes, settled):
        counts = row_counts(plan, decided)[0]
        overlapped |= int((counts % plan.cols > 0).sum()) > 1
        for stream, prompt in enumerate((3, 1)):
            blocked = one.blocked[stream]
            for lane, query in enumerate(one.before[0].tolist()):
                assert not blocked[lane, :prompt].any()
                want = [sees(plan, counts, 1, query, key) for key in range(blocked.shape[1] - prompt)]
                assert (~blocked[lane, prompt:]).tolist() == want, (query, counts)
    assert overlapped and report.passes == len(passes)


@pytest.mark.parametrize("plan", [STILL, ENDS, TokenPlan(2, 3, 4, 12)], ids=["plain", "row ends", "clip"])
@pytest.mark.parametrize("method", ROWS)
def test_tokens_are_fed_at_their_places(decoder, method, plan):
    """Rotary places are those of the raster; decided tokens are what is drawn; stand-ins are ZipAR's."""
    tokens, _, passes, settled = watch(decoder, plan, method=method, window=3, seed=4, row_context=2, law=TWO)
    last, stand_ins, decided_slots = tokens[0], 0, []
    for one, decided in zip(passes, settled):
        before, counts = one.before[0], row_counts(plan, decided)[0]
        assert torch.equal(one.slots, torch.stack([before + 3, before + 1]))
        assert before.unique().numel() == before.numel()  # no slot twice
        for lane, at in enumerate(before.tolist()):
            token, row = int(one.tokens[0, lane]), at // plan.row_stride
            ends_row = at >= 0 and (at + 1) % plan.row_stride == 0
            if at >= 0 and (decided[0, at] or plan.forced[at] >= 0):
                assert token == last[at]
                decided_slots.append(at)
            elif ends_row:
                source = max(row - 1, 0)
                assert token == last[source * plan.cols + counts[source] - 1]
                stand_ins += 1
    assert (stand_ins > 0) == (plan is not ENDS)
    if METHODS[method].every_row:  # what is decided is fed once
        assert len(set(decided_slots)) == len(decided_slots)


@pytest.mark.parametrize("plan", [STILL, ENDS], ids=["plain", "row ends"])
@pytest.mark.parametrize("method", [*ROWS, "row-block"])
@torch.inference_mode()
def test_cache_is_a_masked_forward(decoder, method, plan):
    _, _, passes, _ = watch(decoder, plan, method=method, window=3, seed=4, row_context=2, batch=2, law=TWO)
    alive = [one for one in passes if len(one.tokens) == 2]
    assert len(alive) > 5
    for sample in range(2):
        assert from_scratch(decoder, plan, alive, sample) < 1e-5


# passes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("context", [1, 2, 5, -1, FULL])
@pytest.mark.parametrize("plan", [STILL, ENDS, TokenPlan(1, 3, 16, 12), TokenPlan(2, 3, 4, 12)], ids=str)
def test_passes_of_zipar(decoder, plan, context):
    """(R - 1) * T + C, exactly."""
    _, report = draw(decoder, plan, method="zipar", batch=2, seed=1, row_context=context)
    columns = report.settings["row_context"]
    assert columns == {-1: max(1, round(plan.cols / 4)), FULL: plan.cols}.get(context, min(context, plan.cols))
    assert report.per_sample == [(plan.frames * plan.rows - 1) * columns + plan.cols] * 2


@pytest.mark.parametrize("kept", [False, True], ids=["free", "kept"])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("method", ROWS)
def test_no_row_overtakes_the_row_above(decoder, method, plan, kept):
    kept = kept_cells(plan) if kept else None
    _, report, _, settled = watch(decoder, plan, method=method, window=3, seed=2, batch=3, row_context=2, kept=kept)
    for accepted in report.accepted:
        assert min(accepted) >= 1
    for before, after in zip(settled[1:], settled[2:]):
        assert (after | ~before).all()  # what is decided stays so
        counts = row_counts(plan, after)
        assert (counts[:, 1:] <= counts[:, :-1]).all()


def means(toy, contexts, method="pjd-c", samples=24):
    """(mean passes, z of the mean NLL) of each context."""
    out = []
    for context in contexts:
        codes, report = run(toy, method, batch=samples, window=8, seed=3, row_context=context)
        padded = torch.cat([codes, torch.zeros_like(codes[:, :1])], 1)
        log_p = toy.logits(padded, torch.arange(codes.shape[1]).expand(len(codes), -1)).log_softmax(-1)
        out.append((sum(report.per_sample) / samples, combined_z(entropy_z(log_p, codes))))
    return out


@pytest.mark.slow
def test_shorter_context_is_faster_and_worse():
    """On a toy that looks far up and to the right, which a row with a short context cannot see yet."""
    toy = grid(neighbours={(0, -1): 0.6, (-1, 6): 1.2, (-1, 0): 0.5})
    found = means(toy, (2, 4, 8, 16))
    passes, z = zip(*found)
    assert passes[0] < passes[1] < passes[2] < passes[3], found
    assert abs(z[3]) < 4 and z[0] > z[1] > z[2] > z[3] and z[0] > 10, found


@pytest.mark.slow
def test_the_avoidable_bias_is_gone():
    """Context that shows all that the toy looks at: what is left in PJD's likelihood is its own rule's doing."""
    toy = grid(kappa=0.55, neighbours={(0, -1): 1.0, (-1, 0): 1.0, (-1, -1): 0.6, (0, -2): 0.4, (-2, 0): 0.4})
    (ours, z), (theirs, biased) = means(toy, [6], samples=48)[0], means(toy, [6], "pjd", 48)[0]
    assert abs(z) < 4 < 6 < abs(biased) and ours < 1.05 * theirs, (ours, z, theirs, biased)


# company, room, rules -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", ["auto", "above_law", "left"])
@pytest.mark.parametrize("method", [*ROWS, "row-block"])
def test_row_of_a_batch_is_the_single_run(decoder, method, start):
    """Samples with many and no given tokens; laws of more rows than there was room for at first."""
    plan = TokenPlan(1, 12, 4, 12)
    kept = torch.full((4, 1, 12, 4), -1)
    kept[1, 0, :3] = 5
    kept[2, 0, 4:9, 1:] = 3
    kept[3, 0, :, 3] = 2
    settings = {"method": method, "window": 3, "seed": 8, "start": start, "row_context": 1}
    batch, whole = draw(decoder, plan, batch=4, kept=kept, law=GUIDED, **settings)
    for k in range(4):
        alone, report = draw(decoder, plan, kept=kept[k : k + 1], first_sample=k, law=GUIDED, **settings)
        assert torch.equal(alone[0], batch[k]) and report.accepted[0] == whole.accepted[k]
        assert (kept[k].flatten() < 0).logical_or(batch[k] == kept[k].flatten()).all()


def test_laws_survive_growth(generator):
    lines = Lines(TokenPlan(1, 9, 4, 3))
    ring = LineRing(2, lines, 2, 3, 5, "cpu")
    held = torch.tensor([[8, 9, 10, 13], [20, 21, 22, 25]]).numpy()  # places 0..2 of a row, then 1 of the next
    values = torch.rand(2, 4, 5, generator=generator)
    ring.write(held, values)
    ring.fit(2, held[:, -1] // 4)
    assert ring.count == 2
    ring.fit(5, held[:, -1] // 4)
    assert ring.count == 5 and torch.equal(ring.read(held), values)
    ring.write(held + 8, values + 1)
    assert torch.equal(ring.read(held), values) and torch.equal(ring.read(held + 8), values + 1)


def test_published_rule():
    """Two rows of three: behind a row's first reject drafts with p/q above 1/2 keep token and law."""
    rule, p = METHODS["pjd"], torch.tensor([0.1, 0.3, 0.6])
    q = torch.tensor([0.6, 0.3, 0.1])
    draft = torch.tensor([[1, 0, 1, 0, 1, 2]])
    heads = torch.tensor([[True, False, False, True, False, False]]).numpy()
    laws = (t.expand(1, 6, 3) for t in (p.log(), q))
    scores, q_all = laws
    view = Verdict(scores, draft, q_all, None, Noise(3, [0]), torch.arange(6)[None].numpy(), 1, heads)
    token = torch.tensor([[1, 2, 1, 2, 1, 2]])  # the second and the fourth are rejected, each the first of its row
    drafts, law = rule.couple(view, token)[0], rule.remember(view, token, token == draft)[0]
    kept = [True, False, True, False, True, True]
    for lane, stays in enumerate(kept):
        assert torch.allclose(law[lane], q if stays else p), lane
        assert not stays or drafts[lane] == draft[0, lane]
