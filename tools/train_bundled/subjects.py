"""What the bundled model draws: subjects, backgrounds, motions, and the pairs it never sees in training."""

import hashlib
from typing import NamedTuple


class Subject(NamedTuple):
    """One thing to draw: the short name people type, its picture's code point, other names for it."""

    name: str
    hexcode: str
    synonyms: tuple = ()


def _subjects(table):
    """Read lines of "name, hexcode, synonym, synonym"."""
    rows = [[cell.strip() for cell in line.split(",")] for line in table.strip().splitlines()]
    return tuple(Subject(row[0], row[1], tuple(row[2:])) for row in rows)


# Chosen by eye at 64 px: a clear outline or a clear face, and a colour that stands off most backgrounds.
SUBJECTS = _subjects("""
    monkey, 1f435, ape
    dog, 1f436, puppy, hound
    fox, 1f98a
    cat, 1f431, kitten, kitty
    lion, 1f981
    tiger, 1f42f
    horse, 1f434, pony
    unicorn, 1f984
    zebra, 1f993
    cow, 1f42e
    pig, 1f437, piglet
    sheep, 1f411, lamb
    giraffe, 1f992
    elephant, 1f418
    mouse, 1f42d
    rabbit, 1f430, bunny
    bear, 1f43b, brown bear
    koala, 1f428
    panda, 1f43c, panda bear
    chick, 1f425, baby bird
    penguin, 1f427
    duck, 1f986, mallard
    owl, 1f989
    flamingo, 1f9a9
    parrot, 1f99c, macaw
    frog, 1f438, toad
    turtle, 1f422, tortoise
    snake, 1f40d
    dragon, 1f432
    dinosaur, 1f996, dino, trex
    whale, 1f433
    dolphin, 1f42c
    fish, 1f420, tropical fish
    shark, 1f988
    octopus, 1f419
    crab, 1f980
    butterfly, 1f98b
    bee, 1f41d, honeybee
    ladybug, 1f41e, ladybird
    rose, 1f339, red rose
    sunflower, 1f33b
    tulip, 1f337
    tree, 1f333, oak
    palm tree, 1f334, palm
    cactus, 1f335
    maple leaf, 1f341, leaf
    mushroom, 1f344, toadstool
    grapes, 1f347
    watermelon, 1f349, melon
    lemon, 1f34b
    banana, 1f34c
    pineapple, 1f34d
    apple, 1f34e, red apple
    cherries, 1f352, cherry
    strawberry, 1f353
    avocado, 1f951
    carrot, 1f955
    corn, 1f33d, maize
    cheese, 1f9c0
    burger, 1f354, hamburger, cheeseburger
    fries, 1f35f, french fries, chips
    pizza, 1f355, pizza slice
    hot dog, 1f32d, hotdog, sausage
    popcorn, 1f37f
    ice cream, 1f366, cone, soft ice
    donut, 1f369, doughnut
    birthday cake, 1f382, cake
    cupcake, 1f9c1, muffin
    coffee, 2615, cup, hot chocolate
    earth, 1f30d, globe, planet earth
    house, 1f3e0, home
    castle, 1f3f0, palace
    tent, 26fa, camping
    train, 1f682, locomotive, steam train
    bus, 1f68c
    taxi, 1f695, cab
    car, 1f697, red car, automobile
    tractor, 1f69c
    race car, 1f3ce-fe0f, racing car, formula
    sailboat, 26f5, boat, yacht
    helicopter, 1f681, chopper
    rocket, 1f680, spaceship
    ufo, 1f6f8, flying saucer
    clock, 23f0, alarm clock, alarm
    moon, 1f319, crescent moon, crescent
    sun, 1f31e
    saturn, 1fa90, planet
    star, 2b50, yellow star
    storm, 1f329-fe0f, storm cloud, lightning
    rainbow, 1f308
    umbrella, 2602-fe0f
    snowman, 26c4
    fire, 1f525, flame
    pumpkin, 1f383, halloween
    christmas tree, 1f384, xmas tree
    balloon, 1f388, red balloon
    gift, 1f381, present
    trophy, 1f3c6
    soccer ball, 26bd, football
    basketball, 1f3c0
    teddy bear, 1f9f8, teddy
    crown, 1f451
    diamond, 1f48e, gem, jewel
    guitar, 1f3b8, electric guitar
    lantern, 1f3ee, paper lantern
    heart, 2764-fe0f, red heart, love
    ghost, 1f47b, spook
    robot, 1f916, android
    alien, 1f47d, martian
""")

BACKGROUNDS = {
    "grass": ("lawn", "meadow", "field"),
    "sand": ("beach", "desert"),
    "sky": ("clouds", "air"),
    "night": ("space", "stars"),
    "water": ("sea", "ocean", "lake"),
    "plain": ("color", "colour", "paper"),
    "wood": ("table", "planks"),
    "snow": ("ice", "winter"),
}

MOTIONS = {
    "moving left": ("going left",),
    "moving right": ("going right",),
    "moving up": ("going up", "rising"),
    "moving down": ("going down", "falling"),
    "spinning": ("rotating", "turning"),
    "growing": ("getting bigger",),
    "shrinking": ("getting smaller",),
    "bouncing": ("jumping", "hopping"),
}

BY_NAME = {subject.name: subject for subject in SUBJECTS}

_SHOWN_HELD_OUT = (
    ("fox", "night"), ("panda", "water"), ("car", "snow"), ("rocket", "sand"), ("pizza", "grass"),
    ("lion", "snow"), ("octopus", "night"), ("robot", "grass"), ("butterfly", "night"),
    ("birthday cake", "snow"), ("dog", "grass"), ("sailboat", "night"), ("sunflower", "sky"),
    ("penguin", "wood"), ("tiger", "water"),
)  # fmt: skip


def _held_out(share=0.08, most=2):
    """Draw the pairs by hash, so that the set stays the same on every machine; at most `most` a subject."""
    pairs = [(subject.name, background) for subject in SUBJECTS for background in BACKGROUNDS]
    order = sorted(pairs, key=lambda pair: hashlib.sha256(" on ".join(pair).encode()).digest())
    chosen, count = set(), dict.fromkeys(BY_NAME, 0)
    for pair in (*_SHOWN_HELD_OUT, *order):
        if len(chosen) >= round(share * len(pairs)):
            break
        if pair not in chosen and count[pair[0]] < most:
            chosen.add(pair)
            count[pair[0]] += 1
    return frozenset(chosen)


HELD_OUT = _held_out()
TRAINED = {
    subject.name: tuple(kind for kind in BACKGROUNDS if (subject.name, kind) not in HELD_OUT)
    for subject in SUBJECTS
}
