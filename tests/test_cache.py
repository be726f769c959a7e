"""Window passes through the cache give the logits of one full forward, whatever was rolled back on the way."""

import random

import pytest
import torch
from scd_pack.scd_core.models.session import Session
from scd_pack.scd_core.plan import TokenPlan
from scd_pack.scd_core.prompt import Stream
from scd_tests.naive import Naive
from scd_tests.toys import ToyFamily, tiny_decoder, word_streams

PLAN = TokenPlan(1, 4, 6, 12)
N, BATCH = PLAN.length, 3
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def decoder():
    return tiny_decoder()


@pytest.fixture
def tokens(generator):
    return torch.randint(0, 12, (BATCH, N), generator=generator)


def full_logits(decoder, streams, tokens):
    """[B, S, N, V] by the slow decoder, one sequence at a time; a caption's hidden tokens see only themselves."""
    naive, out = Naive(decoder), []
    for row in tokens:
        for stream in streams:
            x = torch.cat([decoder.embed.prompt(stream, torch.float32), decoder.embed.image(row, torch.float32)])[:-1]
            hidden = None
            if stream.mask is not None:
                hidden = torch.cat([~stream.mask, torch.zeros(len(x) - stream.length, dtype=torch.bool)])
            table = ToyFamily().positions(decoder, PLAN, stream.length, "cpu")
            logits = naive.logits(x, table.cos[: len(x)], table.sin[: len(x)], context=stream.context, hidden=hidden)
            out.append(logits[stream.length - 1 :])
    return torch.stack(out).view(len(tokens), len(streams), *out[0].shape)


class Walk:
    """Feeds a session windows of true tokens up to a frontier and rubbish behind it."""

    def __init__(self, decoder, streams, tokens, prefix=0, seed=0):
        self.rng, self.tokens = random.Random(seed), tokens
        fixed = torch.full(tokens.shape, -1)
        fixed[:, :prefix] = tokens[:, :prefix]
        self.session = Session(decoder, ToyFamily(), PLAN, list(streams), fixed, prefix, "cpu")
        self.want = full_logits(decoder, streams, tokens)
        self.front, self.worst = [prefix] * len(tokens), 0.0

    def step(self, width):
        """One pass; each sample looks at up to `width` positions and commits at least one of them."""
        sizes = [min(width, N - f) for f in self.front]
        lane = torch.arange(max(sizes))
        front = torch.tensor(self.front)[:, None]
        valid = lane < torch.tensor(sizes)[:, None]
        positions = (front + lane).clamp(max=N - 1)
        feed = self.tokens.gather(1, (positions - 1).clamp(min=0))
        good = [self.rng.randint(1, s) for s in sizes]  # rows whose inputs are the true tokens
        rubbish = torch.randint(0, 12, feed.shape)
        feed = torch.where(lane < torch.tensor(good)[:, None], feed, rubbish)
        length = max(f + s for f, s in zip(self.front, sizes)) - 1
        before = torch.where(valid, positions - 1, N)
        logits = self.session.window(feed, before, length, min(self.front) == 0)
        for b, (f, g) in enumerate(zip(self.front, good)):
            error = (logits[b, :, :g].double() - self.want[b, :, f : f + g]).abs().max()
            self.worst = max(self.worst, float(error))
        self.front = [f + g for f, g in zip(self.front, good)]

    def finish(self, width):
        """Walk on until a sample reaches the end; finished samples leave the batch as the loop makes them."""
        while self.front:
            self.step(width)
            for b in reversed(range(len(self.front))):
                if self.front[b] == N:
                    last = len(self.front) - 1
                    if b != last:
                        self.session.move(last, b)
                        self.front[b], self.tokens[b], self.want[b] = (
                            self.front[last], self.tokens[last], self.want[last])
                    self.front.pop()
                    self.tokens, self.want = self.tokens[:last], self.want[:last]
        return self.worst


STREAMS = {
    "one stream": word_streams()[:1],
    "streams of unequal length": word_streams(),
    "longer unconditional": word_streams()[::-1],
    "hidden caption tokens": (
        Stream(ids=torch.tensor([12, 13, 14, 15]), mask=torch.tensor([True, False, False, True])),
        Stream(ids=torch.tensor([13, 15]), mask=torch.tensor([False, True])),
    ),
}


@pytest.mark.parametrize("streams", STREAMS.values(), ids=STREAMS)
@pytest.mark.parametrize("width", [1, 3, 16])
@torch.inference_mode()
def test_window_passes_equal_the_full_forward(decoder, tokens, streams, width):
    assert Walk(decoder, streams, tokens, seed=width).finish(width) < TOLERANCE


@pytest.mark.parametrize("prefix", [1, 2, 7])
@pytest.mark.parametrize("streams", STREAMS.values(), ids=STREAMS)
@torch.inference_mode()
def test_given_prefix(decoder, tokens, streams, prefix):
    assert Walk(decoder, streams, tokens, prefix=prefix).finish(5) < TOLERANCE


@pytest.mark.parametrize(
    "changes",
    [
        {"norm_place": "sandwich", "qk_norm": "layer", "qk_norm_rows": (2, 2), "qkv_bias": True,
         "rope_pairing": "pair"},
        {"kv_heads": 4, "qk_norm": "rms", "out_head": "mlp", "in_embed": "codebook", "embed_args": (12, 5, 2)},
    ],
    ids=["sandwich", "codebook"],
)
@torch.inference_mode()
def test_other_decoders(tokens, changes):
    assert Walk(tiny_decoder(**changes), word_streams(), tokens).finish(5) < TOLERANCE


@torch.inference_mode()
def test_cross_attended_context(tokens, generator):
    streams = tuple(
        Stream(ids=s.ids, context=torch.randn(5, 20, generator=generator)) for s in word_streams()
    )
    assert Walk(tiny_decoder(context_dim=20), streams, tokens).finish(5) < TOLERANCE


@torch.inference_mode()
def test_text_features_as_prompt(tokens, generator):
    """A feature stream beside the learned unconditional rows, some of the caption's rows hidden."""
    decoder = tiny_decoder(in_embed="caption", embed_args=(10, 3))
    mask = torch.tensor([False, True, True])
    streams = (Stream(features=torch.randn(3, 10, generator=generator), mask=mask),
               Stream(features=decoder.embed.uncond.clone()))
    assert Walk(decoder, streams, tokens).finish(5) < TOLERANCE


@torch.inference_mode()
def test_the_comparison_can_fail(decoder, tokens):
    """One wrong token left of the frontier shows far above the tolerance."""
    walk = Walk(decoder, word_streams(), tokens.clone())
    walk.tokens[1, 3] = (walk.tokens[1, 3] + 1) % 12
    assert walk.finish(5) > 100 * TOLERANCE


@torch.inference_mode()
def test_memory_is_what_is_promised(decoder, tokens):
    """Allocated once: 2 * layers * rows * (slots + 1) * kv_heads * head_dim, and the same storage to the end."""
    walk = Walk(decoder, word_streams(), tokens)
    cache = walk.session.cache
    assert cache.bytes == 2 * 2 * (BATCH * 2) * (3 + N + 1) * 2 * 8 * 4
    before = [t.data_ptr() for t in (*cache.k, *cache.v)]
    walk.finish(5)
    assert [t.data_ptr() for t in (*cache.k, *cache.v)] == before


@torch.inference_mode()
def test_written_keys_are_views(decoder):
    """What attention reads is the store itself, not a copy of it."""
    session = Session(decoder, ToyFamily(), PLAN, list(word_streams()), torch.full((1, N), -1), 0, "cpu")
    step = session.cache.step(torch.tensor([[4, 5], [2, 3]]), 6, torch.float32)
    k, v = session.cache.write(0, torch.ones(2, 2, 2, 8), torch.ones(2, 2, 2, 8), step)
    assert k.data_ptr() == session.cache.k[0].data_ptr() and v.data_ptr() == session.cache.v[0].data_ptr()
    assert k.shape == (2, 6, 2, 8) and (k[0, 4:6] == 1).all() and (k[1, 2:4] == 1).all()
    assert step.mask.shape == (2, 1, 2, 6)
    assert (step.mask[0, 0, 0] == 0).tolist() == [True] * 5 + [False]
