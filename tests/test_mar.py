"""MAR: the network against a reference, its schedule and chains, the family, and what a batch may not change."""

import argparse
import json
import math
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from scd_pack.scd_core.continuous.diffusion import Diffusion, cosine_betas, respaced
from scd_pack.scd_core.continuous.family import MarFamily
from scd_pack.scd_core.continuous.mar import Mar, MarConfig
from scd_pack.scd_core.continuous.noise import PATH, RESIDUAL, NormalNoise
from scd_pack.scd_core.continuous.sampler import STEPS, Settings, resolve, sample
from scd_pack.scd_core.continuous.schedule import cosine_schedule
from scd_pack.scd_core.convert import convert
from scd_pack.scd_core.errors import UserError
from scd_pack.scd_core.generate import generate
from scd_pack.scd_core.models.load import load_model, open_model
from scd_pack.scd_core.prompt import Prompt
from scd_tests.continuous_toys import PROMPT, TINY, family_of, random_mar
from scipy import stats

GOLDEN = Path(__file__).parent / "data" / "golden" / "mar"
QUICK = Settings(steps=6, diffusion_steps=5, seed=9)
# dim, blocks a side, heads, head layers, head width, parameters (millions)
PUBLISHED = {"base": (768, 12, 12, 6, 1024, 207.9), "large": (1024, 16, 16, 8, 1280, 478.3),
             "huge": (1280, 20, 16, 12, 1536, 942.4)}  # fmt: skip


# --- the network ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(name):
    dim, layers, heads, depth, width, millions = PUBLISHED[name]
    cfg = MarConfig(dim, dim, layers, layers, heads, heads, 4 * dim, 4 * dim, 256, 16, 64, 1000, depth, width)
    with torch.device("meta"):
        net = Mar(cfg)
    assert round(sum(p.numel() for p in net.parameters()) / 1e6, 1) == millions


def test_block_is_that_of_a_vision_transformer():
    net = random_mar(1)
    block, dim = net.encoder_blocks[0], TINY.dim
    reference = torch.nn.TransformerEncoderLayer(
        dim, TINY.heads, TINY.ffn, dropout=0.0, activation="gelu", layer_norm_eps=1e-6, batch_first=True,
        norm_first=True,
    )  # fmt: skip
    names = {"self_attn.in_proj_": "attn.qkv.", "self_attn.out_proj.": "attn.proj.", "linear1.": "mlp.fc1.",
             "linear2.": "mlp.fc2.", "norm1.": "norm1.", "norm2.": "norm2."}  # fmt: skip
    ours = block.state_dict()
    reference.load_state_dict({
        theirs + end: ours[mine + end] for theirs, mine in names.items() for end in ("weight", "bias")
    })
    x = torch.randn(2, 9, dim, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(block(x), reference.eval()(x), atol=2e-6, rtol=1e-5)


def test_rows_of_different_lengths_are_what_they_are_alone():
    """Several prefixes of a picture in one pass: the padding of the shorter ones is seen by nobody."""
    net, generator = random_mar(3), torch.Generator().manual_seed(3)
    tokens = torch.randn(4, TINY.tokens, TINY.channels, generator=generator)
    known = torch.rand(4, TINY.tokens, generator=generator) < torch.tensor([0.0, 0.2, 0.6, 1.1])[:, None]
    assert len(set(known.sum(1).tolist())) == 4
    classes = net.conditions(torch.tensor([0, 1, -1, 4]))
    together = net(tokens, known, classes)
    for row in range(4):
        alone = net(tokens[row : row + 1], known[row : row + 1], classes[row : row + 1])
        torch.testing.assert_close(together[row : row + 1], alone, atol=3e-6, rtol=1e-5)
    hidden = tokens.masked_fill(~known[..., None], 7.0)
    assert torch.equal(net(hidden, known, classes), together), "masked tokens were read"
    assert (net(tokens + 0.1, known, classes) - together).abs().amax((1, 2))[1:].min() > 1e-3


def test_classes_and_no_class():
    net = random_mar(4)
    given = net.conditions(torch.tensor([2, -1, 0]))
    assert torch.equal(given[0], net.class_emb.weight[2]) and torch.equal(given[1], net.fake_latent[0])
    assert torch.equal(given[2], net.class_emb.weight[0])


def test_guidance_mixes_the_noise_and_keeps_the_spread_of_the_class():
    net, generator = random_mar(5), torch.Generator().manual_seed(5)
    x, cond = torch.randn(3, 4, generator=generator), torch.randn(6, 64, generator=generator)
    times = torch.tensor([0, 500, 999])
    (own, own_spread), (other, _) = (net.noise(x, times, half) for half in cond.chunk(2))
    scale = torch.tensor([[1.0], [3.0], [-0.5]])
    eps, spread = net.noise(x, times, cond, scale)
    torch.testing.assert_close(eps, other + scale * (own - other), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(spread, own_spread, atol=1e-5, rtol=1e-5)


# --- schedule, noise, diffusion -------------------------------------------------------------------------------------


def test_one_token_a_step_with_as_many_steps_as_tokens():
    schedule = cosine_schedule(256, 256)
    assert schedule.counts == [1] * 256
    assert schedule.guidance(3.0, 0) == 1 + 2.0 / 256 and schedule.guidance(3.0, 255) == 1 + 2 * 255 / 256


def test_histogram_of_64_steps():
    counts = Counter(cosine_schedule(256, 64).counts)
    assert counts[1] == 13 and set(counts) == set(range(1, 8)) and sum(n * c for n, c in counts.items()) == 256


@pytest.mark.parametrize(("tokens", "steps"), [(16, 1), (16, 16), (16, 15), (9, 5), (256, 200)])
def test_every_step_draws_something_and_all_is_drawn(tokens, steps):
    schedule, order = cosine_schedule(tokens, steps), np.random.default_rng(0).permutation(tokens)
    assert min(schedule.counts) >= 1 and sum(schedule.counts) == tokens
    drawn = np.concatenate([schedule.cells(order, step) for step in range(steps)])
    assert sorted(drawn) == list(range(tokens))
    for step in range(steps):
        cells = schedule.cells(order, step)
        assert (np.diff(cells) > 0).all() and not schedule.known(order, step)[cells].any()
        assert schedule.known(order, step).sum() == sum(schedule.counts[:step])


def test_steps_that_no_schedule_has():
    for steps in (0, 17, -3):
        with pytest.raises(UserError, match="1 to 16 steps"):
            cosine_schedule(16, steps)
    for count in (1, 0, 1001):
        with pytest.raises(UserError, match="2 to 1000"):
            respaced(count)


def test_noise_is_normal_and_keyed_by_everything():
    source = NormalNoise(11, [0, 1, 2])
    base = source.normal(PATH, 1, 7, 3, 5)
    assert torch.equal(base, NormalNoise(11, [1]).normal(PATH, 0, 7, 3, 5))
    keys = ((PATH, 0, 7, 3), (PATH, 1, 8, 3), (PATH, 1, 7, 4), (RESIDUAL, 1, 7, 3))
    others = [source.normal(*key, 5) for key in keys]
    others.append(NormalNoise(12, [1]).normal(PATH, 0, 7, 3, 5))
    assert all((other - base).abs().min() > 1e-6 for other in others)
    values = source.normal(PATH, 2, np.arange(4000), 0, 6)
    assert stats.kstest(values.numpy().ravel(), "norm").pvalue > 1e-3
    correlation = np.corrcoef(values.numpy().T) - np.eye(6)
    assert np.abs(correlation).max() < 4 / 4000**0.5
    assert stats.kstest(source.uniform(PATH, 0, np.arange(4000)), "uniform").pvalue > 1e-3


def test_orders_are_permutations_of_their_own():
    orders = NormalNoise(1, range(500)).orders(16)
    assert (np.sort(orders, 1) == np.arange(16)).all() and len({tuple(row) for row in orders}) == 500
    assert (orders[3] == NormalNoise(1, [3]).orders(16)[0]).all()
    first = np.bincount(orders[:, 0], minlength=16)
    assert stats.chisquare(first).pvalue > 1e-3


def test_tables_are_those_of_the_process():
    """Marginals composed step by step; the respaced process has the training process's marginals at its times."""
    betas = cosine_betas()
    assert len(betas) == 1000 and betas.max() == 0.999 and (np.diff(betas) >= 0).all()
    assert respaced(1000).tolist() == list(range(1000)) and respaced(4).tolist() == [0, 333, 666, 999]
    diffusion, kept = Diffusion(25), np.cumprod(1 - betas)
    composed = np.cumprod(1 - diffusion.betas.double().numpy())
    np.testing.assert_allclose(composed[:-1], kept[respaced(25)][:-1], rtol=1e-6)  # 1 - the last one is lost in fp32
    np.testing.assert_allclose(diffusion.recip.numpy() ** -2, kept[respaced(25)], rtol=1e-5)


def test_a_step_with_the_true_noise_is_the_posterior():
    """With the noise that made x_t, the mean is that of q(x_(t-1) | x_t, x_0); spread -1 and 1 are both its bounds."""
    diffusion, generator = Diffusion(10), torch.Generator().manual_seed(0)
    kept = np.cumprod(1 - cosine_betas())[respaced(10)]
    start, noise = (torch.randn(5, 3, generator=generator) for _ in range(2))
    for index in (9, 4, 1):
        x = kept[index] ** 0.5 * start + (1 - kept[index]) ** 0.5 * noise
        before, beta = kept[index - 1], 1 - kept[index] / kept[index - 1]
        mean = (before**0.5 * beta * start + (1 - beta) ** 0.5 * (1 - before) * x) / (1 - kept[index])
        law = diffusion.step(x.float(), index, noise, torch.full_like(noise, -1.0))
        torch.testing.assert_close(law.mean, mean.float(), atol=2e-3, rtol=1e-3)
        assert abs(float(law.log_sigma[0, 0]) - 0.5 * math.log(beta * (1 - before) / (1 - kept[index]))) < 1e-4
        wide = diffusion.step(x.float(), index, noise, torch.ones_like(noise), temperature=0.5)
        assert abs(float(wide.log_sigma[0, 0]) - 0.5 * math.log(beta) - math.log(0.5)) < 1e-4


# --- whole pictures ---------------------------------------------------------------------------------------------------


def test_a_row_of_a_batch_is_the_picture_drawn_alone():
    net = random_mar(6)
    family = family_of(net)
    three = sample(net, family, PROMPT, replace(QUICK, batch=3))
    assert three.latents.shape == (3, 4, 4, 4)
    for row in range(3):
        alone = sample(net, family, PROMPT, replace(QUICK, first_sample=row))
        torch.testing.assert_close(three.latents[row], alone.latents[0], atol=2e-4, rtol=1e-3)
    assert (three.latents[0] - three.latents[1]).abs().max() > 0.1
    other = sample(net, family, PROMPT, replace(QUICK, seed=10))
    assert (other.latents[0] - three.latents[0]).abs().max() > 0.1


def test_report_of_the_target_alone():
    net = random_mar(6)
    report = sample(net, family_of(net), PROMPT, replace(QUICK, steps=16)).report
    assert report.method == "mar" and report.lossless and report.passes == 16 and report.draft_passes == 0
    assert report.accepted == [[1] * 16] and report.accepted_share is None and report.tokens_per_pass == 1
    data = json.loads(json.dumps(report.to_dict()))
    assert data["passes_per_sample"] == [16] and data["sha256_tokens"] in {report.sha256_tokens}
    assert "lossless" in report.text() and "16 passes of the target" in report.text()


def test_guidance_of_1_and_no_class_run_one_stream():
    net = random_mar(6)
    family, rows = family_of(net), []
    hook = net.encoder_norm.register_forward_hook(lambda module, inputs, output: rows.append(len(output)))
    plain = sample(net, family, PROMPT, replace(QUICK, cfg=1.0))
    assert set(rows) == {1}
    nearly = sample(net, family, PROMPT, replace(QUICK, cfg=1.0 + 1e-7))
    assert set(rows) == {1, 2}
    torch.testing.assert_close(plain.latents, nearly.latents, atol=1e-3, rtol=1e-3)
    rows.clear()
    sample(net, family, Prompt(text=""), QUICK)
    assert set(rows) == {1}
    hook.remove()


def test_callback_counts_up_and_ends_the_run():
    net = random_mar(6)
    seen = []
    sample(net, family_of(net), PROMPT, replace(QUICK, batch=2), callback=seen.append)
    assert [p.passes for p in seen] == list(range(1, 7)) and seen[-1].done == seen[-1].total == 32
    assert [p.done for p in seen] == sorted(p.done for p in seen)

    class Stop(Exception):
        pass

    def stop(*_):
        raise Stop

    calls = []
    hook = net.encoder_norm.register_forward_hook(lambda *_: calls.append(1))
    for how in ({"callback": stop}, {"poll": stop}):
        calls.clear()
        with pytest.raises(Stop):
            sample(net, family_of(net), PROMPT, QUICK, **how)
        assert len(calls) == ("callback" in how)
    hook.remove()


def test_polls_come_with_every_denoising_step():
    net, polls = random_mar(6), []
    sample(net, family_of(net), PROMPT, QUICK, poll=lambda: polls.append(1))
    assert len(polls) == 6 * (1 + 5)


def test_numbers_that_are_not_finite_are_told():
    net = random_mar(6)
    net.decoder_norm.weight[0] = math.nan
    with pytest.raises(UserError, match="not finite"):
        sample(net, family_of(net), PROMPT, QUICK)


@pytest.mark.parametrize(("field", "value"), [
    ("gamma", 0), ("prefill", 1.5), ("tau", 0.0), ("temperature", 0.0), ("cfg", math.inf), ("seed", -1), ("batch", 0),
    ("steps", 17), ("diffusion_steps", 1), ("mode", "best"),
])  # fmt: skip
def test_settings_that_no_run_can_have(field, value):
    with pytest.raises(UserError) as error:
        resolve(replace(Settings(), **{field: value}), family_of(random_mar(0)))
    assert str(value) in str(error.value) and "\n" not in str(error.value)


def test_own_values_are_filled_in():
    own = resolve(Settings(), family_of(random_mar(0)))
    assert (own.steps, own.diffusion_steps, own.temperature, own.cfg) == (16, 8, 1.0, 2.0) and STEPS == 64


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    """The miniature as a user has it, with the number of heads written down; out of sight of the other tests'."""
    folder = tmp_path / "models" / "ar_models" / "mar"
    shutil.copytree(GOLDEN / "model", folder)
    for place in (folder, folder / "mar_base"):
        (place / "config.json").write_text('{"num_attention_heads": 4}', encoding="utf-8")
    return folder


def test_both_layouts_are_the_averaged_weights(folder):
    safe, pickled = (open_model(folder / name) for name in ("mar-base.safetensors", "mar_base"))
    assert isinstance(pickled.family, MarFamily) and pickled.family.decoder_config == safe.family.decoder_config
    states = [files.build("decoder", dtype=torch.float32).state_dict() for files in (safe, pickled)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    stored = torch.load(folder / "mar_base" / "checkpoint-last.pth", weights_only=False)  # our own fixture
    assert isinstance(stored["args"], argparse.Namespace)
    assert any((stored["model"][name] != states[1][name]).any() for name in states[1]), "which of both would not matter"


def test_pickle_without_averaged_weights_is_read_as_it_is(folder):
    stored = torch.load(folder / "mar_base" / "checkpoint-last.pth", weights_only=False)  # our own fixture
    torch.save({"model": stored["model"]}, folder / "mar_base" / "checkpoint-last.pth")
    net = open_model(folder / "mar_base").build("decoder", dtype=torch.float32)
    assert torch.equal(net.z_proj.weight, stored["model"]["z_proj.weight"])


def test_sizes_are_read_off_the_tensors(folder):
    family = open_model(folder / "mar_base").family
    cfg, codec = family.decoder_config, family.codec_config
    assert (cfg.dim, cfg.encoder_layers, cfg.heads, cfg.tokens, cfg.buffer) == (20, 2, 4, 16, 8)
    assert (cfg.classes, cfg.head_layers, cfg.head_width, cfg.channels) == (10, 2, 28, 16)
    assert (codec.embed, codec.factor, codec.scale, codec.encoder) == (16, 2, 0.2325, False)
    assert str(family.sizes[0]) == "8x8"


def test_random_sizes_round_trip_through_a_file(tmp_path):
    cfg = replace(TINY, dim=24, decoder_dim=40, encoder_layers=1, decoder_layers=3, ffn=50, decoder_ffn=70, channels=16,
                  tokens=9, head_layers=3)  # fmt: skip
    net = Mar(cfg)
    generator = torch.Generator().manual_seed(0)
    state = {name: torch.randn(t.shape, generator=generator) for name, t in net.state_dict().items()}
    save_file(state, tmp_path / "mar.safetensors")
    shutil.copytree(GOLDEN / "model" / "kl16", tmp_path / "kl16")
    (tmp_path / "config.json").write_text('{"num_attention_heads": 4}', encoding="utf-8")
    files = open_model(tmp_path / "mar.safetensors")
    assert files.family.decoder_config == cfg
    loaded = files.build("decoder", dtype=torch.float32).state_dict()
    assert all(torch.equal(loaded[name], state[name]) for name in state)


def test_auto_means_fp32_for_the_diffusion_head(folder):
    assert load_model(folder / "mar_base").decoder.dtype == torch.float32
    assert load_model(folder / "mar_base", "bf16").decoder.dtype == torch.bfloat16


def test_half_precision_draws(folder):
    model = load_model(folder / "mar_base", "bf16")
    drawn = sample(model.decoder, model.family, Prompt(text="1"), QUICK)
    assert drawn.report.dtype == "bfloat16" and drawn.latents.isfinite().all()


def test_classes_by_number_and_refusals(folder):
    text = open_model(folder / "mar_base").family.text
    assert text.number("9") == 9
    for wrong in ("10", "golden retriever"):
        with pytest.raises(UserError, match="0 to 9"):
            text.encode(wrong)


def test_one_file_holds_all_of_it(folder, tmp_path):
    packed = open_model(convert(folder / "mar_base", tmp_path / "one.safetensors"))
    whole = open_model(folder / "mar_base")
    assert packed.family.decoder_config == whole.family.decoder_config
    for part in ("decoder", "codec"):
        mine, theirs = (files.build(part, dtype=torch.float32).state_dict() for files in (packed, whole))
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    with pytest.raises(UserError, match="8 bits"):
        convert(folder / "mar_base", tmp_path / "eight.safetensors", "fp8")


def test_missing_codec_is_told_when_it_is_needed(folder):
    shutil.rmtree(folder / "kl16")
    with pytest.raises(UserError, match=r"picture codec: MISSING, looked for kl16"):
        open_model(folder / "mar-base.safetensors")


def test_codec_of_another_model_is_no_codec(folder):
    state = torch.load(folder / "kl16" / "kl16.ckpt", weights_only=True)["model"]
    state["post_quant_conv.weight"] = torch.zeros(16, 8, 1, 1)
    torch.save(state, folder / "kl16.ckpt")
    with pytest.raises(UserError, match=r"latents of 8 channels, the network draws 16"):
        open_model(folder / "mar-base.safetensors")


@pytest.mark.parametrize("change", ["missing", "extra", "shape"])
def test_wrong_tensors_are_named(folder, change):
    path = folder / "mar-base.safetensors"
    state = load_file(path)
    name = "decoder_blocks.1.mlp.fc2.weight"
    if change == "missing":
        del state[name]
    elif change == "extra":
        state[name := "lora.down.weight"] = torch.zeros(2)
    else:
        state[name] = torch.zeros(7, 5)
    save_file(state, path)
    with pytest.raises(UserError, match=name.replace(".", r"\.")) as error:
        open_model(path).build("decoder")
    assert "\n" not in str(error.value)


def test_codec_alone_is_refused_with_a_reason(folder):
    with pytest.raises(UserError, match="image tokenizer and no language model"):
        open_model(folder / "kl16")


def test_the_road_of_discrete_tokens_refuses_a_mar(folder):
    model = load_model(folder / "mar_base")
    with pytest.raises(UserError, match="Continuous Speculative Sampler"):
        generate(model.decoder, model.family, Prompt(text="1"))


def test_the_continuous_road_refuses_others():
    model = load_model()
    with pytest.raises(UserError, match="draws discrete tokens"):
        sample(model.decoder, model.family, Prompt(text="fox"))
    net = random_mar(0)
    with pytest.raises(UserError, match="draft model is the bundled model"):
        sample(net, family_of(net), PROMPT, QUICK, (model.decoder, model.family))


@pytest.mark.parametrize(("field", "value"), [("tokens", 9), ("channels", 8), ("classes", 3)])
def test_draft_of_another_kind_is_refused(field, value):
    net, draft = random_mar(0), random_mar(0, **{field: value})
    with pytest.raises(UserError, match=f"draft model has {value} {field}"):
        sample(net, family_of(net), PROMPT, QUICK, (draft, family_of(draft)))
