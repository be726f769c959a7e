"""Damage to files, drawn from a `random.Random`: what a bad download, a bad disk, an editor or malice makes of them."""

import io
import json
import math
import struct
import zipfile

NUMBERS = (
    0, -1, 1, 2, 3, 7, 1 << 31, (1 << 63) - 1, 1 << 64, 10**30, -(10**9), 10**400, 0.5, -2.5, 1e308, math.nan,
    math.inf, -math.inf,
)  # fmt: skip
OTHERS = (
    None, True, False, "", "x", "\0", "nan", "12", "../..", "ü" * 40, "a" * 5000, "one\ntwo. Three", [], [1], [[]],
    [None], [-1, 2], ["x"] * 3, {}, {"": 0}, {"a": {"b": []}},
)  # fmt: skip
DTYPES = ("F32", "F16", "BF16", "F64", "I8", "U8", "BOOL", "F8_E4M3", "F4", "Q9", "", None, 3)


# --- bytes ------------------------------------------------------------------------------------------------------------


def flip(r, data, most=None):
    """Some bits of the first `most` bytes turned over."""
    data = bytearray(data)
    for _ in range(r.choice((1, 1, 2, 8, 64)) if data else 0):
        data[r.randrange(min(len(data), most or len(data)))] ^= 1 << r.randrange(8)
    return bytes(data)


def cut(r, data):
    return data[: r.choice((0, 1, 7, 8, 9, len(data) // 2, len(data) - 1, r.randrange(len(data) + 1)))]


def add(r, data):
    return data + r.choice((b"\0", b"x" * 9, bytes(4096), data[:100]))


def splice(r, data):
    """A stretch overwritten with zeros, noise or a stretch from elsewhere."""
    start, length = r.randrange(len(data) + 1), r.choice((1, 8, 100, 5000))
    other = r.choice((bytes(length), r.randbytes(length), data[:length]))
    return data[:start] + other + data[start + length :]


BYTES = (flip, flip, cut, add, splice)


def any_bytes(r, data):
    return r.choice(BYTES)(r, data)


# --- JSON -------------------------------------------------------------------------------------------------------------


def places(value, path=()):
    """All paths in a JSON value, but at most some in long lists and tables."""
    yield path
    if isinstance(value, (dict, list)):
        pairs = list(value.items() if isinstance(value, dict) else enumerate(value))
        for key, inner in pairs[:60] + pairs[-5:]:
            yield from places(inner, (*path, key))


def nested(r):
    """A deep nest, as text."""
    depth = r.choice((50, 900, 5000, 200_000))
    return r.choice(("[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth, "[" * depth))


class Raw(str):
    """A piece of JSON that is written as it is."""


def dumped(value):
    """JSON in which `Raw` pieces stand as they are and what Python cannot write as text is not in the way."""
    pieces = {}

    def mark(v):
        if isinstance(v, Raw):
            pieces[f"<raw {len(pieces)}>"] = v
            return f"<raw {len(pieces) - 1}>"
        if isinstance(v, dict):
            return {k: mark(x) for k, x in v.items()}
        return [mark(x) for x in v] if isinstance(v, list) else v

    text = json.dumps(mark(value), ensure_ascii=False)
    for name, piece in pieces.items():
        text = text.replace(json.dumps(name), piece)
    return text


def some_value(r, old):
    """Another value for one that was `old`."""
    pick = r.random()
    if isinstance(old, (int, float)) and pick < 0.6:
        return r.choice((*NUMBERS, old + 1, old - 1, -old, old * 2, old // 2, old * 1000, float(old), str(old)))
    if isinstance(old, str) and pick < 0.5:
        return r.choice((old[:-1], old + "x", old.upper(), old[::-1], old * 3, ""))
    if isinstance(old, list) and pick < 0.5:
        return r.choice((old[:-1], old + old[:1], old[::-1], old * 2, []))
    if pick > 0.97:
        return Raw(nested(r))
    return r.choice(NUMBERS + OTHERS)


def swap(r, value, among=None):
    """A JSON value with one of its places changed, doubled or taken away. `among`: filter of paths."""
    paths = [path for path in places(value) if path and (among is None or among(path))]
    if not paths:
        return some_value(r, value)
    # as many chances for settings near the top as for the thousands of words of a vocabulary below
    depth = r.choice(sorted({len(path) for path in paths}))
    *way, last = r.choice([path for path in paths if len(path) == depth])
    holder = value
    for key in way:
        holder = holder[key]
    if r.random() < 0.2:
        del holder[last]
    elif isinstance(holder, dict) and r.random() < 0.1:
        holder[str(last) + r.choice(("x", " ", "."))] = holder.pop(last)
    else:
        holder[last] = some_value(r, holder[last])
    return value


def doubled(r, text):
    """JSON text of an object in which a key comes twice."""
    key = r.choice([path[0] for path in places(json.loads(text)) if path] or ["x"])
    return text.rstrip()[:-1] + f", {json.dumps(key)}: {json.dumps(r.choice(NUMBERS[:8] + OTHERS))}" + "}"


def any_json(r, data):
    """Bytes of a JSON file -> damaged bytes; most stay JSON."""
    kind = r.random()
    if kind < 0.2:
        return any_bytes(r, data)
    text = data.decode()
    if kind < 0.25 and text.lstrip().startswith("{"):
        return doubled(r, text).encode()
    if kind < 0.3:
        return dumped(some_value(r, {})).encode()
    value = json.loads(text)
    for _ in range(r.choice((1, 1, 1, 3))):
        value = swap(r, value) if isinstance(value, (dict, list)) else value
    return dumped(value).encode("utf-8", "surrogatepass")


# --- safetensors ------------------------------------------------------------------------------------------------------


def any_safetensors(r, data):
    """Bytes of a safetensors file -> damaged bytes; most of them have a header that can be read."""
    kind, length = r.random(), int.from_bytes(data[:8], "little")
    if kind < 0.15:
        return any_bytes(r, data)
    if kind < 0.3:
        return flip(r, data, 8 + length)
    if kind < 0.4:
        length = r.choice((0, 1, 2, length - 1, length + 1, length + 8, len(data), len(data) - 8, 10**8, 1 << 63))
        return struct.pack("<Q", length) + data[8:]
    raw, rest = data[8 : 8 + length], data[8 + length :]
    if kind < 0.45:
        return with_header(doubled(r, raw.decode()), rest)
    header = json.loads(raw)
    for _ in range(r.choice((1, 1, 2))):
        if isinstance(header, dict):
            header = swap_header(r, header)
    return with_header(dumped(header), rest)


def with_header(text, rest):
    raw = text.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(raw)) + raw + rest


def swap_header(r, header):
    """One entry of a header changed."""
    names = [name for name in header if name != "__metadata__"]
    kind = r.random()
    if "__metadata__" in header and kind < 0.4:
        return swap_metadata(r, header)
    if not names:
        return swap(r, header)
    entry = header[r.choice(names)]
    if not isinstance(entry, dict) or kind > 0.9:
        return swap(r, header)
    name = r.choice(("dtype", "shape", "shape", "data_offsets", "move", "other"))
    if name == "dtype":
        entry["dtype"] = r.choice(DTYPES)
    elif name == "move" and isinstance(entry.get("data_offsets"), list):  # the same length elsewhere: bytes in common
        step = r.choice((-64, -2, 2, 64, 4096))
        entry["data_offsets"] = [n + step if isinstance(n, int) else n for n in entry["data_offsets"]]
    elif name == "shape" and isinstance(entry.get("shape"), list) and r.random() < 0.6:  # as many numbers, otherwise
        shape = entry["shape"]
        entry["shape"] = r.choice((shape[::-1], [1, *shape], [*shape, 1], [math.prod(map(int, shape))], [-1, *shape]))
    elif name in entry:
        entry[name] = some_value(r, entry[name])
    else:
        other = r.choice(names)
        first = r.choice(names)
        header[first], header[other] = header[other], header[first]
    return header


def swap_metadata(r, header):
    """The strings in the metadata are JSON themselves."""
    table = header["__metadata__"]
    name = r.choice(list(table)) if isinstance(table, dict) and table else None
    try:
        table[name] = dumped(swap(r, json.loads(table[name])))
    except (ValueError, TypeError, RecursionError):
        header["__metadata__"] = some_value(r, table)
    return header


# --- pickles ----------------------------------------------------------------------------------------------------------


def any_pickle(r, data):
    """Bytes of a PyTorch file -> damaged bytes; most archives stay whole around a damaged description."""
    kind = r.random()
    if not data.startswith(b"PK") or kind < 0.25:
        return any_bytes(r, data) if kind < 0.2 else flip(r, data, 2000)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = {info.filename: archive.read(info) for info in archive.infolist()}
    name = next(name for name in entries if name.endswith("data.pkl"))
    if kind < 0.8:
        entries[name] = r.choice((flip, flip, cut, splice, words))(r, entries[name])
    else:
        other = r.choice(list(entries))
        moved = entries.pop(other)
        if kind < 0.9:
            entries[other] = any_bytes(r, moved)
        elif kind < 0.95:
            entries[r.choice(("x", "../" + other, other + "x"))] = moved
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    return made.getvalue()


def words(r, data):
    """Numbers of the description (one and two bytes, four bytes) set to others: sizes, strides, offsets."""
    data = bytearray(data)
    spots = [i for i, byte in enumerate(data[:-6]) if byte in b"KMJ"]
    for spot in r.sample(spots, min(len(spots), r.choice((1, 2, 5)))):
        width = {ord("K"): 1, ord("M"): 2, ord("J"): 4}[data[spot]]
        data[spot + 1 : spot + 1 + width] = r.choice((bytes(width), b"\xff" * width, r.randbytes(width)))
    return bytes(data)


def mutate(r, name, data):
    """Bytes of a file -> damaged bytes, by the kind that its name tells."""
    if name.endswith(".json"):
        return any_json(r, data)
    if name.endswith(".safetensors"):
        return any_safetensors(r, data)
    if name.endswith((".pt", ".pth", ".bin", ".ckpt", ".jit")):
        return any_pickle(r, data)
    return any_bytes(r, data)
