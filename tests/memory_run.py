"""Loads a model, and draws for some passes, in a process of its own; tells by how much its memory grew.

    python memory_run.py MODEL DTYPE load|run|ssd
    python memory_run.py mar

Prints JSON: peak growth in bytes, and what the plan says. Run by test_memory_plan.py and test_continuous_room.py.
"""

import contextlib
import gc
import json
import pathlib
import re
import sys
from dataclasses import replace

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import torch

from scd_core import budget
from scd_core.continuous import sampler as mar_sampler
from scd_core.continuous.mar import Mar
from scd_core.continuous.room import working_bytes
from scd_core.generate import Request, generate, law_settings, needed_bytes
from scd_core.models import load
from scd_core.models.kv_cache import KVCache

BATCH, WINDOW, PASSES = 2, 128, 2


class Enough(Exception):
    pass


def memory(field):
    """Resident size of this process, bytes: "VmRSS" now, "VmHWM" at its largest (getrusage would count the parent)."""
    status = pathlib.Path("/proc/self/status").read_text(encoding="utf-8")
    return int(re.search(rf"{field}:\s+(\d+) kB", status)[1]) << 10


def draw(decoder, family, passes, request, kept=None):
    def stop(progress):
        if progress.passes >= passes:
            raise Enough

    with contextlib.suppress(Enough):
        generate(decoder, family, family.text.encode("fox on snow"), None, request, kept, callback=stop)


def continuous():
    """A MAR of small weights and many sequences, of which one round is drawn."""
    loaded = load.load_model(load.SHIPPED["mar"])
    wide = {"dim": 256, "decoder_dim": 256, "ffn": 1024, "decoder_ffn": 1024, "head_width": 256}
    sizes = replace(loaded.decoder.cfg, tokens=256, **wide)
    net, family = Mar(sizes).requires_grad_(False).eval(), loaded.family
    for name, weight in net.named_parameters():
        weight.fill_(float(name.endswith(("norm1.weight", "norm2.weight", "_norm.weight", "_ln.weight"))))
    family.decoder_config = sizes
    asked = mar_sampler.Settings(batch=8, steps=16, diffusion_steps=8, cfg=2.0)
    mar_sampler.sample(net, family, family.text.encode("fox"), replace(asked, batch=1, steps=2))
    gc.collect()
    before = memory("VmRSS")
    mar_sampler.sample(net, family, family.text.encode("fox"), asked, callback=lambda _: True)
    needed = working_bytes(sizes, mar_sampler.resolve(asked, family), 4, False)
    print(json.dumps({"grown": memory("VmHWM") - before, "run": needed}))


def main():
    torch.set_num_threads(1)
    if sys.argv[1:] == ["mar"]:
        return continuous()
    path, dtype, what = sys.argv[1:]
    dtype = load.DTYPES[dtype]
    # a small run first, so that libraries and kernels are in memory before anything is measured
    small = load.load_model(dtype="fp32")
    draw(small.decoder, small.family, PASSES, Request(batch=BATCH, window=WINDOW))
    files = load.open_model(path)
    refs = files.family.refs("decoder")
    plan = files.family.plan(files.family.size())
    del small
    gc.collect()
    before = memory("VmRSS")
    decoder = files.build("decoder", dtype=dtype)
    weights = budget.weight_bytes(refs, dtype)
    if what == "load":
        total = sum(float(t.flatten()[::512].float().sum()) for t in decoder.state_dict().values())  # touch every page
        print(json.dumps({"grown": memory("VmHWM") - before, "weights": weights, "sum": total}))
        return
    # the system hands out zeroed pages when they are first written: make all of the cache count
    zeroed = KVCache.__init__

    def touched(cache, *args, **kwargs):
        zeroed(cache, *args, **kwargs)
        for tensor in (*cache.k, *cache.v):
            tensor.fill_(0.0)

    KVCache.__init__ = touched
    asked, kept = Request(method="scd-gumbel", batch=BATCH, window=WINDOW, cfg=2.0), None
    if what == "ssd":  # the first row is given, the next one is looked at, and the heads draft from that
        asked, kept = replace(asked, method="ssd", rounds=1), torch.full((1, plan.frames, plan.rows, plan.cols), -1)
        kept[:, :, 0] = 5
    draw(decoder, files.family, PASSES, asked, kept)
    streams = files.family.streams(files.family.text.encode("fox"), None, plan)
    law = law_settings(asked, files.family)
    needed = needed_bytes(decoder, files.family, plan, streams, asked, law)
    print(json.dumps({"grown": memory("VmHWM") - before, "weights": weights, "run": needed}))


if __name__ == "__main__":
    main()
