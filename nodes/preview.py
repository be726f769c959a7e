"""The live preview: what is decided so far, sharp; what is still guessed, pale."""

import logging
import time

import torch
from PIL import Image

from .acceptance_map import sheet

log = logging.getLogger(__name__)

INTERVAL = 0.5  # seconds between two previews at least
SHARE = 0.1  # of the run's time that previews may take
TILES = 16  # pictures on one preview at most
SIDE = 256  # small previews are enlarged up to this, in whole steps


def decided_cells(plan, frontier, given):
    """bool [B, frames, rows, cols]: cells left of each sample's frontier, and given ones.

    Args:
        frontier: first position not committed, a sample. given: codes like `TokenPlan.fixed` takes them, or None.
    """
    drawn = (plan.cells >= 0).nonzero()[:, 0]
    inside = drawn[None] < torch.tensor(frontier)[:, None]
    cells = torch.zeros(len(frontier), plan.frames * plan.rows * plan.cols, dtype=torch.bool)
    cells[:, plan.cells[drawn]] = inside
    cells = cells.view(-1, plan.frames, plan.rows, plan.cols)
    return cells if given is None else cells | (given >= 0)


def pale(frames, decided):
    """Grey out undecided cells.

    Args:
        frames: float [N, H, W, 3] in 0..1. decided: bool [N, rows, cols].

    Returns:
        uint8 array [N, H, W, 3].
    """
    height, width = frames.shape[1:3]
    mask = decided.repeat_interleave(height // decided.shape[1], 1).repeat_interleave(width // decided.shape[2], 2)
    guess = 0.3 * frames.mean(-1, keepdim=True) + 0.25
    shown = torch.where(mask[..., None], frames, guess)
    return shown.mul(255).round().clamp(0, 255).to(torch.uint8).numpy()


class Preview:
    """Makes preview pictures in the callback of a run.

    Args:
        plan: `TokenPlan`. decode: codes int64 [N, rows, cols] -> frames float [N, H, W, 3].
        given: kept codes or None. fatal: exceptions that end the run; any other only ends the previews.
    """

    def __init__(self, plan, decode, given=None, fatal=(), clock=time.monotonic):
        self.plan, self.decode, self.given, self.fatal, self.clock = plan, decode, given, fatal, clock
        self.next = clock()

    def __call__(self, progress):
        """PIL picture of a `Progress`, or None when it is too early for the next one."""
        start = self.clock()
        last = progress.done == progress.total  # the page keeps showing the last picture it got
        if self.decode is None or (start < self.next and not last):
            return None
        try:
            picture = self._picture(progress)
        except self.fatal:
            raise
        except Exception:  # a picture that cannot be shown is no reason to lose the run
            log.warning("live preview switched off for this run", exc_info=True)
            self.decode = None
            return None
        spent = self.clock() - start
        self.next = start + max(INTERVAL, spent / SHARE)
        return picture

    def _picture(self, progress):
        plan = self.plan
        codes = plan.codes(progress.tokens).clamp(0, plan.vocab - 1).flatten(0, 1)[:TILES]
        decided = decided_cells(plan, progress.frontier, self.given).flatten(0, 1)[:TILES]
        frames = self.decode(codes).float().cpu()
        picture = sheet(pale(frames, decided))
        grown = max(1, SIDE // max(picture.shape[:2]))
        return Image.fromarray(picture.repeat(grown, 0).repeat(grown, 1))
