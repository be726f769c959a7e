"""The same road from a shell.

    python -m scd_core generate "fox on snow" --seed 1 --out out
    python -m scd_core generate "lion on sand" --keep lion.png --redraw lower-half
    python -m scd_core generate fox --model mar --draft mar-draft --gamma 8
    python -m scd_core batch PROMPTS.csv --out DIR
    python -m scd_core compare "fox on snow" --frames 8
    python -m scd_core info bundled --json
    python -m scd_core verify FOLDER
"""

import argparse
import json
import signal
import sys
from contextlib import closing, nullcontext
from pathlib import Path

import torch

from . import batch, shell_continuous, shell_keep
from .acceptance import DEFAULT_METHOD, METHODS
from .compare import DEFAULT, compare, method_names, rows_of, table
from .drafting import STARTS
from .errors import OutOfMemory, UserError
from .generate import OWN, check_request
from .models.load import DTYPES, load_model, open_model
from .shell import draw, frames_of, model_path, prompts_of, request_of, stem_of, suffix_of, usable_device, write
from .shell_stop import first_press
from .verify import table as table_of
from .verify import verify
from .window import AUTO


def terminal_bar(**options):
    """A bar of tqdm; None where nobody looks on, or where tqdm is missing."""
    if not sys.stderr.isatty():
        return None
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(**options)


class Bar:
    """A progress bar for each run, where there is a terminal."""

    def __init__(self):
        self.bar, self.label = None, None

    def __call__(self, label, progress):
        if label != self.label:
            self.close()
            self.bar, self.label = terminal_bar(total=progress.total, unit="token", desc=label, leave=False), label
        if self.bar is not None:
            self.bar.update(progress.done - self.bar.n)

    def close(self):
        if self.bar is not None:
            self.bar.close()


def free_path(folder, stem, suffix):
    """First name of the form stem_001.suffix that does not exist yet."""
    number = 1
    while (path := folder / f"{stem}_{number:03}{suffix}").exists():
        number += 1
    return path


def save(model, drawn, args):
    """Write each sample as PNG or MP4 into --out; returns the paths as strings."""
    folder = Path(args.out)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for frames in frames_of(model, drawn):
        path = free_path(folder, stem_of(args.prompt), suffix_of(frames))
        write(frames, path, model.family.frame_rate)
        paths.append(str(path))
    return paths


def figures(report, outputs=()):
    """The keys that scripts rely on, then everything else the report knows."""
    return {**report.to_dict(), "outputs": list(outputs)}


def put(data, target):
    text = json.dumps(data, indent=1)
    if target == "-":
        print(text)
    else:
        Path(target).write_text(text, encoding="utf-8")


def run_generate(args):
    request = request_of(args, args.method)
    check_request(request)
    model = load_model(model_path(args.model), args.dtype, usable_device(args.device))
    shell_continuous.check_options(args, model.family.continuous, args.default_of)
    with torch.inference_mode(), closing(Bar()) as bar, first_press(args.keep_partial) as pressed:
        drawn = draw(model, args, request, lambda *told: bar(*told) or pressed())
        outputs = save(model, drawn, args)
    if args.json:
        put(figures(drawn.report, outputs), args.json)
    if args.json != "-":
        print(drawn.report.text())
        print("\n".join(outputs))


def run_batch(args):
    """A list of prompts; the exit status tells whether every row was drawn."""
    bar = terminal_bar(unit="picture")

    def tell(done, total, failed):
        if bar is not None:
            if bar.total is None:
                bar.initial = done  # pictures of earlier runs took no time of this one
            bar.total, bar.n = total, done
            bar.set_postfix({"failed": failed} if failed else {})

    try:
        with nullcontext() if bar is None else closing(bar):
            summary = batch.run(args, args.rows, tell)
    except KeyboardInterrupt:
        print(f"stopped: what was drawn is in {args.out}, and the same command goes on there", file=sys.stderr)
        raise
    for number, error in sorted(summary.failed.items()):
        print(f"row {number}: {error}", file=sys.stderr)
    print(f"{summary.drawn} drawn, {summary.there} there already, {len(summary.failed)} rows failed: "
          f"{Path(args.out) / batch.RESULTS}")
    return 1 if summary.failed else 0


def run_compare(args):
    """One prompt and seed, several methods; the first is the yardstick."""
    methods = method_names(args.methods)
    for method in methods:
        check_request(request_of(args, method))
    model = load_model(model_path(args.model), args.dtype, usable_device(args.device))
    request = request_of(args, methods[0])
    with closing(Bar()) as bar:
        drawn = compare(
            model.decoder, model.family, *prompts_of(model, args), request, methods, model.device,
            callback=lambda number, progress: bar(methods[number], progress),
        )
    reports = [d.report for d in drawn]
    if args.json:
        put([figures(report) for report in reports], args.json)
    if args.json != "-":
        print(table(rows_of(reports)))


def run_info(args):
    files = open_model(model_path(args.path))
    family = files.family
    parts = {}
    for part in ("decoder", "codec"):
        refs = family.refs(part)
        dtypes = sorted({str(ref.dtype).removeprefix("torch.") for ref in refs.values()})
        parts[part] = {"tensors": len(refs), "parameters": files.parameters(part), "dtypes": dtypes}
    data = {
        "name": files.name,
        "family": family.title,
        "files": [str(f) for f in files.source.files],
        "parts": parts,
        "sizes": [str(size) for size in family.sizes],
        "defaults": vars(family.defaults),
    }
    if args.json:
        put(data, args.json)
    if args.json != "-":
        for key, value in data.items():
            print(f"{key}: {value if not isinstance(value, list) else '; '.join(value)}")


def run_verify(args):
    """A model against the numbers of its fixture; the exit status tells whether all agree."""
    rows = verify(args.folder)
    wrong = [row.what for row in rows if not row.ok]
    print(table_of(rows))
    print(f"\n{len(wrong)} of {len(rows)} comparisons failed" if wrong else f"\nall {len(rows)} comparisons agree")
    return 1 if wrong else 0


def add_drawing(parser):
    """The options of `generate` and `batch` that `compare` does not have."""
    parser.add_argument("--method", default=DEFAULT_METHOD, choices=list(METHODS))
    shell_keep.add_options(parser)
    shell_continuous.add_options(parser)


def options():
    parser = argparse.ArgumentParser(prog="python -m scd_core", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--negative", default="", help="what the picture should not be")
    own.add_argument("--seed", type=int, default=0)
    own.add_argument("--window", type=int, default=0, help="positions looked at in a pass; 0: automatic")
    own.add_argument("--temperature", type=float, default=OWN, help="-1: the model's own (also the next three)")
    own.add_argument("--top-k", type=int, default=OWN)
    own.add_argument("--top-p", type=float, default=OWN)
    own.add_argument("--cfg", type=float, default=OWN)
    own.add_argument("--width", type=int, default=0, help="pixels; 0: the model's own")
    own.add_argument("--height", type=int, default=0)
    own.add_argument("--frames", type=int, default=1, help="1: a picture; more: a clip")
    own.add_argument("--batch", type=int, default=1)
    own.add_argument("--start", default="auto", choices=["auto", *STARTS], help="first draft of a position")
    own.add_argument("--no-memory", action="store_true", help="seed-exact without trajectory memory")
    own.add_argument("--nodes", type=int, default=AUTO, help="rows beside the window; -1: automatic")
    own.add_argument("--relax", type=float, default=OWN, help="strength of a lossy method, 0 to 1 (as published)")
    own.add_argument("--relax-budget", type=int, default=-1, help="most tokens taken by relaxation alone; -1: any")
    own.add_argument("--row-context", type=int, default=OWN, help="pjd, pjd-c, zipar: columns before the next row")
    own.add_argument("--rounds", type=int, default=2, help="row-block, ssd: corrections of a row; 0: until exact")
    own.add_argument("--block-rows", type=int, default=1, help="row-block, ssd: rows drafted together")
    own.add_argument("--dtype", default="auto", choices=["auto", *DTYPES])
    own.add_argument("--device", default="cpu")
    own.add_argument("--model", default="bundled", help="'bundled', 'mar', a model file or a model folder")
    common = argparse.ArgumentParser(add_help=False, parents=[own])
    common.add_argument("prompt")
    common.add_argument("--json", nargs="?", const="-", help="print figures as JSON, or write them to a file")
    one = commands.add_parser("generate", parents=[common], help="draw a picture or clip")
    one.add_argument("--out", default="out", help="folder for pictures and clips")
    one.add_argument("--keep-partial", action="store_true", help="Ctrl-C ends the drawing and writes what there is")
    add_drawing(one)
    one.set_defaults(run=run_generate, default_of=one.get_default)
    rows = commands.add_parser("batch", parents=[own], help="draw a list of prompts, going on where it stopped")
    batch.add_options(rows)
    add_drawing(rows)
    rows.set_defaults(run=run_batch, rows=batch.row_parser(own, add_drawing))
    many = commands.add_parser("compare", parents=[common], help="one prompt, several methods")
    many.add_argument("--methods", default=DEFAULT)
    many.set_defaults(run=run_compare)
    info = commands.add_parser("info", help="what a model file or folder holds")
    info.add_argument("path", metavar="MODEL")
    info.add_argument("--json", nargs="?", const="-")
    info.set_defaults(run=run_info)
    check = commands.add_parser("verify", help="compare a model with the numbers of its family's own code")
    check.add_argument("folder", metavar="FOLDER", help="holds model/, expected.safetensors and meta.json")
    check.set_defaults(run=run_verify)
    return parser


def main(argv=None):
    args = options().parse_args(argv)
    try:
        return args.run(args) or 0
    except (UserError, OSError, OutOfMemory) as error:
        print(f"{error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # the end that shells expect, without a list of calls
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)
