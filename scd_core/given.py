"""Pictures that a run is given: brought to a size that the model draws, with the cells that it shall draw anew.

Everything before the encoder. A mask follows the host's inpainting nodes: 1 is drawn anew, 0 is kept. A token cannot be
kept in part, so a cell is drawn anew as soon as one of its pixels is: what shall go must not shine through.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .errors import UserError

FITS = ("crop", "stretch", "pad")
ENDS = ("auto", "start", "end")  # auto: `Family.context_end`
MASKED = 0.5  # a pixel of a soft mask counts as masked from here on


def _middle(down, right):
    return ((down - 0.5).abs() < 0.25) & ((right - 0.5).abs() < 0.25)


# What is drawn anew without a mask: rule of the middle of a cell, both ways in 0..1. A model sees only what comes
# before a token (above it, and left of it in its row): regions with nothing kept before them would be of little use.
REGIONS = {
    "nothing": lambda down, right: (down < 0) | (right < 0),
    "lower half": lambda down, right: (down > 0.5) | (right < 0),
    "right half": lambda down, right: (down < 0) | (right > 0.5),
    "middle": _middle,
}


@dataclass(frozen=True)
class Reading:
    """How pictures are to be read. 0 stands for the model's own choice.

    Attributes:
        width, height: pixels. fit: one of `FITS`. clip: the pictures are the frames of one clip, not a batch of stills.
        frames: of a clip, to be kept. end: which of them, one of `ENDS`. redraw: a key of `REGIONS`.
    """

    width: int = 0
    height: int = 0
    fit: str = "crop"
    clip: bool = False
    frames: int = 0
    end: str = "auto"
    redraw: str = "nothing"


@dataclass(frozen=True, eq=False)
class Given:
    """Ready for the encoder: frames float32 [N, H, W, 3] in 0..1; redraw bool [N or 1, T, h, w], T = 1 for stills."""

    frames: torch.Tensor
    redraw: torch.Tensor

    @property
    def width(self):
        return self.frames.shape[2]

    @property
    def height(self):
        return self.frames.shape[1]

    @property
    def kept(self):
        """bool like redraw, or None when every cell is kept."""
        return ~self.redraw if self.redraw.any() else None

    def pixels(self, cfg):
        """What is drawn anew as a mask of whole cells, float32 [N, H, W]; `cfg` is the codec's."""
        anew, factor = self.redraw.flatten(0, 1), cfg.factor
        if self.redraw.shape[1] > 1:  # grids of a clip back to its frames
            grid = (torch.arange(len(self.frames)) + cfg.compression - 1) // cfg.compression
            anew = anew[grid]
        anew = anew.repeat_interleave(factor, 1).repeat_interleave(factor, 2).float()
        return anew.expand(len(self.frames), -1, -1).contiguous()


def check_reading(how):
    """Refuse what cannot be meant. Raises UserError."""
    for what, value, known in (("fit", how.fit, FITS), ("redraw", how.redraw, REGIONS), ("frames from", how.end, ENDS)):
        if value not in known:
            raise UserError(f"unknown {what} {value!r}: choose one of {', '.join(known)}")
    if min(how.width, how.height, how.frames) < 0:
        raise UserError("width, height and frames are whole numbers from 0 (the model's own choice) upwards")


def prepare(image, mask, family, cfg, how):
    """Pictures and mask as the encoder and the plan of a run need them.

    Args:
        image: float [N, H, W, C] in 0..1. mask: None, or float [M, H', W'] with M 1 or N, of any size: it is stretched
            over the picture; 1 is drawn anew.
        family: `Family` of the model. cfg: of its codec. how: `Reading`.

    Returns:
        `Given`.

    Raises:
        UserError: no pictures, values that are no numbers, masks that do not count like the pictures, or a size or
            number of frames that the model cannot draw.
    """
    check_reading(how)
    image, mask = _pictures(image), _mask(mask, len(image))
    size = drawing_size(family, image.shape[1:3], how.width, how.height, how.clip)
    if how.clip:
        count = context_frames(family, cfg, size, len(image), how.frames)
        index = pick(len(image), count, family.context_end if how.end == "auto" else how.end)
        image, mask = image[index], mask[index] if len(mask) > 1 else mask
    anew = cells(fit_mask(mask, image.shape[1:3], size.width, size.height, how.fit), cfg.factor)
    if how.clip:
        anew = by_grid(anew.expand(len(image), -1, -1), cfg.compression)[None]
    else:
        anew = anew[:, None]
    return Given(
        fit_pictures(image, size.width, size.height, how.fit), anew | region(how.redraw, *anew.shape[2:])
    )


def _pictures(image):
    if image.dim() != 4 or 0 in image.shape:
        raise UserError(
            f"image holds no picture (its shape is {list(image.shape)}): wire one picture, a batch or frames"
        )
    image = image[..., :3].float()
    if not image.isfinite().all():
        raise UserError("image holds values that are no numbers: look at the node that made it")
    return image.expand(-1, -1, -1, 3).clamp(0, 1)


def _mask(mask, count):
    if mask is None:
        return torch.zeros(1, 1, 1)
    if 0 in mask.shape or mask.dim() < 2:
        raise UserError(f"mask is empty (its shape is {list(mask.shape)}): wire a mask, or none")
    mask = mask.reshape(-1, *mask.shape[-2:]).float()
    if len(mask) not in (1, count):
        raise UserError(f"mask holds {len(mask)} masks for {count} pictures: wire one for all of them, or one for each")
    return mask


# --- size ------------------------------------------------------------------------------------------------------------


def drawing_size(family, shape, width=0, height=0, clip=False):
    """The size that pictures of `shape` (height, width) are brought to.

    Where there is a choice: the proportions nearest to the picture's, among the model's largest sizes.

    Raises:
        UserError: a size that the model cannot draw, or a clip for a model of stills.
    """
    sizes = [size for size in family.sizes if (size.frames > 1) == clip]
    if clip and not sizes:
        raise UserError(f"{family.name} draws pictures, not clips: set 'images are' to pictures")
    sizes = sizes or list(family.sizes)  # a model of clips takes each picture for the start of one
    if not (width or height):
        return _nearest(_largest(sizes), shape)
    matching = [size for size in sizes if width in (0, size.width) and height in (0, size.height)]
    if not (matching or clip):  # a picture may be the start of a clip
        matching = [size for size in family.sizes if (width, height) == (size.width, size.height)]
    return _nearest(matching, shape) if matching else family.size(width, height, sizes[0].frames)


def _largest(sizes):
    """Sizes that no other one covers, none of more area than the model's own first choice."""
    most = sizes[0].width * sizes[0].height
    fitting = [size for size in sizes if size.width * size.height <= most]
    pairs = {(size.width, size.height) for size in fitting}
    covered = {(w, h) for w, h in pairs if any((a, b) != (w, h) and a >= w and b >= h for a, b in pairs)}
    return [size for size in fitting if (size.width, size.height) not in covered]


def _nearest(sizes, shape):
    """The size with the proportions nearest to `shape`; the earlier one of equals."""
    return min(sizes, key=lambda size: abs(math.log(size.width * shape[0] / (size.height * shape[1]))))


# --- frames of a clip ------------------------------------------------------------------------------------------------


def context_frames(family, cfg, size, given, wanted=0):
    """How many frames of a clip are kept: as many as `given` where that is possible.

    Codecs that compress time hold only 1 + k * compression frames, and some models were trained to go on from
    certain numbers alone (`Family.contexts`); the last frame is repeated up to the next such number.

    Raises:
        UserError: `wanted` is no such number.
    """
    same = [s.frames for s in family.sizes if (s.width, s.height) == (size.width, size.height)]
    longest = max(same or [s.frames for s in family.sizes])
    counts = [n for n in family.contexts or range(1, longest + 1, cfg.compression) if n <= longest]
    if not wanted:
        return min((n for n in counts if n >= given), default=max(counts))
    if wanted not in counts:
        rule = "1" if len(counts) == 1 else f"{', '.join(map(str, counts[:-1]))} or {counts[-1]}"
        if len(counts) > 4 and not family.contexts:
            step = "" if cfg.compression == 1 else f" in steps of {cfg.compression}"
            rule = f"1 to {counts[-1]}{step}"
        raise UserError(f"frames {wanted}: {family.name} goes on from {rule} frames at this size (0: as many as fit)")
    return wanted


def pick(given, count, end):
    """Indices of `count` frames at the start or the end of `given` ones; the last one is repeated when they are few."""
    first = max(0, given - count) if end == "end" else 0
    return [min(first + i, given - 1) for i in range(count)]


def for_plan(codes, kept, plan):
    """What a run over `plan` gets as given cells: codes int64 [B, frames, rows, cols], -1 where it draws.

    Args:
        codes: int64 [B, T, rows, cols], the first token grids of the run. kept: bool like it or [1, ...]; None: all.

    Raises:
        UserError: there are more grids than the plan has.
    """
    codes = codes if kept is None else torch.where(kept, codes, -1)
    missing = plan.frames - codes.shape[1]
    if missing < 0:
        raise UserError(
            f"kept tokens hold {codes.shape[1]} frames of tokens, this run draws {plan.frames}: raise frames, or keep "
            "fewer of them"
        )
    return torch.cat([codes, codes.new_full((len(codes), missing, *codes.shape[2:]), -1)], 1)


def by_grid(anew, compression):
    """Cells bool [F, h, w] of frames -> [T, h, w] of token grids: the first frame, then `compression` at a time."""
    rest = anew[1:].unflatten(0, ((len(anew) - 1) // compression, compression)).any(1)
    return torch.cat([anew[:1], rest])


# --- pixels ----------------------------------------------------------------------------------------------------------


def _crop_box(shape, width, height):
    """(top, left, height, width) of the largest middle part of `shape` (height, width) in the wanted proportions."""
    scale = max(width / shape[1], height / shape[0])
    h, w = (min(side, max(1, round(wanted / scale))) for side, wanted in zip(shape, (height, width)))
    return (shape[0] - h) // 2, (shape[1] - w) // 2, h, w


def _inner_box(shape, width, height):
    """(top, left, height, width) of a picture of `shape` (height, width), whole, in the middle of width x height."""
    scale = min(width / shape[1], height / shape[0])
    h, w = (min(wanted, max(1, round(side * scale))) for side, wanted in zip(shape, (height, width)))
    return (height - h) // 2, (width - w) // 2, h, w


def _resize(x, height, width):
    if x.shape[2:] == (height, width):
        return x  # not one pixel changes
    return F.interpolate(x, (height, width), mode="bicubic", antialias=True, align_corners=False).clamp(0, 1)


def fit_pictures(frames, width, height, fit):
    """Frames [N, H, W, 3] -> float32 [N, height, width, 3]: cropped to the middle, stretched, or padded.

    A padded border repeats the picture's edge, so that the tokens beside it see no foreign colour; it is drawn anew.
    """
    x = frames.permute(0, 3, 1, 2)
    if fit == "crop":
        top, left, h, w = _crop_box(x.shape[2:], width, height)
        x = x[:, :, top : top + h, left : left + w]
    if fit == "pad":
        top, left, h, w = _inner_box(x.shape[2:], width, height)
        x = F.pad(_resize(x, h, w), (left, width - w - left, top, height - h - top), mode="replicate")
    return _resize(x, height, width).permute(0, 2, 3, 1).contiguous()


def fit_mask(mask, shape, width, height, fit):
    """Masks [M, H', W'] over pictures of `shape` -> bool [M, height, width], True where a masked pixel falls.

    Raises nothing: a mask of another size is stretched over the picture. A padded border is masked.
    """
    masked = (mask >= MASKED).float()[:, None]
    masked = _spread(masked, *shape)
    if fit == "crop":
        top, left, h, w = _crop_box(shape, width, height)
        masked = masked[:, :, top : top + h, left : left + w]
    if fit == "pad":
        top, left, h, w = _inner_box(shape, width, height)
        masked = F.pad(_spread(masked, h, w), (left, width - w - left, top, height - h - top), value=1.0)
    return _spread(masked, height, width)[:, 0] > 0


def _spread(masked, height, width):
    """Resize so that a masked pixel stays masked in every new pixel that it touches."""
    return masked if masked.shape[2:] == (height, width) else F.adaptive_max_pool2d(masked, (height, width))


def cells(masked, factor):
    """Pixels bool [M, H, W] -> cells bool [M, H/factor, W/factor]: one masked pixel is enough."""
    return F.max_pool2d(masked.float()[:, None], factor)[:, 0] > 0


def region(name, rows, cols):
    """Cells of a named region, bool [rows, cols]."""
    down, right = (torch.arange(rows)[:, None] + 0.5) / rows, (torch.arange(cols)[None] + 0.5) / cols
    return REGIONS[name](down, right)
