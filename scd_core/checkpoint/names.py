"""Names of models: listing what can be selected and finding a saved name again.

Links are followed for reading, but a name is judged by how it is written, so a models folder may be made of
links to other drives. Nothing is opened here; only folders are listed.
"""

import logging
import os
import time
import unicodedata
from contextlib import suppress
from itertools import takewhile
from pathlib import Path

from ..errors import UserError
from .files import (
    COMPANION_FOLDER,
    KNOWN,
    SETTINGS,
    choose,
    is_weight,
    scan,
    shard_match,
    shard_sets,
    stays_inside,
    without_companions,
)
from .header import some

log = logging.getLogger(__name__)

DEPTH = 8  # folders below a root that are searched
SETTLED = 2_000_000_000  # ns after its last change that a folder is trusted to show every later one by its time
_lists = {}  # roots -> ({folder: time of its last change}, names)


def list_models(roots):
    """Names of all weight files and model folders below `roots` (paths) -> sorted list of str with slashes.

    A folder whose weights belong together is one name, and nothing inside it is listed; files of a folder
    that only collects models are listed singly. Image tokenizers beside them and text encoders are left out.
    Equal names count once. Never raises: what cannot be read is skipped. A host asks for this list several times a
    run, so folders are read again only when one of them changed.
    """
    roots, now = _usable(roots), time.time_ns()
    place = tuple(map(os.path.abspath, roots))
    folders, names = _lists.get(place, ((), None))
    if names is None or any(_changed(folder) != last for folder, last in folders.items()):
        folders = {}
        found = {name for root in roots for name, listed in _walk(root, seen=folders) if listed}
        names = sorted(found, key=lambda name: (name.casefold(), name))
        if all((last or 0) < now - SETTLED for last in folders.values()):
            _lists[place] = (folders, names)
    return list(names)


def _changed(folder):
    """Time of a folder's last change in ns, None where there is none."""
    with suppress(OSError, ValueError):
        return os.stat(folder).st_mtime_ns
    return None


def _usable(roots):
    """The roots that are paths at all, as Path; duplicates once, order kept."""
    if isinstance(roots, (str, os.PathLike)):
        roots = [roots]
    with suppress(TypeError):
        paths = [Path(root) for root in roots if isinstance(root, (str, os.PathLike)) and str(root)]
        return list(dict.fromkeys(paths))
    return []


def _walk(root, prefix="", above=(), seen=None):
    """Yield (name, listed) below a root; files inside a model folder come with listed=False.

    seen: dict that takes the folders that were read and their times.
    """
    seen = {} if seen is None else seen
    folder = os.path.join(root, prefix)
    real = None
    with suppress(OSError, ValueError):
        real = os.path.realpath(folder)
    if real is None or real in above or len(above) > DEPTH:  # a link back to where we came from
        return
    folder = os.path.abspath(folder)
    seen[folder] = _changed(folder)
    files, folders = scan(folder)
    kind, _ = choose(files)
    start = f"{prefix}/" if prefix else ""
    if prefix and kind in ("index", "shards", "file"):
        yield prefix, not COMPANION_FOLDER.fullmatch(prefix.rpartition("/")[2])
        yield from ((start + name, False) for name in files if is_weight(name))
        if kind == "file" and not _has_settings(files):  # a lone file may have whole releases beside it
            for sub in folders:
                seen[os.path.join(folder, sub)] = _changed(os.path.join(folder, sub))
                if _has_settings(scan(os.path.join(folder, sub))[0]):
                    yield from _walk(root, start + sub, (*above, real), seen)
        return
    # aria2 writes under the final name at once and keeps its notes beside until it is done.
    unfinished = {name.removesuffix(".aria2") for name in files if name.endswith(".aria2")}
    weights = [name for name in files if is_weight(name) and name not in unfinished]
    later = {name for group in shard_sets(weights).values() for name in group[1:]}
    models = set(without_companions(weights)) - later
    yield from ((start + name, name in models) for name in weights)
    below = [found for sub in folders for found in _walk(root, start + sub, (*above, real), seen)]
    if prefix and not weights and not below and _has_settings(files):
        below = [(prefix, True)]  # half a model: selectable, so that loading it can say what is missing
    yield from below


def _has_settings(files):
    return any(name in files for name in SETTINGS)


def resolve_model(name, roots):
    """Path below `roots` of the model called `name`, be it spelled as listed or as on another machine.

    Backslashes count as slashes; a name that does not exist as written is looked for without regard to case,
    then by its last part if only one model has it. The first root wins. Raises UserError: '..' or an absolute
    path, several candidates, or none (then with what is there and where to put files).
    """
    roots = _usable(roots)
    text = str(name).replace("\\", "/")
    parts = [part for part in text.split("/") if part not in ("", ".")]
    if text.startswith("/") or (parts and not stays_inside("/".join(parts))):
        raise UserError(f"'{name}' is not a name inside the models folders: absolute paths and '..' are "
                        "refused; select a model from the list.")
    exact = [path for root in roots if parts and _selectable(path := root.joinpath(*parts))]
    if exact:
        return _first(exact, name)
    for root in roots:
        spelled = _any_case(root, parts) if parts else []
        if spelled:
            return _only(spelled, name)
    alike = _same_ending(parts, roots) if parts else []
    if alike:
        return _only(alike, name)
    there = list_models(roots)
    raise UserError(f"No model is called '{name}'; there "
                    f"{'are ' + some(there, 12) if there else 'is none at all'}; put weight files or model "
                    f"folders into {some([str(root) for root in roots]) or 'a models folder'}.")


def _selectable(path):
    with suppress(OSError, ValueError):
        return path.is_dir() or (is_weight(path.name) and path.is_file())
    return False


def _first(paths, name):
    if len(paths) > 1:
        log.info("Model '%s' is in %d models folders; using '%s'.", name, len(paths), paths[0])
    return paths[0]


def _only(paths, name):
    if len(paths) > 1:
        raise UserError(f"'{name}' fits several models ({some([str(path) for path in paths])}); select one "
                        "from the list.")
    log.warning("There is no model '%s'; using '%s'.", name, paths[0])
    return paths[0]


def _key(text):
    """Spelling without case and without the two ways of writing accents (macOS stores the other one)."""
    return unicodedata.normalize("NFC", text).casefold()


def _any_case(root, parts):
    found = [root]
    for part in parts:
        found = [path / n for path in found for names in scan(path) for n in names if _key(n) == _key(part)]
    return [path for path in found if _selectable(path)]


def _same_ending(parts, roots):
    """Models whose path shares the most last parts with the wanted one.

    File names that every release uses say nothing about the model, so for them one folder must agree as well.
    """
    wanted = [_key(part) for part in parts][::-1]
    needed = 2 if len(parts) > 1 and (parts[-1].lower() in KNOWN or shard_match(parts[-1])) else 1
    best, found = needed, {}
    for root in roots:
        for name, _ in _walk(root):
            have = [_key(part) for part in name.split("/")][::-1]
            shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(have, wanted)))
            if shared > best:
                best, found = shared, {}
            if shared == best:
                found.setdefault(name, root.joinpath(*name.split("/")))
    return list(found.values())
