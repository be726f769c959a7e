"""Cosmos' discrete video codec: golden numbers, causality, steps in time, and the files it comes in."""

import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from scd_pack.scd_core.budget import codec_bytes
from scd_pack.scd_core.checkpoint import Source, save_safetensors
from scd_pack.scd_core.codecs.causal import Past, haar, unhaar
from scd_pack.scd_core.codecs.dv3d import DVCodec, DVConfig, DVHalf
from scd_pack.scd_core.codecs.dv_layouts import dv_layout, find_dv, find_dv_encoder
from scd_pack.scd_core.errors import UserError
from scd_pack.scd_core.golden_dv import facts
from scd_pack.scd_core.models.dv_parts import find_video_codec, video_codec
from scd_pack.scd_core.models.load import ModelFiles, open_model
from scd_pack.scd_core.verify import verify

GOLDEN = Path(__file__).parent / "data" / "golden" / "cosmos-dv8x16x16"
WANT = load_file(GOLDEN / "expected.safetensors")


class Alone:
    """A family of which only the codec is there."""

    def __init__(self, layout):
        self.codec_config, self._refs = layout.config, layout.refs

    def refs(self, part):
        return self._refs


def build(layout):
    return ModelFiles(None, Alone(layout), "the codec").build("codec", dtype=torch.float32)


@pytest.fixture(scope="module")
def codec():
    decoder = Source.open(GOLDEN / "model" / "decoder.safetensors")
    return build(video_codec(decoder, decoder))


@pytest.fixture(scope="module")
def other(request):
    """Random weights, with attention inside a level, three halvings of the frame rate and other levels of values."""
    draws = DVHalf(channels=(8, 12, 16, 16), z=10, blocks=2, entry=16, space=(1, 3), time=(1, 2, 3), attn=(2,))
    reads = DVHalf(channels=(8, 12, 16, 16), z=6, blocks=1, entry=4, space=(0, 1), time=(0, 1, 2), attn=(1,))
    net = DVCodec(DVConfig(draws, reads, levels=(7, 4, 3), patch=2)).requires_grad_(False)
    generator = torch.Generator().manual_seed(3)
    for parameter in net.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return net


@pytest.fixture
def drawn(generator):
    """Codes of a clip of seven grids."""
    return torch.randint(0, 64000, (7, 2, 3), generator=generator)


# wavelets and codes ---------------------------------------------------------------------------------------------------


def test_wavelets_and_back_are_identity(generator):
    x = torch.rand(2, 3, 4, 6, 8, generator=generator)
    bands = haar(x)
    assert bands.shape == (2, 24, 2, 3, 4)
    assert torch.allclose(unhaar(bands), x, atol=1e-6)
    assert torch.allclose(haar(bands[:, :, :, :2]), haar(haar(x)[:, :, :, :2]))
    assert torch.allclose(bands[:, :3], torch.nn.functional.avg_pool3d(x, 2), atol=1e-6), "the first band is the mean"
    step = torch.zeros(1, 1, 2, 2, 2)
    step[:, :, 0] = 2  # a change in time alone
    assert haar(step).flatten().tolist() == [1, 0, 0, 0, 1, 0, 0, 0]


def test_every_code_is_its_values_rounded(codec):
    codes = torch.arange(codec.cfg.codes)
    values = codec.values(codes)
    assert torch.equal(codec.rounded(values), codes)
    assert values.min() == -1 and values.max() == 1 and values.unique(dim=0).shape[0] == 64000
    assert torch.equal(codec.values(WANT["fsq_indices"]), WANT["fsq_codes"])


def test_every_code_has_features_that_the_encoder_could_say(codec, other):
    """The squashing of features turned round: nothing but the rounding lies between them and the codes."""
    for net in (codec, other):
        codes, levels = torch.arange(net.cfg.codes), torch.tensor(net.cfg.levels)
        half, offset = (levels - 1) * 1.001 / 2, (levels % 2 == 0) / 2
        z = ((net.values(codes) * (levels // 2) + offset) / half).atanh() - (offset / half).atanh()
        for shift in (-0.02, 0.02):
            assert torch.equal(net.nearest((z + shift).t()[None, :, :, None, None]).flatten(), codes)


# golden numbers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grids", [1, 2, 3])
@torch.inference_mode()
def test_golden_pixels(codec, grids):
    codes, want = WANT[f"codes_T{grids}"], WANT[f"pixels_T{grids}"]
    assert codec.cfg.frames(grids) == want.shape[2]
    assert (codec.decode_raw(codes) - want).abs().max() < 1e-4
    clip = codec.decode_clip(codes[0])
    assert clip.dtype == torch.float32
    assert (clip - ((want[0].permute(1, 2, 3, 0) + 1) / 2).clamp(0, 1)).abs().max() < 1e-4


@pytest.mark.parametrize("frames", [1, 9])
@torch.inference_mode()
def test_golden_codes(codec, frames):
    video, want = WANT[f"video_F{frames}"], WANT[f"encoder_codes_F{frames}"]
    assert (codec.features(video) - WANT[f"encoder_latent_F{frames}"]).abs().max() < 1e-4
    pictures = (video[0].permute(1, 2, 3, 0) + 1) / 2
    assert torch.equal(codec.encode_clip(pictures), want[0].long())
    if frames == 1:
        assert torch.equal(codec.encode(pictures), want[0].long())


def test_verify_compares_all_of_the_fixture(codec):
    rows = verify(GOLDEN)
    assert all(row.ok for row in rows) and set(WANT) <= {row.what for row in rows}


def test_verify_reads_the_codecs_facts(codec):
    subject = SimpleNamespace(codec=codec)
    shape = {"channels": 4, "num_res_blocks": 1, "channels_mult": [2, 4, 4], "z_channels": 16, "patch_size": 4}
    told = facts({"fsq_levels": [8, 8, 8, 5, 5, 5], "vq": shape})
    assert len(told) == 6 and all(value == have(subject) for value, have in told.values())


# stills and clips -----------------------------------------------------------------------------------------------------


@torch.inference_mode()
def test_pictures_of_a_batch_are_clips_of_one_grid(codec, drawn):
    batch = codec.decode(drawn)
    assert batch.shape == (7, 32, 48, 3)
    for picture, codes in zip(batch, drawn):
        assert torch.allclose(picture, codec.decode_clip(codes[None])[0], atol=1e-5)
    assert torch.equal(codec.encode(batch), torch.cat([codec.encode_clip(picture[None]) for picture in batch]))


@pytest.mark.parametrize("which", ["codec", "other"])
@torch.inference_mode()
def test_frames_do_not_depend_on_later_grids(request, drawn, which):
    net = request.getfixturevalue(which)
    codes = drawn % net.cfg.codes
    whole = net.decode_raw(codes[None])
    assert whole.shape[2] == net.cfg.frames(7)
    for grids in (1, 2, 5):
        changed = codes.clone()
        changed[grids:] = (changed[grids:] + 11) % net.cfg.codes
        first, rest = net.decode_raw(changed[None]).split([net.cfg.frames(grids), (7 - grids) * net.cfg.compression], 2)
        assert (first - whole[:, :, : net.cfg.frames(grids)]).abs().max() < 1e-5
        assert (rest - whole[:, :, net.cfg.frames(grids) :]).abs().amax((0, 1, 3, 4)).min() > 1e-3


@pytest.mark.parametrize("which", ["codec", "other"])
@pytest.mark.parametrize("grids", [1, 2, 3, 6])
@torch.inference_mode()
def test_steps_in_time_are_the_whole_clip(request, drawn, generator, which, grids):
    net = request.getfixturevalue(which)
    codes = drawn % net.cfg.codes
    whole = net.decode_clip(codes, grids=7)
    steps = list(net.decode_steps(codes, grids))
    each = net.cfg.compression
    assert [len(step) for step in steps] == [1 + (grids - 1) * each] + [
        min(grids, 7 - done) * each for done in range(grids, 7, grids)
    ]
    assert (torch.cat(steps) - whole).abs().max() < 1e-5
    frames = torch.rand(net.cfg.frames(7), 4 * net.cfg.factor, 2 * net.cfg.factor, 3, generator=generator)
    assert torch.equal(net.encode_clip(frames, grids), net.encode_clip(frames, grids=7))


@torch.inference_mode()
def test_a_step_holds_no_more_of_a_long_clip_than_of_a_short_one(codec, monkeypatch):
    """What is kept between two steps: two frames a convolution in time, and one key and value a grid."""
    from scd_pack.scd_core.codecs import causal

    kept = []

    def steps(self, items):
        for number, item in enumerate(items):
            self.start, self.more = number == 0, number < len(items) - 1
            yield item
            held = [t for v in self.kept.values() for t in (v if isinstance(v, tuple) else (v,))]
            kept.append(sum(t.untyped_storage().nbytes() for t in held))

    monkeypatch.setattr(causal.Past, "steps", steps)
    generator = torch.Generator().manual_seed(5)
    for part in codec.decode_steps(torch.randint(0, 64000, (12, 2, 2), generator=generator), 1):
        assert len(part) in (1, 8)
    keys = 2 * 4 * codec.cfg.decoder.entry * 4  # one key and value for each of 4 cells
    assert len(kept) == 12 and kept[-1] == 0
    assert kept[1] == kept[0] + keys and kept[10] == kept[1] + 9 * keys


def test_large_clips_go_grid_by_grid_and_small_ones_at_once(codec):
    cfg = codec.cfg
    assert cfg.grids(1024, 640) == 1 and cfg.grids(64, 64) >= 8
    assert codec_bytes(cfg, 1024, 640, 33, clip=True) == codec_bytes(cfg, 1024, 640, 257, clip=True)
    assert codec_bytes(cfg, 1024, 640, 2) == 2 * codec_bytes(cfg, 1024, 640, 1)


@pytest.mark.parametrize(
    "frames, height, width, told",
    [(8, 16, 16, "8 times k"), (0, 16, 16, "0 frames"), (9, 24, 16, "16x24"), (9, 16, 40, "40x16")],
)
def test_what_cannot_be_encoded_is_one_sentence(codec, frames, height, width, told):
    with pytest.raises(ValueError, match=told):
        codec.encode_clip(torch.zeros(frames, height, width, 3))


# files ----------------------------------------------------------------------------------------------------------------


def copied(folder, *names):
    folder.mkdir(parents=True)
    for name in names:
        shutil.copy(GOLDEN / "model" / name, folder)
    return folder


def tensors(name):
    return load_file(GOLDEN / "model" / name)


def as_program(weights, path):
    """A TorchScript file whose state dict is `weights`."""
    root = torch.nn.Module()
    for name, tensor in weights.items():
        module = root
        *parents, last = name.split(".")
        for parent in parents:
            if not hasattr(module, parent):
                module.add_module(parent, torch.nn.Module())
            module = getattr(module, parent)
        module.register_buffer(last, tensor)
    torch.jit.save(torch.jit.script(root), path)


def same(one, two):
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), two.state_dict().values(), strict=True))


def test_both_halves_are_recognised(codec):
    decoder, encoder = (Source.open(GOLDEN / "model" / f"{half}.safetensors") for half in ("decoder", "encoder"))
    assert find_dv(decoder) == "" and find_dv(encoder) is None
    assert find_dv_encoder(encoder) == "" and find_dv_encoder(decoder) is None
    cfg = dv_layout(decoder, "", encoder).config
    assert (cfg.codes, cfg.factor, cfg.compression, cfg.patch) == (64000, 16, 8, 4)
    assert cfg.decoder.channels == (8, 16, 16) and cfg.encoder.entry == 4


def test_a_decoder_alone_draws_and_says_that_it_cannot_read(tmp_path):
    decoder = Source.open(copied(tmp_path / "x", "decoder.safetensors") / "decoder.safetensors")
    net = build(video_codec(decoder, decoder))
    assert net.cfg.encoder is None
    assert (net.decode_raw(WANT["codes_T2"]) - WANT["pixels_T2"]).abs().max() < 1e-4
    with pytest.raises(ValueError, match="no encoder"):
        net.encode(torch.zeros(1, 16, 16, 3))


def test_an_encoder_that_is_not_whole_is_none(tmp_path):
    folder = copied(tmp_path / "x", "decoder.safetensors")
    weights = tensors("encoder.safetensors")
    weights.pop("encoder.mid.block_2.conv2.1.conv3d.bias")
    save_safetensors(weights, folder / "encoder.safetensors")
    decoder = Source.open(folder / "decoder.safetensors")
    assert video_codec(decoder, decoder).config.encoder is None


def test_programs_of_the_release_are_read_without_running_them(tmp_path, codec):
    as_program(tensors("decoder.safetensors"), tmp_path / "decoder.jit")
    shutil.copy(GOLDEN / "model" / "encoder.safetensors", tmp_path)
    decoder = Source.open(tmp_path / "decoder.jit")
    assert same(build(video_codec(decoder, decoder)), codec)


def test_one_file_of_both_halves_under_a_prefix(tmp_path, codec):
    both = tensors("decoder.safetensors") | tensors("encoder.safetensors")
    save_safetensors({f"vq.{name}": tensor for name, tensor in both.items()}, tmp_path / "both.safetensors")
    source = Source.open(tmp_path / "both.safetensors")
    assert find_dv(source) == "vq."
    assert same(build(video_codec(source, source)), codec)


@pytest.mark.parametrize(
    "lost", ["decoder.up.1.block.0.conv1.0.conv3d.weight", "decoder.mid.attn_1.1.q.conv3d.bias"]
)
def test_missing_weights_are_named(tmp_path, lost):
    weights = tensors("decoder.safetensors")
    weights.pop(lost)
    save_safetensors(weights, tmp_path / "decoder.safetensors")
    decoder = Source.open(tmp_path / "decoder.safetensors")
    with pytest.raises(UserError, match=lost):
        video_codec(decoder, decoder)


def test_surplus_weights_are_named(tmp_path):
    weights = tensors("decoder.safetensors") | {"decoder.surprise.weight": torch.zeros(2)}
    save_safetensors(weights, tmp_path / "decoder.safetensors")
    decoder = Source.open(tmp_path / "decoder.safetensors")
    with pytest.raises(UserError, match="surprise"):
        video_codec(decoder, decoder)


def test_continuous_tokenizers_are_none(tmp_path):
    weights = tensors("decoder.safetensors")
    weights = {name: t for name, t in weights.items() if not name.startswith("inv_quant")}
    weights["post_quant_conv.conv3d.weight"] = torch.zeros(16, 16, 1, 1, 1)
    save_safetensors(weights, tmp_path / "decoder.safetensors")
    assert find_dv(Source.open(tmp_path / "decoder.safetensors")) is None


@pytest.fixture
def model(tmp_path):
    """A language model's `Source` in a models folder, and the folder."""
    folder = tmp_path / "a" / "models" / "words"
    folder.mkdir(parents=True)
    save_safetensors({"x": torch.zeros(1)}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text("{}", encoding="utf-8")
    return Source.open(folder), folder


@pytest.mark.parametrize("place", [".", "vq", "../Cosmos-1.0-Tokenizer-DV8x16x16", "../../vae/Cosmos"])
def test_the_codec_is_found_around_a_model(model, place, codec):
    source, folder = model
    target = (folder / place).resolve()
    target.mkdir(parents=True, exist_ok=True)
    for half in ("decoder", "encoder"):
        shutil.copy(GOLDEN / "model" / f"{half}.safetensors", target)
    layout, part = find_video_codec(source, 128, "Words")
    assert part.where == target / "decoder.safetensors" and same(build(layout), codec)


def test_without_a_codec_the_part_tells_what_to_get(model):
    layout, part = find_video_codec(model[0], 128, "Words")
    assert layout is None and part.where is None and "DV8x16x16" in part.get


def test_a_codec_of_too_few_codes_is_refused(model):
    source, folder = model
    shutil.copy(GOLDEN / "model" / "decoder.safetensors", folder)
    with pytest.raises(UserError, match=r"64000 codes.*70000"):
        find_video_codec(source, 70000, "Words")


def test_a_codec_is_no_model(tmp_path):
    copied(tmp_path / "x", "decoder.safetensors")
    with pytest.raises(UserError, match="no language model"):
        open_model(tmp_path / "x")


# Names of another implementation -> ours, one after the other.
DIFFUSERS = (
    (r"conv_s\.", "0.conv3d."),
    (r"conv_t\.", "1.conv3d."),
    (r"mid_block\.resnets\.0", "mid.block_1"),
    (r"mid_block\.resnets\.1", "mid.block_2"),
    (r"mid_block\.attentions\.0", "mid.attn_1.0"),
    (r"mid_block\.temp_attentions\.0", "mid.attn_1.1"),
    (r"\.resnets\.", ".block."),
    (r"\.attentions\.(\d+)", r".attn.\1.0"),
    (r"\.temp_attentions\.(\d+)", r".attn.\1.1"),
    (r"samplers\.0\.(conv\d)\.", r"sample.\1.conv3d."),
    (r"conv_shortcut\.", "nin_shortcut.conv3d."),
    (r"to_([qkv])\.", r"\1.conv3d."),
    (r"to_out\.0\.", "proj_out.conv3d."),
    (r"down_blocks\.", "down."),
    (r"up_blocks\.(\d)", lambda match: f"up.{2 - int(match[1])}"),
)


def renamed(name):
    for pattern, ours in DIFFUSERS:
        name = re.sub(pattern, ours, name)
    return name


@torch.inference_mode()
def test_same_numbers_as_diffusers(generator):
    """Random weights, with attention inside a level."""
    cosmos = pytest.importorskip("diffusers.models.autoencoders.autoencoder_kl_cosmos")
    common = {"num_resnet_blocks": 1, "attention_resolutions": (8,), "resolution": 64, "patch_type": "haar"}
    common |= {"patch_size": 4, "spatial_compression_ratio": 16, "temporal_compression_ratio": 8}
    theirs = {
        "encoder": cosmos.CosmosEncoder3d(out_channels=16, block_out_channels=(4, 8, 16, 16), **common),
        "decoder": cosmos.CosmosDecoder3d(in_channels=16, block_out_channels=(8, 16, 16, 16), **common),
    }
    draws = DVHalf((8, 16, 16), z=16, blocks=2, entry=16, space=(1, 2), time=(1,), attn=(1,))
    ours = DVCodec(DVConfig(draws, DVHalf((8, 16, 16), 16, 1, 4, space=(0, 1), time=(0,), attn=(1,))))
    for half, net in theirs.items():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.15)
        weights = {renamed(name): tensor for name, tensor in net.named_parameters()}
        getattr(ours, half).load_state_dict(weights, strict=True)
    for grids in (1, 2, 5):
        z = torch.randn(1, 16, grids, 2, 3, generator=generator)
        want = theirs["decoder"](z)
        assert (ours.decoder(z, Past()) - want).abs().max() < 1e-5 * want.abs().max()
        video = torch.rand(1, 3, 8 * grids - 7, 32, 48, generator=generator) * 2 - 1
        want = theirs["encoder"](video)
        assert (ours.encoder(video, Past()) - want).abs().max() < 1e-5 * want.abs().max()
