"""Workflow files of the ComfyUI page: check them against a server's /object_info and turn them into prompts.

The page saves a litegraph file (nodes with positional widget values, links); the server runs an API prompt
({node id: {class_type, inputs}}). `to_api` does what the page does when Run is pressed, `problems` says what
a person opening the file would stumble over.
"""

ALWAYS, MUTED, BYPASSED = 0, 2, 4
VALUE_TYPES = {"INT", "FLOAT", "STRING", "BOOLEAN", "COMBO"}
# inputs whose widget brings a button that saves a value of its own
UPLOADS = ("image_upload", "video_upload", "audio_upload", "animated_image_upload")
PAGE_ONLY = {"Note", "MarkdownNote", "Reroute", "PrimitiveNode"}


class WorkflowError(ValueError):
    """The workflow cannot be turned into a prompt; the message says which node and why."""


def input_specs(info):
    """{input name: (type, options)} of one /object_info entry, in widget order; a choice is a COMBO."""
    specs = {}
    for kind in ("required", "optional"):
        entries = info["input"].get(kind) or {}
        for name in (info.get("input_order") or {}).get(kind) or entries:
            entry = entries[name]
            options = dict(entry[1]) if len(entry) > 1 else {}
            if isinstance(entry[0], list):
                options.setdefault("options", entry[0])
            specs[name] = ("COMBO" if isinstance(entry[0], list) else entry[0], {**options, "kind": kind})
    return specs


def is_widget(kind, options):
    """Whether the page draws a box for this input, and so saves a value for it."""
    return kind in VALUE_TYPES and not options.get("forceInput")


def extra_values(name, kind, options):
    """How many further values the page saves after this widget's own one."""
    control = options.get("control_after_generate")
    if control is None:
        control = kind == "INT" and name in ("seed", "noise_seed")
    return int(bool(control)) + int(any(options.get(key) for key in UPLOADS))


def widget_values(node, info):
    """({input name: saved value}, number of values the page saves) of one node."""
    saved = node.get("widgets_values") or []
    if isinstance(saved, dict):
        return {k: v for k, v in saved.items() if k in input_specs(info)}, len(saved)
    values, at = {}, 0
    for name, (kind, options) in input_specs(info).items():
        if is_widget(kind, options):
            if at < len(saved):
                values[name] = saved[at]
            at += 1 + extra_values(name, kind, options)
    return values, at


def _links(workflow):
    """{link id: (source node id, source slot, target node id, target slot, type)}; both file versions."""
    table = {}
    for link in workflow.get("links") or []:
        if isinstance(link, dict):
            link = [link[k] for k in ("id", "origin_id", "origin_slot", "target_id", "target_slot", "type")]
        table[link[0]] = tuple(link[1:6])
    return table


def _title(node):
    return f"node {node['id']} ({node.get('title') or node['type']})"


def _source(link_id, nodes, links, info, seen=()):
    """What feeds a link: [node id, slot], ("value", x) for a primitive, None where nothing arrives."""
    if link_id is None or link_id not in links or link_id in seen:
        return None
    origin, slot, *_, kind = links[link_id]
    node = nodes.get(origin)
    if node is None or node.get("mode", ALWAYS) == MUTED:
        return None
    through = [entry.get("link") for entry in node.get("inputs") or []]
    if node["type"] == "Reroute":
        return _source(through[0] if through else None, nodes, links, info, (*seen, link_id))
    if node["type"] == "PrimitiveNode":
        return ("value", node["widgets_values"][0])
    if node.get("mode", ALWAYS) == BYPASSED:
        # as the page does: the first input of the same type, the one in the same row if it fits
        fitting = [e for e in node.get("inputs") or [] if e.get("type") == kind and e.get("link") is not None]
        same_row = [e for e in (node.get("inputs") or [])[slot:slot + 1] if e in fitting]
        chosen = (same_row or fitting or [{}])[0]
        return _source(chosen.get("link"), nodes, links, info, (*seen, link_id))
    return [str(origin), slot]


def to_api(workflow, object_info):
    """Turn a saved workflow (litegraph JSON, version 0.4 or 1) into the prompt that POST /prompt takes.

    Reroutes, primitives, muted and bypassed nodes are resolved as the page does. Raises WorkflowError for
    a node type that the server does not know and for subgraphs.
    """
    if (workflow.get("definitions") or {}).get("subgraphs"):
        raise WorkflowError("the workflow holds subgraphs, which this converter does not unfold")
    nodes, links = {node["id"]: node for node in workflow["nodes"]}, _links(workflow)
    prompt = {}
    for node in nodes.values():
        if node["type"] in PAGE_ONLY or node.get("mode", ALWAYS) in (MUTED, BYPASSED):
            continue
        if node["type"] not in object_info:
            raise WorkflowError(f"{_title(node)}: the server has no node type {node['type']!r}")
        info = object_info[node["type"]]
        inputs, _ = widget_values(node, info)
        for entry in node.get("inputs") or []:
            source = _source(entry.get("link"), nodes, links, info)
            if isinstance(source, tuple):
                inputs[entry["name"]] = source[1]
            elif source is not None:
                inputs[entry["name"]] = source
        title = node.get("title") or info.get("display_name") or node["type"]
        prompt[str(node["id"])] = {"class_type": node["type"], "inputs": inputs, "_meta": {"title": title}}
    return prompt


def _fits(made, wanted):
    made, wanted = set(str(made).split(",")), set(str(wanted).split(","))
    return "*" in made | wanted or bool(made & wanted)


def _value_problem(name, value, kind, options):
    """What is wrong with one saved widget value, or None."""
    if kind == "COMBO":
        choices = options.get("options")
        if choices and value not in choices:
            return f"{name} is {value!r}, which is not among {choices}"
    elif kind in ("INT", "FLOAT"):
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or (kind == "INT" and value != int(value)):
            return f"{name} is {value!r}, expected {kind}"
        if not options.get("min", value) <= value <= options.get("max", value):
            return f"{name} is {value}, outside {options.get('min')}..{options.get('max')}"
    elif not isinstance(value, {"STRING": str, "BOOLEAN": bool}[kind]):
        return f"{name} is {value!r}, expected {kind}"
    return None


def _widget_problems(node, info, strict):
    specs = input_specs(info)
    values, count = widget_values(node, info)
    saved = len(node.get("widgets_values") or [])
    if saved < count or (strict and saved != count):
        yield f"saves {saved} widget values, the node has {count}"
    for name, value in values.items():
        wrong = _value_problem(name, value, *specs[name])
        if wrong:
            yield wrong


def _socket_problems(node, info, links):
    specs = input_specs(info)
    linked = {entry["name"] for entry in node.get("inputs") or [] if entry.get("link") is not None}
    for name, (kind, options) in specs.items():
        if options["kind"] == "required" and not is_widget(kind, options) and name not in linked:
            yield f"input {name} is not connected"
    for at, entry in enumerate(node.get("inputs") or []):
        if entry["name"] not in specs:
            yield f"has no input {entry['name']!r}"
        elif entry.get("link") is not None and links.get(entry["link"], (None,) * 4)[2:4] != (node["id"], at):
            yield f"input {entry['name']} names link {entry['link']}, which does not lead to it"
    made = list(zip(info.get("output_name") or [], info.get("output") or []))
    for at, entry in enumerate(node.get("outputs") or []):
        if at >= len(made) or not _fits(made[at][1], entry.get("type")):
            yield f"output {at} is {entry.get('name')} ({entry.get('type')}), the node makes {made}"
        for link in entry.get("links") or []:
            if links.get(link, (None,) * 2)[:2] != (node["id"], at):
                yield f"output {at} names link {link}, which does not start there"


def _link_problems(nodes, links, object_info):
    for number, (origin, slot, target, place, kind) in links.items():
        ends = [nodes.get(origin), nodes.get(target)]
        if None in ends:
            yield f"link {number} joins node {origin} to node {target}, one of which is missing"
            continue
        if any(n["type"] in PAGE_ONLY or n["type"] not in object_info for n in ends):
            continue
        makes = object_info[ends[0]["type"]].get("output") or []
        entries = ends[1].get("inputs") or []
        if slot >= len(makes) or place >= len(entries):
            yield f"link {number} uses a socket that is not there: {origin}.{slot} or {target}.{place}"
            continue
        wanted = input_specs(object_info[ends[1]["type"]]).get(entries[place]["name"], (kind,))[0]
        if not (_fits(makes[slot], wanted) and _fits(makes[slot], kind)):
            yield f"link {number} ({kind}) joins {makes[slot]} to {wanted}"


def problems(workflow, object_info, own="SCD_", registry_id="speculative-coupled-decoding"):
    """Sentences about everything that would show as a red node, a lost link or a value in the wrong box.

    Nodes whose type starts with `own` must also save exactly the widgets they have and carry the properties
    by which a missing pack is found (cnr_id, ver).
    """
    found = []
    nodes, links = {node["id"]: node for node in workflow["nodes"]}, _links(workflow)
    if len(nodes) != len(workflow["nodes"]):
        found.append("two nodes have the same id")
    for node in nodes.values():
        if node["type"] in PAGE_ONLY:
            continue
        if node["type"] not in object_info:
            found.append(f"{_title(node)}: unknown node type {node['type']!r}")
            continue
        info, mine = object_info[node["type"]], node["type"].startswith(own)
        found += [f"{_title(node)}: {text}" for text in _widget_problems(node, info, strict=mine)]
        found += [f"{_title(node)}: {text}" for text in _socket_problems(node, info, links)]
        properties = node.get("properties") or {}
        if mine and (properties.get("cnr_id") != registry_id or not properties.get("ver")
                     or properties.get("Node name for S&R") != node["type"]):
            found.append(f"{_title(node)}: properties must name cnr_id {registry_id}, ver and the node id")
    return found + list(_link_problems(nodes, links, object_info))
