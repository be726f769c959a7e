"""Procedural backgrounds with real texture entropy: filtered Gaussian noise, grain and a few drawn marks."""

import numpy as np

HEIGHT, WIDTH = 88, 256
PLAIN_COLOURS = (
    (226, 62, 98), (250, 140, 40), (250, 200, 60), (92, 184, 92),
    (38, 176, 176), (58, 120, 220), (128, 92, 214), (226, 96, 186),
)  # fmt: skip


def noise(rng, across, down, octaves=1, fall=0.5):
    """Smooth tileable Gaussian noise of unit variance, float32 [HEIGHT, WIDTH].

    `across` and `down` are feature sizes in pixels; each octave halves them and weighs `fall` of the last.
    """
    fy, fx = np.fft.fftfreq(HEIGHT)[:, None], np.fft.rfftfreq(WIDTH)[None]
    total = np.zeros((HEIGHT, WIDTH), np.float32)
    for octave in range(octaves):
        wide, tall = across / 2**octave, down / 2**octave
        keep = np.exp(-2.0 * ((fx * wide) ** 2 + (fy * tall) ** 2))
        layer = np.fft.irfft2(np.fft.rfft2(rng.standard_normal((HEIGHT, WIDTH))) * keep, (HEIGHT, WIDTH))
        total += fall**octave * layer / layer.std()
    return total / total.std()


def ramp(values, stops, colours):
    """Map values to colours by linear interpolation between stops: float32 [..., 3]."""
    return np.stack([np.interp(values, stops, channel) for channel in np.array(colours, float).T], -1)


def depth():
    """Height in the picture, 0 at the top and 1 at the bottom, [HEIGHT, 1]."""
    return np.linspace(0, 1, HEIGHT, dtype=np.float32)[:, None]


def grass(rng):
    """Green blades: noise stretched upwards, bent a little, lighter towards the top."""
    blades = noise(rng, 2.6, 9, 2, 0.6) + 0.5 * noise(rng, 30, 24) + 0.35 * (0.5 - depth())
    tips = noise(rng, 2.2, 5)
    return ramp(blades + 0.35 * np.maximum(tips - 1, 0), (-2.2, -0.7, 0.5, 2.2),
                ((34, 100, 30), (58, 138, 38), (88, 172, 50), (156, 212, 84)))  # fmt: skip


def sand(rng):
    """Warm grains over soft dune ripples."""
    ripples = np.sin((np.arange(HEIGHT)[:, None] + 4 * noise(rng, 48, 26)) * (2 * np.pi / 15))
    value = 0.5 * ripples + 0.55 * noise(rng, 40, 20, 2) + 0.55 * noise(rng, 2, 2)
    return ramp(value, (-2.2, 0, 2.2), ((198, 158, 98), (229, 196, 136), (250, 228, 178)))


def sky(rng):
    """A blue gradient with soft, flat-bottomed white clouds."""
    blue = ramp(np.broadcast_to(depth(), (HEIGHT, WIDTH)), (0, 1), ((50, 128, 226), (146, 202, 250)))
    cloud = noise(rng, 40, 20, 4, 0.5)
    cover = np.clip((cloud - 0.45) * 1.3, 0, 1)[..., None]
    light = np.clip(0.9 + 0.1 * np.roll(cloud, 3, 0) - 0.05 * cloud, 0.8, 1)[..., None] * (252, 253, 255)
    return blue * (1 - cover) + light * cover + 2.0 * noise(rng, 1.6, 1.6)[..., None]


def stamp(picture, rng, count, colour, widths):
    """Add round soft dots of `colour` at random places, wrapping around the edges."""
    for _ in range(count):
        row, column, width = rng.integers(HEIGHT), rng.integers(WIDTH), rng.uniform(*widths)
        reach = int(3 * width) + 1
        span = np.arange(-reach, reach + 1)
        dot = np.exp(-(span[:, None] ** 2 + span[None] ** 2) / (2 * width * width))[..., None]
        rows, columns = (row + span) % HEIGHT, (column + span) % WIDTH
        picture[np.ix_(rows, columns)] += dot * colour * rng.uniform(0.5, 1)
    return picture


def night(rng):
    """Deep blue with violet haze and stars of several sizes."""
    haze = noise(rng, 44, 32, 3, 0.5)
    picture = ramp(haze, (-2, 0, 1.2, 2.6), ((10, 10, 34), (18, 18, 58), (42, 30, 96), (78, 52, 136)))
    picture += 1.6 * noise(rng, 1.6, 1.6)[..., None]
    stamp(picture, rng, 150, np.array((170, 180, 215)), (0.45, 0.6))
    return stamp(picture, rng, 34, np.array((255, 250, 225)), (0.7, 1.0))


def water(rng):
    """Waves: noise stretched sideways, ridged into bright crests."""
    swell = noise(rng, 22, 7, 2, 0.6)
    crest = np.maximum(1 - 1.6 * np.abs(noise(rng, 20, 4.5, 2, 0.5)), 0) ** 3
    blues = (10, 74, 156), (26, 116, 200), (70, 168, 232)
    picture = ramp(swell - 0.7 * (depth() - 0.5), (-2.2, 0, 2.2), blues)
    return picture + (crest * np.clip(0.5 + 0.4 * swell, 0, 1))[..., None] * np.array((110, 96, 64))


def plain(rng):
    """One saturated colour with soft light and a little grain."""
    colour = np.array(PLAIN_COLOURS[rng.integers(len(PLAIN_COLOURS))], float)
    light = 1.05 - 0.12 * depth() + 0.045 * noise(rng, 40, 40, 2) + 0.016 * noise(rng, 1.8, 1.8)
    return colour * light[..., None]


def wood(rng):
    """Horizontal planks about 21 px high, each with its own tone and grain, dark seams between them."""
    row = np.arange(HEIGHT) + rng.integers(22)
    plank = row // 22
    tone = rng.normal(0, 0.5, plank.max() + 1)[plank][:, None]
    shift = rng.integers(WIDTH, size=plank.max() + 1)[plank]
    grain = 0.7 * noise(rng, 60, 2.4, 2, 0.7) + 0.5 * noise(rng, 110, 7)
    grain = np.take_along_axis(grain, (np.arange(WIDTH) + shift[:, None]) % WIDTH, 1)
    picture = ramp(grain + tone, (-2.2, 0, 2.2), ((98, 58, 28), (150, 98, 52), (198, 142, 86)))
    edge = row % 22
    seam = np.where(edge == 0, 0.5, np.where(edge == 1, 1.1, np.where(edge == 21, 0.82, 1.0)))
    return picture * seam[:, None, None]


def snow(rng):
    """Blue-white drifts with cold shadows and sparkle."""
    drift = noise(rng, 46, 16, 3, 0.45) + 0.28 * noise(rng, 2, 2)
    picture = ramp(drift, (-2.4, -0.6, 1.2), ((176, 202, 236), (222, 234, 249), (250, 252, 255)))
    return stamp(picture, rng, 90, np.array((40, 30, 18)), (0.45, 0.7))


KINDS = {
    "grass": grass, "sand": sand, "sky": sky, "night": night,
    "water": water, "plain": plain, "wood": wood, "snow": snow,
}  # fmt: skip


def texture(rng, kind):
    """One background texture of the kind, uint8 [HEIGHT, WIDTH, 3]."""
    return np.clip(KINDS[kind](rng) + 0.5, 0, 255).astype(np.uint8)
