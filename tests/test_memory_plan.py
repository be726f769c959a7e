"""What a host is told about memory is what a model takes: 7B shapes by arithmetic, a mid-size model by measurement."""

import json
import math
import os
import pathlib
import shutil
import subprocess
import sys

import pytest
import torch
from scd_pack.scd_core import budget
from scd_pack.scd_core.checkpoint import Source, save_safetensors, stream_safetensors
from scd_pack.scd_core.codecs.conv2d import ConvCodec, ConvCodecConfig
from scd_pack.scd_core.models.load import BUNDLED, open_model
from scd_pack.scd_core.models.spatial_heads import SpatialHeads, pack_heads
from scd_pack.scd_core.models.transformer import Decoder, DecoderConfig
from scd_pack.scd_core.plan import TokenPlan

# Published sizes (parameters in 1e9 of what is loaded, bytes of keys and values a token and stream in bf16).
JANUS = {"in_embed": "codebook", "embed_args": (16384, 8, 2), "out_head": "mlp"}
RELEASES = {
    # LM 1.443 and 0.05 of input and head; 6.6 without the 0.04 of its codec
    "Janus-Pro-1B": (DecoderConfig(2048, 24, 16, 16, 128, 5632, 102400, 16384, **JANUS), 1.493, 196_608),
    "Janus-Pro-7B": (DecoderConfig(4096, 30, 32, 32, 128, 11008, 102400, 16384, **JANUS), 6.56, 491_520),
    # 7.01 with the rows of the head that are no picture codes
    "Lumina-mGPT-7B": (DecoderConfig(4096, 32, 32, 32, 128, 11008, 65536, 8192, qk_norm="layer"), 6.779, 524_288),
    "LlamaGen-XL": (
        DecoderConfig(1280, 36, 20, 20, 64, 3584, 16384, 16384, in_embed="class", embed_args=(1001,)), 0.775, 184_320,
    ),
    "LlamaGen-3B": (
        DecoderConfig(3200, 24, 32, 32, 100, 8704, 16384, 16384, in_embed="class", embed_args=(1001,)), 3.097, 307_200,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RELEASES)
def test_shapes_of_the_releases_without_their_weights(name):
    cfg, billions, per_token = RELEASES[name]
    with torch.device("meta"):
        state = Decoder(cfg, dtype=torch.bfloat16).state_dict()
    assert sum(t.numel() for t in state.values()) / 1e9 == pytest.approx(billions, rel=0.01)
    assert budget.cache_bytes(cfg, 100, 2, 2) == per_token * 101 * 2
    plan = TokenPlan(1, 24, 24, vocab=cfg.head_rows)
    run = budget.sampler_bytes(cfg, 2, plan, prompt=50, streams=2, batch=1, window=32)
    assert budget.cache_bytes(cfg, 50 + 576, 2, 2) < run < 1.5 * budget.cache_bytes(cfg, 50 + 576, 2, 2)


class Part:
    """Stands for a `Ref`: a tensor of a file."""

    def __init__(self, shape, dtype, scaled=False):
        self.shape, self.dtype, self.scaled = shape, dtype, scaled


def test_weights_count_as_they_will_lie_in_memory():
    refs = {"a": Part((10, 20), torch.float32), "b": Part((30,), torch.bfloat16)}
    refs["c"] = Part((5, 8), torch.bfloat16, scaled=True)
    assert budget.weight_bytes(refs) == 800 + 60 + 80
    assert budget.weight_bytes(refs, torch.bfloat16) == 400 + 60 + 80
    assert budget.weight_bytes(refs, torch.bfloat16, keep_fp8=True) == 400 + 60 + 40


# --- a mid-size model, measured ---------------------------------------------------------------------------------------

WEIGHTS = 252e6


@pytest.fixture(scope="module")
def middle(tmp_path_factory):
    """A random model in bf16 of the bundled family: `WEIGHTS` weights (1 GB in fp32), 16384 codes."""
    config = dict(Source.open(BUNDLED).config)
    codec = ConvCodecConfig(codes=16384, code_dim=8, z_channels=32, ch=32, ch_mult=(1, 1, 1), groups=32)
    decoder = DecoderConfig(
        1024, 17, 16, 16, 64, 2816, 16384 + 3 + len(config["words"]), 16384, abs_pos="input", grid_embed=(9, 16, 16)
    )
    config |= {"codec": vars(codec), "decoder": vars(decoder)}
    with torch.device("meta"):
        parts = {"decoder": Decoder(decoder), "codec": ConvCodec(codec)}
    shapes = {f"{part}.{key}": t.shape for part, net in parts.items() for key, t in net.state_dict().items()}
    entries = {key: (tuple(shape), torch.bfloat16) for key, shape in shapes.items()}
    generator = torch.Generator().manual_seed(3)

    def read(key):
        if key.endswith("norm.weight"):
            return torch.ones(shapes[key], dtype=torch.bfloat16)
        return (torch.randn(shapes[key], generator=generator) * 0.02).bfloat16()

    path = tmp_path_factory.mktemp("middle") / "model.safetensors"
    return stream_safetensors(entries, read, path, {"config": json.dumps(config)})


@pytest.fixture(scope="module")
def pickled(middle):
    path = middle.with_name("model.pt")
    source = Source.open(middle)
    torch.save({key: source.read(key) for key in source.keys()}, path)
    path.with_name("config.json").write_text(json.dumps(source.config), encoding="utf-8")
    return path


def measure(*args):
    """What memory_run.py prints."""
    script = pathlib.Path(__file__).with_name("memory_run.py")
    # freed memory goes back to the system, or an earlier peak would hide a later need
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run([sys.executable, str(script), *map(str, args)], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


needs_peak = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


@needs_peak
@pytest.mark.slow
@pytest.mark.parametrize(("form", "dtype"), [("middle", "fp32"), ("middle", "bf16"), ("pickled", "fp32")])
def test_loading_peaks_below_a_fifth_more_than_the_weights(form, dtype, request):
    found = measure(request.getfixturevalue(form), dtype, "load")
    assert math.isfinite(found["sum"])
    assert found["weights"] == pytest.approx(WEIGHTS * (4 if dtype == "fp32" else 2), rel=0.05)
    assert 0.9 * found["weights"] < found["grown"] < 1.2 * found["weights"], found


@needs_peak
@pytest.mark.slow
def test_estimate_is_the_peak_of_a_run_within_a_tenth(middle):
    found = measure(middle, "fp32", "run")
    estimate = found["weights"] + found["run"]
    assert found["run"] > 0.2 * found["weights"], "the run must weigh enough to be seen"
    assert found["grown"] == pytest.approx(estimate, rel=0.1), (found, estimate)


@needs_peak
@pytest.mark.slow
def test_heads_count_too(tmp_path):
    """SSD reads further weights when a run begins; here they are most of what it takes."""
    model = shutil.copy(BUNDLED, tmp_path / "model.safetensors")
    net = open_model(model).build("decoder")
    with torch.device("meta"):
        heads = SpatialHeads(net, 1 << 14, 2, 3)
    state = {key: torch.full(t.shape, 0.01, dtype=torch.bfloat16) for key, t in heads.state_dict().items()}
    heads.load_state_dict(state, assign=True)
    tensors, metadata = pack_heads(heads, "the bundled model")
    save_safetensors(tensors, tmp_path / "ssd_heads.safetensors", metadata)
    found, size = measure(model, "fp32", "ssd"), 4 * sum(t.numel() for t in state.values())
    assert 2 * found["weights"] < size < found["run"], "the heads must weigh enough to be seen"
    assert found["grown"] == pytest.approx(found["weights"] + found["run"], rel=0.1), (found, size)
