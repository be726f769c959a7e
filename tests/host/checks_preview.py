"""Checks inside the host: the live preview changes no token, comes seldom and costs little."""

import time

import numpy as np
import torch
from checks_common import drawn, previews_whatever_they_take, ready, replaced


def pictures(inside):
    """The preview pictures of the last run, each an array [H, W, 3]."""
    return [np.asarray(preview[1]).astype(int) for *_, preview in inside.progress if preview]


def check_previews_change_no_token(inside):
    """One after every pass: stills in a batch, clips, rows side by side, kept tokens."""
    model, positive, _ = ready(inside)
    tokens = drawn(inside, model, positive, seed=1)[0]
    half = torch.zeros_like(tokens.codes, dtype=torch.bool)
    half[:, :, :4] = True
    part = type(tokens)(tokens.codes, 32, 32, tokens.vocab, tokens.model, tokens.family, kept=half)
    runs = ({"method": "seed-exact", "tree_nodes": 0}, {"method": "sjd", "batch_size": 2},
            {"method": "pjd", "frames": 3}, {"method": "row-block"}, {"method": "scd-gumbel", "kept": part})
    module = inside.module("nodes.preview")
    for widgets in runs:
        without = drawn(inside, model, positive, seed=4, **widgets)[0].codes
        inside.progress.clear()
        with previews_whatever_they_take(inside), replaced(module, "INTERVAL", 0.0), replaced(module, "FIRST", 0.0):
            shown, report, _ = drawn(inside, model, positive, seed=4, **{**widgets, "preview": "auto"})
        assert (shown.codes == without).all(), widgets
        assert len(pictures(inside)) == int(report.split(" tokens in ")[1].split()[0]), "one a pass"
        mark = 255 * np.array(module.MARK)
        marked = [bool((np.abs(picture - mark).max(-1) <= 1).any()) for picture in pictures(inside)]
        assert all(marked[:-1]) and not marked[-1], widgets


def check_previews_are_few_and_cheap(inside):
    """Pictures and clips of the bundled model, slowly and fast: two previews a second at most, a twentieth of the time.

    Of runs of about a second or less, too; the first two pictures of a size tell what one takes.
    """
    model, positive, _ = ready(inside)
    sampler, made, share = inside.module("nodes.sampler"), [], inside.module("nodes.preview").SHARE

    class Watched(inside.module("nodes.preview").Preview):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            made.append(self)

    whole = {"method": "autoregressive", "width": 0, "height": 0, "frames": 1, "preview": "auto"}
    fast = {**whole, "method": "seed-exact", "window": 32, "tree_nodes": 0}
    for widgets, runs in ((whole, 2), (fast, 4), ({"preview": "auto", "tree_nodes": 0}, 4)):
        shares = []
        for seed in range(runs):
            inside.progress.clear()
            start = time.monotonic()
            with replaced(sampler, "Preview", Watched):
                drawn(inside, model, positive, seed=seed, **widgets)
            seconds = time.monotonic() - start
            assert (widgets is not whole) <= len(pictures(inside)) + 1 <= 2 * seconds + 2
            shares.append(made[-1].spent / seconds)
        told = ", ".join(f"{share:.2%}" for share in shares)
        print(f"previews took {told} of the runs, {len(pictures(inside))} in the last one of {seconds:.2f} s")
        assert min(shares) < 0.05 and sorted(shares[1:])[len(shares) // 2 - 1] < 0.05, (widgets, shares)
        # where there is time for one there is one
        assert widgets is not whole or pictures(inside) or 1.2 * made[-1].cost.each > share * seconds
