"""What people ask for at the edges: odd grids, hopeless drafts, any batch, models from another mode."""

import subprocess
import sys
import textwrap

import pytest
import torch
from scd_pack.scd_core import loop
from scd_pack.scd_core.acceptance import METHODS
from scd_pack.scd_core.codecs.conv2d import ConvCodec, ConvCodecConfig
from scd_pack.scd_core.errors import UserError
from scd_pack.scd_core.law import LawSettings
from scd_pack.scd_core.plan import TokenPlan
from scd_pack.scd_core.prompt import Stream
from scd_tests.toys import Toy, ToyFamily, draw, initialise, row_end_plan, run, tiny_decoder, word_streams

PLAN = TokenPlan(1, 4, 5, 12)


@pytest.fixture(scope="module")
def decoder():
    return tiny_decoder()


# a model that can draw nothing, or anything ---------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_a_model_that_allows_nothing_is_told(method):
    """Everything that may be drawn at a place is impossible there: a sentence, not a picture of token 0."""

    def logits(known, positions):
        out = torch.zeros(*positions.shape, 6)
        out[..., :4] = torch.where((positions == 4)[..., None], float("-inf"), 0.0)
        return out

    plan = TokenPlan(1, 2, 4, 6, allowed=torch.tensor([True] * 4 + [False] * 2))
    with pytest.raises(UserError, match=r"not finite in pass \d+, near token \d+ of picture 1"):
        run(Toy(plan, logits), method=method, window=3)


def test_drafts_that_rarely_survive_are_told_and_good_ones_not():
    plan, g = TokenPlan(1, 6, 8, 64), torch.Generator().manual_seed(3)
    table = torch.randn(48, 64, 64, generator=g) * 6  # the next token hangs on the one before, and on nothing else

    def wild(known, positions):
        before = known.gather(1, (positions - 1).clamp(min=0)).clamp(min=0) * (positions > 0)
        return table[positions, before]

    calm = Toy(plan, lambda known, positions: table[:, 0][positions])
    words = "drafts rarely survive here"
    for method in ("sjd", "scd-maximal", "seed-exact"):
        assert words in run(Toy(plan, wild), method=method, window=8, memory=False)[1].text(), method
        assert words not in run(calm, method=method, window=8, memory=False)[1].text(), method


# grids ----------------------------------------------------------------------------------------------------------------


SMALL = [(method, *grid) for method in METHODS for grid in ((1, 1), (1, 9), (9, 1), (2, 3))]
LARGE = [("seed-exact", 45, 80), ("sjd", 24, 24), ("row-block", 24, 24)]


@pytest.mark.parametrize(("method", "rows", "cols"), SMALL + LARGE)
def test_every_grid_is_filled(method, rows, cols):
    """Windows longer than what is left, single rows and columns, wide pictures: as many tokens as cells, no more."""
    sure = torch.full((3,), -30.0)
    sure[1] = 30.0
    toy = Toy(TokenPlan(1, rows, cols, 3), lambda known, positions: sure.expand(*positions.shape, -1))
    codes, report = run(toy, method=method, window=16)
    assert codes.shape == (1, rows * cols) and (codes == 1).all()
    assert report.tokens == rows * cols == sum(report.accepted[0]) and report.visits.min() >= 1


@pytest.mark.parametrize("cols", [1, 7])
def test_row_ends_are_counted_and_never_drawn(decoder, cols):
    plan = row_end_plan(rows=5, cols=cols)
    tokens, report = draw(decoder, plan, window=16)
    assert plan.length == (cols + 1) * 5 == tokens.shape[1] and report.tokens == cols * 5
    assert plan.codes(tokens).shape == (1, 1, 5, cols)


# batches --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["seed-exact", "sjd", "row-block"])
def test_rows_of_every_batch_size_are_single_runs(decoder, method):
    """Two streams of three and one prompt tokens in each row; no number of rows may spoil one."""
    law = LawSettings(temperature=0.9, cfg=2.0)
    alone = [draw(decoder, PLAN, method=method, seed=4, window=6, law=law, first_sample=k)[0] for k in range(9)]
    for batch in range(1, 10):
        tokens, _ = draw(decoder, PLAN, method=method, seed=4, window=6, law=law, batch=batch)
        assert torch.equal(tokens, torch.cat(alone[:batch])), batch


# modes ----------------------------------------------------------------------------------------------------------------


def decode(decoder, method):
    """A run as a program would start it, in no mode of its own."""
    settings = loop.Settings(method=method, window=5, batch=2, law=LawSettings(cfg=2.0))
    kept = torch.full((1, 1, 4, 5), -1)
    kept[0, 0, 1, 1:3] = 2
    return loop.decode(decoder, ToyFamily(), PLAN, word_streams(), settings, kept=kept)[0]


@pytest.mark.parametrize("method", METHODS)
def test_models_made_in_one_mode_draw_in_another(decoder, method):
    """A host makes models and runs nodes under inference_mode, a program may do neither, or one of them."""
    with torch.inference_mode():
        made = tiny_decoder()
    want = decode(decoder, method)
    assert torch.equal(decode(made, method), want)
    with torch.inference_mode():
        assert torch.equal(decode(decoder, method), want) and torch.equal(decode(made, method), want)


def test_codecs_made_in_one_mode_work_in_another():
    def codec():
        cfg = ConvCodecConfig(codes=16, code_dim=4, z_channels=8, ch=8, ch_mult=(1, 1), groups=4)
        return initialise(ConvCodec(cfg, dtype=torch.float32))

    with torch.inference_mode():
        made = codec()
        codes = torch.arange(16).view(1, 4, 4)
    plain = codec()
    want = plain.decode(codes)
    assert torch.equal(made.decode(codes.clone()), want)
    with torch.inference_mode():
        assert torch.equal(plain.decode(codes), want) and torch.equal(made.encode(want), plain.encode(want))


# neighbours -----------------------------------------------------------------------------------------------------------


def test_nothing_of_torch_or_the_process_is_changed(root):
    """Importing the pack and drawing leaves what other packs rely on as it was."""
    code = textwrap.dedent("""
        import os, sys, warnings
        import numpy, torch, PIL.Image
        sys.path.insert(0, sys.argv[1])

        def state():
            places = {"functional": torch.nn.functional, "Tensor": torch.Tensor, "torch": torch, "nn": torch.nn,
                      "numpy": numpy, "Linear": torch.nn.Linear, "Module": torch.nn.Module}
            known = {f"{p}.{k}": id(v) for p, place in places.items() for k, v in vars(place).items()
                     if callable(v) and not k.startswith("__")}
            backends = torch.backends
            values = [torch.get_default_dtype(), torch.get_num_threads(), torch.get_rng_state().sum().item(),
                      torch.is_grad_enabled(), torch.get_float32_matmul_precision(), dict(os.environ),
                      str(warnings.filters), torch.are_deterministic_algorithms_enabled(), sys.stdout, sys.excepthook,
                      backends.cuda.matmul.allow_tf32, backends.cudnn.benchmark, numpy.random.get_state()[1].sum(),
                      PIL.Image.MAX_IMAGE_PIXELS]
            return known, values

        before = state()
        from scd_core.generate import Request, generate
        from scd_core.models.load import load_model
        model = load_model(dtype="fp32")
        prompt = model.family.text.encode("fox")
        request = Request(method="scd-gumbel", frames=2, window=64)
        drawn = generate(model.decoder, model.family, prompt, request=request, callback=lambda p: p.passes == 3)
        model.codec.decode_clip(drawn.codes[0])
        after = state()
        changed = [k for k, v in before[0].items() if after[0].get(k) != v]
        assert not changed, changed
        assert before[1] == after[1], (before[1], after[1])
    """)
    done = subprocess.run([sys.executable, "-c", code, str(root)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


# weights that rest elsewhere ------------------------------------------------------------------------------------------


class Far(torch.nn.Module):
    """A layer whose weights a host brings to wherever its input is."""

    def forward(self, x):
        return torch.zeros(*x.shape, 32, device=x.device) if x.dtype == torch.int64 else x


def test_vectors_go_where_the_host_computes_not_where_their_tables_rest():
    """Tables of one model may lie on different devices when memory is short. (meta stands for the accelerator.)"""
    decoder = tiny_decoder(in_embed="caption", embed_args=(9, 4), grid_embed=(3, 4, 5))
    decoder.embed.caption_in = decoder.embed.caption_out = Far()
    assert decoder.embed.prompt(Stream(), torch.float32).device.type == "cpu"
    decoder.embed.device = torch.device("meta")
    for stream in (Stream(), Stream(features=torch.ones(4, 9))):
        assert decoder.embed.prompt(stream, torch.float32).device.type == "meta"
    decoder.row_embed = decoder.frame_embed = decoder.col_embed = Far()
    assert decoder.grid_vectors(range(2), range(3), range(4), "meta").device.type == "meta"
