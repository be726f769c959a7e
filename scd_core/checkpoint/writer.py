"""Writing a .safetensors file tensor by tensor, whole or not at all."""

import json
import math
import os
from contextlib import suppress
from pathlib import Path

import torch

from ..errors import UserError
from .files import SAFE_ENDINGS
from .header import HEADER_LIMIT, STORED, label

CODES = {name: (bits, code) for code, (bits, name) in STORED.items()}


def save_safetensors(tensors, path, metadata=None, overwrite=False):
    """Write tensors (dict name -> tensor, any device) to a .safetensors file, whole or not at all -> Path.

    metadata: dict of str to str; other values are stored as JSON, so {"config": {...}} comes back as
    `Source.config`. Raises UserError when the file exists and `overwrite` is False, the ending is wrong, or
    the disk refuses; then nothing is left behind and an older file stays as it was.
    """
    entries = {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in tensors.items()}
    return stream_safetensors(entries, lambda key: tensors[key], path, metadata, overwrite)


def stream_safetensors(entries, read, path, metadata=None, overwrite=False):
    """Like `save_safetensors`, with one tensor in memory at a time.

    Args:
        entries: {name: (shape, torch dtype)}, in the order they are written.
        read: name -> tensor of that shape and dtype.
    """
    path = Path(path)
    if not path.name.lower().endswith(SAFE_ENDINGS):
        raise UserError(f"{label(path)} must end in .safetensors to be written.")
    if path.exists() and not overwrite:
        raise UserError(f"{label(path)} exists already and is not overwritten; choose another name or ask "
                        "for overwriting.")
    head = _header(entries, metadata or {}, path)
    part = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(part, "wb") as file:
            file.write(len(head).to_bytes(8, "little") + head)
            for key, (shape, dtype) in entries.items():
                file.write(_bytes(read(key), shape, dtype, key))
            file.flush()
            os.fsync(file.fileno())
        if path.exists() and not overwrite:  # somebody else was faster
            raise UserError(f"{label(path)} exists already and is not overwritten; choose another name.")
        os.replace(part, path)
    except OSError as error:
        raise UserError(f"{label(path)} cannot be written ({error}); check the free space, the permissions "
                        "and that no program has it open.") from error
    finally:
        with suppress(OSError):
            part.unlink()
    return path


def _header(entries, metadata, path):
    """JSON header of the format, padded to 8 bytes so that the tensors behind it are aligned."""
    texts = {key: text if isinstance(text, str) else json.dumps(text) for key, text in metadata.items()}
    table, end = ({"__metadata__": texts} if texts else {}), 0
    for key, (shape, dtype) in entries.items():
        bits, code = CODES.get(str(dtype).removeprefix("torch."), (0, None))
        if code is None:
            raise UserError(f"{label(path)}: '{key}' is of the type {dtype}, which safetensors files cannot hold.")
        start, end = end, end + math.prod(shape) * bits // 8
        table[key] = {"dtype": code, "shape": list(shape), "data_offsets": [start, end]}
    raw = json.dumps(table, separators=(",", ":")).encode()
    if len(raw) > HEADER_LIMIT:
        raise UserError(f"{label(path)}: names and settings need {len(raw):,} bytes, the format allows "
                        f"{HEADER_LIMIT:,}.")
    return raw + b" " * (-len(raw) % 8)


def _bytes(tensor, shape, dtype, key):
    """The memory of a tensor, dense and on the CPU."""
    if tuple(tensor.shape) != tuple(shape) or tensor.dtype != dtype:
        raise ValueError(f"{key}: {tuple(tensor.shape)} {tensor.dtype} was announced as {tuple(shape)} {dtype}")
    dense = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(dense.view(torch.uint8).numpy()) if dense.numel() else b""
