"""The training data of the bundled model, on synthetic subject pictures."""

import importlib
import sys

import numpy as np
import pytest
from PIL import Image, ImageDraw


@pytest.fixture(scope="module")
def modules(root):
    """tools/train_bundled/{data,subjects}.py, imported the way its scripts import each other."""
    before, names = set(sys.modules), ("data", "subjects", "backgrounds")
    sys.path.insert(0, str(root / "tools" / "train_bundled"))
    try:
        yield importlib.import_module("data"), importlib.import_module("subjects")
    finally:
        sys.path.pop(0)
        for name in set(names) - before:
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def scene(modules, tmp_path_factory):
    """A scene whose subjects are red discs and whose bank holds one texture a kind."""
    data, subjects = modules
    folder = tmp_path_factory.mktemp("assets")
    disc = Image.new("RGBA", (64, 64))
    ImageDraw.Draw(disc).ellipse((4, 4, 59, 59), fill=(230, 20, 20, 255))
    disc.save(folder / "disc.webp", lossless=True)
    picture = (folder / "disc.webp").read_bytes()
    for subject in subjects.SUBJECTS:
        (folder / f"{subject.hexcode}.webp").write_bytes(picture)
    return data.Scene(folder, seed=3, bank=1)


def test_held_out_pairs_are_some_and_never_sampled(modules):
    data, subjects = modules
    held, total = subjects.HELD_OUT, len(subjects.SUBJECTS) * len(subjects.BACKGROUNDS)
    assert 0.07 < len(held) / total < 0.09
    assert ("fox", "night") in held
    rng = np.random.default_rng(0)
    seen = {data.pair(rng) for _ in range(20000)}
    assert not seen & held
    assert len(seen) == total - len(held)
    assert {background for _, background in held} == set(subjects.BACKGROUNDS)


def test_names_are_unambiguous(modules):
    _, subjects = modules
    tables = [
        {subject.name: subject.synonyms for subject in subjects.SUBJECTS},
        subjects.BACKGROUNDS,
        subjects.MOTIONS,
    ]
    for table in tables:
        names = [name for key, others in table.items() for name in (key, *others)]
        assert len(names) == len(set(names))
    assert len({subject.hexcode for subject in subjects.SUBJECTS}) == len(subjects.SUBJECTS)


def test_vocabulary_covers_captions(modules):
    data, subjects = modules
    words = data.vocabulary()
    assert words == sorted(set(words)) and not {"a", "an", "the"} & set(words)
    rng = np.random.default_rng(1)
    used = set()
    for turn in range(12000):
        subject, background = data.pair(rng)
        motion = None if turn % 2 else list(subjects.MOTIONS)[turn % 16 // 2]
        used.update(data.caption(rng, subject, background, motion))
    assert used == set(words)
    assert data.canonical("fox", "snow") == "fox on snow"
    assert data.canonical("car", "sand", "moving left") == "car moving left on sand"


def test_caption_drops_the_background_when_asked(modules):
    data, _ = modules
    rng = np.random.default_rng(2)
    assert data.caption(rng, "birthday cake", "wood", drop=1, synonyms=0) == ["birthday", "cake"]
    assert data.caption(rng, "fox", "sky", "growing", drop=0, synonyms=0) == ["fox", "growing", "on", "sky"]


def test_batches_have_their_shapes_and_follow_the_generator(modules, scene):
    data, _ = modules
    pictures, masks, captions = data.sample_pictures(scene, np.random.default_rng(4), 12)
    assert pictures.shape == (12, 64, 64, 3) and pictures.dtype == np.uint8
    assert masks.shape == (12, 16, 16) and masks.dtype == bool
    assert len(captions) == 12 and all(isinstance(word, str) for words in captions for word in words)
    clips, covers, spoken = data.sample_clips(scene, np.random.default_rng(4), 6)
    assert clips.shape == (6, 8, 32, 32, 3) and clips.dtype == np.uint8
    assert covers.shape == (6, 8, 8, 8) and covers.dtype == bool
    for again, first in (
        (data.sample_pictures(scene, np.random.default_rng(4), 12), (pictures, masks, captions)),
        (data.sample_clips(scene, np.random.default_rng(4), 6), (clips, covers, spoken)),
    ):
        assert np.array_equal(again[0], first[0]) and np.array_equal(again[1], first[1])
        assert again[2] == first[2]
    other = data.sample_pictures(scene, np.random.default_rng(5), 12)
    assert not np.array_equal(other[0], pictures)


def test_masks_mark_the_subject_on_the_token_grid(scene):
    rng, corners = np.random.default_rng(6), set()
    for _ in range(60):
        picture, mask = scene.picture(rng, "fox", "water")
        rows, columns = np.nonzero(mask)
        corners.add((rows.min(), columns.min()))
        assert np.ptp(rows) == np.ptp(columns) == 12
        centre = picture[4 * rows.min() + 26, 4 * columns.min() + 26]
        assert centre[0] > 180 and centre[2] < 80
    assert len(corners) == 16


@pytest.mark.parametrize(
    ("motion", "axis", "low", "high"),
    [
        ("moving left", 1, -10, -7), ("moving right", 1, 7, 10), ("moving up", 0, -10, -7),
        ("moving down", 0, 7, 10), ("spinning", 0, -1, 1), ("bouncing", 1, -1, 1),
    ],
)  # fmt: skip
def test_motions_move(scene, motion, axis, low, high):
    frames, mask = scene.clip(np.random.default_rng(7), "fox", "water", motion)
    red = (frames[..., 0] > 150) & (frames[..., 2] < 120)
    middle = [np.mean([index.min(), index.max()]) for index in (np.nonzero(frame)[axis] for frame in red)]
    travel = middle[-1] - middle[0]
    assert low <= travel <= high
    assert mask.any((1, 2)).all()


def test_growing_and_shrinking_change_the_area(scene):
    rng = np.random.default_rng(8)
    grown = scene.clip(rng, "fox", "sky", "growing")[1].sum((1, 2))
    shrunk = scene.clip(rng, "fox", "sky", "shrinking")[1].sum((1, 2))
    assert grown[-1] > 4 * grown[0] and (np.diff(grown) >= 0).all()
    assert shrunk[0] > 4 * shrunk[-1] and (np.diff(shrunk) <= 0).all()
