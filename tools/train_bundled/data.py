"""Training data of the bundled model: emoji subjects composited on procedural backgrounds, with captions.

Run from the repository root to see what the model is trained on:
    python tools/train_bundled/data.py --data .data --sheet sheet.png
"""

import argparse
import pathlib
import time

import numpy as np
from backgrounds import HEIGHT, WIDTH, texture
from PIL import Image, ImageDraw, ImageFilter
from subjects import BACKGROUNDS, BY_NAME, MOTIONS, SUBJECTS, TRAINED

SIZE, SUBJECT, CELL, FRAMES = 64, 52, 4, 8
MASKED = 0.15  # a cell belongs to the subject when its mean alpha is above this
SUPER = 4  # clips are drawn this many times larger and averaged down
MARGIN = 8  # room around a clip's frame, in pixels of a 32 px frame, so that a track may be shifted


def premultiplied(image):
    """RGBA picture to float32 [h, w, 4] in 0..255 with colours times alpha."""
    pixels = np.asarray(image, np.float32)
    return np.concatenate([pixels[..., :3] * pixels[..., 3:] / 255, pixels[..., 3:]], -1)


def shadowed(pixels, radius, drop, strength=0.34):
    """Lay a soft dark shadow under a premultiplied picture, so that pale subjects stand off pale ground."""
    alpha = Image.fromarray(np.uint8(pixels[..., 3])).filter(ImageFilter.GaussianBlur(radius))
    shade = np.roll(np.asarray(alpha, np.float32), drop, 0) * strength
    shade[:drop] = 0
    below = np.concatenate([np.zeros((*shade.shape, 3), np.float32), shade[..., None]], -1)
    return pixels + below * (1 - pixels[..., 3:] / 255)


def cells(alpha, size):
    """Mean alpha (0..255) of size x size cells above MASKED: bool [..., h / size, w / size]."""
    *lead, height, width = alpha.shape
    mean = alpha.reshape(*lead, height // size, size, width // size, size).mean((-3, -1))
    return mean > MASKED * 255


def over(ground, subject):
    """Composite premultiplied [..., h, w, 4] in 0..255 over uint8 [h, w, 3]; uint8 [..., h, w, 3]."""
    mixed = ground * (1 - subject[..., 3:] * np.float32(1 / 255)) + subject[..., :3]
    return np.clip(mixed + 0.5, 0, 255).astype(np.uint8)


def path_of(motion):
    """Eight (x, y, side, angle) of a motion in pixels of a 32 px frame and degrees, relative to its start."""
    step = [1.25 * index for index in range(FRAMES)]
    back = [-value for value in step]
    if motion in ("moving left", "moving right"):
        return [(x, 0, 24, 0) for x in (back if motion == "moving left" else step)]
    if motion in ("moving up", "moving down"):
        return [(0, y, 24, 0) for y in (back if motion == "moving up" else step)]
    if motion == "spinning":
        return [(0, 0, 24, -360 / FRAMES * index) for index in range(FRAMES)]
    if motion == "bouncing":
        phase = [2 * index / FRAMES % 1 for index in range(FRAMES)]
        return [(0, -8 * 4 * u * (1 - u), 24, 0) for u in phase]
    side = [8 + 20 * index / (FRAMES - 1) for index in range(FRAMES)]
    if motion == "shrinking":
        side.reverse()
    return [((side[0] - s) / 2, (side[0] - s) / 2, s, 0) for s in side]


# First positions (x, y) of the subject's box, on the 4 px grid, that keep the whole motion in the frame.
_FREE = (0, 4, 8)
STARTS = {
    "moving left": [(8, y) for y in _FREE],
    "moving right": [(0, y) for y in _FREE],
    "moving up": [(x, 8) for x in _FREE],
    "moving down": [(x, 0) for x in _FREE],
    "spinning": [(x, y) for x in _FREE for y in _FREE],
    "growing": [(x, y) for x in (8, 12, 16) for y in (8, 12, 16)],
    "shrinking": [(x, y) for x in (0, 4) for y in (0, 4)],
    "bouncing": [(x, 8) for x in _FREE],
}


class Scene:
    """Composites subjects on backgrounds; everything slow is done once, in the constructor or on first use.

    assets_dir: folder of the 256 px pictures (`1f34e.webp`, ...); seed: of the background textures;
    bank: textures a kind; frame: side of a clip's frames in pixels; cell: side of a clip's mask cells.
    """

    def __init__(self, assets_dir, seed=0, bank=128, frame=32, cell=CELL):
        self.frame, self.cell, self.tracks = frame, cell, {}
        self.sources, self.subjects, self.alphas = {}, {}, {}
        for subject in SUBJECTS:
            with Image.open(pathlib.Path(assets_dir) / f"{subject.hexcode}.webp") as image:
                source = image.convert("RGBA")
            self.sources[subject.name] = source.resize((8 * frame, 8 * frame), Image.Resampling.LANCZOS)
            small = premultiplied(source.resize((SUBJECT, SUBJECT), Image.Resampling.LANCZOS))
            self.alphas[subject.name] = small[..., 3]
            room = np.pad(small, ((0, SIZE - SUBJECT), (4, SIZE - SUBJECT - 4), (0, 0)))
            self.subjects[subject.name] = shadowed(room, 2.0, 2)
        self.bank = {}
        for index, kind in enumerate(BACKGROUNDS):
            rng = np.random.default_rng((seed, index))
            self.bank[kind] = np.stack([texture(rng, kind) for _ in range(bank)])

    def ground(self, rng, background):
        """A random, perhaps mirrored 64 px crop of a texture of the kind: uint8 [64, 64, 3]."""
        sheets = self.bank[background]
        index, top, left = rng.integers((len(sheets), HEIGHT - SIZE + 1, WIDTH - SIZE + 1))
        crop = sheets[index, top : top + SIZE, left : left + SIZE]
        return crop[:, ::-1] if rng.random() < 0.5 else crop

    def picture(self, rng, subject, background, place=None):
        """Draw a subject on a background: (uint8 [64, 64, 3], bool [16, 16] true on the subject).

        place: (x, y) of the subject's box in pixels, None: any place on the grid of the tokens.
        """
        x, y = rng.integers((SIZE - SUBJECT) // CELL + 1, size=2) * CELL if place is None else place
        layer = np.zeros((SIZE, SIZE, 4), np.float32)
        sprite = self.subjects[subject][: SIZE - y]
        left = max(x - 4, 0)
        piece = sprite[:, left - x + 4 : SIZE - x + 4]
        layer[y:, left : left + piece.shape[1]] = piece
        alpha = np.zeros((SIZE, SIZE), np.float32)
        alpha[y : y + SUBJECT, x : x + SUBJECT] = self.alphas[subject]
        return over(self.ground(rng, background), layer), cells(alpha, CELL)

    def track(self, subject, motion):
        """A subject's motion from position (0, 0): premultiplied and bare alpha, uint8 [8, s, s, 5]."""
        key = subject, motion
        if key not in self.tracks:
            unit = self.frame / 32
            side = round((32 + 2 * MARGIN) * unit)
            self.tracks[key] = np.stack([
                self._drawn(subject, side, (MARGIN + x) * unit, (MARGIN + y) * unit, s * unit, angle)
                for x, y, s, angle in path_of(motion)
            ])  # fmt: skip
        return self.tracks[key]

    def _drawn(self, subject, side, x, y, size, angle):
        """One frame of a track, drawn SUPER times larger at (x, y) and averaged down."""
        source = self.sources[subject]
        width = max(round(size * SUPER), 1)
        image = source.resize((width, width), Image.Resampling.LANCZOS)
        canvas = Image.new("RGBA", (side * SUPER, side * SUPER))
        canvas.paste(image, (round(x * SUPER), round(y * SUPER)))
        if angle:
            centre = ((x + size / 2) * SUPER, (y + size / 2) * SUPER)
            canvas = canvas.rotate(angle, Image.Resampling.BICUBIC, center=centre)
        pixels = premultiplied(canvas.reduce(SUPER))
        shaded = shadowed(pixels, self.frame / 28, 0)
        return np.uint8(np.concatenate([shaded, pixels[..., 3:]], -1) + 0.5)

    def clip(self, rng, subject, background, motion):
        """Draw a motion in front of a still camera: (uint8 [8, f, f, 3], bool [8, f / cell, f / cell])."""
        starts = STARTS[motion]
        x, y = starts[rng.integers(len(starts))]
        track = self.track(subject, motion)
        unit, frame = self.frame / 32, self.frame
        top, left = round((MARGIN - y) * unit), round((MARGIN - x) * unit)
        if top < 0 or left < 0:
            grow = ((0, 0), (max(-top, 0), 0), (max(-left, 0), 0), (0, 0))
            track, top, left = np.pad(track, grow), max(top, 0), max(left, 0)
        view = track[:, top : top + frame, left : left + frame]
        ground = Image.fromarray(np.ascontiguousarray(self.ground(rng, background)))
        ground = np.asarray(ground.resize((frame, frame), Image.Resampling.BOX))
        return over(ground, view[..., :4].astype(np.float32)), cells(view[..., 4], self.cell)


def caption(rng, subject, background, motion=None, drop=0.08, synonyms=0.25):
    """Words of a training caption, in order.

    Each part is a synonym with probability `synonyms`; the background is left out with probability `drop`.
    """

    def said(name, others):
        return others[rng.integers(len(others))] if others and rng.random() < synonyms else name

    words = said(subject, BY_NAME[subject].synonyms).split()
    if motion is not None:
        words += said(motion, MOTIONS[motion]).split()
    if rng.random() >= drop:
        words += ["on", said(background, BACKGROUNDS[background])]
    return words


def canonical(subject, background, motion=None):
    """The caption shown to people: "fox on snow", "car moving left on sand"."""
    return " ".join([subject, *([motion] if motion else []), "on", background])


def vocabulary():
    """All words a caption can hold, sorted."""
    phrases = [name for subject in SUBJECTS for name in (subject.name, *subject.synonyms)]
    for table in (BACKGROUNDS, MOTIONS):
        phrases += [name for key, others in table.items() for name in (key, *others)]
    return sorted({"on"}.union(*(phrase.split() for phrase in phrases)))


def pair(rng):
    """A subject and a background that training may show: uniform over subjects, never held out."""
    subject = SUBJECTS[rng.integers(len(SUBJECTS))].name
    kinds = TRAINED[subject]
    return subject, kinds[rng.integers(len(kinds))]


def sample_pictures(scene, rng, n):
    """Random training pictures: (uint8 [n, 64, 64, 3], bool [n, 16, 16], list of n lists of words)."""
    pictures, masks, captions = [], [], []
    for _ in range(n):
        subject, background = pair(rng)
        picture, mask = scene.picture(rng, subject, background)
        pictures.append(picture)
        masks.append(mask)
        captions.append(caption(rng, subject, background))
    return np.stack(pictures), np.stack(masks), captions


def sample_clips(scene, rng, n):
    """Random training clips: (uint8 [n, 8, f, f, 3], bool [n, 8, f / cell, f / cell], n lists of words)."""
    motions, clips, masks, captions = list(MOTIONS), [], [], []
    for _ in range(n):
        subject, background = pair(rng)
        motion = motions[rng.integers(len(motions))]
        clip, mask = scene.clip(rng, subject, background, motion)
        clips.append(clip)
        masks.append(mask)
        captions.append(caption(rng, subject, background, motion))
    return np.stack(clips), np.stack(masks), captions


def assets(folder):
    """Where fetch.py leaves the subject pictures below its folder."""
    return pathlib.Path(folder) / "lobehub-fluent-emoji-3d-1.1.0" / "package" / "assets"


def contact_sheet(scene, rng, shown=2):
    """A sheet of 40 random training pictures and 6 clips with their captions, enlarged `shown` times."""
    wide, high, label = 8, 5, 14
    edge = SIZE * shown + 4
    sheet = Image.new("RGB", (wide * edge, (high + 6) * (edge + label)), "white")
    pen = ImageDraw.Draw(sheet)

    def put(pixels, words, column, row):
        image = Image.fromarray(pixels).resize((edge - 4, edge - 4), Image.Resampling.BICUBIC)
        sheet.paste(image, (column * edge, row * (edge + label)))
        pen.text((column * edge + 2, row * (edge + label) + edge - 3), words, fill="black")

    pictures, _, captions = sample_pictures(scene, rng, wide * high)
    for index, (pixels, words) in enumerate(zip(pictures, captions)):
        put(pixels, " ".join(words), index % wide, index // wide)
    clips, _, captions = sample_clips(scene, rng, 6)
    for row, (frames, words) in enumerate(zip(clips, captions)):
        for column, pixels in enumerate(frames):
            put(pixels, "" if column else " ".join(words), column, high + row)
    return sheet


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default=".data", help="folder that fetch.py filled")
    parser.add_argument("--sheet", required=True, help="PNG file to write")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    start = time.perf_counter()
    scene, rng = Scene(assets(options.data), options.seed), np.random.default_rng(options.seed)
    ready = time.perf_counter() - start
    print(f"{len(SUBJECTS)} subjects, {len(vocabulary())} words, ready in {ready:.1f} s")
    contact_sheet(scene, rng).save(options.sheet)
    start = time.perf_counter()
    sample_pictures(scene, rng, 500)
    print(f"{500 / (time.perf_counter() - start):.0f} pictures/s")
    start = time.perf_counter()
    sample_clips(scene, rng, 100)
    print(f"{100 / (time.perf_counter() - start):.0f} clips/s (tracks still being drawn)")


if __name__ == "__main__":
    main()
