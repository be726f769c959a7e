"""Compare Methods inside the host."""

import torch
from checks_common import encoded, loaded, refused


def check_pictures_plot_and_table(inside):
    model, text, _ = loaded(inside)
    positive = encoded(inside, text)
    made = inside.call(
        "SCD_Compare", model=model, positive=positive, methods="autoregressive, seed-exact, cool-sd", seed=3, window=32,
        temperature=0.0, cfg=1.0,
    )
    pictures, plot, report = made.args
    assert pictures.ndim == 4 and pictures.shape[0] == 1 and plot.shape[0] == 1
    assert all(t.dtype == torch.float32 and float(t.min()) >= 0 and float(t.max()) <= 1 for t in (pictures, plot))
    lines = report.splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["autoregressive", "seed-exact", "cool-sd"]
    assert float(lines[2].split()[6].removesuffix("x")) > 2
    assert "seed-exact" in str(made.ui.as_dict())


def check_clip_gives_a_sheet_a_frame(inside):
    model, text, _ = loaded(inside)
    pictures, _, _ = inside.call(
        "SCD_Compare", model=model, positive=encoded(inside, text), methods="jacobi", frames=3, cfg=1.0, window=32,
    ).args
    assert pictures.shape[0] == 3


def check_unknown_method_is_told(inside):
    model, text, _ = loaded(inside)
    with refused("unknown method 'fastest'"):
        inside.call("SCD_Compare", model=model, positive=encoded(inside, text), methods="fastest")
