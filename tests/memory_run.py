"""Loads a model, and draws for some passes, in a process of its own; tells by how much its memory grew.

    python memory_run.py MODEL DTYPE load|run

Prints JSON: peak growth in bytes, and what the plan says. Run by test_memory_plan.py.
"""

import contextlib
import gc
import json
import pathlib
import re
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import torch

from scd_core import budget
from scd_core.generate import Request, generate
from scd_core.models import load
from scd_core.models.kv_cache import KVCache

BATCH, WINDOW, PASSES = 2, 128, 2


class Enough(Exception):
    pass


def memory(field):
    """Resident size of this process, bytes: "VmRSS" now, "VmHWM" at its largest (getrusage would count the parent)."""
    status = pathlib.Path("/proc/self/status").read_text(encoding="utf-8")
    return int(re.search(rf"{field}:\s+(\d+) kB", status)[1]) << 10


def draw(decoder, family, passes, request):
    def stop(progress):
        if progress.passes >= passes:
            raise Enough

    with contextlib.suppress(Enough):
        generate(decoder, family, family.text.encode("fox on snow"), None, request, callback=stop)


def main():
    path, dtype, what = sys.argv[1:]
    torch.set_num_threads(1)
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
    draw(decoder, files.family, PASSES, Request(method="scd-gumbel", batch=BATCH, window=WINDOW, cfg=2.0))
    streams = files.family.streams(files.family.text.encode("fox"), None, plan)
    needed = budget.sampler_bytes(
        decoder.cfg, dtype.itemsize, plan, max(s.length for s in streams), len(streams), BATCH, WINDOW
    )
    print(json.dumps({"grown": memory("VmHWM") - before, "weights": weights, "run": needed}))


if __name__ == "__main__":
    main()
