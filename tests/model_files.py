"""Small model files and folders, whole and broken, and what a refusal must look like."""

import json
import re
import struct

import pytest
import torch
from safetensors.torch import save_file
from scd_pack.scd_core.errors import UserError

A, B = torch.arange(6.0).reshape(2, 3), torch.arange(4, dtype=torch.int64)


def refused(call, *words):
    """The message of the UserError that `call` raises: one sentence holding all the words."""
    with pytest.raises(UserError) as caught:
        call()
    message = str(caught.value)
    assert message.endswith(".") and "\n" not in message and not re.search(r"\. [A-Z]", message), message
    for word in words:
        assert str(word) in message, (word, message)
    return message


def whole_bytes(tmp_path, tensors=None):
    path = tmp_path / "whole.tmp"
    save_file(tensors or {"a": A, "b": B}, path)
    data = path.read_bytes()
    path.unlink()
    return data


def put(path, data=b""):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(data, encoding="utf-8") if isinstance(data, str) else path.write_bytes(data)
    return path


def weights(path, **tensors):
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = tensors or {"a": A}
    save_file(tensors, path) if path.suffix == ".safetensors" else torch.save(tensors, path)
    return path


def header_file(path, header, data=b"", length=None):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return put(path, struct.pack("<Q", len(raw) if length is None else length) + raw + data)


def two_shards(folder, ending="safetensors", index=True):
    stem = "model" if ending == "safetensors" else "pytorch_model"
    names = [f"{stem}-0000{n}-of-00002.{ending}" for n in (1, 2)]
    weights(folder / names[0], a=A)
    weights(folder / names[1], b=B)
    if index:
        put(
            folder / f"{stem}.{ending}.index.json",
            json.dumps({"metadata": {}, "weight_map": {"a": names[0], "b": names[1]}}),
        )
    return names
