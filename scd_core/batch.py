"""Many pictures from a list of prompts: `python -m scd_core batch PROMPTS.csv --out DIR`.

The list is a table whose columns are options of `generate`, or a text with a prompt a line. Every picture is written
whole, then one JSON line about it is added to DIR/results.jsonl; a run that was broken off goes on where it stopped.
A picture depends on its own row alone: one `decode` has one prompt and one seed, so rows are not mixed in a batch, and
`batch` counts the pictures of a row, which are those of single runs with the same seed.
"""

import argparse
import csv
import hashlib
import io
import json
import os
import tempfile
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
from filelock import FileLock, Timeout

from . import shell_continuous
from .errors import UserError
from .generate import check_request
from .models.load import load_model, open_model
from .shell import draw, frames_of, model_path, request_of, stem_of, suffix_of, usable_device, write

RESULTS, LOCK = "results.jsonl", ".batch.lock"
SEEDS = 1 << 64
FILES = ("keep", "mask")  # options that name a file, which may become another one under its name
OF_THE_RUN = ("model", "dtype", "device")  # options that all rows share
YES, NO = ("1", "yes", "true", "on", "x"), ("0", "no", "false", "off")
LONG = ("visits", "accepted_per_pass")  # figures that would make a line of a JSON file endless
PART = ".part"


# --- the list ---------------------------------------------------------------------------------------------------------


class RowParser(argparse.ArgumentParser):
    """Reads a row with the parser of the command line, and complains in one sentence."""

    def error(self, message):
        raise UserError(message.replace("argument --", ""))


def row_parser(settings, add_drawing):
    """The parser of a row.

    Args:
        settings: parser with the options that all commands have. add_drawing: adds those of `generate`.
    """
    parser = RowParser(add_help=False, parents=[settings], allow_abbrev=False)
    add_drawing(parser)
    parser.add_argument("prompt")
    return parser


@dataclass
class Row:
    """One row of the list.

    Attributes:
        number: 1, 2, .. among the rows that are not empty. args: parsed options, or None. error: why there are none.
        key: tells this row's pictures from those of other rows and of other versions of this row, 16 hex digits.
    """

    number: int
    args: argparse.Namespace | None = None
    error: str = ""
    key: str = ""

    @property
    def samples(self):
        return range(self.args.batch)


def read_rows(path, args, parser):
    """Rows of a .csv or .txt file.

    Args:
        args: parsed command line, whose options count where a row does not say otherwise; a row without a seed takes
            its number plus that of the command line. parser: see `row_parser`.

    Returns:
        list of `Row`; what is wrong with a single row is told in it.

    Raises:
        UserError: a file that cannot be read, that is empty or that has a column of no meaning.
    """
    text, own = _text(path), {action.dest for action in parser._actions}
    common = {name: value for name, value in vars(args).items() if name in own}
    cells = _table(path, text, parser) if Path(path).suffix.lower() != ".txt" else _lines(text)
    rows = [_row(number, told, common, parser) for number, told in enumerate(cells, 1)]
    if not rows:
        raise UserError(f"'{path}' holds no prompts: write one a line, or a table with the column prompt")
    return rows


def _text(path):
    if not Path(path).is_file():
        raise UserError(f"'{path}' is not there, or is no file: check the name")
    try:
        return Path(path).read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"'{path}' is no UTF-8 text ({error.reason}): save it again as CSV in UTF-8") from error


def _lines(text):
    return [{"prompt": line.strip()} for line in text.splitlines() if line.strip()]


def _table(path, text, parser):
    """Cells of a table by column; spreadsheets of some countries part them by semicolons or tabs."""
    head = text.lstrip().partition("\n")[0]
    sign = max(",;\t", key=head.count)
    try:
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=sign)
        rows = [row for row in reader if any(cell.strip() for cell in row)]
    except csv.Error as error:
        raise UserError(f"'{path}' is no table that can be read ({error}): save it again as CSV in UTF-8") from error
    columns = [name.strip().lower().replace("-", "_").replace(" ", "_") for name in rows[0]] if rows else ["prompt"]
    known = [action.dest for action in parser._actions if action.dest not in OF_THE_RUN]
    wrong = next((name for name in columns if name not in known or columns.count(name) > 1), None)
    if wrong is not None or "prompt" not in columns:
        told = "has no column prompt" if wrong is None else f"has the column {wrong!r} " + (
            "twice" if wrong in known else "for the whole run: give it as an option" if wrong in OF_THE_RUN else
            "that means nothing here"
        )  # fmt: skip
        raise UserError(f"'{path}' {told}; columns are {', '.join(sorted(known))}")
    return [_cells(columns, row) for row in rows[1:]]


def _cells(columns, row):
    told = {name: cell.strip() for name, cell in zip(columns, row)}
    if any(cell.strip() for cell in row[len(columns) :]):
        told[""] = f"more cells than the {len(columns)} columns: a prompt with commas belongs in quotation marks"
    return told


def _row(number, told, common, parser):
    """Options of a row as `Row`."""
    args = argparse.Namespace(**{**common, "seed": (common["seed"] + number) % SEEDS})
    try:
        if "" in told:
            raise UserError(told[""])
        named = [(name, cell) for name, cell in told.items() if name != "prompt" and cell]
        words = [word for name, cell in named for word in _option(name, cell, parser)]
        parser.parse_args([*words, "--", told.get("prompt", "")], args)
        check_request(request_of(args, args.method))
    except UserError as error:
        return Row(number, error=str(error))
    # options that nobody set leave no trace, so that pictures outlast a version of the pack that has more of them
    told = {name: value for name, value in vars(args).items() if value != parser.get_default(name) and name != "device"}
    told |= {f"content of {name}": _digest(told[name]) for name in FILES if name in told}
    key = hashlib.sha256(json.dumps([number, told], sort_keys=True).encode()).hexdigest()[:16]
    return Row(number, args, key=key)


def _digest(path):
    """Of a file's content; None where it cannot be read, which drawing will tell."""
    with suppress(OSError):
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    return None


def _option(name, cell, parser):
    """A cell as words of a command line."""
    action = next(action for action in parser._actions if action.dest == name)
    if action.nargs != 0:
        whole = action.type is int and cell.endswith(".0")  # what spreadsheets make of whole numbers
        return [f"{action.option_strings[0]}={cell.removesuffix('.0') if whole else cell}"]
    if cell.lower() not in YES + NO:
        raise UserError(f"{name} {cell!r} is neither yes nor no")
    return [action.option_strings[0]] if cell.lower() in YES else []


# --- drawing ----------------------------------------------------------------------------------------------------------


class Painter:
    """Loads a model once and draws rows.

    Args:
        model, dtype, device: as on the command line. default_of: option -> value where nobody says otherwise.
    """

    def __init__(self, model, dtype, device, defaults):
        self.model, self.defaults = load_model(model_path(model), dtype, usable_device(device)), defaults

    @torch.inference_mode()
    def pictures(self, args):
        """Options of a row -> [(suffix, bytes of the file, figures)] of its pictures.

        Raises:
            UserError: options that this model cannot use.
        """
        shell_continuous.check_options(args, self.model.family.continuous, self.defaults.get)
        drawn = draw(self.model, args, request_of(args, args.method), lambda label, progress: None)
        told = {name: value for name, value in drawn.report.to_dict().items() if name not in LONG}
        found = []
        with tempfile.TemporaryDirectory() as folder:
            for number, frames in enumerate(frames_of(self.model, drawn)):
                path = Path(folder) / f"{number}{suffix_of(frames)}"
                write(frames, path, self.model.family.frame_rate)
                found.append((path.suffix, path.read_bytes(), told))
        return found

    def row(self, args):
        """(pictures, error): what a row gave; one bad row must not stop the rest."""
        try:
            return self.pictures(args), ""
        except UserError as error:
            return [], str(error)
        except Exception as error:
            return [], f"{type(error).__name__}: {' '.join(str(error).split())}"


# --- results ----------------------------------------------------------------------------------------------------------


@dataclass
class Summary:
    """What became of the rows: pictures drawn now and found there, {row number: error}."""

    drawn: int = 0
    there: int = 0
    failed: dict = field(default_factory=dict)


class Results:
    """The folder of a batch (see `alone`): pictures, and a line about each in `RESULTS`.

    Lines of failed rows, of pictures that are gone and a last line that was cut off are dropped on opening.
    """

    def __init__(self, folder):
        self.folder, self.path = Path(folder), Path(folder) / RESULTS
        self.done = {}  # {key: samples that are there}
        for left in self.folder.glob(f".*{PART}.*"):
            left.unlink()
        self._tidy()

    def _tidy(self):
        before = self.path.read_bytes() if self.path.exists() else b""
        kept = []
        for line in before.splitlines(keepends=True):
            with suppress(ValueError, TypeError, KeyError, AttributeError):
                told = json.loads(line)
                key, sample, name = told["key"], told["sample"], told["file"]
                whole = line.endswith(b"\n") and sample not in self.done.get(key, ())
                if whole and (self.folder / Path(name).name).is_file():
                    self.done.setdefault(key, set()).add(sample)
                    kept.append(line)
        if b"".join(kept) != before:
            part = self.folder / f".{RESULTS}{PART}.{os.getpid()}"
            part.write_bytes(b"".join(kept))
            os.replace(part, self.path)

    def missing(self, row):
        """Samples of a row that are not there yet."""
        return [sample for sample in row.samples if sample not in self.done.get(row.key, ())]

    def add(self, row, pictures, **more):
        """Write what is missing of a row's pictures, then its lines; returns how many there were."""
        lines, missing = [], self.missing(row)
        for sample in missing:
            suffix, data, told = pictures[sample]
            tail = f"-{sample + 1}" if len(row.samples) > 1 else ""
            name = f"{row.number:05}-{stem_of(row.args.prompt)}-{row.key[:8]}{tail}{suffix}"
            self._write(name, data)
            lines.append({"row": row.number, "key": row.key, "sample": sample, "file": name,
                          "prompt": row.args.prompt, "seed": row.args.seed, **more, **told})
        self._append(lines)
        self.done.setdefault(row.key, set()).update(missing)
        return len(missing)

    def fail(self, row, error):
        """Write the line of a row that could not be drawn."""
        prompt = {} if row.args is None else {"prompt": row.args.prompt, "seed": row.args.seed}
        self._append([{"row": row.number, **prompt, "error": error}])

    def _write(self, name, data):
        """A file that is there whole or not at all."""
        part = self.folder / f".{name}{PART}.{os.getpid()}"
        try:
            with open(part, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, self.folder / name)
        finally:
            part.unlink(missing_ok=True)

    def _append(self, lines):
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        with open(self.path, "ab") as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())


# --- the command ------------------------------------------------------------------------------------------------------


def here(rows, args, defaults):
    """Draw rows in this process, yielding (row, pictures, error, further figures)."""
    painter = Painter(args.model, args.dtype, args.device, defaults)
    for row in rows:
        yield (row, *painter.row(row.args), {})


def add_options(parser):
    """What `batch` has beside the options of `generate`."""
    parser.add_argument("prompts", metavar="PROMPTS", help="a .csv file whose columns are prompt and options such as "
                        "negative, seed, width, method, cfg, or a .txt file with a prompt a line")
    parser.add_argument("--out", default="out", help=f"folder for pictures and {RESULTS}")
    parser.add_argument("--workers", default="", help="processes that draw side by side; auto: one a GPU (needs Ray)")
    parser.add_argument("--address", help="of a Ray cluster, to draw on many machines")


def run(args, parser, tell=lambda done, total, failed: None):
    """Draw all rows that are not there yet.

    Args:
        args: parsed command line. parser: see `row_parser`. tell: called as tell(pictures done, all, rows failed).

    Returns:
        `Summary`.

    Raises:
        UserError: no such list or model, Ray is missing. OSError: the folder cannot be written.
    """
    rows = read_rows(args.prompts, args, parser)
    open_model(model_path(args.model)).source.close()  # or all rows would fail
    with alone(args.out):
        return _draw(rows, Results(args.out), args, parser, tell)


@contextmanager
def alone(folder):
    """Make the folder and keep other batches out of it: each would take the other's files for leftovers."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    lock = FileLock(Path(folder) / LOCK, timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        told = f"another batch is writing into '{folder}': wait until it is done, or name another folder with --out"
        raise UserError(told) from error
    except NotImplementedError:
        pass  # some network folders know no locks
    try:
        yield
    finally:
        with suppress(OSError):  # first, while nobody else can have it; some systems keep open files
            (Path(folder) / LOCK).unlink()
        lock.release()


def _draw(rows, results, args, parser, tell):
    """`run` for rows that were read and a folder that is open."""
    summary = Summary()
    total = sum(len(row.samples) for row in rows if row.args is not None)
    todo = []
    for row in rows:
        if row.error:
            results.fail(row, row.error)
            summary.failed[row.number] = row.error
            continue
        missing = len(results.missing(row))
        summary.there += len(row.samples) - missing
        todo += [row] if missing else []
    tell(summary.there, total, len(summary.failed))
    for row, pictures, error, more in _road(args)(todo, args, vars(_defaults(parser))) if todo else ():
        if error:
            results.fail(row, error)
            summary.failed[row.number] = error
        else:
            summary.drawn += results.add(row, pictures, **more)
        tell(summary.there + summary.drawn, total, len(summary.failed))
    return summary


def _defaults(parser):
    return argparse.Namespace(**{action.dest: action.default for action in parser._actions})


def _road(args):
    """What draws the rows: this process, or Ray's workers."""
    if args.address is None and args.workers in ("", "1"):
        return here
    from .batch_ray import spread

    return spread
