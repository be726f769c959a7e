"""What the converter puts into the metadata of a model's one file: its other weights, and its side files as text."""

import json

from ..errors import UserError

PARTS, SIDES = "parts", "side_files"  # metadata entries


def packed_parts(metadata):
    """{label: {"prefix", "config", "sides"}} of weights of other files that lie under a prefix in this one."""
    parts = _entry(metadata, PARTS)
    for part in parts.values():
        known = isinstance(part, dict) and isinstance(part.get("prefix"), str) and part["prefix"]
        if not known or not isinstance(part.get("config"), dict) or not isinstance(part.get("sides"), dict):
            raise UserError(f"the metadata entry '{PARTS}' of the file is damaged; convert the model again.")
    return parts


def stored_sides(metadata):
    """{file name: text}."""
    return _entry(metadata, SIDES)


def _entry(metadata, name):
    if name not in metadata:
        return {}
    try:
        found = json.loads(metadata[name])
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {}
