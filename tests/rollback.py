"""Teacher-forced logits of a model through its cache, with wrong drafts that the next pass overwrites."""

import torch
from scd_pack.scd_core.models.session import Session


@torch.inference_mode()
def windows(model, plan, streams, ids, width):
    """Logits [2, N, V] of given ids in windows, each read with wrong drafts first."""
    n = plan.length
    tokens, before = torch.cat([ids[:1], ids[: n - 1]])[None], torch.arange(n)[None] - 1
    session = Session(model.decoder, model.family, plan, streams, torch.full((1, n), -1), 0, "cpu")
    found = []
    for start in range(0, n, width):
        rows = slice(start, start + width)
        some, length = tokens[:, rows], int(before[0, rows].max()) + 1
        session.window(torch.cat([some[:, :1], some[:, 1:] - 7], 1), before[:, rows], length, start == 0)
        found.append(session.window(some, before[:, rows], length, start == 0)[0])
    return torch.cat(found, 1).float()
