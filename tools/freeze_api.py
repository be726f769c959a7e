"""Freeze what saved graphs and API prompts of a release rely on, so that tests refuse every later breach of it.

    python tools/freeze_api.py [--object-info FILE]

Kept are, of every node, the names, types, order, defaults, ranges and choices of its inputs and the names and types of
its outputs, and of every shipped workflow its API prompt and the values that the page saves. Nodes come from a running
host (started for this) or from a saved /object_info. Run it last thing before the first release of a major version:
from then on nodes may only grow by optional inputs and by choices, and this file stays as it is.
"""

import json
import pathlib
import sys

from workflow_json import extra_values, input_specs, is_widget, to_api

ROOT = pathlib.Path(__file__).resolve().parents[1]
OUT = ROOT / "tests" / "data" / "api_v1.json"
OWN = "SCD_"
KEPT = ("kind", "default", "min", "max", "options")


def described(info):
    """The promises of one /object_info entry -> {"inputs": {name: {...}}, "outputs": [[name, type], ...]}.

    "saves" of an input: how many values the page saves for it.
    """
    inputs = {}
    for name, (kind, options) in input_specs(info).items():
        saves = 1 + extra_values(name, kind, options) if is_widget(kind, options) else 0
        inputs[name] = {"type": kind, "saves": saves, **{k: options[k] for k in KEPT if options.get(k) is not None}}
    return {"inputs": inputs, "outputs": [list(pair) for pair in zip(info["output_name"], info["output"])]}


def breaches(promised, info):
    """Sentences about what a node (an /object_info entry) does not keep of its `described` self of a release."""
    now = described(info)
    if now["outputs"][: len(promised["outputs"])] != promised["outputs"]:
        yield f"its outputs were {promised['outputs']}, now they are {now['outputs']}"
    for kind in ("required", "optional"):
        had, has = ([name for name, one in node["inputs"].items() if one["kind"] == kind] for node in (promised, now))
        if has[: len(had)] != had:
            yield f"its {kind} inputs were {had}, now they are {has}"
        elif kind == "required" and has != had:
            yield f"new inputs must be optional: {has[len(had):]}"
    for name, had in promised["inputs"].items():
        if name in now["inputs"]:
            yield from (f"{name}: {told}" for told in _changes(had, now["inputs"][name]))


def _changes(had, has):
    """What one input does not keep."""
    for key in ("type", "default", "saves"):
        if had.get(key) != has.get(key):
            yield f"its {key} was {had.get(key)!r}, now it is {has.get(key)!r}"
    gone = [choice for choice in had.get("options", ()) if choice not in has.get("options", ())]
    if gone:
        yield f"the choices {gone} are gone"
    if "min" in had and (has["min"] > had["min"] or has["max"] < had["max"]):
        yield f"it took {had['min']} to {had['max']}, now {has['min']} to {has['max']}"


def frozen(object_info, workflows):
    """All that is kept, as one dict.

    Args:
        object_info: of a host whose models folder is empty. workflows: {name: the page's file}.
    """
    nodes = {name: described(info) for name, info in object_info.items() if name.startswith(OWN)}
    prompts = {name: to_api(workflow, object_info) for name, workflow in workflows.items()}
    saved = {
        name: {str(node["id"]): node["widgets_values"] for node in workflow["nodes"] if node["type"].startswith(OWN)}
        for name, workflow in workflows.items()
    }
    return {"nodes": nodes, "prompts": prompts, "saved": saved}


def shipped():
    """{name: the page's file} of all workflows."""
    files = sorted((ROOT / "workflows").glob("*.json"))
    return {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in files}


def lines(value, deep, indent=""):
    """JSON with one line for whatever lies `deep` levels down, so that a difference shows where it is."""
    if not deep or not isinstance(value, dict):
        return json.dumps(value, ensure_ascii=False)
    further = indent + " "
    inner = [f"{further}{json.dumps(key)}: {lines(item, deep - 1, further)}" for key, item in value.items()]
    return "{\n" + ",\n".join(inner) + f"\n{indent}}}"


def main():
    from host_api import object_info_asked_for

    info = object_info_asked_for(__doc__.splitlines()[0])
    OUT.write_text(lines(frozen(info, shipped()), 4) + "\n", encoding="utf-8")
    print(OUT.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
