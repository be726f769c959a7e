"""The live preview: what is decided so far, sharp; what is guessed, pale; the place where it grows, marked."""

import logging
import time

import torch
from PIL import Image

from ..scd_core.budget import codec_bytes
from .acceptance_map import sheet

log = logging.getLogger(__name__)

INTERVAL = 0.5  # seconds between two previews at least
SHARE = 0.05  # of the run's time that previews may take
SHORT = 2.0  # seconds; a run that is expected to end sooner shows its end only
TILES = 16  # pictures on one preview at most
SIDE = 256  # small previews are enlarged up to this, in whole steps
EMPTY = 0.15  # grey of cells without so much as a guess
MARK = (1.0, 0.55, 0.0)  # colour of the cells that come next


def on_grid(plan, values):
    """Values bool [B, D] of the positions that draw a cell -> bool [B, frames, rows, cols]."""
    cells = torch.zeros(len(values), plan.frames * plan.rows * plan.cols, dtype=torch.bool)
    cells[:, plan.cells[plan.cells >= 0]] = values
    return cells.view(-1, plan.frames, plan.rows, plan.cols)


def decided_cells(plan, frontier, given, settled=None):
    """bool [B, frames, rows, cols]: cells left of each sample's frontier, and given ones.

    Args:
        frontier: first position not committed, a sample. given: codes like `TokenPlan.fixed` takes them, or None.
        settled: bool [B, N] committed positions where they are no prefix, or None.
    """
    drawn = (plan.cells >= 0).nonzero()[:, 0]
    inside = drawn[None] < torch.tensor(frontier)[:, None] if settled is None else settled[:, drawn]
    cells = on_grid(plan, inside)
    return cells if given is None else cells | (given >= 0)


def drafted_cells(plan, tokens, given):
    """bool [B, frames, rows, cols]: cells up to the last one that a guess has reached; a run begins with zeros.

    Args:
        tokens: int64 [B, N]. given: as in `decided_cells`.
    """
    drawn = (plan.cells >= 0).nonzero()[:, 0]
    reached = tokens[:, drawn] != 0
    if given is not None:
        reached &= given.expand(len(tokens), *given.shape[1:]).flatten(1)[:, plan.cells[drawn]] < 0
    return on_grid(plan, reached.flip(1).cummax(1).values.flip(1))


def next_cells(decided, settled=None):
    """bool [B, frames, rows, cols]: the first open cell of each sample, and of each row that has begun.

    Args:
        decided: as `decided_cells` gives it. settled: the same of what the run itself has reached, where rows run side
            by side.
    """
    left = torch.cat([torch.ones_like(decided[..., :1]), decided[..., :-1]], -1).long().cumprod(-1).bool()
    opens = (left & ~decided).flatten(1)  # one a row that is not complete
    first = opens & (opens.cumsum(1) == 1)
    if settled is not None:
        first |= opens & settled.any(-1, keepdim=True).expand_as(settled).flatten(1)
    return first.view_as(decided)


def pale(frames, decided, drafted=None, coming=None):
    """Grey out undecided cells.

    Args:
        frames: float [N, H, W, 3] in 0..1. decided: bool [N, rows, cols].
        drafted: the same, cells with a guess, the others show nothing; None: all. coming: the same, cells to mark.

    Returns:
        uint8 array [N, H, W, 3].
    """
    high, wide = frames.shape[1] // decided.shape[1], frames.shape[2] // decided.shape[2]

    def pixels(cells):
        return cells.repeat_interleave(high, 1).repeat_interleave(wide, 2)[..., None]

    guess = 0.3 * frames.mean(-1, keepdim=True) + 0.25
    if drafted is not None:
        guess = torch.where(pixels(drafted), guess, EMPTY)
    shown = torch.where(pixels(decided), frames, guess)
    if coming is not None:
        shown = torch.where(pixels(coming), shown.new_tensor(MARK), shown)
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
    """Makes preview pictures in the callback of a run: at most one in `INTERVAL`, and in at most `SHARE` of its time
    unless the run is as short as a few of them. The last one, of the whole picture, always comes.

    Args:
        plan: `TokenPlan`. decode: codes int64 [N, rows, cols] -> frames float [N, H, W, 3].
        given: kept codes or None. fatal: exceptions that end the run; any other only ends the previews.
        clips: the codes for `decode` must be the first token grids of one clip.
    """

    def __init__(self, plan, decode, given=None, fatal=(), clock=time.monotonic, clips=False):
        self.plan, self.decode, self.given, self.fatal, self.clock = plan, decode, given, fatal, clock
        self.clips, self.begun, self.spent = clips, clock(), 0.0
        self.next = self.begun + INTERVAL

    def __call__(self, progress):
        """PIL picture of a `Progress`, or None when it is too early for the next one."""
        start = self.clock()
        last = progress.done == progress.total  # the page keeps showing the last picture it got
        lasts = (start - self.begun) * progress.total / max(progress.done, 1)
        if self.decode is None or (not last and (start < self.next or lasts < SHORT)):
            return None
        try:
            picture = self._picture(progress)
        except self.fatal:
            raise
        except Exception:  # a picture that cannot be shown is no reason to lose the run
            log.warning("live preview switched off for this run", exc_info=True)
            self.decode = None
            return None
        cost = self.clock() - start
        self.spent += cost
        # as soon as there is time for two more: that one, and the last one
        self.next = max(start + INTERVAL, self.begun + (self.spent + 2 * cost) / SHARE)
        return picture

    def _picture(self, progress):
        plan, settled = self.plan, progress.settled
        codes = plan.codes(progress.tokens).clamp(0, plan.vocab - 1)
        decided = decided_cells(plan, progress.frontier, self.given, settled)
        drafted = drafted_cells(plan, progress.tokens, self.given)
        reached = None if settled is None else decided_cells(plan, None, None, settled)
        coming = next_cells(decided, reached)
        if self.clips:
            shown = max(1, TILES // plan.frames)
            frames = torch.cat([self._clip(*clip) for clip in zip(codes[:shown], decided)])
        else:
            frames = self._some(codes.flatten(0, 1)[:TILES], (decided | drafted).flatten(0, 1)[:TILES])
        frames = frames[:TILES].float().cpu()
        cells = (each.flatten(0, 1)[: len(frames)] for each in (decided, drafted, coming))
        picture = sheet(pale(frames, *cells))
        grown = max(1, SIDE // max(picture.shape[:2]))
        return Image.fromarray(picture.repeat(grown, 0).repeat(grown, 1))

    def _some(self, codes, begun):
        """Pictures [N, H, W, 3]; those of which no cell is begun are not decoded and stay empty.

        Args:
            codes, begun: [N, rows, cols].
        """
        begun = begun.flatten(1).any(1)
        begun[0] = True
        made = self.decode(codes[begun])
        frames = made.new_zeros(len(codes), *made.shape[1:])
        frames[begun.to(made.device)] = made
        return frames

    def _clip(self, codes, decided):
        """One picture a token grid [frames, H, W, 3], those of grids that are not begun empty.

        Args:
            codes, decided: [frames, rows, cols].
        """
        begun = decided.flatten(1).any(1).nonzero()
        count = int(begun.max()) + 1 if len(begun) else 1
        frames = self.decode(codes[:count])
        return torch.cat([frames, frames.new_zeros(len(codes) - count, *frames.shape[1:])])
