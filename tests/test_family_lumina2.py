"""Lumina-mGPT 2.0: golden numbers, its vocabulary with a gap, its parts under the names that people have, its sizes."""

import copy
import json
import shutil
import tracemalloc
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from scd_pack.scd_core.checkpoint import save_safetensors
from scd_pack.scd_core.codecs.conv2d import ConvCodec, ConvCodecConfig
from scd_pack.scd_core.errors import UserError
from scd_pack.scd_core.generate import Request, generate
from scd_pack.scd_core.law import guide
from scd_pack.scd_core.models.chameleon import AnoleFamily, LuminaFamily, is_second
from scd_pack.scd_core.models.family import Size
from scd_pack.scd_core.models.load import load_model, open_model
from scd_pack.scd_core.models.lumina2 import Lumina2Family
from scd_pack.scd_core.models.tokenizer import HubTokenizer
from scd_pack.scd_core.prompt import Prompt
from scd_tests.chameleon_files import GOLDEN, models, save_weights, tensors_of
from scd_tests.rollback import windows
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["models"]  # a fixture
NAME, LOGITS, PIXELS = "lumina-mgpt-2", 2e-4, 1e-4
CODEC = GOLDEN / "movqgan" / "model" / "movqgan_270M.ckpt"
WANT = load_file(GOLDEN / NAME / "expected.safetensors")
META = json.loads((GOLDEN / NAME / "meta.json").read_text(encoding="utf-8"))


def lay_out(folder, codec="movqgan_270M.ckpt", without=(), **config):
    """The fixture's files in `folder`; `codec` is where its image tokenizer goes, `config` changes settings."""
    shutil.copytree(GOLDEN / NAME / "model", folder, ignore=shutil.ignore_patterns(*without))
    if codec:
        (folder / codec).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(CODEC, folder / codec)
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8")) | config
    settings = {key: value for key, value in settings.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_model(lay_out(tmp_path_factory.mktemp("one") / "two" / "three" / "Lumina-mGPT-2.0"), "fp32")


@pytest.fixture(scope="module")
def drawing(model):
    """(plan, streams) of the fixture's picture."""
    family = model.family
    plan = family.plan(family.size(*META["image_px"][::-1]))
    return plan, list(family.streams(family.text.encode(META["prompt"]), None, plan))


def draw(model, method, **changes):
    height, width = META["image_px"]
    request = Request(method=method, width=width, height=height, **changes)
    return generate(model.decoder, model.family, model.family.text.encode(META["prompt"]), None, request).codes


# golden numbers -----------------------------------------------------------------------------------------------------


def test_prompts_and_format(model, drawing):
    plan, streams = drawing
    for stream, name in zip(streams, ("cond", "uncond")):
        assert torch.equal(stream.ids, WANT[f"prompt_ids_{name}"])
    assert int(streams[0].ids[0]) == META["bos_used"]
    codes = WANT["codes"].view(1, 1, plan.rows, plan.cols)
    assert plan.fixed(1, codes)[0].tolist() + list(model.family.ending) == WANT["image_seq_ids"].tolist()
    assert (plan.base, plan.vocab) == (META["image_id_offset"], META["codebook"]) == (314, 80)


@pytest.mark.parametrize("width", [1, 3, 16, 36])
def test_logits_of_both_streams_in_every_window(model, drawing, width):
    """Wrong drafts first, which the next pass overwrites, then the given codes."""
    plan, streams = drawing
    n = plan.length
    found = windows(model, plan, streams, WANT["image_seq_ids"], width)
    for row, name in enumerate(("cond", "uncond")):
        assert (found[row] - WANT[f"logits_{name}"][:n]).abs().max() < LOGITS
    assert (guide(found[None], META["cfg_scale"])[0] - WANT["cfg_logits"][:n]).abs().max() < LOGITS
    assert model.family.defaults.cfg == META["cfg_scale"] and model.family.defaults.top_k == 4096


@pytest.mark.parametrize("method, window", [("autoregressive", 0), ("seed-exact", 9), ("jacobi", 16)])
def test_greedy_codes(model, method, window):
    assert torch.equal(draw(model, method, window=window, temperature=0).flatten(), WANT["greedy_codes"])


def test_seed_exact_draws_what_autoregressive_draws(model, drawing):
    want, cols = draw(model, "autoregressive", seed=11, batch=2), drawing[0].cols
    for window in (cols, cols + 1, 17):
        assert torch.equal(draw(model, "seed-exact", seed=11, batch=2, window=window), want)


@torch.inference_mode()
def test_pixels(model):
    numbers = load_file(GOLDEN / "movqgan" / "expected.safetensors")
    rows, cols = json.loads((GOLDEN / "movqgan" / "meta.json").read_text(encoding="utf-8"))["grid"]
    found = model.codec.decode_raw(numbers["codes"].view(1, rows, cols))
    assert (found - numbers["pixels"]).abs().max() < PIXELS
    assert model.codec.cfg.spatial_norm and not model.codec.cfg.encoder and model.codec.cfg.factor == 8


# which model it is --------------------------------------------------------------------------------------------------


class Named:
    """What detection looks at."""

    def __init__(self, rows, root="model", **config):
        self.root, self.files, self.config, self.rows = Path(root), (Path(root) / "model.safetensors",), config, rows

    def keys(self):
        return ["model.layers.0.self_attn.q_norm.bias", "model.embed_tokens.weight"]

    def shape(self, key):
        return (self.rows, 64)


@pytest.mark.parametrize(
    "source, second",
    [
        (Named(171385), True),
        (Named(171385, root="Anole-7b"), True),
        (Named(65536, root="Lumina-mGPT-2.0"), False),  # the older model in a folder of this name
        (Named(65536, vocabulary_map={"<MOVQGAN00000>": 155000}), True),
        (Named(65536, vocabulary_map={"IMGIMGAZ": 4}), False),
        (Named(65536, scd={"family": "Lumina-mGPT 2.0"}), True),
        (Named(171385, scd={"family": "Lumina-mGPT"}), False),
    ],
)
def test_which_family(source, second):
    assert is_second(source) == second == Lumina2Family.detect(source)
    assert (LuminaFamily.detect(source) or AnoleFamily.detect(source)) != second


def test_a_folder_called_chameleon_is_no_reason_to_refuse(models):
    assert isinstance(open_model(lay_out(models / "chameleon-2")).family, Lumina2Family)


# vocabulary ---------------------------------------------------------------------------------------------------------


def renamed(rename):
    """The fixture's token map with its picture tokens changed by rename(number, id) -> (name, id)."""
    words = json.loads((GOLDEN / NAME / "model" / "config.json").read_text(encoding="utf-8"))["vocabulary_map"]
    pictures = sorted((id, name) for name, id in words.items() if name.startswith("<MOVQGAN"))
    rest = {name: id for name, id in words.items() if not name.startswith("<MOVQGAN")}
    return rest | dict(rename(n, id) for n, (id, _) in enumerate(pictures))


def test_only_the_first_part_of_the_picture_tokens_names_counts(models):
    family = open_model(lay_out(models / "lumina", vocabulary_map=renamed(lambda n, id: (f"<MOVQGAN_x{79 - n}y>", id))))
    assert (family.family.base, family.family.decoder_config.head_rows) == (314, 80)


def test_picture_tokens_must_count_up(models):
    gap = renamed(lambda n, id: (f"<MOVQGAN{n}>", id + (n == 79)))
    with pytest.raises(UserError, match=r"names 80 picture tokens .* do not count up from 314 to 393"):
        open_model(lay_out(models / "lumina", vocabulary_map=gap))


def test_without_a_token_map_the_releases_ids_count(models):
    """The real offset, in a model of the real number of rows; the words come from the tokenizer alone."""
    folder = lay_out(models / "lumina", codec=None, vocabulary_map=None)
    tensors, rows = tensors_of(folder), 171385
    for key in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[key] = torch.zeros(rows, tensors[key].shape[1], dtype=torch.bfloat16)
    save_weights(folder, tensors)
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**settings, "vocab_size": rows}), encoding="utf-8")
    files = open_model(folder, need=("decoder",))
    assert isinstance(files.family, Lumina2Family) and files.family.base == 155000
    assert files.family.refs("decoder")["lm_head.weight"].rows == (155000, 171384)


@pytest.mark.parametrize(
    "file, told, name",
    [
        ("tokenizer_config.json", {"bos_token": "<|im_start|>", "eos_token": "<|endoftext|>"}, "<|im_start|>"),
        ("tokenizer_config.json", {"bos_token": None, "eos_token": {"content": "<|im_end|>"}}, "<|im_end|>"),
        ("special_tokens_map.json", {"eos_token": "<|im_end|>"}, "<|im_end|>"),
        (None, None, "<|endoftext|>"),
    ],
)
def test_a_text_begins_with_the_start_token_or_the_end_token(models, file, told, name):
    folder = lay_out(models / "lumina", without=("tokenizer_config.json", "special_tokens_map.json"))
    if file:
        (folder / file).write_text(json.dumps(told), encoding="utf-8")
    family = open_model(folder).family
    assert family.text.ids("cat")[0] == HubTokenizer(folder / "tokenizer.json").id(name)


def test_names_of_special_tokens_are_plain_text_for_users(model, drawing):
    text = Prompt("a <racm3:break> <reserved08706><eoss> cat")
    ids = model.family.streams(text, None, drawing[0])[0].ids.tolist()
    tokens = model.family.tokens
    assert [ids.count(tokens[n]) for n in ("<racm3:break>", "<eoss>", "<reserved08706>")] == [1, 0, 1]


def test_negative_prompts_take_the_place_of_the_unconditional_stream(model, drawing):
    plan, streams = drawing
    for negative in (None, Prompt(""), Prompt(" ")):
        assert torch.equal(model.family.streams(Prompt("x"), negative, plan)[1].ids, streams[1].ids)
    same = model.family.streams(Prompt("x"), Prompt("x"), plan)
    assert torch.equal(same[0].ids, same[1].ids)


# parts --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "place",
    [
        "movqgan_270M.ckpt",
        "movqgan/270M/movqgan_270M.ckpt",
        "270M/movqgan_270M.ckpt",
        "../movqgan/270M/movqgan_270M.ckpt",
        "../MoVQGAN/movqgan_270M.ckpt",
        "../MoVQGAN_270M_fp32.pt",
    ],
)
def test_the_image_tokenizer_under_the_names_that_people_have(models, place):
    folder = lay_out(models / "Lumina-mGPT-2.0", codec=place)
    where = open_model(folder).family.parts[1].where
    assert where.resolve() == (folder / place).resolve()


def test_an_image_tokenizer_as_safetensors(models):
    folder = lay_out(models / "Lumina-mGPT-2.0", codec=None)
    save_safetensors(tensors_of(CODEC), models / "vae" / "movqgan_270M.safetensors")
    assert open_model(folder).family.parts[1].where.name == "movqgan_270M.safetensors"


def test_its_smaller_siblings_and_chameleons_are_passed_over(models):
    """They fit in every shape, or nearly, and speak another language."""
    folder = lay_out(models / "Lumina-mGPT-2.0", codec="movqgan_67M.ckpt")
    shutil.copy(CODEC, models / "movqgan_102M.ckpt")
    shutil.copytree(GOLDEN / "chameleon-tokenizer" / "model", models / "chameleon")
    with pytest.raises(UserError, match=r"image tokenizer: MISSING, looked for movqgan_270M\.ckpt or \.safetensors in"):
        open_model(folder)
    shutil.copy(CODEC, models / "movqgan_270M.ckpt")
    assert open_model(folder).family.parts[1].where.name == "movqgan_270M.ckpt"


def test_chameleons_models_pass_over_this_image_tokenizer(models):
    shutil.copytree(GOLDEN / "lumina-mgpt-hf" / "model", models / "lumina")
    save_safetensors(tensors_of(CODEC), models / "lumina" / "movqgan_270M.safetensors")
    (models / "tokenizer").mkdir()
    shutil.copy(GOLDEN / "chameleon-tokenizer" / "model" / "vqgan.ckpt", models / "tokenizer")
    weights = models / "lumina" / "model.safetensors.index.json"
    assert weights.is_file() and open_model(models / "lumina").family.parts[1].where.name == "vqgan.ckpt"


@pytest.mark.parametrize(
    "change, told", [("codes", "has 88 codes, the token map names 80"), ("size", "draws 4 pixels a code")]
)
def test_an_image_tokenizer_of_another_model_is_refused(models, change, told):
    tensors = tensors_of(CODEC)
    if change == "codes":
        tensors["quantize.embedding.weight"] = torch.zeros(88, 4)
    else:
        tensors = {key: tensor for key, tensor in tensors.items() if not key.startswith("decoder.up.0.")}
        tensors = {key.replace("decoder.up.", "decoder.up.-"): tensor for key, tensor in tensors.items()}
        tensors = {key.replace("up.-1", "up.0").replace("up.-2", "up.1").replace("up.-3", "up.2"): tensor
                   for key, tensor in tensors.items() if "up.-1.upsample" not in key}  # fmt: skip
    folder = lay_out(models / "lumina", codec=None)
    save_safetensors(tensors, folder / "movqgan_270M.safetensors")
    with pytest.raises(UserError, match=told):
        open_model(folder)


def test_a_complete_image_tokenizer_reads_pictures(models):
    """The release holds an encoder, training leftovers, and an averaged copy under other names."""
    config = ConvCodecConfig(
        codes=80, code_dim=4, z_channels=4, ch=32, ch_mult=(1, 2, 2, 4), encoder_blocks=2, decoder_blocks=3,
        attn_levels=(3,), spatial_norm=True,
    )  # fmt: skip
    torch.manual_seed(3)
    codec = ConvCodec(config).requires_grad_(False)
    codec.load_state_dict({key: torch.randn(t.shape) * 0.1 for key, t in codec.state_dict().items()})
    junk = {"loss.discriminator.main.0.weight": torch.ones(2), "ema_encoder.conv_inweight": torch.ones(2)}
    folder = lay_out(models / "lumina", codec=None)
    torch.save({**codec.state_dict(), **junk}, folder / "movqgan_270M.ckpt")
    files = open_model(folder)
    assert files.family.codec_config == config
    found, frames = files.build("codec"), torch.rand(1, 16, 24, 3)
    codes = found.encode(frames)
    assert torch.equal(codes, codec.encode(frames)) and len(codes.unique()) > 1
    assert torch.equal(found.decode_raw(codes), codec.decode_raw(codes))


@pytest.mark.parametrize("gone", ["tokenizer.json", "config.json"])
def test_a_missing_tokenizer_is_told(models, gone):
    folder = lay_out(models / "lumina")
    (folder / "tokenizer.json").unlink()
    if gone == "config.json":  # the token map with it: nothing tells any more that it is this model
        (folder / "config.json").write_text(json.dumps({"scd": {"family": "Lumina-mGPT 2.0"}}), encoding="utf-8")
    with pytest.raises(UserError, match=r"text tokenizer: MISSING, looked for tokenizer\.json in .* \(tokenizer\.json"):
        open_model(folder)


def test_a_tokenizer_beside_another_folder_brings_its_own_start_token(models):
    folder = lay_out(models / "Omni", without=("tokenizer*",))
    other = lay_out(models / "Lumina-mGPT-2.0", codec=None, without=("model*",))
    told = json.loads((other / "tokenizer_config.json").read_text(encoding="utf-8"))
    (other / "tokenizer_config.json").write_text(json.dumps({**told, "bos_token": "<|im_start|>"}), encoding="utf-8")
    family = open_model(folder).family
    assert family.parts[2].where == str(other / "tokenizer.json")
    assert family.text.ids("cat")[0] == family.tokens["<|im_start|>"]


@pytest.mark.parametrize("what", ["chameleon's", "moved"])
def test_a_tokenizer_of_another_model_is_refused(models, what):
    folder = lay_out(models / "lumina")
    file = folder / "tokenizer.json"
    if what == "moved":
        file.write_text(file.read_text(encoding="utf-8").replace("<eoss>", "<other>"), encoding="utf-8")
    else:
        shutil.copy(GOLDEN / "lumina-mgpt-hf" / "model" / "tokenizer.json", file)
    with pytest.raises(UserError, match=r"tokenizer\.json' belongs to another model \(<(eoss|racm3:break)> is None\)"):
        open_model(folder)


# sizes --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def full_sized(model):
    """The fixture's family with all size tokens of the release."""
    family = object.__new__(Lumina2Family)
    family.__dict__.update(model.family.__dict__)
    family.units = {n: 5000 + n for n in range(1, 200)}
    family.sizes = family._crops()
    return family


def test_sizes(full_sized):
    family = full_sized
    assert family.size() == Size(768, 768) and family.size(1024) == Size(1024, 576)
    assert family.size(512, 1024) == Size(512, 1024)  # the authors' own example
    assert family.size(2048, 256) == Size(2048, 256) and family.size(800, 800) == Size(800, 800)  # beyond the list
    sides = [(s.width, s.height) for s in family.sizes]
    assert all(w * h <= 768**2 and max(w, h) <= 4 * min(w, h) for w, h in sides) and (1536, 384) in sides
    for asked, told in (
        ((1024, 768), "and a picture has 10240 tokens at most, one for 8x8 pixels; the nearest size is "),
        ((1000, 500), "sides are multiples of 32 pixels.*nearest size is 992x512"),
        ((768, 768, 5), "draws pictures, not clips"),
    ):
        with pytest.raises(UserError, match=told):
            family.size(*asked)


def test_a_size_without_its_token_is_refused(model):
    assert model.family.sizes[0] == Size(256, 256)  # the miniature has tokens up to here
    with pytest.raises(UserError, match="cannot draw 288x256"):
        model.family.size(288, 256)


class Largest(TorchDispatchMode):
    """Numbers in the largest tensor that torch makes."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        sizes = (t.numel() for t in tree_leaves(found) if isinstance(t, torch.Tensor))
        self.most = max(self.most, *sizes, 0)
        return found


class Enough(Exception):
    pass


def test_a_large_picture_makes_nothing_quadratic(model, full_sized):
    """9,216 codes: one table of positions against positions would have 87 million entries."""
    passes = []

    def stop(progress):
        passes.append(progress.done)
        if len(passes) == 3:
            raise Enough

    request = Request(method="seed-exact", width=768, height=768, window=16, seed=1)
    family = copy.copy(full_sized)
    family.streams = lambda prompt, negative, plan: model.family.streams(prompt, negative, small)
    small = model.family.plan(model.family.size(64, 32))  # the miniature's embedding has no token for such a size

    def draw():
        passes.clear()
        with pytest.raises(Enough), Largest() as seen:
            generate(model.decoder, family, Prompt("a cat"), None, request, callback=stop)
        return seen

    draw()  # what is imported at the first use is no memory of a run
    tracemalloc.start()
    seen = draw()
    on_host = tracemalloc.get_traced_memory()[1]  # numpy's and Python's, not torch's
    tracemalloc.stop()
    cache = model.decoder.cfg.layers * 2 * 2 * (96 * 97 + 100) * model.decoder.cfg.dim
    assert passes[-1] >= 3 and 96 * 97 < seen.most <= cache and on_host < 8 << 20
