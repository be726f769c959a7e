"""What belongs to a model but lies outside its weight files: tokenizers, settings, another release's codec.

A search goes from near to far: the model's own folders, then the folders beside it, up to two levels above, because
people keep one codec or tokenizer for several models. What was found far away must prove that it fits.
"""

import json
import os
from fnmatch import fnmatchcase
from pathlib import Path

from ..errors import UserError
from .files import scan
from .header import AGAIN, reading, refuse_text

UP = 2  # levels above the weights whose folders are looked into
MOST = 4000  # folders looked into at most: a models folder may lie in a crowded place


class SideFile:
    """A small file of a model: on disk, or stored in the metadata of its one file.

    Attributes:
        name: file name. where: for messages. path: `Path`, or None when it is stored.
    """

    def __init__(self, name, where, path=None, stored=None):
        self.name, self.where, self.path, self._stored = name, where, path, stored

    def __repr__(self):
        return f"SideFile({self.where})"

    def bytes(self):
        """All of it.

        Raises:
            UserError: unreadable, or something else under its name: nothing, a pointer, a web page.
        """
        if self._stored is not None:
            return self._stored
        with reading(self.path):
            found = self.path.read_bytes()
        if self.name.endswith((".json", ".yaml")):  # lists of tokens may begin as web pages do
            refuse_text(self.path, found[:512], len(found), "a file of the model")
        return found

    def text(self):
        """The whole text.

        Raises:
            UserError: unreadable, or no UTF-8.
        """
        try:
            return self.bytes().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise UserError(f"'{self.where}' is no text file ({error.reason}); {AGAIN}.") from error

    def json(self):
        """The JSON object in it, as dict.

        Raises:
            UserError: it holds something else.
        """
        try:
            found = json.loads(self.text())
        except (ValueError, RecursionError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(f"'{self.where}' is not valid JSON ({error}); {AGAIN}.") from error
        if not isinstance(found, dict):
            raise UserError(f"'{self.where}' holds a JSON {type(found).__name__}, not an object; {AGAIN}.")
        return found


def own_folders(root, whole):
    """Folders of one model: the weights' own, its subfolders if they belong to it, and Meta's release folders."""
    folders = [root]
    if whole:
        folders += [root / sub for sub in scan(root)[1]]
    release = release_folder(root)
    if release != root:
        folders += [release, release / "tokenizer"]
    return folders


def release_folder(root):
    """The folder that a model's weights were released in: for Meta's layout (models/7b/params.json) two above."""
    return root.parent.parent if root.parent.name == "models" and (root / "params.json").is_file() else root


def far_folders(root, whole):
    """Folders beside a model, near ones first: children and grandchildren of the folders above it (a generator)."""
    root = Path(os.path.abspath(root))  # links are not followed: a models folder may be made of them
    seen = set(own_folders(root, whole))
    levels = ([] if whole else [root]) + list(release_folder(root).parents[:UP])
    for level in levels:
        children = [level / sub for sub in scan(level)[1]]
        below = [child / sub for child in children for sub in scan(child)[1]]
        for folder in [level, *children, *below]:
            if folder not in seen and len(seen) < MOST:
                seen.add(folder)
                yield folder


def matches(folder, name):
    """Files of a folder that a name stands for; it may hold a subfolder, and wildcards in its last part."""
    place = folder / Path(name).parent
    tail = Path(name).name
    if not any(sign in tail for sign in "*?["):
        return [place / tail] if (place / tail).is_file() else []
    return [place / file for file in scan(place)[0] if fnmatchcase(file, tail)]


def accepted(fits, found, near):
    """Whether `fits` takes what was found; what it says about a far file is of no interest to the user."""
    if fits is None:
        return True
    try:
        return fits(found) is not False
    except UserError:
        if near:
            raise
        return False
