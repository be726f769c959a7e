"""`batch` on many GPUs or machines: Ray Data hands out the rows, and draws a row again whose worker died.

Only this process writes: workers send the bytes of their pictures. So machines need no folder in common, and a picture
that is drawn twice is there once.
"""

import argparse
import json
import logging
import os
import platform
from pathlib import Path

import torch

from .batch import Painter
from .errors import UserError

PACKAGE = Path(__file__).parent
# what Ray reads from the environment, where the user says nothing: no reports to its makers
SETTINGS = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
TRIES = 4  # Ray gives its own processes 15 seconds to start, which are not enough on a busy machine


class Worker:
    """One process: loads the model once, then draws row after row. Arguments: those of `Painter`, threads."""

    def __init__(self, model, dtype, device, defaults, threads):
        torch.set_num_threads(threads)
        self.painter = Painter(model, dtype, device, defaults)
        self.name = f"{platform.node()}:{os.getpid()}"

    def __call__(self, rows):
        """{"place": [n], "args": [JSON]} -> {"place": [n], "told": [JSON], "data": [list of bytes]}."""
        pictures, error = self.painter.row(argparse.Namespace(**json.loads(rows["args"][0])))
        told = {
            "error": error, "worker": self.name, "suffixes": [suffix for suffix, _, _ in pictures],
            "figures": [figures for _, _, figures in pictures],
        }  # fmt: skip
        return {"place": rows["place"][:1], "told": [json.dumps(told)], "data": [[data for _, data, _ in pictures]]}


def ray_data():
    """(ray, ray.data), told to keep quiet and to report to nobody.

    Raises:
        UserError: Ray is not installed.
    """
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise UserError("--workers and --address need Ray: pip install 'ray[data]', or leave them out") from error
    ray.data.DataContext.get_current().enable_progress_bars = False
    for name in ("ray", "ray.data"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return ray, ray.data


def count_of(text):
    """Workers asked for, 0 for auto. Raises UserError."""
    if text in ("", "auto"):
        return 0
    if not text.isdecimal() or int(text) < 1:
        raise UserError(f"--workers {text}: use a whole number from 1 upwards, or auto")
    return int(text)


def workers_of(ray, asked, gpus):
    """How many workers there will be.

    Args:
        asked: 0: one a GPU, or one a machine without. gpus: they draw on GPUs.

    Raises:
        UserError: the machines have no place for so many.
    """
    kind = "GPU" if gpus else "CPU"
    there = int(ray.cluster_resources().get(kind, 0))
    if not there or asked > there:
        raise UserError(
            f"--workers {asked or 'auto'}: Ray knows {there} {kind}s, and each worker takes one: ask for fewer, or "
            "choose another --device"
        )
    return asked or (there if gpus else sum(node["Alive"] for node in ray.nodes()))


def spread(rows, args, defaults):
    """Draw rows with Ray's workers, yielding (row, pictures, error, further figures) as they are ready.

    Args:
        rows: list of `Row`. args: parsed command line. defaults: see `Painter`.

    Raises:
        UserError: no Ray, no such cluster, or no place for the workers.
    """
    asked, gpus = count_of(args.workers), args.device != "cpu"
    ray, data = ray_data()
    start(ray, args.address, asked)
    try:
        count = workers_of(ray, asked, gpus)
        threads = max(1, len(ray.nodes()) * (os.cpu_count() or 1) // count)
        items = [{"place": place, "args": json.dumps(vars(row.args))} for place, row in enumerate(rows)]
        drawn = data.from_items(items, override_num_blocks=len(items)).map_batches(
            Worker,
            fn_constructor_args=(args.model, args.dtype, args.device, defaults, threads),
            compute=data.ActorPoolStrategy(size=min(count, len(rows)), max_tasks_in_flight_per_actor=2),
            batch_size=1,
            num_cpus=1,
            num_gpus=int(gpus),
        )
        for found in drawn.iter_rows():
            told = json.loads(found["told"])
            pictures = list(zip(told["suffixes"], map(bytes, found["data"]), told["figures"]))
            yield rows[found["place"]], pictures, told["error"], {"worker": told["worker"]}
    except ray.exceptions.RayError as error:
        told = [line.strip() for line in str(error).splitlines() if line.strip()][-1]
        raise UserError(f"Ray gave up ({told}); what was drawn is kept, and the same command goes on there") from error
    finally:
        ray.shutdown()


def start(ray, address, workers):
    """Connect to a cluster, or make one of this machine. Raises UserError."""
    places = max(workers, os.cpu_count() or 1) + 1  # Ray keeps books on one of them
    rest = {} if address else {"num_cpus": places, "include_dashboard": False}
    for last in range(TRIES - 1, -1, -1):
        try:
            ray.init(
                address or "local", logging_level=logging.ERROR, log_to_driver=False,
                runtime_env={"py_modules": [str(PACKAGE)]}, **rest,
            )  # fmt: skip
            return
        except Exception as error:  # Ray raises bare ones too
            ray.shutdown()
            if address or not last:
                told = str(error).splitlines()[0]
                raise UserError(f"Ray cannot be reached at {address or 'this machine'} ({told})") from error
