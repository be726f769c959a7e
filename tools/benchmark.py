"""Measured figures: passes a picture and a clip for every method and window, sampler overhead, wall clock.

    python tools/benchmark.py --suite steps --json out/benchmark.json

Suites: steps (temperature 1, top-k off, cfg 1), preset (the bundled model's own settings), wall (seconds against
autoregressive in its best dtype), overhead (kernel time over backbone time; also on a random model of
Janus-Pro-1B's shape), long (a pass against the length of the sequence). Ratios are meant to be quoted, seconds are
only comparable within one run.
"""

import argparse
import json
import pathlib
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import replace

import torch

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scd_core.acceptance import METHODS  # noqa: E402
from scd_core.generate import Request, generate, law_settings  # noqa: E402
from scd_core.law import LawSettings  # noqa: E402
from scd_core.loop import Settings, decode  # noqa: E402
from scd_core.models.load import load_model, native_bf16  # noqa: E402
from scd_core.models.rope import rope_1d  # noqa: E402
from scd_core.models.session import Session  # noqa: E402
from scd_core.models.transformer import Decoder, DecoderConfig, Positions  # noqa: E402
from scd_core.plan import TokenPlan  # noqa: E402
from scd_core.prompt import Stream  # noqa: E402

PICTURES = (
    "fox on snow",
    "rocket on night",
    "burger on wood",
    "strawberry on plain",
    "penguin on snow",
    "elephant on grass",
    "pizza slice on wood",
    "lion on sand",
    "panda on grass",
    "sailboat on water",
    "tiger on grass",
    "rainbow on sky",
    "apple on wood",
    "bus on sand",
    "tree on grass",
    "frog on water",
    "donut on plain",
    "car on sand",
    "balloon on sky",
    "robot on plain",
    "train on grass",
    "bear on snow",
    "sunflower on grass",
    "octopus on water",
    "birthday cake on wood",
    "tractor on grass",
    "guitar on wood",
    "cow on grass",
    "earth on night",
    "parrot on sky",
    "duck on water",
    "moon on night",
    "",
)
CLIPS = (
    "panda growing on grass",
    "car moving left on sand",
    "rocket moving up on night",
    "fox bouncing on snow",
    "duck moving right on water",
    "apple spinning on wood",
    "balloon moving up on sky",
    "robot shrinking on plain",
    "lion growing on sand",
    "penguin bouncing on snow",
    "donut spinning on plain",
    "bus moving right on grass",
    "frog bouncing on water",
    "moon moving down on night",
    "tree shrinking on grass",
    "train moving left on wood",
    "",
)
BENCHMARK = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "cfg": 1.0}


SUITES = ("steps", "preset", "wall", "overhead", "long")


def stale(view, token, kept):
    """The released SCD bookkeeping: accepted drafts keep their old law. Biased; here only to be measured."""
    return torch.where(kept[..., None], view.q, view.p)


# label -> (method, request changes, replacement of the method's row); what follows is measured at each window
ROWS = {
    "autoregressive": ("autoregressive", {}, None, {"image": (1,), "video": (1,)}),
    "sjd": ("sjd", {}, None, {"image": (8, 16, 32, 64, 128), "video": (16, 64, 128)}),
    "scd-maximal": ("scd-maximal", {}, None, {"image": (8, 16, 32, 64, 128, 256), "video": (32, 64, 128, 256)}),
    "scd-gumbel": ("scd-gumbel", {}, None, {"image": (16, 32, 64, 128), "video": (64, 128, 256)}),
    "seed-exact without memory": (
        "seed-exact",
        {"memory": False},
        None,
        {"image": (16, 32, 64, 128), "video": (64, 128, 256)},
    ),
    "seed-exact": (
        "seed-exact",
        {"nodes": 0},
        None,
        {"image": (8, 16, 32, 64, 128, 256), "video": (8, 16, 32, 64, 128, 256)},
    ),
    "seed-exact + 32 tree nodes": ("seed-exact", {"nodes": 32}, None, {"image": (32, 64), "video": (32, 64, 128, 256)}),
    "seed-exact + 64 tree nodes": ("seed-exact", {"nodes": 64}, None, {"image": (64, 128), "video": (64, 128, 256)}),
    "sjd + 7 candidates": ("sjd", {"nodes": 7}, None, {"image": (64,), "video": (64,)}),
    "scd-maximal + 3 candidates": ("scd-maximal", {"nodes": 3}, None, {"image": (64,), "video": (64, 128)}),
    "scd-maximal + 7 candidates": ("scd-maximal", {"nodes": 7}, None, {"image": (64,), "video": (64, 128)}),
    "csd (lossy)": ("csd", {}, None, {"image": (64,), "video": (64,)}),
    "csd as published (lossy)": ("csd", {"relax": 1.0}, None, {"image": (64,), "video": (64,)}),
    "gsd (lossy)": ("gsd", {}, None, {"image": (64,), "video": (64,)}),
    "cool-sd (lossy)": ("cool-sd", {}, None, {"image": (64,), "video": (64,)}),
    "pjd (lossy)": ("pjd", {}, None, {"image": (8,), "video": (8,)}),
    "pjd-c (lossy)": ("pjd-c", {}, None, {"image": (8, 16), "video": (8,)}),
    "zipar (lossy)": ("zipar", {}, None, {"image": (1,), "video": (1,)}),
    "row-block 1 round (lossy)": ("row-block", {"rounds": 1}, None, {"image": (16,), "video": (8,)}),
    "row-block 2 rounds (lossy)": ("row-block", {"rounds": 2}, None, {"image": (16,), "video": (8,)}),
    "row-block until exact": ("row-block", {"rounds": 0}, None, {"image": (16,), "video": (8,)}),
    "control: stale law (biased)": (
        "scd-maximal",
        {},
        replace(METHODS["scd-maximal"], remember=stale, lossless=False),
        {"image": (32, 64, 128), "video": (64, 128)},
    ),
}


def first_frame(model, prompt, seed):
    """Kept codes [1, 8, 8, 8]: the first frame of a clip drawn with the model's own settings."""
    encode = model.family.text.encode
    request = Request(frames=8, seed=seed + 5000, window=64)
    drawn = generate(model.decoder, model.family, encode(prompt), request=request)
    kept = torch.full_like(drawn.codes, -1)
    kept[:, 0] = drawn.codes[:, 0]
    return kept


def run(model, prompt, request, kept=None, method=None):
    """One run through the loop; `method` replaces the table's row."""
    prompt = model.family.text.encode(prompt)
    if method is None:
        return generate(model.decoder, model.family, prompt, request=request, kept=kept).report
    plan = model.family.plan(model.family.size(frames=request.frames))
    settings = Settings(
        method=request.method, window=request.window, seed=request.seed, law=law_settings(request, model.family)
    )
    streams = model.family.streams(prompt, None, plan)
    return decode(model.decoder, model.family, plan, streams, settings, kept, method=method)[1]


def row(kind, label, window, reports):
    passes = [r.passes for r in reports]
    error = statistics.stdev(passes) / len(passes) ** 0.5 if len(passes) > 1 else 0.0
    return {
        "kind": kind,
        "method": label,
        "window": window,
        "start": reports[0].settings["start"],
        "memory": reports[0].settings["memory"],
        "tree_nodes": reports[0].settings["nodes"],
        **{k: reports[0].settings[k] for k in ("relax", "relax_budget", "layout", "row_context", "rounds")},
        "tokens": reports[0].tokens,
        "passes": round(statistics.mean(passes), 2),
        "passes_se": round(error, 2),
        "n": len(passes),
        "seconds": round(statistics.mean(r.total_seconds for r in reports), 4),
        "lossless": reports[0].lossless,
        "tokens_sha256": [r.sha256_tokens[:16] for r in reports],
    }


def steps(model, preset, windows=None, limit=None, labels=None):
    """Mean passes of every row of the table over the prompts; one common seed a prompt."""
    out = []
    for kind, prompts in (("image", PICTURES[:limit]), ("video", CLIPS[:limit])):
        frames = 1 if kind == "image" else 8
        kept = [first_frame(model, p, i) if frames > 1 else None for i, p in enumerate(prompts)]
        for label, (method, changes, other, table) in ROWS.items():
            if labels and label not in labels:
                continue
            for window in [w for w in table[kind] if windows is None or w in windows or w == 1]:
                request = Request(method=method, window=window, frames=frames, **preset, **changes)
                reports = [
                    run(model, p, replace(request, seed=1000 + i), kept[i], other) for i, p in enumerate(prompts)
                ]
                out.append(row(kind, label, window, reports))
                show(out[-1])
    return out


def wall(models, limit=None):
    """Seconds with window auto in the fast dtype against autoregressive in its own best dtype.

    All kinds of runs take turns prompt by prompt and medians are compared: a machine's moods pass over all of them.
    """
    out = []
    for kind, prompts in (("image", PICTURES[:limit]), ("video", CLIPS[:limit])):
        frames = 1 if kind == "image" else 8
        kept = [first_frame(models["fp32"], p, i) if frames > 1 else None for i, p in enumerate(prompts)]
        requests = {m: Request(method=m, frames=frames, **BENCHMARK) for m in ("autoregressive", "seed-exact")}
        cells = [(dtype, method) for dtype in models for method in requests]
        for dtype, method in cells:
            run(models[dtype], prompts[0], requests[method], kept[0])  # warm up and measure the window
        reports = {cell: [] for cell in cells}
        for i, prompt in enumerate(prompts):
            for dtype, method in cells:
                request = replace(requests[method], seed=1000 + i)
                reports[dtype, method].append(run(models[dtype], prompt, request, kept[i]))
        seconds = {cell: statistics.median(r.total_seconds for r in told) for cell, told in reports.items()}
        best = min(seconds[dtype, "autoregressive"] for dtype in models)
        for (dtype, method), told in reports.items():
            line = row(kind, method, told[0].settings["window"], told)
            line = {**line, "dtype": dtype, "seconds": round(seconds[dtype, method], 4)}
            out.append({**line, "times_faster": round(best / line["seconds"], 2)})
            show(out[-1])
    return out


class WideFamily:
    """Just enough of a family to run a random model: plain positions, no text."""

    guidance = "logits"

    def positions(self, decoder, plan, prompt_length, device):
        return Positions(*rope_1d(prompt_length + plan.length, decoder.cfg.head_dim, device=device))


def janus_shaped(dtype):
    """A random decoder of Janus-Pro-1B's shape (24 layers of 2,048, vocabulary 16,384)."""
    cfg = DecoderConfig(
        dim=2048, layers=24, heads=16, kv_heads=16, head_dim=128, ffn=5632, vocab=16400, head_rows=16384, eps=1e-6
    )
    return random_decoder(cfg, dtype)


def random_decoder(cfg, dtype):
    net = Decoder(cfg, dtype=dtype).requires_grad_(False)
    for p in net.parameters():
        p.uniform_(-0.02, 0.02) if p.dim() > 1 else p.fill_(1.0)
    return net


KERNELS = (("scd-maximal", 0), ("seed-exact", 0), ("seed-exact", 32))  # method, tree nodes


def overhead_of(report):
    s = report.seconds
    return round((s["kernel"] + s["rest"]) / s["backbone"], 4)


def overhead(models, wide=True):
    """(kernel + rest) / backbone of whole runs."""
    out = []
    for dtype, model in models.items():
        for kind, frames, window in (("image", 1, 32), ("image", 1, 64), ("video", 8, 128)):
            for method, nodes in KERNELS:
                request = Request(method=method, frames=frames, window=window, nodes=nodes, **BENCHMARK)
                ratios = [overhead_of(run(model, p, replace(request, seed=i))) for i, p in enumerate(PICTURES[:8])]
                out.append(
                    {
                        "model": "bundled",
                        "dtype": dtype,
                        "kind": kind,
                        "method": method,
                        "window": window,
                        "tree_nodes": nodes,
                        "overhead": statistics.median(ratios),
                    }
                )
                show(out[-1])
    if wide:
        out += overhead_wide()
    return out


def overhead_wide(tokens=(12, 16)):
    """The same on the Janus-shaped model: vocabulary 16,384, window 32, guidance on."""
    dtype = torch.bfloat16 if native_bf16("cpu") else torch.float32
    net, plan = janus_shaped(dtype), TokenPlan(1, *tokens, vocab=16384)
    streams = [Stream(ids=torch.arange(30) + i) for i in range(2)]
    out = []
    for method, nodes in KERNELS:
        settings = Settings(method=method, window=32, nodes=nodes, seed=1, law=LawSettings(cfg=5.0))
        report = decode(net, WideFamily(), plan, streams, settings)[1]
        out.append(
            {
                "model": "random, Janus-Pro-1B shape",
                "dtype": str(dtype).removeprefix("torch."),
                "kind": "image",
                "method": method,
                "window": 32,
                "tree_nodes": nodes,
                "overhead": overhead_of(report),
            }
        )
        show(out[-1])
    return out


def long_sequences(lengths=(512, 1024, 2048, 4096, 8192, 12288), window=32, turns=5):
    """Seconds of a pass against the tokens before it, on a random model of middle size (12 layers of 1,024)."""
    dtype = torch.bfloat16 if native_bf16("cpu") else torch.float32
    cfg = DecoderConfig(
        dim=1024, layers=12, heads=16, kv_heads=4, head_dim=64, ffn=2816, vocab=16384, head_rows=16384
    )
    net = random_decoder(cfg, dtype)
    plan = TokenPlan(1, 1, lengths[-1] + window, vocab=16384)
    fixed = torch.full((1, plan.length), -1)
    out = []
    with torch.inference_mode():
        session = Session(net, WideFamily(), plan, [Stream(ids=torch.arange(30))], fixed, 0, "cpu")
        for length in lengths:
            before = torch.arange(length - 1, length - 1 + window)[None]
            seconds = []
            for _ in range(turns):
                begin = time.perf_counter()
                session.window(torch.zeros_like(before), before, length + window - 1, False)
                seconds.append(time.perf_counter() - begin)
            cache = 2 * cfg.layers * cfg.kv_heads * cfg.head_dim * length * dtype.itemsize
            out.append({"tokens_before": length, "cache_mb": round(cache / 1e6, 1), "seconds": min(seconds)})
            out[-1]["times_the_shortest"] = round(min(seconds) / out[0]["seconds"], 2)
            show(out[-1])
    return out


def show(entry):
    print("  ".join(f"{k} {v}" for k, v in entry.items() if k != "tokens_sha256"), flush=True)


def machine():
    name = platform.processor() or platform.machine()
    info = pathlib.Path("/proc/cpuinfo")
    if info.exists():
        lines = info.read_text().splitlines()
        name = next((line.split(":")[1].strip() for line in lines if "model name" in line), name)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT).stdout
    return {
        "cpu": name,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "bf16": native_bf16("cpu"),
        "commit": commit.strip(),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", default="steps", choices=[*SUITES, "all"])
    parser.add_argument("--json", help="file for the figures")
    parser.add_argument("--limit", type=int, help="only so many prompts (a quick look; do not quote)")
    parser.add_argument("--windows", type=lambda s: [int(x) for x in s.split(",")], help="only these windows")
    parser.add_argument("--methods", type=lambda s: s.split(","), help="only these rows of the table")
    args = parser.parse_args()
    begin, data = time.time(), {"steps": [], "overhead": [], "machine": machine()}
    exact = load_model(dtype="fp32")
    wanted = SUITES if args.suite == "all" else [args.suite]
    models = {"fp32": exact}
    if native_bf16("cpu"):
        models["bf16"] = load_model(dtype="bf16")
    if "steps" in wanted:
        data["steps"] = steps(exact, BENCHMARK, args.windows, args.limit, args.methods)
    if "preset" in wanted:
        data["preset"] = steps(exact, {}, args.windows or (32, 64, 128), args.limit, args.methods)
    if "wall" in wanted:
        data["wall"] = wall(models, args.limit)
    if "overhead" in wanted:
        data["overhead"] = overhead(models)
    if "long" in wanted:
        data["long"] = long_sequences()
    data["minutes"] = round((time.time() - begin) / 60, 1)
    if args.json:
        pathlib.Path(args.json).parent.mkdir(parents=True, exist_ok=True)
        pathlib.Path(args.json).write_text(json.dumps(data, indent=1))


if __name__ == "__main__":
    main()
