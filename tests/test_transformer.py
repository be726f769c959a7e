"""Every field of the decoder's configuration against the slow decoder of `naive`."""

import pytest
import torch
from scd_pack.scd_core.models import rope
from scd_pack.scd_core.models.transformer import Decoder, Positions
from scd_pack.scd_core.prompt import Stream
from scd_tests.naive import Naive, gelu, gelu_tanh
from scd_tests.toys import initialise, position_rows, tiny_config, tiny_decoder

LENGTH = 9
FIELDS = {
    "plain": {},
    "post norms": {"norm_place": "post"},
    "sandwich norms": {"norm_place": "sandwich"},
    "rms head norms": {"qk_norm": "rms", "qk_eps": 1e-3},
    "layer head norms": {"qk_norm": "layer", "qk_norm_rows": (4, 2), "qk_eps": 1e-3},
    "layer head norms, fewer rows than heads": {"qk_norm": "layer", "qk_norm_rows": (2, 1)},
    "layer head norms, one row": {"qk_norm": "layer"},
    "no grouping": {"kv_heads": 4},
    "one key head": {"kv_heads": 1},
    "heads wider than the model": {"head_dim": 16},
    "qkv bias": {"qkv_bias": True},
    "pairs": {"rope_pairing": "pair"},
    "gelu": {"act": "gelu_tanh"},
    "norm offset": {"norm_offset": 1.0},
    "large eps": {"eps": 0.5},
    "mlp head": {"out_head": "mlp"},
    "tied head": {"tied_head": True, "head_rows": 16},
    "scaled embedding": {"embed_scale": 32**0.5},
    "absolute at the input": {"abs_pos": "input"},
    "absolute in every layer": {"abs_pos": "every_layer"},
    "cross attention": {"context_dim": 20, "qk_norm": "rms"},
    "everything at once": {
        "norm_place": "sandwich", "qk_norm": "layer", "qk_norm_rows": (2, 2), "qkv_bias": True, "rope_pairing": "pair",
        "act": "gelu_tanh", "norm_offset": 1.0, "abs_pos": "every_layer", "context_dim": 20, "out_head": "mlp",
    },
}


def compare(decoder, cos, sin, absolute=None, context=None):
    ids = torch.randint(0, 12, (2, LENGTH), generator=torch.Generator().manual_seed(4))
    x = decoder.embed.image(ids, torch.float32)
    rows = position_rows(decoder, Positions(cos, sin, absolute), LENGTH)
    got = decoder.logits(decoder.hidden(x, rows, context=context))
    assert got.shape == (2, LENGTH, decoder.cfg.head_rows)
    for b in range(2):
        want = Naive(decoder).logits(x[b], cos, sin, absolute, None if context is None else context[b])
        error = float((got[b].double() - want).abs().max())
        assert error < 2e-5 * max(1.0, float(want.abs().max())), error


@pytest.mark.parametrize("changes", FIELDS.values(), ids=FIELDS)
def test_field(changes, generator):
    decoder = tiny_decoder(**changes)
    cfg = decoder.cfg
    absolute = torch.randn(LENGTH, cfg.dim, generator=generator) if cfg.abs_pos else None
    context = torch.randn(2, 5, cfg.context_dim, generator=generator) if cfg.context_dim else None
    compare(decoder, *rope.rope_1d(LENGTH, cfg.head_dim), absolute, context)


@pytest.mark.parametrize("pairing", ["half", "pair"])
def test_partial_rotation(pairing):
    """Tables narrower than the head: the rest of the head is not turned (GLM)."""
    compare(tiny_decoder(rope_pairing=pairing), *rope.rope_1d(LENGTH, 4))


def test_fields_make_a_difference(generator):
    """A field that the network ignored would pass all comparisons if the slow one ignored it too."""
    ids = torch.arange(LENGTH)[None] % 12
    seen = []
    for name, changes in FIELDS.items():
        if "abs_pos" in changes or "context_dim" in changes or "embed_scale" in changes:
            continue
        decoder = tiny_decoder(**changes)
        rows = position_rows(decoder, Positions(*rope.rope_1d(LENGTH, decoder.cfg.head_dim)), LENGTH)
        logits = decoder.logits(decoder.hidden(decoder.embed.image(ids, torch.float32), rows))[..., :12]
        assert all(not torch.allclose(logits, other, atol=1e-3) for other in seen), name
        seen.append(logits)


def test_table_embedding():
    plain, scaled = tiny_decoder(), tiny_decoder(embed_scale=3.0)
    ids = torch.tensor([[3, 15]])
    assert torch.allclose(scaled.embed.image(ids, torch.float32), 3 * plain.embed.image(ids, torch.float32))
    assert torch.equal(plain.embed.prompt(Stream(ids=ids[0]), torch.float32), plain.embed.image(ids, torch.float32)[0])


def test_codebook_embedding():
    """Image codes are short rows lifted by a small network; words have a table of their own."""
    embed = tiny_decoder(in_embed="codebook", embed_args=(12, 5, 3)).embed
    ids = torch.tensor([0, 7, 11])
    want = embed.gen_embed.weight[ids] @ embed.aligner[0].weight.t() + embed.aligner[0].bias
    for layer in embed.aligner[1:]:
        want = gelu(want) @ layer.weight.t() + layer.bias
    assert len(embed.aligner) == 3 and torch.allclose(embed.image(ids, torch.float32), want, atol=1e-5)
    assert torch.equal(embed.prompt(Stream(ids=ids), torch.float32), embed.embed_tokens.weight[ids])


def test_class_embedding():
    embed = tiny_decoder(in_embed="class", embed_args=(7,)).embed
    assert torch.equal(embed.prompt(Stream(ids=torch.tensor([6])), torch.float32), embed.class_table.weight[6:])
    assert torch.equal(embed.image(torch.tensor([2]), torch.float32), embed.embed_tokens.weight[2:3])


def test_caption_embedding(generator):
    """Text features are projected; without any, the learned unconditional rows are."""
    embed = initialise(Decoder(tiny_config(in_embed="caption", embed_args=(10, 3)))).embed
    features = torch.randn(3, 10, generator=generator)
    lift = lambda f: gelu_tanh(f @ embed.caption_in.weight.t()) @ embed.caption_out.weight.t()  # noqa: E731
    assert torch.allclose(embed.prompt(Stream(features=features), torch.float32), lift(features), atol=1e-5)
    assert torch.allclose(embed.prompt(Stream(), torch.float32), lift(embed.uncond), atol=1e-5)


def test_grid_vectors():
    """Raster order, one frame after the other; ranges may start anywhere in a table."""
    decoder = tiny_decoder(grid_embed=(4, 3, 5))
    f, r, c = (getattr(decoder, n).weight for n in ("frame_embed", "row_embed", "col_embed"))
    want = [f[i] + r[j] + c[k] for i in (2, 3) for j in range(3) for k in range(5)]
    assert torch.allclose(decoder.grid_vectors(range(2, 4), range(3), range(5)), torch.stack(want))


def test_rope_1d():
    cos, sin = rope.rope_1d(6, 8, theta=100.0)
    for s in range(6):
        for j in range(4):
            angle = torch.tensor(s * 100.0 ** (-2 * j / 8), dtype=torch.float64)
            assert abs(float(cos[s, j]) - float(angle.cos())) < 1e-6
            assert abs(float(sin[s, j]) - float(angle.sin())) < 1e-6


def test_rope_2d_grid():
    """Half of the pairs turn with the row, half with the column; condition tokens vanish."""
    cos, sin = rope.rope_2d_grid(2, 3, 8, condition=2)
    assert (cos[:2] == 0).all() and (sin[:2] == 0).all() and len(cos) == 2 + 6
    freqs = [1.0, 10000.0**-0.5]
    for r in range(2):
        for c in range(3):
            angles = torch.tensor([r * f for f in freqs] + [c * f for f in freqs])
            assert torch.allclose(cos[2 + 3 * r + c], angles.cos()) and torch.allclose(sin[2 + 3 * r + c], angles.sin())


def test_rope_3d_grid():
    """Pairs are shared out among time, row and column; a start token shifts the rest by one."""
    cos, _ = rope.rope_3d_grid(2, 2, 3, 16, theta=100.0, start_token=True)
    assert len(cos) == 1 + 12 and (cos[0] == 1).all() and cos.shape[1] == 8
    parts = [(0, 8), (1, 4), (2, 4)]  # axis, width of its share
    for n in range(12):
        cell = (n // 6, n // 3 % 2, n % 3)
        angles = [cell[a] * 100.0 ** (-2 * j / d) for a, d in parts for j in range(d // 2)]
        assert torch.allclose(cos[1 + n], torch.tensor(angles).cos(), atol=1e-6)


def test_yarn_slows_the_slow_frequencies_only():
    freqs = torch.tensor([1.0, 0.5, 0.01, 0.0001])
    scaled = rope.yarn_scaled(freqs, length=100, scale=4.0, beta_fast=4, beta_slow=1)
    assert torch.allclose(scaled[:2], freqs[:2]) and torch.allclose(scaled[2:], freqs[2:] / 4)
    middle = 2 * torch.pi * torch.tensor([2.5]) / 100
    assert torch.allclose(rope.yarn_scaled(middle, 100, 4.0, 4, 1), middle * (0.5 + 0.5 / 4))


def test_rope_sections():
    """Pair j follows the axis whose section it falls into."""
    positions = torch.tensor([[0, 1, 2], [5, 5, 6], [9, 8, 7]])
    cos, _ = rope.rope_sections(positions, 12, (2, 1, 3), theta=50.0)
    axis = [0, 0, 1, 2, 2, 2]
    for s in range(3):
        angles = torch.tensor([float(positions[axis[j], s]) * 50.0 ** (-2 * j / 12) for j in range(6)])
        assert torch.allclose(cos[s], angles.cos(), atol=1e-6)


def test_dtype_can_be_set_by_the_host():
    decoder = tiny_decoder()
    assert decoder.dtype == torch.float32
    decoder.compute_dtype = torch.bfloat16
    assert decoder.dtype == torch.bfloat16
