"""The live preview: what is decided so far, sharp; what is still guessed, pale."""

import logging
import time

import torch
from PIL import Image

from ..scd_core.budget import codec_bytes
from .acceptance_map import sheet

log = logging.getLogger(__name__)

INTERVAL = 0.5  # seconds between two previews at least
SHARE = 0.1  # of the run's time that previews may take
TILES = 16  # pictures on one preview at most
SIDE = 256  # small previews are enlarged up to this, in whole steps


def decided_cells(plan, frontier, given, settled=None):
    """bool [B, frames, rows, cols]: cells left of each sample's frontier, and given ones.

    Args:
        frontier: first position not committed, a sample. given: codes like `TokenPlan.fixed` takes them, or None.
        settled: bool [B, N] committed positions where they are no prefix, or None.
    """
    drawn = (plan.cells >= 0).nonzero()[:, 0]
    inside = drawn[None] < torch.tensor(frontier)[:, None] if settled is None else settled[:, drawn]
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


def decoder(codec, place, plan):
    """How a preview of a run over `plan` is decoded by `codec` on the device `place`: arguments of `Preview`."""
    cfg = codec.cfg
    if plan.frames == 1 or cfg.compression == 1:
        return {"decode": lambda codes: codec.decode(codes.to(place))}
    last = [cfg.frames(count + 1) - 1 for count in range(plan.frames)]  # frame that a token grid ends with
    return {"decode": lambda codes: codec.decode_clip(codes.to(place))[last[: len(codes)]], "clips": True}


def preview_bytes(cfg, plan, batch):
    """Estimate for decoding a preview."""
    if plan.frames > 1 and cfg.compression > 1:
        return codec_bytes(cfg, plan.width, plan.height, cfg.frames(plan.frames), clip=True)
    return codec_bytes(cfg, plan.width, plan.height, min(TILES, batch * plan.frames))


class Preview:
    """Makes preview pictures in the callback of a run.

    Args:
        plan: `TokenPlan`. decode: codes int64 [N, rows, cols] -> frames float [N, H, W, 3].
        given: kept codes or None. fatal: exceptions that end the run; any other only ends the previews.
        clips: the codes for `decode` must be the first token grids of one clip.
    """

    def __init__(self, plan, decode, given=None, fatal=(), clock=time.monotonic, clips=False):
        self.plan, self.decode, self.given, self.fatal, self.clock = plan, decode, given, fatal, clock
        self.clips, self.next = clips, clock()

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
        codes = plan.codes(progress.tokens).clamp(0, plan.vocab - 1)
        decided = decided_cells(plan, progress.frontier, self.given, progress.settled)
        if self.clips:
            shown = max(1, TILES // plan.frames)
            frames = torch.cat([self._clip(*clip) for clip in zip(codes[:shown], decided)])
        else:
            frames = self.decode(codes.flatten(0, 1)[:TILES])
        frames = frames[:TILES].float().cpu()
        picture = sheet(pale(frames, decided.flatten(0, 1)[: len(frames)]))
        grown = max(1, SIDE // max(picture.shape[:2]))
        return Image.fromarray(picture.repeat(grown, 0).repeat(grown, 1))

    def _clip(self, codes, decided):
        """One picture a token grid [frames, H, W, 3], those of grids that are not begun empty.

        Args:
            codes, decided: [frames, rows, cols].
        """
        begun = decided.flatten(1).any(1).nonzero()
        count = int(begun.max()) + 1 if len(begun) else 1
        frames = self.decode(codes[:count])
        return torch.cat([frames, frames.new_zeros(len(codes) - count, *frames.shape[1:])])
