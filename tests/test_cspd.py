"""Continuous speculation: what each mode keeps of the target's law, what it costs, and who gives it away."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scd_pack.scd_core.continuous import coupling, cspd
from scd_pack.scd_core.continuous.cspd import MODES, joined
from scd_pack.scd_core.continuous.sampler import Run, Settings, sample
from scd_pack.scd_core.continuous.side import Cells
from scd_tests.continuous_toys import PROMPT, Chain, chain_run, family_of, random_mar

TARGET, DRAFT = (0.9, 0.6), (0.75, 0.8)
SAMPLES, LENGTH = 6000, 8
QUICK = Settings(steps=8, diffusion_steps=5, seed=3, prefill=0.125)


@pytest.fixture(scope="module")
def pair():
    """(target, draft): two little MARs that nearly agree."""
    net = random_mar(1)
    return net, random_mar(2, near=net, apart=0.01)


def drawn(net, draft, **settings):
    family = family_of(net)
    return sample(net, family, PROMPT, replace(QUICK, **settings), draft and (draft, family))


# --- cost -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("prefill", "gamma"), [(0.0, 3), (0.05, 4), (0.5, 4), (0.125, 16), (1.0, 4)])
def test_passes_of_block_mode(pair, prefill, gamma):
    report = drawn(*pair, mode="block", prefill=prefill, gamma=gamma).report
    first = int(np.ceil(prefill * 8))
    assert report.passes == first + int(np.ceil((8 - first) / gamma))
    assert report.draft_passes == 8 - first and not report.lossless
    assert report.tested == sum([1, 1, 1, 2, 2, 3, 3, 3][first:]) and sum(report.accepted[0]) == 16


@pytest.mark.parametrize("mode", ["prefix", "exact"])
def test_passes_where_nothing_and_where_everything_is_taken(pair, mode):
    net = pair[0]
    none = drawn(net, random_mar(8), mode=mode, gamma=3).report
    assert none.passes == 8 and none.taken == 0, "every pass commits a step all the same"
    everything = drawn(net, net, mode=mode, gamma=3).report
    assert everything.accepted_share == 1 and everything.passes == 1 + 2  # 7 steps in rounds of 3 + 1
    assert everything.draft_passes == 6


# --- identities -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_draft_that_is_the_target_gives_the_targets_picture(pair, mode):
    alone = drawn(pair[0], None)
    gamma = 1 if mode == "block" else 3  # block hides the drafts of a round from the target
    twice = drawn(pair[0], pair[0], mode=mode, gamma=gamma)
    assert twice.report.accepted_share == 1
    if mode == "block":
        assert torch.equal(twice.latents, alone.latents), "the same passes over the same rows"
    torch.testing.assert_close(twice.latents, alone.latents, atol=3e-4, rtol=1e-3)


def test_block_mode_hides_the_drafts_of_a_round(pair):
    report = drawn(pair[0], pair[0], mode="block", gamma=4).report
    assert report.accepted_share < 0.9


@pytest.mark.parametrize("mode", MODES)
def test_a_row_of_a_batch_is_the_picture_drawn_alone(pair, mode):
    three = drawn(*pair, mode=mode, gamma=3, batch=3)
    rows = [drawn(*pair, mode=mode, gamma=3, first_sample=row) for row in range(3)]
    for row, alone in enumerate(rows):
        torch.testing.assert_close(three.latents[row], alone.latents[0], atol=5e-4, rtol=2e-3)
        assert three.report.accepted[row] == alone.report.accepted[0]
    assert three.report.tested == sum(alone.report.tested for alone in rows)


@pytest.mark.parametrize("mode", MODES)
def test_settings_act(pair, mode):
    base = drawn(*pair, mode=mode)
    assert torch.equal(drawn(*pair, mode=mode).latents, base.latents)
    assert not torch.equal(drawn(*pair, mode=mode, seed=4).latents, base.latents)
    flat = drawn(*pair, mode=mode, tau=42.0)
    assert flat.report.taken > base.report.taken if mode != "exact" else torch.equal(flat.latents, base.latents)
    if mode != "exact":
        assert flat.report.accepted_share > 0.9, "flattened densities take nearly every draft of a near model"


def test_refused_drafts_do_not_stay_zero(pair):
    """Without a proposal that is taken the target's own token is used."""
    net, far = pair[0], random_mar(9)
    for mode in ("block", "prefix"):
        latents = drawn(net, far, mode=mode).latents
        assert latents.abs().amax(1).min() > 1e-3


def test_reports_tell_the_truth(pair):
    for mode, told in MODES.items():
        report = drawn(*pair, mode=mode).report
        assert report.lossless is told.lossless is (mode == "exact")
        assert report.method == f"cspd-{mode}" and "fewer steps" in report.text() and told.note in report.notes
        assert ("lossless" in report.text().splitlines()[0]) is told.lossless
        assert ("tau 1" in report.text()) is (mode != "exact")
        assert set(report.seconds) == {"target", "draft", "head", "rest"} and min(report.seconds.values()) >= 0


# --- laws: AR(1) chains whose joint law is known ----------------------------------------------------------------------


def chain_error(x, rho=TARGET[0], sigma=TARGET[1]):
    """Largest deviation of the cells' covariance from the chain's, in standard errors."""
    x = x.double()
    n, length = x.shape
    place = torch.arange(length)
    true = sigma**2 / (1 - rho**2) * rho ** (place[:, None] - place[None]).abs().double()
    found = x.T @ x / n
    error = ((true.diagonal()[:, None] * true.diagonal()[None] + true**2) / n).sqrt()
    return float(((found - true) / error).abs().max())


def lag(x):
    """Correlation of neighbours, mean over all pairs."""
    return float(np.mean([np.corrcoef(x[:, j], x[:, j + 1])[0, 1] for j in range(x.shape[1] - 1)]))


@pytest.mark.parametrize("last_noise", [False, True], ids=["silent end", "noisy end"])
def test_exact_mode_keeps_the_law_of_a_chain(last_noise):
    x, run = chain_run("exact", SAMPLES, TARGET, DRAFT, last_noise)
    assert chain_error(x) < 4.2 and 0.2 < run.taken / run.tested < 0.95
    committed = [sum(counts) for counts in run.accepted]
    assert set(committed) == {LENGTH} and max(len(counts) for counts in run.accepted) > 2


def test_prefix_mode_keeps_the_law_where_a_token_is_one_step():
    x, run = chain_run("prefix", SAMPLES, TARGET, DRAFT, last_noise=True)
    assert chain_error(x) < 4.2 and 0.2 < run.taken / run.tested < 0.95


def test_block_mode_loses_the_dependence():
    x, _ = chain_run("block", SAMPLES, TARGET, DRAFT, last_noise=True)
    assert chain_error(x) > 10 and lag(x) < 0.8 < lag(chain_run("prefix", SAMPLES, TARGET, DRAFT, True)[0])


def test_power_tau_of_the_released_code_is_seen_in_the_law():
    x, run = chain_run("prefix", SAMPLES, TARGET, DRAFT, last_noise=True, tau=42.0)
    assert run.taken / run.tested > 0.97 and chain_error(x) > 10


def test_power_reciprocal_factor_is_seen_in_the_law(monkeypatch):
    for module in (coupling, cspd):
        monkeypatch.setattr(module, "log_ratio", lambda x, p, q, scale, tau=1.0: ratio(x, p, q, -scale, tau))
    x, _ = chain_run("prefix", SAMPLES, TARGET, DRAFT, last_noise=True)
    assert chain_error(x) > 6


ratio = coupling.log_ratio


def test_power_criterion_without_noise_in_the_last_step_is_seen():
    """The published chain ends without noise, so a draft sits where its own density is highest."""
    x, _ = chain_run("prefix", SAMPLES, TARGET, DRAFT, last_noise=False)
    assert chain_error(x) > 6


class Linear(Chain):
    """Three denoising steps x -> a x + b + s noise of its own for each."""

    def __init__(self, numbers):
        super().__init__(0.5, 1.0, True)
        self.numbers, self.diffusion.count = numbers, len(numbers)

    def law(self, x, index, cond, steps):
        a, b, s = self.numbers[index]
        return coupling.Step(a * x + b, torch.full_like(x, float(np.log(s))))


def test_ratio_is_that_of_the_paths_under_shared_noise():
    """log R is the difference of both paths' log densities; with the reciprocal factor it is not."""
    p = Linear([(0.9, 0.1, 0.3), (0.8, -0.2, 0.5), (1.1, 0.0, 0.9)])
    q = Linear([(0.7, 0.0, 0.4), (1.0, 0.3, 0.2), (1.0, 0.0, 2.0)])
    n, channels = 50, 3
    noise = torch.randn(4, n, channels, generator=torch.Generator().manual_seed(0))
    zeros = np.zeros(n, np.int64)
    cells = Cells(zeros, zeros, zeros, zeros)
    mine, other = (side.chain(torch.zeros(n, 1), cells, noise, keep=True) for side in (p, q))

    def log_density(path, end):
        total = 0.0
        for law, reached in zip(path.laws, [*path.states[1:], end]):
            sigma = law.log_sigma.double().exp()
            total = total - 0.5 * ((reached - law.mean).double() / sigma).square().sum(-1) - sigma.log().sum(-1)
        return total

    direct = log_density(mine, other.x) - log_density(other, other.x)
    scale = other.log_sigma - mine.log_sigma
    ours = ratio(other.x.double(), mine.last, other.last, scale)
    torch.testing.assert_close(ours, direct, atol=1e-4, rtol=1e-4)
    reciprocal = ratio(other.x.double(), mine.last, other.last, -scale)
    assert (reciprocal - direct).abs().min() > 1


# --- rows of unequal progress -----------------------------------------------------------------------------------------


def test_rows_part_ways_and_all_arrive(pair):
    """With tau between the extremes some rows refuse where others do not."""
    report = drawn(*pair, mode="prefix", gamma=4, batch=6, tau=2.0).report
    assert len({len(counts) for counts in report.accepted}) > 1 or len({tuple(c) for c in report.accepted}) > 1
    assert all(sum(counts) == 16 for counts in report.accepted)
    assert report.passes == max(len(counts) for counts in report.accepted)


def test_every_cell_is_drawn_once(pair):
    """No step is committed twice, none left out, whatever the frontiers do."""
    net, family = pair[0], family_of(pair[0])
    settings = replace(QUICK, mode="prefix", batch=4, gamma=3, tau=2.0, cfg=1.5, temperature=1.0)
    run = Run((net, pair[1]), family, PROMPT, settings, "cpu")
    seen = np.zeros((4, 16), int)
    put = run.put

    def note(canvas, cells, x):
        if canvas is run.canvas:
            np.add.at(seen, (cells.rows, cells.cells), 1)
        put(canvas, cells, x)

    run.put = note
    run.loop()
    assert (seen == 1).all()


def test_joined_rounds_keep_their_order():
    def one(step):
        cells = Cells(*(np.array([step, step]) for _ in range(4)))
        law = coupling.Step(torch.full((2, 1), float(step)), torch.zeros(2, 1))
        return cells, cspd.Path(law.mean, law, law.mean[:, 0].double(), [], [])

    cells, path = joined([one(2), one(5)])
    assert cells.steps.tolist() == [2, 2, 5, 5] and path.x[:, 0].tolist() == [2, 2, 5, 5]
    assert path.log_sigma.tolist() == [2, 2, 5, 5] and path.last.mean[:, 0].tolist() == [2, 2, 5, 5]
