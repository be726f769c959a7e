"""What the converter puts into the metadata of a model's one file: its other weights, and its side files."""

import base64
import json

from ..errors import UserError

PARTS, SIDES = "parts", "side_files"  # metadata entries


def packed_parts(metadata):
    """{label: {"prefix", "config", "sides"}} of weights of other files that lie under a prefix in this one.

    Raises:
        UserError: a damaged entry.
    """
    parts = {}
    for label, part in _entry(metadata, PARTS).items():
        kinds = {"prefix": str, "config": dict, "sides": dict}
        if not isinstance(part, dict) or not all(isinstance(part.get(name), kind) for name, kind in kinds.items()):
            raise _damaged(PARTS)
        parts[label] = {**part, "sides": _files(part["sides"])}
    return parts


def stored_sides(metadata):
    """{file name: bytes} of small files.

    Raises:
        UserError: a damaged entry.
    """
    return _files(_entry(metadata, SIDES))


def _files(entry):
    found = {}
    for name, stored in entry.items():
        try:
            found[name] = stored.encode() if isinstance(stored, str) else base64.b64decode(stored["base64"])
        except (ValueError, TypeError, KeyError) as error:
            raise _damaged(SIDES) from error
    return found


def _entry(metadata, name):
    """A metadata entry of ours as dict; other programs' entries of that name are none."""
    try:
        found = json.loads(metadata.get(name, "{}"))
    except (ValueError, RecursionError):
        found = {}
    return found if isinstance(found, dict) else {}


def _damaged(name):
    return UserError(f"the metadata entry '{name}' of the file is damaged; convert the model again.")
