"""Comparison of methods: names, figures, table, sheet and plot."""

import numpy as np
import pytest
import torch
from scd_pack.scd_core.compare import compare, method_names, picture_sheet, plot, rows_of, table
from scd_pack.scd_core.errors import UserError
from scd_pack.scd_core.generate import Request
from scd_pack.scd_core.models.load import load_model
from scd_tests.toys import grid, run


@pytest.fixture(scope="module")
def reports():
    toy = grid(kappa=0.55)
    names = ("autoregressive", "seed-exact", "csd")
    return [run(toy, name, batch=2, window=32, seed=3, **({"relax": 1.0} if name == "csd" else {}))[1]
            for name in names]


def test_names():
    assert method_names(" sjd,seed-exact\n, sjd ") == ["sjd", "seed-exact"]
    for text, told in (("sjd, fast", "'fast'"), (" , ", "no method")):
        with pytest.raises(UserError, match=told):
            method_names(text)


def test_figures_are_against_the_first(reports):
    rows = rows_of(reports)
    assert [row["method"] for row in rows] == ["autoregressive", "seed-exact", "csd"]
    assert [row["same_tokens"] for row in rows] == [True, True, False]
    assert [row["lossless"] for row in rows] == [True, True, False]
    assert rows[0]["fewer_passes"] == 1 and rows[2]["fewer_passes"] > rows[1]["fewer_passes"] > 2
    want = sum(reports[0].per_sample) / sum(reports[1].per_sample)
    assert rows[1]["fewer_passes"] == pytest.approx(want, abs=0.01)
    lines = table(rows).splitlines()
    assert len(lines) == 4 and lines[0].split()[:2] == ["method", "window"] and lines[3].split()[0] == "csd"
    assert lines[1].index("1.0x") == lines[2].index(f"{rows[1]['fewer_passes']:.1f}x")


def test_sheet_shows_every_picture(reports):
    frames = [np.full((2, 16, 24, 3), shade) for shade in (0.2, 0.6, 1.0)]
    sheets = picture_sheet(frames, rows_of(reports))
    assert sheets.dtype == np.uint8 and len(sheets) == 2 and np.array_equal(sheets[0], sheets[1])
    for shade in (51, 153, 255):
        assert (sheets[0] == shade).all(-1).sum() >= 16 * 24, "a picture is missing or was altered"
    frames[1][1] = 0.0
    other = picture_sheet(frames, rows_of(reports))
    assert np.array_equal(other[0], sheets[0]) and not np.array_equal(other[1], sheets[1])


def test_plot_has_a_bar_and_a_curve_for_each(reports):
    whole, two = plot(reports), plot(reports[:2])
    assert whole.dtype == np.uint8 and whole.shape == two.shape == (540, 960, 3)
    orange = (whole[:, :480] == (226, 120, 60)).all(-1).sum()
    blue = [(part[:, :480] == (64, 160, 200)).all(-1).sum() for part in (whole, two)]
    assert orange > 100 and blue[0] == blue[1] > 100
    assert not (two[:, :480] == (226, 120, 60)).all(-1).any()
    assert not np.array_equal(whole[:, 480:], two[:, 480:])


@pytest.mark.slow
def test_on_the_bundled_model():
    model, seen = load_model(dtype="fp32"), set()
    request = Request(seed=4, window=64, temperature=0.0, cfg=1.0, frames=2)
    prompt = model.family.text.encode("fox on snow")
    drawn = compare(
        model.decoder, model.family, prompt, None, request, ["seed-exact", "jacobi"],
        callback=lambda number, progress: seen.add((number, progress.passes)),
    )  # fmt: skip
    assert [d.report.method for d in drawn] == ["seed-exact", "jacobi"]
    assert torch.equal(drawn[0].codes, drawn[1].codes)
    assert {n for n, _ in seen} == {0, 1} and max(p for _, p in seen) == max(d.report.passes for d in drawn)
