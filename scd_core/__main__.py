"""The same road from a shell.

    python -m scd_core generate "fox on snow" --seed 1 --out out
    python -m scd_core compare "fox on snow" --frames 8
    python -m scd_core info bundled --json
    python -m scd_core verify FOLDER
"""

import argparse
import json
import re
import sys
from contextlib import closing
from functools import partial
from pathlib import Path

import torch
from PIL import Image

from .acceptance import DEFAULT_METHOD, METHODS
from .compare import DEFAULT, compare, method_names, rows_of, table
from .drafting import STARTS
from .errors import UserError
from .generate import OWN, Request, check_request, generate
from .models.load import BUNDLED, DTYPES, load_model, open_model
from .verify import table as table_of
from .verify import verify
from .video import write_frames
from .window import AUTO


def usable_device(name):
    """A torch device that this machine has.

    Raises:
        UserError.
    """
    try:
        torch.zeros(1, device=name)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"device {name!r} cannot be used here ({str(error).splitlines()[0]}): try cpu") from error
    return name


def model_path(name):
    return BUNDLED if name == "bundled" else Path(name)


def request_of(args, method):
    """Command line -> `Request`."""
    return Request(
        method=method,
        seed=args.seed,
        window=args.window,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        cfg=args.cfg,
        width=args.width,
        height=args.height,
        frames=args.frames,
        batch=args.batch,
        start=args.start,
        memory=not args.no_memory,
        nodes=args.nodes,
        relax=args.relax,
        relax_budget=args.relax_budget,
        row_context=args.row_context,
        rounds=args.rounds,
    )


class Bar:
    """A progress bar for each run, where there is a terminal."""

    def __init__(self):
        self.bar, self.label = None, None

    def __call__(self, label, progress):
        if not sys.stderr.isatty():
            return
        if label != self.label:
            from tqdm import tqdm

            self.close()
            self.bar, self.label = tqdm(total=progress.total, unit="token", desc=label, leave=False), label
        self.bar.update(progress.done - self.bar.n)

    def close(self):
        if self.bar is not None:
            self.bar.close()


def prompts_of(model, args):
    """(prompt, negative prompt or None) of the command line."""
    encode = model.family.text.encode
    return encode(args.prompt), encode(args.negative) if args.negative else None


def draw(model, args, request):
    """Run one request."""
    with closing(Bar()) as bar:
        return generate(
            model.decoder, model.family, *prompts_of(model, args), request, device=model.device,
            callback=partial(bar, request.method),
        )


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
    stem = re.sub(r"[^\w-]+", "-", args.prompt).strip("-")[:60] or "empty"
    paths = []
    for codes in drawn.codes:
        frames = model.codec.decode_clip(codes.to(model.device)).cpu()
        if len(frames) > 1:
            path = free_path(folder, stem, ".mp4")
            write_frames(frames, path, rate=model.family.frame_rate, fmt="mp4 (h264)")
        else:
            path = free_path(folder, stem, ".png")
            picture = (frames[0] * 255).round().to(torch.uint8).numpy()
            with open(path, "xb") as file:
                Image.fromarray(picture).save(file, "PNG")
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
    with torch.inference_mode():
        drawn = draw(model, args, request)
        outputs = save(model, drawn, args)
    if args.json:
        put(figures(drawn.report, outputs), args.json)
    if args.json != "-":
        print(drawn.report.text())
        print("\n".join(outputs))


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


def options():
    parser = argparse.ArgumentParser(prog="python -m scd_core", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("prompt")
    common.add_argument("--negative", default="", help="what the picture should not be")
    common.add_argument("--seed", type=int, default=0)
    common.add_argument("--window", type=int, default=0, help="positions looked at in a pass; 0: automatic")
    common.add_argument("--temperature", type=float, default=OWN, help="-1: the model's own (also the next three)")
    common.add_argument("--top-k", type=int, default=OWN)
    common.add_argument("--top-p", type=float, default=OWN)
    common.add_argument("--cfg", type=float, default=OWN)
    common.add_argument("--width", type=int, default=0, help="pixels; 0: the model's own")
    common.add_argument("--height", type=int, default=0)
    common.add_argument("--frames", type=int, default=1, help="1: a picture; more: a clip")
    common.add_argument("--batch", type=int, default=1)
    common.add_argument("--start", default="auto", choices=["auto", *STARTS], help="first draft of a position")
    common.add_argument("--no-memory", action="store_true", help="seed-exact without trajectory memory")
    common.add_argument("--nodes", type=int, default=AUTO, help="rows of a draft tree beside the window; -1: automatic")
    common.add_argument("--relax", type=float, default=OWN, help="strength of a lossy method, 0 to 1 (as published)")
    common.add_argument("--relax-budget", type=int, default=-1, help="most tokens taken by relaxation alone; -1: any")
    common.add_argument("--row-context", type=int, default=OWN, help="pjd, pjd-c, zipar: columns before the next row")
    common.add_argument("--rounds", type=int, default=2, help="row-block: corrections of a row, 1 to 8; 0: until exact")
    common.add_argument("--dtype", default="auto", choices=["auto", *DTYPES])
    common.add_argument("--device", default="cpu")
    common.add_argument("--model", default="bundled", help="'bundled', a model file or a model folder")
    common.add_argument("--json", nargs="?", const="-", help="print figures as JSON, or write them to a file")
    one = commands.add_parser("generate", parents=[common], help="draw a picture or clip")
    one.add_argument("--method", default=DEFAULT_METHOD, choices=list(METHODS))
    one.add_argument("--out", default="out", help="folder for pictures and clips")
    one.set_defaults(run=run_generate)
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
    except (UserError, OSError) as error:
        print(f"{error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
