"""Is this file whole, and is it what its name says? Looked at before any library opens it.

Downloads break in a handful of ways (cut off, a Git LFS pointer, a saved error page, a wrong ending). The
first bytes and the file size tell them apart, so each gets its own sentence. The wording of library errors is
never read: it changes from release to release.
"""

import json
import math
import os
import re
import zipfile
from contextlib import contextmanager

from ..errors import UserError

# Stored type -> (bits of one element, name of the torch dtype, which older builds may lack).
STORED = {
    "F64": (64, "float64"), "F32": (32, "float32"), "F16": (16, "float16"), "BF16": (16, "bfloat16"),
    "I64": (64, "int64"), "I32": (32, "int32"), "I16": (16, "int16"), "I8": (8, "int8"),
    "U64": (64, "uint64"), "U32": (32, "uint32"), "U16": (16, "uint16"), "U8": (8, "uint8"),
    "BOOL": (8, "bool"), "C64": (64, "complex64"),
    "F8_E4M3": (8, "float8_e4m3fn"), "F8_E5M2": (8, "float8_e5m2"), "F8_E8M0": (8, "float8_e8m0fnu"),
    "F8_E4M3FNUZ": (8, "float8_e4m3fnuz"), "F8_E5M2FNUZ": (8, "float8_e5m2fnuz"),
}  # fmt: skip
# First bytes of what people rename: other kinds of weights, and archives that hold the weights.
FOREIGN = {
    b"GGUF": "a GGUF file with quantised weights, which cannot be read here; get the safetensors files of the model",
    b"\x89HDF": "an HDF5 file of another framework; get the safetensors files of the model",
    b"7z\xbc\xaf": "a 7z archive; unpack it and select what is inside",
    b"Rar!": "a RAR archive; unpack it and select what is inside",
    b"\x1f\x8b\x08": "a gzip archive; unpack it and select what is inside",
    b"\xfd7zXZ": "an xz archive; unpack it and select what is inside",
    b"BZh9": "a bzip2 archive; unpack it and select what is inside",
}
HEADER_LIMIT = 100_000_000  # the format's own limit for the JSON header, in bytes
AGAIN = "download it again"


def label(path):
    """How a message names a file: its name and the folder it lies in."""
    path = os.fspath(path)
    return f"'{os.path.basename(path) or path}' in '{os.path.dirname(path) or '.'}'"


def some(names, most=6):
    """The first names of a list, quoted, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(f"'{name}'" for name in names[:most]) + more


@contextmanager
def reading(path):
    """Turn the operating system's refusals inside the block into one UserError about `path`."""
    try:
        yield
    except FileNotFoundError as error:
        raise UserError(f"{label(path)} {_where_it_leads(path)}; check its name and that the drive "
                        "is connected.") from error
    except PermissionError as error:
        raise UserError(f"{label(path)} may not be read by this user; change its permissions.") from error
    except OSError as error:
        raise UserError(f"{label(path)} cannot be read ({error.strerror or error}); check that its drive is "
                        "connected.") from error


def _where_it_leads(path):
    """What a message says of a path under which nothing is."""
    if not os.path.islink(path):
        return "does not exist"
    target = os.readlink(path)
    lost = "whose content git-annex has not fetched ('git annex get' does)" if "annex/objects" in target else \
        "which is not there"
    return f"is a link to '{target}', {lost}"


def first_bytes(path, count=512):
    """The start of a file and its size -> (bytes, int). Raises UserError when it cannot be read."""
    with reading(path), open(path, "rb") as file:
        return file.read(count), os.fstat(file.fileno()).st_size


def refuse_text(path, head, size, wanted):
    """Raise for what people get instead of the real file: nothing, an LFS pointer or a web page."""
    if size == 0:
        raise UserError(f"{label(path)} is empty (0 bytes) where {wanted} is expected, so the download "
                        f"never started or the disk was full; {AGAIN}.")
    if head.startswith(b"version https://git-lfs"):
        real = re.search(rb"\nsize (\d+)", head)
        expected = f"{int(real[1]):,} bytes" if real else wanted
        raise UserError(f"{label(path)} is a Git LFS pointer of {size:,} bytes instead of the real file "
                        f"({expected} expected): run 'git lfs pull' there or download the file itself.")
    if re.match(rb"/?(\.git/)?annex/objects/", head):
        real = re.search(rb"-s(\d+)-", head)
        expected = f"{int(real[1]):,} bytes" if real else wanted
        raise UserError(f"{label(path)} is a git-annex pointer of {size:,} bytes instead of the real file "
                        f"({expected} expected): run 'git annex get' there or download the file itself.")
    kind = next((kind for start, kind in FOREIGN.items() if head.startswith(start) and head[8:9] != b"{"), None)
    if kind:
        raise UserError(f"{label(path)} ({size:,} bytes) is not {wanted} as its name promises but {kind}.")
    # The length in front of a safetensors header may begin with any byte, but never lacks zeros.
    if b"\0" not in head[:8] and head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"<"):
        raise UserError(f"{label(path)} is a web page of {size:,} bytes where {wanted} is expected: the "
                        f"site sent a login or error page; {AGAIN}, signed in if the model asks for it.")


def zip_names(path):
    """Names of all files in a zip archive.

    Raises UserError for one that was cut off.
    """
    try:
        with reading(path), zipfile.ZipFile(path) as archive:
            return archive.namelist()
    except zipfile.BadZipFile as error:
        raise UserError(f"{label(path)} has {os.path.getsize(path):,} bytes where more are expected: the end of the "
                        f"archive is missing, so the download or copy was cut off; {AGAIN}.") from error


def read_json(path):
    """Read a settings file (config.json, params.json, an index) -> dict.

    Raises UserError when it is missing, unreadable, not JSON, or not a JSON object.
    """
    head, size = first_bytes(path)
    refuse_text(path, head, size, "a JSON file")
    try:
        with reading(path), open(path, encoding="utf-8-sig") as file:
            found = json.load(file)
    except (ValueError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{label(path)} ({size:,} bytes) is not valid JSON ({error}); {AGAIN} or undo the "
                        "last edit.") from error
    if not isinstance(found, dict):
        raise UserError(f"{label(path)} holds a JSON {type(found).__name__} where an object {{...}} is "
                        f"expected; {AGAIN}.")
    return found


def read_header(path):
    """Read and check the header of a safetensors file without touching its tensors.

    Returns (entries, metadata): entries maps tensor name -> {"dtype", "shape", "data_offsets"}, metadata is
    the str -> str dict stored with them. Raises UserError when the file is not whole or not safetensors: the
    8-byte length, the JSON and every tensor's byte range are compared with the size of the file.
    """
    head, size = first_bytes(path)
    refuse_text(path, head, size, "a safetensors file")
    if size < 8:
        raise UserError(f"{label(path)} has {size:,} bytes where at least 8 are expected before the header "
                        f"of a safetensors file, so the download broke off at once; {AGAIN}.")
    # A header's length may begin with the same bytes as a pickle, but then "{" follows it.
    if head[8:9] != b"{" and head.startswith((b"PK\x03\x04", *(bytes((128, n)) for n in range(2, 6)))):
        if head.startswith(b"PK") and not any(name.endswith("data.pkl") for name in zip_names(path)):
            raise UserError(f"{label(path)} ({size:,} bytes) is a zip archive where a safetensors file is "
                            "expected; unpack it and select the weight file inside.")
        raise UserError(f"{label(path)} ({size:,} bytes) is a pickled PyTorch file, not the safetensors "
                        "file its name promises; rename it to end in .pt or .ckpt, or get the real "
                        "safetensors file.")
    if re.fullmatch(rb"[\x09\x0a\x0d\x20-\x7e]+", head):
        raise UserError(f"{label(path)} is a text of {size:,} bytes where a safetensors file is expected, "
                        f"probably an error message of the site; {AGAIN}.")
    length = int.from_bytes(head[:8], "little")
    if length > HEADER_LIMIT:
        raise UserError(f"{label(path)} ({size:,} bytes) announces a header of {length:,} bytes where at "
                        f"most {HEADER_LIMIT:,} are expected, so it is damaged or no safetensors file; "
                        f"{AGAIN}.")
    if length > size - 8:
        raise UserError(f"{label(path)} has {size:,} bytes where at least {length + 8:,} are expected, so "
                        f"it ends inside its header: the download was cut off; {AGAIN}.")
    return _parse_header(path, length, size)


def _parse_header(path, length, size):
    with reading(path), open(path, "rb") as file:
        file.seek(8)
        raw = file.read(length)
    try:
        entries = json.loads(raw)
        metadata = entries.pop("__metadata__", None) or {}
        ends = [_check_entry(entry) for entry in entries.values()]
        if not all(isinstance(text, str) for pair in metadata.items() for text in pair):
            raise ValueError("metadata that is not text")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UserError(f"{label(path)} ({size:,} bytes, {length:,} expected to be the header) has a broken "
                        f"header ({error}): it was damaged on the way; {AGAIN}.") from error
    expected = 8 + length + max(ends, default=0)
    if size < expected:
        raise UserError(f"{label(path)} has {size:,} bytes where {expected:,} are expected: the download or "
                        f"copy was cut off; {AGAIN}.")
    if size > expected:
        raise UserError(f"{label(path)} has {size:,} bytes where {expected:,} are expected: something was "
                        f"appended, as when a broken download is resumed; {AGAIN}.")
    return entries, metadata


def _check_entry(entry):
    """End of one tensor's bytes, relative to the data; ValueError when its shape and range do not agree."""
    shape, (start, end) = entry["shape"], entry["data_offsets"]
    if not all(type(n) is int and n >= 0 for n in [*shape, start, end]):
        raise ValueError(f"shape {shape!r} at {start!r}:{end!r}")
    bits = STORED.get(entry["dtype"], (None,))[0]
    if bits is not None and (end - start) * 8 != math.prod(shape) * bits:
        raise ValueError(f"shape {shape} of {entry['dtype']} does not fill bytes {start}:{end}")
    return end
