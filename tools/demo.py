"""Run the shipped picture and clip workflows in a real ComfyUI, then measure every method on the same prompt.

    python tools/demo.py [--prompt TEXT] [--seed N] [--frames N] [--out FOLDER]

Writes the files into FOLDER (out/demo) and prints one table. Exit code 1 and one sentence if anything fails.
"""

import argparse
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

from host_api import ROOT, HostError, WorkflowError, problems, running_host, to_api

WORKFLOWS = ("SCD text to image", "SCD text to video")
METHODS = "autoregressive,sjd,scd-maximal,scd-gumbel,seed-exact"
COLUMNS = ("what", "method", "passes", "tokens/pass", "seconds", "passes vs. AR", "lossless",
           "same tokens as AR")


class DemoError(RuntimeError):
    """Something a person running the demo has to know; the message is all that is shown."""


def run_workflow(host, name, out):
    """Run one shipped workflow over the HTTP API and copy what it writes into `out`; returns the paths."""
    workflow = json.loads((ROOT / "workflows" / f"{name}.json").read_text(encoding="utf-8"))
    wrong = problems(workflow, host.object_info)
    if wrong:
        raise DemoError(f"{name}: {'; '.join(wrong)}")
    result = host.run(to_api(workflow, host.object_info), workflow=workflow)
    if result.status != "success":
        reason = (result.error or {}).get("exception_message", result.status)
        raise DemoError(f"{name}: {reason.strip()}")
    files = [item for _, item in result.files() if item.get("type") == "output"]
    if not files:
        raise DemoError(f"{name}: the workflow ran but saved no file")
    paths = []
    for item in files:
        paths.append(out / pathlib.Path(item["filename"]).name)
        paths[-1].write_bytes(host.view(item))
    print(f"{name}: {result.seconds:.1f} s, {', '.join(str(shown(p)) for p in paths)}", flush=True)
    return paths


def shown(path):
    """The path as a person in the repository would type it."""
    return path.relative_to(ROOT) if path.is_relative_to(ROOT) else path


def compare(prompt, seed, frames=None):
    """Rows of `python -m scd_core compare` in fp32: a picture, or a clip where `frames` is given."""
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder) / "compare.json"
        command = [sys.executable, "-m", "scd_core", "compare", prompt, "--methods", METHODS,
                   "--dtype", "fp32", "--seed", str(seed), "--json", str(report)]
        command += ["--frames", str(frames)] if frames else []
        run = subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if run.returncode:
            reason = (run.stderr.strip() or f"exit code {run.returncode}").splitlines()[-1]
            raise DemoError(f"comparing the methods failed: {reason}")
        return json.loads(report.read_text(encoding="utf-8"))


def table_rows(what, rows):
    """Cells of the table: each method against the autoregressive row of the same run."""
    reference = next(row for row in rows if row["method"] == "autoregressive")
    for row in rows:
        same = row["sha256_tokens"] == reference["sha256_tokens"]
        fewer = "reference" if row is reference else f"{reference['passes'] / row['passes']:.2f}x fewer"
        yield (what, row["method"], str(row["passes"]), f"{row['tokens_per_pass']:.2f}",
               f"{row['seconds']:.2f}", fewer, "yes" if row["lossless"] else "no", "yes" if same else "no")


def print_table(rows):
    """Print rows of cells under COLUMNS, numbers to the right."""
    rows = [COLUMNS, *rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    for at, row in enumerate(rows):
        aligned = [str.ljust, str.ljust, *[str.rjust] * 4, str.ljust, str.ljust]
        print("  ".join(put(cell, w) for put, cell, w in zip(aligned, row, widths)).rstrip())
        if at == 0:
            print("  ".join("-" * w for w in widths))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt", default="fox on snow", help="prompt of the table")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--frames", type=int, default=8, help="frames of the clip in the table")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "out" / "demo")
    args = parser.parse_args()
    start = time.monotonic()
    base = ROOT / ".comfy" / "demo"
    shutil.rmtree(base / "output", ignore_errors=True)
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    try:
        print("Starting ComfyUI ...", flush=True)
        with running_host(base) as host:
            for name in WORKFLOWS:
                run_workflow(host, name, args.out)
        print(f'\nEvery method on "{args.prompt}", seed {args.seed}, fp32 (a minute or two):', flush=True)
        rows = [*table_rows("picture", compare(args.prompt, args.seed)),
                *table_rows(f"clip, {args.frames} frames", compare(args.prompt, args.seed, args.frames))]
    except (DemoError, HostError, WorkflowError, TimeoutError, OSError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    print_table(rows)
    print(f"\nDone in {time.monotonic() - start:.0f} s. The picture and the clip are in {shown(args.out)}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
