"""The noise: right laws, one key a decision, the same bits everywhere and in any company."""

import pytest
import torch
from scd_pack.scd_core import noise as module
from scd_pack.scd_core.noise import ACCEPT, GUMBEL, REDRAW, RESIDUAL, START, Noise, mix
from scipy import stats

STREAMS = {"gumbel": GUMBEL, "accept": ACCEPT, "residual": RESIDUAL, "redraw": REDRAW, "start": START}
SEEDS = [0, 1, 1 << 31, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 2, (1 << 64) - 1]
TOP = (1 << 64) - 1
UNIFORMS = [0.943239, 0.132679, 0.751277, 0.040389]
GUMBELS = [-1.3517, 0.3267, 2.5052, 2.0382, -1.3576, -0.4605]


def ks(values, law="uniform"):
    return stats.kstest(values.flatten().double().numpy(), law).pvalue


def correlation_z(a, b):
    a, b = a.flatten().double(), b.flatten().double()
    return float(torch.corrcoef(torch.stack([a, b]))[0, 1]) * len(a) ** 0.5


def test_mixer_is_splitmix64():
    """Bit for bit the published finaliser, computed with Python's own integers."""

    def plain(x):
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & TOP
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & TOP
        return x ^ (x >> 31)

    values = [0, 1, 2, 12345, 1 << 31, 1 << 32, 1 << 62, 1 << 63, TOP, TOP - 1, 0x9E3779B97F4A7C15]
    got = mix(torch.tensor([module._signed(v) for v in values]))
    assert [int(g) & TOP for g in got] == [plain(v) for v in values]
    assert int(mix(torch.tensor(module._signed(0x9E3779B97F4A7C15)))) & TOP == 0xE220A8397B1DCDAF  # published vector


@pytest.mark.parametrize("stream", STREAMS.values(), ids=STREAMS)
@pytest.mark.parametrize("seed", [0, TOP])
def test_uniforms_are_uniform(stream, seed):
    """Along samples, along positions and along passes."""
    n = 40_000
    along_positions = Noise(seed, [0]).uniform(stream, torch.arange(n)[None])
    along_samples = Noise(seed, range(n)).uniform(stream, torch.full((n, 1), 3))
    passes = torch.arange(n)
    along_passes = Noise(seed, [7] * n).uniform(stream, torch.full((n, 1), 3), passes)
    for u in (along_positions, along_samples, along_passes):
        assert ks(u) > 1e-4
        assert u.dtype == torch.float32 and 0 < float(u.min()) and float(u.max()) < 1
        assert abs(correlation_z(u.flatten()[1:], u.flatten()[:-1])) < 4.5


def test_uniforms_never_reach_the_ends():
    """Bits all 0 and all 1: strictly inside, so u * total never equals 0 or total."""
    u = module._unit(torch.tensor([0, -1, (1 << 63) - 1, -(1 << 63)]))
    assert 0 < float(u.min()) < 1e-7 and 1 - 1e-7 < float(u.max()) < 1


def test_gumbel_law():
    g = Noise(5, [0]).gumbel(torch.arange(2000)[None], 100)
    assert g.shape == (1, 2000, 100) and g.dtype == torch.float32 and torch.isfinite(g).all()
    assert ks(g, "gumbel_r") > 1e-4
    # the maxima decide: they must follow the law of the largest of 100, Gumbel shifted by log 100
    assert ks(g.max(-1).values - torch.tensor(100.0).log(), "gumbel_r") > 1e-4
    assert abs(correlation_z(g[..., 1:], g[..., :-1])) < 4.5
    assert abs(correlation_z(g[:, 1:], g[:, :-1])) < 4.5


@pytest.mark.slow
def test_gumbel_tail_is_fine():
    """Among eight million values hardly two are equal where winners live: no visible grid of uniforms."""
    g = Noise(6, [0]).gumbel(torch.arange(8)[None], 1_000_000).flatten()
    top = g[g > 9]
    assert abs(len(top) - 8e6 * 1.2340e-4) < 5 * 987**0.5
    assert len(top.unique()) >= len(top) - 2
    assert ks(top - 9, "expon") > 1e-4


def test_every_key_matters():
    positions, passes = torch.arange(500)[None], torch.tensor([4])
    base = Noise(1, [0])
    u = base.uniform(ACCEPT, positions, passes)
    others = {
        "seed": Noise(2, [0]).uniform(ACCEPT, positions, passes),
        "sample": Noise(1, [1]).uniform(ACCEPT, positions, passes),
        "position": base.uniform(ACCEPT, positions + 1000, passes),
        "pass": base.uniform(ACCEPT, positions, passes + 1),
        "no pass": base.uniform(ACCEPT, positions),
        **{name: base.uniform(s, positions, passes) for name, s in STREAMS.items() if s != ACCEPT},
    }
    for name, v in others.items():
        assert (u == v).sum() <= 1, name
        assert abs(correlation_z(u, v)) < 4.5, name


def test_shifted_keys_do_not_line_up():
    """Position and pass, sample and position, seed and sample must not be interchangeable counters."""
    n = 64
    grid = torch.stack([Noise(0, [0]).uniform(ACCEPT, torch.arange(n)[None], torch.tensor([t]))[0] for t in range(n)])
    samples = Noise(0, range(n)).uniform(ACCEPT, torch.arange(n)[None].expand(n, -1))
    seeds = torch.cat([Noise(s, [0]).uniform(ACCEPT, torch.arange(n)[None]) for s in range(n)])
    for table in (grid, samples, seeds, torch.cat([samples[1:], seeds[1:]])):
        assert len(table.flatten().unique()) > 0.999 * table.numel()
        assert abs(correlation_z(table[1:, :-1], table[:-1, 1:])) < 4.5


def test_seeds_of_all_sizes_differ():
    draws = [Noise(seed, [0]).gumbel(torch.arange(4)[None], 16).flatten() for seed in SEEDS]
    for i, a in enumerate(draws):
        for b in draws[:i]:
            assert not (a == b).any()


def test_same_bits_in_any_company():
    positions = torch.tensor([[3, 4, 5], [0, 9, 2], [7, 7, 1]])
    passes = torch.tensor([1, 5, 2])
    whole = Noise(TOP, [10, 11, 12])
    for k in range(3):
        alone = Noise(TOP, [10 + k])
        row = positions[k : k + 1]
        assert torch.equal(alone.gumbel(row, 33)[0], whole.gumbel(positions, 33)[k])
        assert torch.equal(
            alone.uniform(RESIDUAL, row, passes[k : k + 1])[0], whole.uniform(RESIDUAL, positions, passes)[k]
        )
    # a longer vocabulary or a wider call changes nothing either
    assert torch.equal(whole.gumbel(positions, 50)[..., :33], whole.gumbel(positions, 33))
    assert torch.equal(whole.uniform(START, positions)[:, :2], whole.uniform(START, positions[:, :2]))
    assert torch.equal(whole.uniform(START, positions[:2]), whole.uniform(START, positions)[:2])


def test_move_carries_the_sample():
    noise, positions = Noise(3, [0, 1, 2]), torch.arange(5)[None].expand(3, -1)
    before = noise.gumbel(positions, 7)
    noise.move(2, 0)
    assert torch.equal(noise.gumbel(positions[:2], 7), before[[2, 1]])


def test_global_generator_is_neither_read_nor_moved():
    state = torch.get_rng_state()
    a = Noise(3, [0]).gumbel(torch.arange(5)[None], 7)
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(1)
    assert torch.equal(a, Noise(3, [0]).gumbel(torch.arange(5)[None], 7))


def test_seeds_mean_the_same_in_every_release():
    """Pictures are shared as seed and prompt: whoever changes these numbers changes everybody's pictures."""
    noise = Noise(42, [0, 3])
    u = noise.uniform(ACCEPT, torch.tensor([[0, 1], [0, 1]]), torch.tensor([1, 1]))
    g = noise.gumbel(torch.tensor([[5], [5]]), 3)
    assert [round(float(x), 6) for x in u.flatten()] == UNIFORMS
    assert [round(float(x), 4) for x in g.flatten()] == GUMBELS
