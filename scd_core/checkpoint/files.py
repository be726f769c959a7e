"""Which files make up a model: the choice inside one folder. Only names and index files are read here."""

import os
import re
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath

from ..errors import UserError
from .header import label, read_json, reading, some

SAFE_ENDINGS = (".safetensors", ".sft")
PICKLE_ENDINGS = (".pt", ".pth", ".ckpt", ".bin")
PROGRAM_ENDINGS = (".jit",)  # TorchScript: opened by name only, as it is never a whole model
SETTINGS = ("config.json", "params.json")
INDEX = re.compile(r".+\.(safetensors|bin)\.index\.json$")
SHARD = re.compile(r"(?P<stem>.*)(?P<n>\d{5})-of-(?P<total>\d{5})(?P<tail>\.\w+)$")
# A release's own name for "the weights", best first: it wins over other files in the same folder.
KNOWN = (
    "model.safetensors", "diffusion_pytorch_model.safetensors", "consolidated.safetensors",
    "pytorch_model.bin", "diffusion_pytorch_model.bin", "model.pt", "model.pth", "model.ckpt",
    "consolidated.pth", "checkpoint-last.pth",
)  # fmt: skip
# What trainers leave beside weights under the same endings.
TRAINER = re.compile(
    r"(training_args|optimizer|scheduler|scaler|rng_state\w*)\.(bin|pt|pth)$|(.+\.ssd|ssd_heads)\.safetensors$"
)
# A release's own name for the image tokenizer that people put beside the language model.
COMPANION = re.compile(r"((mo)?vqgan|vq[_-]ds\d+|(en|de)coder\.|kl-?\d+\.)", re.IGNORECASE)
COMPANION_FOLDER = re.compile(r"(flan-)?t5-[\w.]+|text_encoder(_\d)?", re.IGNORECASE)  # text encoders
FOREIGN = (".jit", ".gguf", ".onnx", ".h5", ".msgpack", ".zip")
PARTIAL = (".part", ".partial", ".incomplete", ".crdownload", ".aria2", ".download", ".tmp")


@dataclass(frozen=True)
class Pick:
    """The weight files of one model.

    `names` are relative to `folder`; `weight_map` (tensor -> name) comes from an index, if there is one.
    `whole` tells that the folder belongs to this model alone, so that its subfolders may be searched for side
    files.
    """

    folder: Path
    names: tuple
    weight_map: dict | None = None
    whole: bool = True


def is_weight(name):
    """Does this file name (without folders) stand for weights that can be opened?"""
    low = name.lower()
    return low.endswith(SAFE_ENDINGS + PICKLE_ENDINGS) and not low.startswith(".") and not TRAINER.match(low)


def without_companions(weights):
    """The names among `weights` that stand for a model: image tokenizers count only when nothing else is there."""
    return [name for name in weights if not COMPANION.match(name)] or weights


def shard_match(name):
    """Match of a numbered file of a set ("x-00002-of-00003.safetensors"), or None."""
    match = SHARD.match(name)
    return match if match and 1 <= int(match["n"]) <= int(match["total"]) else None


def scan(folder):
    """(file names, folder names) of one folder, sorted, links followed; empty when it cannot be read.

    Hidden names and names that no message or graph could carry are left out.
    """
    files, folders = [], []
    with suppress(OSError, ValueError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError, UnicodeError):  # one entry is a link loop or has a name that is no text
                entry.name.encode("utf-8")
                if not entry.name.startswith("."):
                    (folders if entry.is_dir() else files if entry.is_file() else []).append(entry.name)
    return sorted(files), sorted(folders)


def pick(path):
    """Find the weight files of a file or folder -> Pick. Raises UserError when none or too many fit."""
    path = Path(path)
    with reading(path):
        mode = os.stat(path).st_mode
    picked = _pick_folder(path) if stat.S_ISDIR(mode) else _pick_file(path, mode)
    unfinished = [name for name in picked.names if _is_unfinished(picked.folder / name)]
    if unfinished:
        raise UserError(f"'{picked.folder}' is still being downloaded ({some(unfinished)}); let the download "
                        "finish.")
    return picked


def _is_unfinished(path):
    """Is there a download's own file beside this one?

    aria2 reserves the full size at once, and its notes alone tell that bytes are missing. Browsers keep an empty file
    under the name until they are done.
    """
    with suppress(OSError):
        empty = path.stat().st_size == 0
        return any(path.with_name(path.name + ending).exists() for ending in (PARTIAL if empty else (".aria2",)))
    return False


def _pick_file(path, mode):
    known = SAFE_ENDINGS + PICKLE_ENDINGS + PROGRAM_ENDINGS
    if not stat.S_ISREG(mode) or not path.name.lower().endswith(known):
        raise UserError(f"{label(path)} is no weight file that can be opened; select a folder or a file "
                        f"ending in {', '.join(SAFE_ENDINGS + PICKLE_ENDINGS)}.")
    folder, name = path.parent, path.name
    names = _names(folder)
    for index in filter(INDEX.match, names):
        try:
            named = set(_read_index(folder, index).values())
        except UserError:
            if shard_match(name):
                raise
            continue  # a broken index concerns this file only when the file is numbered as part of a set
        if name in named:
            return _pick_index(folder, [index])
    if shard_match(name):
        expected = _expected_shards(name)
        _check_complete(folder, names, expected)
        return Pick(folder, tuple(expected))
    return Pick(folder, (name,), whole=any(setting in names for setting in SETTINGS))

def _names(folder):
    """All names in a folder but the hidden ones (some systems hide a "._name" beside each file)."""
    with reading(folder):
        return sorted(name for name in os.listdir(folder) if not name.startswith("."))


def _pick_folder(folder):
    names = _names(folder)
    kind, chosen = choose(names)
    if kind == "index":
        return _pick_index(folder, chosen)
    if kind == "many":
        raise UserError(f"'{folder}' holds {len(chosen)} weight files and nothing tells which belong "
                        f"together ({some(chosen)}); select one of the files instead of the folder.")
    if kind == "none":
        releases = sorted(folder.glob("models/*/params.json"))  # Meta's layout keeps weights two folders down
        if len(releases) == 1:
            return _pick_folder(releases[0].parent)
        raise UserError(_nothing_here(folder, names))
    if kind == "shards":
        _check_complete(folder, chosen, _expected_shards(chosen[0]))
    return Pick(folder, tuple(chosen))


def choose(names):
    """Choose among the file names of one folder, reading nothing.

    Returns (kind, names): "index" with the index files best first; "shards" with the numbered files of one
    set that are there; "file" with one name; "many" with unrelated candidates; "none" with nothing.
    """
    indexes = sorted(filter(INDEX.match, names), key=lambda n: (".safetensors." not in n, len(n), n))
    if indexes:
        return "index", indexes
    weights = [name for name in names if is_weight(name)]
    stems = {name.rpartition(".")[0] for name in weights if name.lower().endswith(SAFE_ENDINGS)}
    weights = [n for n in weights if n.lower().endswith(SAFE_ENDINGS) or n.rpartition(".")[0] not in stems]
    weights = without_companions(weights)
    sets = shard_sets(weights)
    safe = {key: group for key, group in sets.items() if group[0].lower().endswith(SAFE_ENDINGS)}
    if len(safe or sets) == 1:
        return "shards", next(iter((safe or sets).values()))
    known = [name for name in KNOWN if name in weights][:1]
    if len(weights) == 1 or known:
        return "file", known or weights
    return ("many", weights) if weights else ("none", [])


def shard_sets(weights):
    """The numbered files among `weights`, grouped by set -> dict of lists."""
    sets = {}
    for name in weights:
        if match := shard_match(name):
            sets.setdefault((match["stem"], match["total"], match["tail"]), []).append(name)
    return sets


def _expected_shards(name):
    stem, total, tail = shard_match(name).group("stem", "total", "tail")
    return [f"{stem}{n:05d}-of-{total}{tail}" for n in range(1, int(total) + 1)]


def _check_complete(folder, present, expected):
    missing = sorted(set(expected).difference(present))
    if missing:
        raise UserError(f"'{folder}' holds {len(expected) - len(missing)} of {len(expected)} weight files; "
                        f"missing: {some(missing)}; download the missing ones into the same folder.")


def _pick_index(folder, indexes):
    """The first index whose files are all there; else the complaint about the first one."""
    first_error = None
    for index in indexes:
        try:
            weight_map = _read_index(folder, index)
            names = sorted(set(weight_map.values()))
            _check_complete(folder, [name for name in names if (folder / name).is_file()], names)
            return Pick(folder, tuple(names), weight_map)
        except UserError as error:
            first_error = first_error or error
    raise first_error


def _read_index(folder, index):
    """tensor name -> file name, from one index file; an entry that leaves the folder is refused."""
    path = folder / index
    weight_map = read_json(path).get("weight_map")
    usable = isinstance(weight_map, dict) and all(isinstance(name, str) for name in weight_map.values())
    if not usable or not weight_map:
        raise UserError(f"{label(path)} has no \"weight_map\" of tensor names to file names; download it "
                        "again.")
    for name in sorted(set(weight_map.values())):
        if not stays_inside(name) or not is_weight(PurePosixPath(name).name):
            raise UserError(f"{label(path)} names '{name}', which is not a weight file inside the folder, "
                            "so the index is refused; get it from the model's own page.")
    return weight_map


def stays_inside(name):
    """A relative path with forward slashes, without '..', drive or anything Windows reads as such."""
    windows = PureWindowsPath(name)
    parts = name.split("/")
    return ("\\" not in name and "\0" not in name and not windows.drive and not windows.root
            and not any(part.strip(" .") == "" for part in parts))


def _nothing_here(folder, names):
    """What a folder without weights holds instead, so that the user sees what is left to do."""
    found = {
        "settings are there": [name for name in names if name in SETTINGS or "tokenizer" in name],
        "unfinished downloads": [name for name in names if name.lower().endswith(PARTIAL)],
        "kinds that cannot be read here": [name for name in names if name.lower().endswith(FOREIGN)],
        "weights one folder below": [
            f"{sub}/{name}" for sub in scan(folder)[1] for name in scan(folder / sub)[0] if is_weight(name)
        ],
    }
    notes = [f"{what}: {some(which)}" for what, which in found.items() if which]
    notes = ", ".join(notes) or ("it is empty" if not names else "its files are of other kinds")
    return (f"'{folder}' holds no weight file ({notes}); put the model's *.safetensors, *.bin, *.pt, *.pth "
            "or *.ckpt into it or select another.")
