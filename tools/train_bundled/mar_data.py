"""MAR, step 1: pictures of the classes, as the latents that the MAR pair learns to draw.

    python tools/train_bundled/mar_data.py --data .data --out .data/mar_latents.pt

A class is a subject; its background, one of two, is left to the model. Subjects lie on the 8 px grid of the tokens, at
one of four places, so that the same part of a picture always makes the same token.

The codec is the bundled model's, read before its codebook. A token is the features of 2x2 cells, which are 32 numbers
that lie close to a space of 12: the tokens are places in that space (principal components, flattened).
"""

import argparse
import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from common import save
from data import Scene, assets
from subjects import BY_NAME
from train_vq import to_input

from scd_core.models.load import BUNDLED, load_model

PLACES = ((8, 8), (0, 8), (8, 0), (0, 0))  # of a subject's box, in pixels; the first is nearly the middle
PATCH = 2  # cells of the codec a token, in both directions
NUMBERS = 12  # a token
FLATTEN = 0.5  # principal components are divided by this power of their deviation
CLASSES = {
    "fox": ("snow", "grass"),
    "panda": ("grass", "snow"),
    "penguin": ("snow", "water"),
    "frog": ("grass", "water"),
    "lion": ("sand", "grass"),
    "apple": ("wood", "grass"),
    "burger": ("wood", "plain"),
    "donut": ("plain", "wood"),
    "sunflower": ("sky", "grass"),
    "sailboat": ("water", "sky"),
    "rocket": ("night", "sky"),
    "earth": ("night", "plain"),
}
NAMES = [[name, *BY_NAME[name].synonyms] for name in CLASSES]  # of each class, best first


def sample(scene, rng, n):
    """Random training pictures.

    Returns:
        (uint8 [n, 64, 64, 3], bool [n, 16, 16] true on the subject, numbers of classes and of places int64 [n] each).
    """
    numbers, places = rng.integers(len(CLASSES), size=n), rng.integers(len(PLACES), size=n)
    table, drawn = list(CLASSES.items()), []
    for number, place in zip(numbers, places):
        subject, kinds = table[number]
        drawn.append(scene.picture(rng, subject, kinds[rng.integers(len(kinds))], PLACES[place]))
    pictures, masks = zip(*drawn)
    return np.stack(pictures), np.stack(masks), numbers, places


def components(patches):
    """The space of the patches [N, 32]: (mean [32], basis [32, 12] with patch = mean + basis @ token of unit size)."""
    mean = patches.mean(0)
    _, sizes, rows = torch.linalg.svd(patches - mean, full_matrices=False)
    deviation = sizes[:NUMBERS] / math.sqrt(len(patches))
    flat = deviation**FLATTEN
    scale = (deviation / flat).square().mean().sqrt()  # so that the tokens' numbers have unit variance on the whole
    return mean, rows[:NUMBERS].T * flat * scale


@torch.inference_mode()
def main(args):
    net, scene = load_model(args.model, dtype="fp32").codec, Scene(assets(args.data))
    rng, parts = np.random.default_rng((args.seed, 7)), []
    for start in range(0, args.pictures, 200):
        frames, mask, numbers, places = sample(scene, rng, min(200, args.pictures - start))
        with torch.autocast("cpu", torch.bfloat16):
            z = net.features(to_input(frames)).float()
        patches = F.pixel_unshuffle(z, PATCH).flatten(2).transpose(1, 2)
        seen = F.max_pool2d(torch.from_numpy(mask)[:, None].float(), PATCH).flatten(1) > 0
        parts.append((patches, seen, torch.from_numpy(numbers), torch.from_numpy(places)))
        if start % 2000 == 0:
            print(f"{start} of {args.pictures} pictures", flush=True)
    patches, seen, classes, places = (torch.cat(p) for p in zip(*parts))
    mean, basis = components(patches.flatten(0, 1))
    tokens = (patches - mean) @ torch.linalg.pinv(basis).T
    left = (patches - mean - tokens @ basis.T).square().mean() / (patches - mean).square().mean()
    print(f"{NUMBERS} numbers a token leave {100 * left:.2f} % of the variance")
    found = {"tokens": tokens.half(), "subject": seen, "classes": classes, "places": places}
    save({**found, "mean": mean, "basis": basis}, args.out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default=".data")
    parser.add_argument("--out", default=".data/mar_latents.pt")
    parser.add_argument("--model", type=Path, default=BUNDLED, help="model whose codec is used")
    parser.add_argument("--pictures", type=int, default=8000)
    parser.add_argument("--seed", type=int, default=0)
    main(parser.parse_args())
