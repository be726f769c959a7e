"""What a file name prefix stands for: the words that the page fills in for the host's own save nodes.

The page does so only for nodes on a list of its own, and a client of the API gets no help at all; so it is done
here, by the same rules. The host itself then fills in %width%, %year% and their kin, and counts.
"""

import datetime
import re

WORD = re.compile("%([^%]+)%")
DATE_PART = re.compile("dd?|MM?|hh?|mm?|ss?|yyyy|yy")
UNSAFE = re.compile(r'[?<>\\:*|"\x00-\x1f\x7f\ud800-\udfff]')
DEVICE = re.compile(r"(con|prn|aux|nul|(com|lpt)[0-9\u00b9\u00b2\u00b3])(?=\.|$)", re.IGNORECASE)  # no file on Windows
LONGEST = 200  # bytes of a name; file systems take 255, and number and ending follow
DEFAULT_DATE = "yyyy-MM-dd"


def expand(prefix, prompt=None, extra_pnginfo=None, now=None):
    """Return `prefix` with its %words% filled in; a word that names nothing stays as it is.

    %date% and %date:FORMAT% (d, M, h, m, s once or twice, yy, yyyy; "/" makes folders), %NODE.WIDGET%: the value
    of a widget, the node by its "Node name for S&R" or its title. Characters that no file name may hold become "_".

    prompt, extra_pnginfo: the host's hidden inputs, or None. now: datetime, the present if None.
    """
    now = now or datetime.datetime.now()

    def fill(match):
        word = match[1]
        if word == "date" or word.startswith("date:"):
            return _date(word[5:] or DEFAULT_DATE, now)
        value = _widget(word, prompt or {}, extra_pnginfo or {})
        return match[0] if value is None else value

    return WORD.sub(fill, prefix)


def portable(prefix):
    """The prefix as it can be a path below a folder on every system, or None: absolute, or on a drive of its own.

    Backslashes are slashes, as in graphs from Windows. ".." stays, for whoever joins it to a folder to look where it
    leads.
    """
    prefix = prefix.replace("\\", "/")
    if prefix.startswith("/") or re.match("[A-Za-z]:", prefix):
        return None
    return "/".join(_portable_name(part) for part in prefix.split("/"))


def _portable_name(part):
    """One name of a path: no character, length or meaning that some file system refuses."""
    if part in ("", ".", ".."):
        return part
    part = UNSAFE.sub("_", part).encode()[:LONGEST].decode(errors="ignore")
    part = part.rstrip(" .") or "_"  # Windows drops these, and would read ".. " as ".."
    return DEVICE.sub(r"\1_", part) if DEVICE.match(part) else part


def _date(form, now):
    parts = {"d": now.day, "M": now.month, "h": now.hour, "m": now.minute, "s": now.second}

    def fill(match):
        part = match[0]
        if part[0] == "y":
            return str(now.year)[-len(part):]
        return str(parts[part[0]]).zfill(len(part))

    return UNSAFE.sub("_", DATE_PART.sub(fill, form))


def _widget(word, prompt, extra_pnginfo):
    """The value of %NODE.WIDGET% as text for a file name; None if there is none, or if it comes over a wire."""
    name, dot, widget = word.partition(".")
    if not dot or "." in widget:
        return None
    workflow = extra_pnginfo.get("workflow") or {}
    given = {str(node.get("id")): (node.get("properties") or {}).get("Node name for S&R")
             for node in workflow.get("nodes") or []}
    for number, node in prompt.items():
        title = (node.get("_meta") or {}).get("title")
        value = node.get("inputs", {}).get(widget)
        if name in (given.get(number) or node.get("class_type"), title) and isinstance(value, (str, int, float)):
            text = str(value).lower() if isinstance(value, bool) else str(value)
            return UNSAFE.sub("_", text).replace("/", "_")
    return None
