"""Damaged model files through the public road: a model, or one sentence; never another error, a hang or a huge claim.

Case i is a function of i alone. SCD_FUZZ=2000 asks for as many cases as that; without it a short form runs.
"""

import gc
import os
import random
import shutil
import signal
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from scd_pack.scd_core.checkpoint import Source
from scd_pack.scd_core.convert import convert
from scd_pack.scd_core.errors import UserError
from scd_pack.scd_core.models.emu3_text import SPECIAL
from scd_pack.scd_core.models.load import BUNDLED, open_model
from scd_pack.scd_core.models.tiktoken_file import TiktokenTokenizer
from scd_tests.emu3_files import write_tiktoken
from scd_tests.mutations import mutate
from scd_tests.sentences import is_one_sentence
from scd_tests.test_jit import Inner

resource = pytest.importorskip("resource")  # what limits the memory of a process, where the system can

CASES = int(os.environ.get("SCD_FUZZ", "200"))
PARTS = 8
SECONDS, ROOM = 20, 3 << 30  # of the processor's time and of memory that a case may take
GOLDEN = Path(__file__).parent / "data" / "golden"
VQ, DV, VQ16 = "chameleon-tokenizer", "cosmos-dv8x16x16", "llamagen-vq-ds16"
MODELS = {  # miniature: what lies in the folder beside it
    "janus-pro-hf": None, "janus-pro-original": None, "llamagen-c2i": VQ16, "llamagen-t2i": VQ16,
    "llamagen-t2i-jadohu": VQ16, "lumina-mgpt-hf": VQ, "lumina-mgpt-mp2": VQ, "anole-hf": None, "anole-meta": None,
    "lumina-mgpt-2": "movqgan", "emu3-hf": None, "cosmos-ar-v2w": DV, "cosmos-ar-yarn": DV, "simplear": DV, "mar": None,
}  # fmt: skip
PACKED = ("janus-pro-hf", "llamagen-c2i", "lumina-mgpt-2", "simplear")  # also as the converter's one file


class Hang(BaseException):
    """A case took too long; no handler of ours catches it."""


@contextmanager
def limits():
    """A case may neither hang nor claim all of the machine's memory."""

    def late(*_):
        raise Hang(f"no answer after {SECONDS} s of work")

    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before, handler = resource.getrlimit(resource.RLIMIT_AS), signal.signal(signal.SIGPROF, late)
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, before[1]))
    signal.setitimer(signal.ITIMER_PROF, SECONDS)  # of this process: others may keep the machine busy
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, handler)
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """[(what is opened, its files)] of all miniatures, each in a folder of its own."""
    root, found = tmp_path_factory.mktemp("fuzz"), []
    for name, beside in MODELS.items():
        place = root / name / "a" / "b" / "models"
        shutil.copytree(GOLDEN / name / "model", place / name)
        if beside:
            shutil.copytree(GOLDEN / beside / "model", place / beside)
            if beside is VQ16:  # the miniatures share one, the releases call theirs vq_ds16_c2i and vq_ds16_t2i
                (place / beside / "vq_ds16_c2i.pt").rename(place / beside / "vq_ds16.pt")
        opened = {"anole-meta": "models/7b", "mar": "mar_base"}.get(name, "")
        found.append((place / name / opened, sorted(file for file in place.rglob("*") if file.is_file())))
        if name in PACKED:
            target = root / f"{name}-one" / "a" / "b" / "models" / "one.safetensors"
            target.parent.mkdir(parents=True)
            found.append((convert(place / name, target), [target]))
    bundled = root / "bundled" / "a" / "b" / "model.safetensors"
    bundled.parent.mkdir(parents=True)
    shutil.copy(BUNDLED, bundled)
    program, words = root / "program" / "decoder.jit", root / "words" / "emu3.tiktoken"
    program.parent.mkdir()
    torch.jit.save(torch.jit.trace(Inner(), torch.zeros(1, 2, 1, 4, 4).bfloat16()), program)
    write_tiktoken(words.parent)
    return [*found, *((path, [path]) for path in (bundled, program, words))]


def use(path):
    """What a user does with a model, up to the first pass; files that are no models by themselves are read."""
    if path.suffix == ".tiktoken":
        TiktokenTokenizer(path, SPECIAL).ids("a red fox")
        return
    if path.suffix == ".jit":
        source = Source.open(path)
        assert all(source.read(key).shape == source.shape(key) for key in source.keys())
        return
    files = open_model(path)
    decoder = files.build("decoder", dtype=torch.float32)
    files.build("codec", dtype=torch.float32)
    family = files.family
    if family.continuous:
        return
    plan = family.plan(family.size(frames=family.sizes[0].frames))
    words = "7" if family.name.startswith("LlamaGen class") else "" if family.reads else "a red fox"
    streams = family.streams(family.text.encode(words), None, plan)
    family.positions(decoder, plan, max(stream.length for stream in streams), "cpu")


def check(models, number, use=use):
    """Damage one file of one model, look at what the public road says, put the file back."""
    r = random.Random(number)
    path, files = models[number % len(models)]
    file = r.choice(files)
    whole = file.read_bytes()
    file.unlink()  # a new file each time: what was mapped must not change underneath
    file.write_bytes(mutate(r, file.name, whole))
    try:
        with limits():
            use(path)
    except UserError as error:
        assert is_one_sentence(str(error)), f"case {number}, {file.name}: {str(error)[:2000]!r}"
    except BaseException as error:
        raise AssertionError(f"case {number}, {path.name}, {file.name}: {type(error).__name__}: {error}") from error
    finally:
        gc.collect(0)
        file.unlink()
        file.write_bytes(whole)


def test_the_whole_models_open(models):
    for path, _ in models:
        use(path)


@pytest.mark.parametrize("part", range(PARTS))
def test_damaged_files_get_one_sentence(models, part):
    for number in range(part, CASES, PARTS):
        check(models, number)
