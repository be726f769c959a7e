"""The noise: right laws, one key a decision, the same bits everywhere and in any company."""

import numpy as np
import pytest
import torch
from scd_pack.scd_core.noise import ACCEPT, GUMBEL, REDRAW, RESIDUAL, START, Noise, mix, mix_tensor
from scipy import stats

STREAMS = {"gumbel": GUMBEL, "accept": ACCEPT, "residual": RESIDUAL, "redraw": REDRAW, "start": START}
SEEDS = [0, 1, 1 << 31, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 2, (1 << 64) - 1]
TOP = (1 << 64) - 1
UNIFORMS = [0.943239, 0.132679, 0.751277, 0.040389]
GUMBELS = [-1.3517, 0.3267, 2.5052, 2.0382, -1.3576, -0.4605]


def ks(values, law="uniform"):
    return stats.kstest(np.asarray(values, dtype=np.float64).ravel(), law).pvalue


def correlation_z(a, b):
    a, b = (np.asarray(x, dtype=np.float64).ravel() for x in (a, b))
    return float(np.corrcoef(a, b)[0, 1]) * len(a) ** 0.5


def row(*positions):
    return np.array([positions])


def test_mixer_is_splitmix64():
    """Bit for bit the published finaliser, computed with Python's own integers; on the host and on the device."""

    def plain(x):
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & TOP
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & TOP
        return x ^ (x >> 31)

    values = [0, 1, 2, 12345, 1 << 31, 1 << 32, 1 << 62, 1 << 63, TOP, TOP - 1, 0x9E3779B97F4A7C15]
    array = np.array(values, dtype=np.uint64)
    want = [plain(v) for v in values]
    assert mix(array).tolist() == want
    assert mix_tensor(torch.from_numpy(array.view(np.int64))).numpy().view(np.uint64).tolist() == want
    assert want[-1] == 0xE220A8397B1DCDAF  # published vector: the first output for seed 0


def test_host_and_device_mix_the_same_bits():
    """Keys are made by one, which leaves its input alone, and expanded by the other, in place."""
    x = np.random.default_rng(0).integers(0, TOP, 100_000, dtype=np.uint64, endpoint=True)
    before, tensor = x.copy(), torch.from_numpy(x.view(np.int64).copy())
    mixed = mix(x)
    assert mixed.dtype == np.uint64 and np.array_equal(mixed, mix_tensor(tensor).numpy().view(np.uint64))
    assert np.array_equal(x, before) and np.array_equal(tensor.numpy().view(np.uint64), mixed)


@pytest.mark.parametrize("stream", STREAMS.values(), ids=STREAMS)
@pytest.mark.parametrize("seed", [0, TOP])
def test_uniforms_are_uniform(stream, seed):
    """Along samples, along positions and along passes."""
    n = 40_000
    along_positions = Noise(seed, [0]).uniform(stream, np.arange(n)[None])
    along_samples = Noise(seed, range(n)).uniform(stream, np.full((n, 1), 3))
    # a pass number for every row stands for n calls, of which a few are made
    passes = np.arange(n, dtype=np.uint64)[:, None]
    along_passes = Noise(seed, [7] * n).uniform(stream, np.full((n, 1), 3), passes)
    for t in (0, 1, 2, 77, 4099, n - 1):
        assert along_passes[t, 0] == Noise(seed, [7]).uniform(stream, row(3), t)[0, 0]
    for u in (along_positions, along_samples, along_passes):
        assert ks(u) > 1e-4
        assert u.dtype == np.float32 and u.min() > 0 and u.max() < 1
        assert abs(correlation_z(u.ravel()[1:], u.ravel()[:-1])) < 4.5


@pytest.mark.parametrize("bits", [0, TOP])
def test_uniforms_never_reach_the_ends(bits, monkeypatch):
    """Bits all 0 and all 1: strictly inside, so u * total is never 0 or total."""
    monkeypatch.setattr("scd_pack.scd_core.noise.mix", lambda x: np.full_like(x, bits))
    u = float(Noise(0, [0]).uniform(ACCEPT, row(1))[0, 0])
    assert u == 2.0**-24 if bits == 0 else u == 1 - 2.0**-24


@pytest.mark.parametrize("bits", [0, -1, 1 << 62, -(1 << 63)])
def test_gumbel_is_finite_for_all_bits(bits, monkeypatch):
    monkeypatch.setattr("scd_pack.scd_core.noise.mix_tensor", lambda x: torch.full_like(x, bits))
    g = Noise(0, [0]).gumbel(row(1), 3)
    assert torch.isfinite(g).all() and -3 < float(g[0, 0, 0]) < 35


def test_gumbel_law():
    g = Noise(5, [0]).gumbel(np.arange(2000)[None], 100)
    assert g.shape == (1, 2000, 100) and g.dtype == torch.float32 and torch.isfinite(g).all()
    assert ks(g, "gumbel_r") > 1e-4
    # the maxima decide: they must follow the law of the largest of 100, Gumbel shifted by log 100
    assert ks(g.max(-1).values - torch.tensor(100.0).log(), "gumbel_r") > 1e-4
    assert abs(correlation_z(g[..., 1:], g[..., :-1])) < 4.5
    assert abs(correlation_z(g[:, 1:], g[:, :-1])) < 4.5


@pytest.mark.slow
def test_gumbel_tail_is_fine():
    """Among eight million values hardly two are equal where winners live: no visible grid of uniforms."""
    g = Noise(6, [0]).gumbel(np.arange(8)[None], 1_000_000).flatten()
    top = g[g > 9]
    assert abs(len(top) - 8e6 * 1.2340e-4) < 5 * 987**0.5
    assert len(top.unique()) >= len(top) - 2
    assert ks(top - 9, "expon") > 1e-4


def test_every_key_matters():
    positions = np.arange(500)[None]
    base = Noise(1, [0])
    u = base.uniform(ACCEPT, positions, 4)
    others = {
        "seed": Noise(2, [0]).uniform(ACCEPT, positions, 4),
        "sample": Noise(1, [1]).uniform(ACCEPT, positions, 4),
        "position": base.uniform(ACCEPT, positions + 1000, 4),
        "pass": base.uniform(ACCEPT, positions, 5),
        "no pass": base.uniform(ACCEPT, positions),
        **{name: base.uniform(s, positions, 4) for name, s in STREAMS.items() if s != ACCEPT},
    }
    for name, v in others.items():
        assert (u == v).sum() <= 1, name
        assert abs(correlation_z(u, v)) < 4.5, name


def test_shifted_keys_do_not_line_up():
    """Position and pass, sample and position, seed and sample must not be interchangeable counters."""
    n = 64
    line = np.arange(n)[None]
    passes = np.concatenate([Noise(0, [0]).uniform(ACCEPT, line, t) for t in range(n)])
    samples = Noise(0, range(n)).uniform(ACCEPT, line.repeat(n, 0))
    seeds = np.concatenate([Noise(s, [0]).uniform(ACCEPT, line) for s in range(n)])
    for table in (passes, samples, seeds, np.concatenate([samples[1:], seeds[1:]])):
        assert len(np.unique(table)) > 0.999 * table.size
        assert abs(correlation_z(table[1:, :-1], table[:-1, 1:])) < 4.5


def test_seeds_of_all_sizes_differ():
    draws = [Noise(seed, [0]).gumbel(np.arange(4)[None], 16).flatten() for seed in SEEDS]
    for i, a in enumerate(draws):
        for b in draws[:i]:
            assert not (a == b).any()


def test_same_bits_in_any_company():
    positions = np.array([[3, 4, 5], [0, 9, 2], [7, 7, 1]])
    whole = Noise(TOP, [10, 11, 12])
    for k in range(3):
        alone, own = Noise(TOP, [10 + k]), positions[k : k + 1]
        assert torch.equal(alone.gumbel(own, 33)[0], whole.gumbel(positions, 33)[k])
        assert (alone.uniform(RESIDUAL, own, 6)[0] == whole.uniform(RESIDUAL, positions, 6)[k]).all()
    # a longer vocabulary, a wider call and a smaller batch change nothing either
    assert torch.equal(whole.gumbel(positions, 50)[..., :33], whole.gumbel(positions, 33))
    assert (whole.uniform(START, positions)[:, :2] == whole.uniform(START, positions[:, :2])).all()
    assert (whole.uniform(START, positions[:2]) == whole.uniform(START, positions)[:2]).all()


def test_move_carries_the_sample():
    noise, positions = Noise(3, [0, 1, 2]), np.arange(5)[None].repeat(3, 0)
    before = noise.gumbel(positions, 7)
    noise.move(2, 0)
    assert torch.equal(noise.gumbel(positions[:2], 7), before[[2, 1]])


@pytest.mark.parametrize("stream", [ACCEPT, (ACCEPT, RESIDUAL), [RESIDUAL]])
def test_kept_keys_change_nothing(stream):
    """A run keeps the keys of its positions for all passes, also when its samples change places or leave."""
    plain, kept = Noise(9, [0, 1, 2]), Noise(9, [0, 1, 2], length=12)
    positions = np.array([[0, 1, 11], [5, 6, 7], [11, 11, 3]])
    for passes in (1, 2):
        assert (plain.uniform(stream, positions, passes) == kept.uniform(stream, positions, passes)).all()
    assert (plain.uniform(stream, positions) == kept.uniform(stream, positions)).all()
    for noise in (plain, kept):
        noise.move(2, 0)
    assert (plain.uniform(stream, positions[:2], 3) == kept.uniform(stream, positions[:2], 3)).all()


def test_global_generator_is_neither_read_nor_moved():
    state = torch.get_rng_state()
    a = Noise(3, [0]).gumbel(np.arange(5)[None], 7)
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(1)
    assert torch.equal(a, Noise(3, [0]).gumbel(np.arange(5)[None], 7))


def test_seeds_mean_the_same_in_every_release():
    """Pictures are shared as seed and prompt: whoever changes these numbers changes everybody's pictures."""
    noise = Noise(42, [0, 3])
    u = noise.uniform(ACCEPT, np.array([[0, 1], [0, 1]]), 1)
    g = noise.gumbel(np.array([[5], [5]]), 3)
    assert [round(float(x), 6) for x in u.flat] == UNIFORMS
    assert [round(float(x), 4) for x in g.flatten()] == GUMBELS
