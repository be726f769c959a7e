"""Draft trees: the tokens stay those of one-at-a-time sampling, a node sees its own path only, passes fall."""

import numpy as np
import pytest
import torch
from scd_pack.scd_core.bank import LawBank
from scd_pack.scd_core.memory import TrajectoryMemory
from scd_pack.scd_core.models.session import Session
from scd_pack.scd_core.plan import TokenPlan
from scd_pack.scd_core.ring import Ring
from scd_pack.scd_core.tree import RUNNERS, DraftTree, Nodes, runners_in, runners_of
from scd_tests.naive import Naive
from scd_tests.test_identity import GUIDED, PLANS, SEED, kept_cells, same
from scd_tests.toys import ToyFamily, draw, tiny_decoder, word_streams

PLAN = TokenPlan(1, 5, 6, 12)


@pytest.fixture(scope="module")
def decoder():
    return tiny_decoder()


@pytest.mark.parametrize("nodes", [1, 5, 32])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_same_tokens(decoder, plan, nodes):
    assert same(decoder, plan, window=7, nodes=nodes).settings["nodes"] == nodes


@pytest.mark.parametrize("window", [2, 3, 64])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_same_tokens_guided_with_kept_cells(decoder, plan, window):
    same(decoder, plan, law=GUIDED, kept=kept_cells(plan), window=window, nodes=8)


def test_row_of_a_batch_is_the_single_run(decoder):
    batch, _ = draw(decoder, PLAN, method="seed-exact", seed=SEED, batch=4, window=7, nodes=8, law=GUIDED)
    for k in (0, 3):
        alone, _ = draw(decoder, PLAN, method="seed-exact", seed=SEED, window=7, nodes=8, first_sample=k, law=GUIDED)
        assert torch.equal(alone[0], batch[k])


def test_no_tree_without_memory_or_match(decoder):
    cases = ({"method": "seed-exact", "memory": False}, {"method": "csd"}, {"method": "autoregressive"})
    for settings in cases:
        _, report = draw(decoder, PLAN, seed=1, window=7, nodes=8, **settings)
        assert report.settings["nodes"] == 0


@pytest.mark.slow
def test_fewer_passes(decoder):
    passes = [
        sum(draw(decoder, PLAN, method="seed-exact", seed=3, batch=48, window=16, nodes=n)[1].per_sample)
        for n in (0, 16)
    ]
    assert passes[1] < 0.95 * passes[0], passes


def grown(rng, nodes=9, batch=2, window=8):
    """`Nodes` of a memory filled with random answers, and what they were grown from."""
    memory = TrajectoryMemory(batch, PLAN.length, TrajectoryMemory.neighbours(PLAN.row_stride, 0), RUNNERS)
    tokens = rng.integers(0, 12, (batch, PLAN.length + 1))
    positions = np.tile(np.arange(PLAN.length), (batch, 1))
    everywhere = np.ones_like(positions, dtype=bool)
    for _ in range(3):
        ranked = rng.permuted(np.broadcast_to(np.arange(12), (*positions.shape, 12)), axis=-1)
        answers, runners = ranked[..., 0], np.concatenate([ranked[..., 1:], ranked[..., :1]], -1)
        gaps = np.sort(rng.exponential(0.5, runners.shape), -1).astype(np.float32)
        gaps[..., -1] = np.inf  # the vocabulary is shorter than the list
        memory.record(memory.context(tokens, positions), answers, positions, everywhere, runners, gaps)
    fronts = np.array([3, 14])
    fixed = np.full_like(tokens, -1)
    tree = DraftTree(nodes, memory, random_bank(rng, batch, positions))
    return tree.grow(tokens, fixed, fronts, fronts + window, window), tokens, fronts, window


def random_bank(rng, batch, positions):
    """A `LawBank` that knows every position and most tokens."""
    noise, shape = Ring(batch, PLAN.length, 12, "cpu"), (*positions.shape, 12)
    noise.store.normal_(generator=torch.Generator().manual_seed(int(rng.integers(1 << 30))))
    bank = LawBank(batch, 12, 0, PLAN.length, noise, "cpu")
    laws = torch.from_numpy(rng.standard_normal(shape).astype(np.float32))
    bank.record(laws, positions, rng.integers(0, 12, positions.shape), np.ones_like(positions, dtype=bool), PLAN.length)
    return bank


def path_of(nodes, sample, node, lanes):
    """Tokens by position from the chain to the node, by walking up the parents."""
    path = {}
    while True:
        path[int(nodes.position[sample, node])] = int(nodes.token[sample, node])
        up = int(nodes.parent[sample, node])
        if up < lanes:
            return path
        node = up - lanes


def test_nodes_hang_together():
    """Positions grow by one along a path, parents come first, answers stay in the window, `sees` is the path."""
    rng, depths = np.random.default_rng(0), set()
    for _ in range(20):
        nodes, _, fronts, window = grown(rng, nodes=24)
        for b, front in enumerate(fronts):
            seen = set()
            for m in np.flatnonzero(nodes.live[b]):
                path, up = path_of(nodes, b, m, window), nodes.parent[b, m]
                depths.add(len(path))
                first = min(path)
                assert sorted(path) == list(range(first, first + len(path))) and nodes.root[b, m] == first
                assert front <= first and max(path) < front + window - 1
                assert up < window and up == first - front if len(path) == 1 else up - window < m
                ancestors = {int(x) for x in np.flatnonzero(nodes.sees[b, m])}
                assert len(ancestors) == len(path) and m in ancestors
                assert {int(nodes.position[b, a]) for a in ancestors} == set(path)
                key = (first, tuple(path[j] for j in sorted(path)))
                assert key not in seen, "two nodes stand for the same path"
                seen.add(key)
    assert max(depths) >= 3


@torch.inference_mode()
def test_a_node_sees_its_path_and_nothing_else(decoder):
    """Brute force: the logits of every row equal a full forward over the prompt, the tokens before and its path."""
    nodes, tokens, fronts, window = grown(np.random.default_rng(4), nodes=12)
    streams, naive = word_streams(), Naive(decoder)
    fixed = torch.from_numpy(tokens[:, : PLAN.length])
    session = Session(decoder, ToyFamily(), PLAN, list(streams), fixed, 3, "cpu", scratch=12)
    prefix = np.tile(np.arange(3, 14), (2, 1)) - 1  # the second sample's committed tokens behind the common prefix
    session.window(fixed.gather(1, torch.from_numpy(prefix)), torch.from_numpy(prefix), 13, False)
    positions = fronts[:, None] + np.arange(window)
    before = positions - 1
    visible = nodes.visible(before, PLAN.length, "cpu")
    feed = np.concatenate([np.take_along_axis(tokens, before, 1), nodes.token], 1)
    where = np.concatenate([before, np.where(nodes.live, nodes.position, PLAN.length)], 1)
    got = session.window(torch.from_numpy(feed), torch.from_numpy(where), int(positions.max()), False, visible)
    for b in range(2):
        for m in np.flatnonzero(nodes.live[b]):
            path = path_of(nodes, b, m, window)
            row = tokens[b].copy()
            row[list(path)] = list(path.values())
            for s, stream in enumerate(streams):
                ids = torch.from_numpy(row[: max(path) + 1])
                x = torch.cat([decoder.embed.prompt(stream, torch.float32), decoder.embed.image(ids, torch.float32)])
                table = ToyFamily().positions(decoder, PLAN, stream.length, "cpu")
                want = naive.logits(x, table.cos[: len(x)], table.sin[: len(x)])[-1].float()
                assert torch.allclose(got[b, s, window + m], want, atol=1e-5)
    # what a path leaves in the cache once it is accepted is what feeding its tokens would have left
    m = int(np.flatnonzero(nodes.live[0])[-1])
    path = path_of(nodes, 0, m, window)
    taken = [np.flatnonzero(nodes.sees[0, m] & (nodes.position[0] == j))[0] for j in sorted(path)]
    session.settle(torch.zeros(len(path), dtype=torch.int64), torch.tensor(taken), torch.tensor(sorted(path)))
    last = max(path)
    again = session.window(
        torch.tensor([[int(nodes.token[0, m])]] * 2), torch.tensor([[last]] * 2), last + 1, False
    )
    assert torch.allclose(again[0, :, 0], got[0, :, window + m], atol=1e-5)


def test_follow_walks_to_the_deepest_match():
    nodes = Nodes(
        parent=np.array([[1, 4, 5, 0]]), position=np.array([[11, 12, 13, 10]]), token=np.array([[7, 8, 9, 7]]),
        live=np.ones((1, 4), dtype=bool), root=np.array([[11, 11, 11, 10]]), context=None, sees=None,
    )  # fmt: skip
    fixed = np.full((1, 20), -1)
    new = np.array([[1, 7, 2, 3]])
    counts, taken = nodes.follow(np.array([2]), np.array([10]), new, np.array([[8, 5, 6, 4]]), fixed)
    assert counts.tolist() == [4] and new.tolist() == [[1, 7, 8, 5]]
    assert [part.tolist() for part in taken] == [[0, 0], [0, 1], [11, 12]]
    fixed[0, 12] = 8  # a given token is what the walk looks for, whatever the row answered
    new = np.array([[1, 7, 2, 3]])
    counts, _ = nodes.follow(np.array([2]), np.array([10]), new, np.array([[0, 5, 6, 4]]), fixed)
    assert counts.tolist() == [4] and new.tolist() == [[1, 7, 8, 5]]
    counts, taken = nodes.follow(np.array([2]), np.array([10]), np.array([[1, 6, 2, 3]]), np.zeros((1, 4)), fixed)
    assert counts.tolist() == [2] and taken is None


def test_runners_are_the_next_best():
    scores = torch.randn(2, 3, 40)
    columns, gaps = map(torch.from_numpy, runners_in(torch.stack(runners_of(scores)).numpy()))
    order = scores.argsort(-1, descending=True)
    assert torch.equal(columns, order[..., 1 : RUNNERS + 1])
    ranked = scores.gather(-1, order)
    assert torch.allclose(gaps.float(), ranked[..., :1] - ranked[..., 1 : RUNNERS + 1], atol=1e-3)
    few = runners_of(torch.randn(1, 1, 3))
    assert len(few) == 2 * RUNNERS and int(few[-1]) == 1 << 30
