"""A list of prompts: what a row may say, one line a picture, going on where it stopped, many processes."""

import csv
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from PIL import Image
from scd_pack.scd_core import batch
from scd_pack.scd_core.__main__ import main, options
from scd_pack.scd_core.errors import UserError
from scd_tests.sentences import is_one_sentence

ROOT = Path(__file__).resolve().parents[1]
QUICK = ["--temperature", "0", "--cfg", "1", "--window", "64", "--dtype", "fp32"]
PATIENCE = 600  # seconds that a busy machine may take for processes to start


def table(path, *rows, sign=","):
    with open(path, "w", newline="", encoding="utf-8-sig") as file:
        csv.writer(file, delimiter=sign).writerows(rows)
    return str(path)


def lines(folder):
    return [json.loads(line) for line in (Path(folder) / batch.RESULTS).read_text(encoding="utf-8").splitlines()]


def rows_of(path, *argv):
    args = options().parse_args(["batch", str(path), *argv])
    return batch.read_rows(args.prompts, args, args.rows)


# the list -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sign", [",", ";", "\t"])
def test_cells_are_options_of_a_single_run(tmp_path, sign):
    path = table(
        tmp_path / "p.csv",
        ["Prompt", "seed", "Top-K", "no memory", "temperature", "negative", "batch"],
        ["fox, on snow", "5.0", "", "yes", "-1", "dog", "2"], ["", "", "", "", "", "", ""],
        ["--cfg 3", "", "7", "no", "0.5", "", ""], sign=sign,
    )  # fmt: skip
    first, second = (row.args for row in rows_of(path, "--top-k", "3", "--seed", "10", "--frames", "2"))
    assert (first.prompt, first.seed, first.top_k, first.no_memory) == ("fox, on snow", 5, 3, True)
    assert (first.temperature, first.negative, first.batch, first.frames) == (-1, "dog", 2, 2)
    assert (second.prompt, second.seed, second.top_k, second.no_memory) == ("--cfg 3", 12, 7, False)
    assert second.temperature == 0.5 and second.batch == 1


def test_a_text_has_a_prompt_a_line(tmp_path):
    (tmp_path / "p.txt").write_text("fox on snow\n\n  lion, on sand \n", encoding="utf-8")
    rows = rows_of(tmp_path / "p.txt")
    assert [(row.number, row.args.prompt, row.args.seed) for row in rows] == [
        (1, "fox on snow", 1), (2, "lion, on sand", 2)
    ]  # fmt: skip
    assert rows_of(tmp_path / "p.txt", "--seed", str((1 << 64) - 1))[0].args.seed == 0


@pytest.mark.parametrize(
    "head, cells, told",
    [
        ("prompt,seed", "fox,x", "seed"), ("prompt,seed", "fox,1.5", "seed"), ("prompt,seed", "fox,-1", "seed -1"),
        ("prompt,method", "fox,sdj", "sdj"), ("prompt,seed", "fox,1,on snow", "quotation marks"),
        ("prompt,no_memory", "fox,perhaps", "neither yes nor no"), ("prompt,batch", "fox,0", "batch size 0"),
        ("prompt,cfg", "fox,inf", ""), ("prompt,rounds", "fox,99", "rounds 99"),
    ],
)  # fmt: skip
def test_a_bad_row_is_told_and_no_other_suffers(tmp_path, head, cells, told):
    (tmp_path / "p.csv").write_text(f"{head}\n{cells}\nlion\n", encoding="utf-8")
    bad, good = rows_of(tmp_path / "p.csv")
    assert good.args.prompt == "lion" and not good.error
    if told:
        assert bad.args is None and told in bad.error and is_one_sentence(bad.error)


@pytest.mark.parametrize(
    "data, told",
    [
        (b"", "no prompts"), (b"prompt\n", "no prompts"), (b"text\nfox\n", "'text'"), (b"seed\n1\n", "no column"),
        (b"prompt,cgf\nfox,1\n", "'cgf'"), (b"prompt,prompt\na,b\n", "twice"), (b"prompt,model\na,b\n", "whole run"),
        (b"prompt\n\xff\xfe\n", "UTF-8"), (b'prompt\n"' + b"x" * 200_000 + b'"\n', "field"),
    ],
)  # fmt: skip
def test_a_bad_list_is_refused_at_once(capsys, tmp_path, data, told):
    (tmp_path / "p.csv").write_bytes(data)
    assert main(["batch", str(tmp_path / "p.csv"), "--out", str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err.strip()
    assert told in error and is_one_sentence(error) and not (tmp_path / "out").exists()


def test_what_is_not_there_is_told(capsys, tmp_path):
    assert main(["batch", str(tmp_path / "none.csv")]) == 1
    assert "none.csv" in capsys.readouterr().err
    (tmp_path / "p.txt").write_text("fox", encoding="utf-8")
    for wrong in (["--model", str(tmp_path)], ["--workers", "0"], ["--workers", "many"]):
        assert main(["batch", str(tmp_path / "p.txt"), "--out", str(tmp_path / "out"), *wrong]) == 1
        assert is_one_sentence(capsys.readouterr().err.strip())


# results ------------------------------------------------------------------------------------------------------------


class Pencil(batch.Painter):
    """Draws nothing, quickly; remembers what it was asked for."""

    asked = []

    def __init__(self, *_):
        pass

    def pictures(self, args):
        self.asked.append(args.prompt)
        if args.prompt == "stop":
            raise KeyboardInterrupt
        if args.prompt == "bad":
            raise UserError("this prompt is bad: write another")
        if args.prompt == "worse":
            raise RuntimeError("two\nlines")
        return [(".png", f"{args.prompt} {args.seed} {n}".encode(), {"tokens": 4}) for n in range(args.batch)]


@pytest.fixture
def pencil(monkeypatch):
    monkeypatch.setattr(batch, "Painter", Pencil)
    monkeypatch.setattr(Pencil, "asked", [])
    return Pencil


def draw(path, out, *argv):
    return main(["batch", str(path), "--out", str(out), *argv])


def test_what_is_done_is_not_drawn_again(pencil, capsys, tmp_path):
    rows = ["fox", "2"], ["bad", ""], ["worse", ""], ["lion", ""]
    path, out = table(tmp_path / "p.csv", ["prompt", "batch"], *rows), tmp_path / "out"
    assert draw(path, out) == 1
    told = capsys.readouterr()
    assert "3 drawn, 0 there already, 2 rows failed" in told.out and "row 2: this prompt is bad" in told.err
    assert "row 3: RuntimeError: two lines" in told.err
    found = lines(out)
    assert [(line["row"], line.get("sample"), "error" in line) for line in found] == [
        (1, 0, False), (1, 1, False), (2, None, True), (3, None, True), (4, 0, False)
    ]  # fmt: skip
    assert all((out / line["file"]).is_file() for line in found if "file" in line)
    before, pencil.asked[:] = {file.name: file.stat().st_mtime_ns for file in out.glob("*.png")}, []
    assert draw(path, out) == 1 and pencil.asked == ["bad", "worse"] and len(lines(out)) == 5
    assert before == {file.name: file.stat().st_mtime_ns for file in out.glob("*.png")}
    assert "0 drawn, 3 there already" in capsys.readouterr().out


def test_a_row_that_changed_is_drawn_and_nothing_is_overwritten(pencil, tmp_path):
    out = tmp_path / "out"
    assert draw(table(tmp_path / "p.csv", ["prompt"], ["fox"], ["lion"]), out) == 0
    assert draw(table(tmp_path / "p.csv", ["prompt"], ["fox"], ["tiger"]), out) == 0
    assert draw(tmp_path / "p.csv", out, "--cfg", "3") == 0
    assert pencil.asked == ["fox", "lion", "tiger", "fox", "tiger"] and len(list(out.glob("*.png"))) == 5
    assert len({line["key"] for line in lines(out)}) == 5


@pytest.mark.parametrize("kept", ["cut", "no end", "noise", "twice"])
def test_a_broken_last_line_costs_one_picture(pencil, tmp_path, kept):
    path, out = table(tmp_path / "p.csv", ["prompt"], ["fox"], ["lion"], ["cat"]), tmp_path / "out"
    assert draw(path, out) == 0
    results, whole = out / batch.RESULTS, (out / batch.RESULTS).read_bytes()
    last = whole.splitlines(keepends=True)[-1]
    spoiled = {"cut": whole[:-20], "no end": whole[:-1], "noise": whole + b"\0\xff{\n[1]\n", "twice": whole + last}
    results.write_bytes(spoiled[kept])
    (out / f".x.png{batch.PART}.1").write_bytes(b"half")
    pencil.asked.clear()
    assert draw(path, out) == 0 and pencil.asked == (["cat"] if kept in ("cut", "no end") else [])
    assert results.read_bytes() == whole and not list(out.glob(".*"))


def test_a_run_that_was_broken_off_goes_on(pencil, capsys, tmp_path):
    path, out = table(tmp_path / "p.csv", ["prompt"], ["fox"], ["stop"], ["lion"]), tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        draw(path, out)
    assert "the same command goes on there" in capsys.readouterr().err
    assert [line["prompt"] for line in lines(out)] == ["fox"]
    (out / lines(out)[0]["file"]).unlink()  # a picture that was thrown away is wanted again
    table(path, ["prompt"], ["fox"], ["cat"], ["lion"])
    assert draw(path, out) == 0 and [line["prompt"] for line in lines(out)] == ["fox", "cat", "lion"]


def test_any_prompt_gives_a_name_inside_of_the_folder(pencil, tmp_path):
    """Same prompts, paths, letters that take four bytes each."""
    prompts = ["fox", "fox", "../fox", "/fox\\on: snow", "\U0001d41f" * 90, "狐" * 90, "?"]
    path, out = table(tmp_path / "p.csv", ["prompt"], *[[prompt] for prompt in prompts]), tmp_path / "out"
    assert draw(path, out) == 0 and sorted(os.listdir(tmp_path)) == ["out", "p.csv"]
    assert {line["file"] for line in lines(out)} == {*os.listdir(out)} - {batch.RESULTS} and len(lines(out)) == 7


def test_the_bar_counts_pictures(pencil, monkeypatch, tmp_path):
    tqdm, bars = pytest.importorskip("tqdm"), []

    class Bar(tqdm.tqdm):
        def close(self):
            bars.append((self.initial, self.n, self.total))
            super().close()

    monkeypatch.setattr(tqdm, "tqdm", Bar)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    for rows in ([["fox", "2"]], [["fox", "2"], ["lion", "1"]]):
        assert draw(table(tmp_path / "p.csv", ["prompt", "batch"], *rows), tmp_path / "out") == 0
    assert list(dict.fromkeys(bars)) == [(0, 2, 2), (2, 3, 3)]  # a bar is closed again when it is thrown away


def test_a_picture_is_there_whole_or_not_at_all(pencil, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(batch.os, "replace", full)
    assert draw(table(tmp_path / "p.csv", ["prompt"], ["fox"]), tmp_path / "out") == 1
    assert list((tmp_path / "out").iterdir()) == []


def test_a_row_is_drawn_again_when_its_picture_became_another(pencil, tmp_path):
    path, given = table(tmp_path / "p.csv", ["prompt", "keep"], ["fox", tmp_path / "a.png"]), tmp_path / "a.png"
    for drawn, content in (1, b"one"), (1, b"one"), (2, b"two"):
        given.write_bytes(content)
        assert draw(path, tmp_path / "out") == 0 and len(pencil.asked) == drawn
    given.unlink()
    assert draw(path, tmp_path / "out") == 0 and len(pencil.asked) == 3


def test_a_folder_takes_one_batch_at_a_time(pencil, capsys, tmp_path):
    path, out = table(tmp_path / "p.csv", ["prompt"], ["fox"]), tmp_path / "out"
    with batch.alone(out):
        (out / f".x.png{batch.PART}.1").write_bytes(b"of the other one")
        assert draw(path, out) == 1
        assert is_one_sentence(told := capsys.readouterr().err.strip()) and "another batch is writing" in told
        assert (out / f".x.png{batch.PART}.1").exists() and not list(out.glob("*.png"))
    assert draw(path, out) == 0 and len(list(out.glob("*.png"))) == 1 and not list(out.glob(".*"))


# real pictures ------------------------------------------------------------------------------------------------------


def single(folder, *argv):
    assert main(["generate", *argv, *QUICK, "--out", str(folder)]) == 0
    return [file.read_bytes() for file in sorted(Path(folder).iterdir())]


def test_pictures_are_those_of_single_runs(tmp_path):
    path = table(
        tmp_path / "p.csv", ["prompt", "seed", "frames", "batch", "method", "width"],
        ["fox on snow", "5", "", "2", "", ""], ["car on sand", "", "2", "", "scd-maximal", ""],
        ["fox", "", "", "", "", "9"],
    )  # fmt: skip
    assert draw(path, tmp_path / "out", *QUICK) == 1
    found = {(line["row"], line.get("sample", 0)): line for line in lines(tmp_path / "out")}
    data = {key: (tmp_path / "out" / line["file"]).read_bytes() for key, line in found.items() if "file" in line}
    assert "cannot draw 9x" in found[3, 0]["error"] and found[2, 0]["seed"] == 2
    assert [data[1, 0], data[1, 1]] == single(tmp_path / "a", "fox on snow", "--seed", "5", "--batch", "2")
    clip = single(tmp_path / "b", "car on sand", "--seed", "2", "--frames", "2", "--method", "scd-maximal")
    assert found[2, 0]["file"].endswith(".mp4") and [len(data[2, 0])] == [len(clip[0])]
    assert found[1, 0]["lossless"] and found[1, 0]["passes"] >= 1 and "visits" not in found[1, 0]


# processes ----------------------------------------------------------------------------------------------------------


def wait_for(condition, process):
    """Until a condition holds; a process that ended before is an error."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert process.poll() is None, process.communicate()[1][-2000:]
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.05)


def started(path, out, *argv):
    """The command in a process of its own; pictures take a while."""
    command = [sys.executable, "-m", "scd_core", "batch", path, "--out", str(out), "--method", "autoregressive",
               "--dtype", "fp32", *argv]  # fmt: skip
    return subprocess.Popen(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True)  # fmt: skip


def has_one(out):
    """There is a picture, and its line."""
    return any(out.glob("*.png")) and b'"file"' in (out / batch.RESULTS).read_bytes()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Ctrl-C goes to a whole console there")
def test_ctrl_c_keeps_what_is_drawn_and_the_same_command_goes_on(capsys, tmp_path):
    path, out = table(tmp_path / "p.csv", ["prompt", "cfg"], *[["fox", "1"]] * 3), tmp_path / "out"
    with started(path, out) as process:
        wait_for(lambda: has_one(out), process)
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=PATIENCE)
    assert process.returncode == -signal.SIGINT and is_one_sentence(told.strip()) and "goes on there" in told
    before = lines(out)
    assert 1 <= len(before) < 3
    assert draw(path, out, "--method", "autoregressive", "--dtype", "fp32") == 0
    assert f"{3 - len(before)} drawn, {len(before)} there already" in capsys.readouterr().out
    assert lines(out)[: len(before)] == before


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray: pip install 'ray[data]'")
def test_a_killed_worker_loses_no_picture(tmp_path):
    """Two workers of Ray; one dies while it draws. Pictures are those of single runs, each there once."""
    count, out = 6, tmp_path / "out"
    path = table(tmp_path / "p.csv", ["prompt", "cfg"], *[["fox on snow", "1"]] * count, ["fox", "inf"])
    process = started(path, out, "--workers", "2")
    try:
        wait_for(lambda: has_one(out), process)
        victim = next(line["worker"] for line in lines(out) if "file" in line)
        os.kill(int(victim.rpartition(":")[2]), signal.SIGKILL)
        assert len(lines(out)) < count - 1, "too late: nothing was left to draw"
        told, errors = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    assert process.returncode == 1 and f"{count} drawn" in told, errors[-2000:]
    found = [line for line in lines(out) if "file" in line]
    assert sorted(line["row"] for line in found) == list(range(1, count + 1))
    assert len({line["sha256_tokens"] for line in found}) == count == len(list(out.glob("*.png")))
    workers = {line["worker"] for line in found}
    assert victim in workers and len(workers) >= 2
    assert [line["row"] for line in lines(out) if "error" in line] == [count + 1]
    last = next(line for line in found if line["row"] == count)
    assert Image.open(out / last["file"]).size == (64, 64)
    assert main(["generate", "fox on snow", "--seed", str(count), "--cfg", "1", "--method", "autoregressive", "--dtype",
                 "fp32", "--json", str(tmp_path / "one.json"), "--out", str(tmp_path / "one")]) == 0  # fmt: skip
    assert json.loads((tmp_path / "one.json").read_text())["sha256_tokens"] == last["sha256_tokens"]
