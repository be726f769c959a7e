"""The live preview: what is decided so far, sharp; what is guessed, pale; the place where it grows, marked."""

import logging
import time
import weakref
from dataclasses import dataclass

import torch
from PIL import Image

from ..scd_core.budget import codec_bytes
from .acceptance_map import sheet

log = logging.getLogger(__name__)
_costs = weakref.WeakKeyDictionary()  # codec -> {(device, rows, cols): `Cost`}

INTERVAL = 0.5  # seconds between two previews at least
SHARE = 0.04  # of the run's time that previews may take; with what it takes to send them, a twentieth at most
FIRST = 1.0  # seconds before the first preview where nobody knows yet what one takes
TIMED = 2  # previews after which that is known: the first one may have to warm a device up
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
    cfg, cost = codec.cfg, cost_of(codec, place, plan.rows, plan.cols)
    if plan.frames == 1 or cfg.compression == 1:
        return {"decode": lambda codes: codec.decode(codes.to(place)), "cost": cost}
    last = [cfg.frames(count + 1) - 1 for count in range(plan.frames)]  # frame that a token grid ends with
    decode = lambda codes: codec.decode_clip(codes.to(place))[last[: len(codes)]]  # noqa: E731
    return {"decode": decode, "cost": cost, "clips": True}


def preview_bytes(cfg, plan, batch):
    """Estimate for decoding a preview."""
    if plan.frames > 1 and cfg.compression > 1:
        return codec_bytes(cfg, plan.width, plan.height, cfg.frames(plan.frames), clip=True)
    return codec_bytes(cfg, plan.width, plan.height, min(TILES, batch * plan.frames))


@dataclass
class Cost:
    """What a preview takes, by those that were made, also in earlier runs. each: seconds a token grid."""

    each: float = 0.0
    timed: int = 0

    def note(self, seconds, grids):
        """A picture of so many grids was made; the latest ones count most."""
        self.each += (seconds / max(grids, 1) - self.each) * (1 if self.timed < TIMED else 0.25)
        self.timed += 1


def cost_of(codec, place, rows, cols):
    """The `Cost` of a codec on a device at a size; it lives as long as the codec."""
    return _costs.setdefault(codec, {}).setdefault((str(place), rows, cols), Cost())


class Preview:
    """Makes preview pictures in the callback of a run: at most one in `INTERVAL`, in at most `SHARE` of its time.

    None is made that would go beyond that share, and room is left for the last one, of the whole picture. A run too
    short for it has none, but for the first two of a codec, by which is seen what they take.

    Args:
        plan: `TokenPlan`. decode: codes int64 [N, rows, cols] -> frames float [N, H, W, 3].
        given: kept codes or None. fatal: exceptions that end the run; any other only ends the previews.
        clips: the codes for `decode` must be the first token grids of one clip. cost: of earlier previews.
    """

    def __init__(self, plan, decode, given=None, fatal=(), clock=time.monotonic, clips=False, cost=None):
        self.plan, self.decode, self.given, self.fatal, self.clock = plan, decode, given, fatal, clock
        self.clips, self.cost, self.begun, self.spent = clips, cost or Cost(), clock(), 0.0
        self.made = 0  # token grids of the picture at hand that were decoded
        self.next = self.begun + INTERVAL

    def due(self, now, grids, last):
        """Is it time for a picture of so many token grids? last: the run is over."""
        if not last and now < self.next:
            return False
        gone, cost = now - self.begun, self.cost
        if cost.timed < TIMED and (last or not cost.timed):
            return last or gone >= FIRST
        return self.spent + (1 if last else 2) * grids * cost.each <= SHARE * gone

    def __call__(self, progress):
        """PIL picture of a `Progress`, or None when it is not due."""
        start = self.clock()
        if self.decode is None or not self.due(start, self._grids(progress), progress.done == progress.total):
            return None
        self.made = 0
        try:
            picture = self._picture(progress)
        except self.fatal:
            raise
        except Exception:  # a picture that cannot be shown is no reason to lose the run
            log.warning("live preview switched off for this run", exc_info=True)
            self.decode = None
            return None
        seconds = self.clock() - start
        self.spent += seconds
        self.cost.note(seconds, self.made)
        self.next = start + INTERVAL
        return picture

    def _grids(self, progress):
        """Token grids of a whole picture."""
        samples, frames = len(progress.tokens), self.plan.frames
        return min(samples, max(1, TILES // frames)) * frames if self.clips else min(TILES, samples * frames)

    def _decoded(self, codes):
        self.made += len(codes)
        return self.decode(codes)

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
        made = self._decoded(codes[begun])
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
        frames = self._decoded(codes[:count])
        return torch.cat([frames, frames.new_zeros(len(codes) - count, *frames.shape[1:])])
