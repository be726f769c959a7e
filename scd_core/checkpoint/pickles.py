"""Pickled PyTorch files (.pt, .pth, .ckpt, .bin): weights only, never anything that could run."""

import argparse
import io
import os
import pickle
import pickletools
import re
import tarfile
import zipfile
from collections.abc import Mapping

import torch

from ..errors import UserError
from .header import AGAIN, first_bytes, label, reading, refuse_text, some, zip_names

# Values without behaviour that releases store beside their weights: training arguments, and byte buffers that
# layers of an accelerated library leave under "_extra_state". torch refuses everything else that is no
# tensor.
SAFE_CLASSES = [argparse.Namespace, io.BytesIO]
# Names under which trainers put the weights, taken without asking.
WRAPPERS = ("model", "module", "state_dict")
# Globals that plain tensor files name. For wording only: torch alone decides what is loaded.
HARMLESS = re.compile(r"torch\.(_utils|storage)\.|torch\.(\w*Storage|\w+\d+|Size|device|bool)$"
                      r"|collections\.OrderedDict$|argparse\.Namespace$|_io\.BytesIO$")


def load_tensors(path, part=None):
    """Load a pickled PyTorch file weights-only -> dict of tensor name -> CPU tensor.

    An archive is memory mapped, the old format is read whole. `part` names the dict that holds the weights
    when it is not one of WRAPPERS, such as "model_ema". Raises UserError for files that are damaged, ask for
    other Python objects than tensors, or hold no tensors.
    """
    return _tensors_of(_load(path, archive=check_pickle(path)), path, part)


def _load(path, archive):
    allowed = torch.serialization.safe_globals(SAFE_CLASSES)
    try:
        with reading(path), allowed:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=archive)
    except (MemoryError, UserError):
        raise
    except Exception as error:  # a damaged file makes the unpickler fail in any way
        foreign = foreign_globals(path) if isinstance(error, pickle.UnpicklingError) else []
        if foreign:
            raise UserError(f"{label(path)} asks for {some(foreign, 3)} besides tensors and is refused, "
                            "because such a file can run programs when it is opened; get or make a "
                            ".safetensors copy and select that.") from error
        raise UserError(f"{label(path)} ({os.path.getsize(path):,} bytes) does not hold what its start "
                        f"promises ({type(error).__name__}): more bytes or others are expected, so it was "
                        "cut off or damaged; download it again.") from error


def _tensors_of(loaded, path, part):
    """The flat dict of tensors inside a checkpoint."""
    parts = {k: v for k, v in loaded.items() if isinstance(v, Mapping)} if isinstance(loaded, Mapping) else {}
    if part is not None and part not in parts:
        raise UserError(f"{label(path)} has no part '{part}' (its parts: "
                        f"{some([str(k) for k in parts]) or 'none'}); select the file of the release that "
                        "has it.")
    weights = loaded if part is None else parts[part]
    while isinstance(weights, Mapping):
        inner = next((weights[name] for name in WRAPPERS if isinstance(weights.get(name), Mapping)), None)
        if inner is None:
            break
        weights = inner
    # Counters, arguments and "_extra_state" buffers are no weights.
    pairs = weights.items() if isinstance(weights, Mapping) else ()
    tensors = {k: v for k, v in pairs if isinstance(k, str) and isinstance(v, torch.Tensor)}
    if not tensors:
        raise UserError(f"{label(path)} holds no named tensors but a {type(weights).__name__}; select a "
                        "file with the weights of a model.")
    return tensors


def archive_names(path):
    """File names (without folders) in the zip archive that a PyTorch file is -> set of str; None when it is none.

    Raises UserError for what is not the real file at all, and for an archive that was cut off.
    """
    head, size = first_bytes(path)
    refuse_text(path, head, size, "a PyTorch file")
    if not head.startswith(b"PK\x03\x04"):
        return None
    return {name.rpartition("/")[2] for name in zip_names(path)}


def check_pickle(path):
    """Check that a file is a whole PyTorch file -> True when it is an archive, which can be memory mapped.

    Nothing is unpickled here. Raises UserError for empty, cut, renamed, foreign and TorchScript files.
    """
    head, size = first_bytes(path)
    inside = archive_names(path)
    if inside is not None:
        if "constants.pkl" in inside:
            raise UserError(f"{label(path)} ({size:,} bytes) is a TorchScript program where plain weights "
                            "are expected; convert its state dict to safetensors and select that.")
        if "data.pkl" not in inside:
            raise UserError(f"{label(path)} ({size:,} bytes) is a zip archive without PyTorch weights where "
                            "a PyTorch file is expected; unpack it and select the weight file inside.")
        return True
    if head[8:9] == b"{" and 0 < int.from_bytes(head[:8], "little") <= size - 8:
        raise UserError(f"{label(path)} ({size:,} bytes) is a safetensors file where a PyTorch file is "
                        "expected by its name; rename it to end in .safetensors.")
    if size < 8:
        raise UserError(f"{label(path)} has {size:,} bytes where a PyTorch file is expected, so the "
                        f"download broke off at once; {AGAIN}.")
    with reading(path):
        archive = tarfile.is_tarfile(path)
    if archive:  # very old PyTorch files are such archives; releases before 2.6 do not read them weights-only
        raise UserError(f"{label(path)} ({size:,} bytes) is a tar archive where a PyTorch file is expected; unpack it "
                        "and select the weight file inside.")
    if head[:1] != b"\x80":
        raise UserError(f"{label(path)} ({size:,} bytes) is of an unknown kind where a PyTorch file is "
                        f"expected, so it is damaged or misnamed; {AGAIN}.")
    return False


def foreign_globals(path):
    """Python objects that a pickled file asks for besides tensors -> sorted list of "module.name".

    Reads the opcodes without executing any; used only to say why torch refused a file.
    """
    found = set()
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                for name in archive.namelist():
                    if name.endswith("data.pkl"):
                        with archive.open(name) as stream:
                            _collect_globals(stream, found)
        else:
            with open(path, "rb") as stream:
                for _ in range(5):  # the old format: magic, version, system, weights, keys; raw bytes follow
                    _collect_globals(stream, found)
    except (OSError, ValueError, KeyError, IndexError, zipfile.BadZipFile):
        pass  # the file is damaged from here on; what was named before is still worth saying
    return sorted(name for name in found if not HARMLESS.match(name))


def _collect_globals(stream, found):
    """Add the globals named in one pickle to `found`; the last two strings pushed name a STACK_GLOBAL."""
    texts, memo, last = [], {}, None
    for op, arg, _ in pickletools.genops(stream):
        if op.name == "GLOBAL":
            found.add(arg.replace(" ", "."))
        elif op.name == "STACK_GLOBAL":
            found.add(".".join(text or "?" for text in texts[-2:]))
        if op.name in ("MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT"):
            memo[len(memo) if arg is None else int(arg)] = last
            continue
        last = memo.get(int(arg)) if "GET" in op.name else arg if "UNICODE" in op.name else None
        if "UNICODE" in op.name or "GET" in op.name:
            texts.append(last)
