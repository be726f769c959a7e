"""Building blocks of the shipped workflows: a litegraph file in the making, and the parts that all of them share.

A workflow is a function that fills a `Graph`, registered under the name that the template browser shows:

    @workflow("SCD text to image")
    def text_to_image(graph): ...
"""

from workflow_json import UPLOADS, input_specs, is_widget

VERSION = "0.1.0"
REGISTRY_ID = "speculative-coupled-decoding"
GREEN, RED = ("#232", "#353"), ("#322", "#533")
HEAD = 36  # room for the title of a group above its nodes
BLUE, GREY = "#3f789e", "#8a8a8a"
WORKFLOWS = {}  # name: function(graph)


def workflow(name):
    """Register a function that fills a `Graph` as the workflow `name`."""
    def register(make):
        WORKFLOWS[name] = make
        return make

    return register


class Graph:
    """A litegraph file in the making: nodes by name, wires by socket name.

    Attributes:
        models: names of models that a user has to download, chosen in loaders.
    """

    def __init__(self, object_info):
        self.models = set()
        self.info, self.nodes, self.links, self.groups, self.ids = object_info, [], [], [], {}

    def add(self, name, kind, at, size, title=None, colours=None, wires=None, **values):
        """A node. wires: {input: (node name, output number)}; values: {widget: value}, the others keep defaults."""
        number = self.ids[name] = len(self.nodes) + 1
        info, wires = self.info[kind], wires or {}
        specs = input_specs(info)
        unknown = (set(values) | set(wires)) - set(specs)
        if unknown:
            raise SystemExit(f"{kind} has no input {', '.join(sorted(unknown))}")
        mine = kind.startswith("SCD_")
        properties = {"Node name for S&R": kind, "cnr_id": REGISTRY_ID if mine else "comfy-core",
                      "ver": VERSION if mine else "0.3.75"}
        node = {"id": number, "type": kind, "pos": list(at), "size": list(size), "flags": {}, "order": number - 1,
                "mode": 0, "inputs": [], "outputs": outputs_of(info), "properties": properties}
        for spec, (what, options) in specs.items():
            if is_widget(what, options) and spec not in wires:
                continue
            entry = {"name": spec, "type": what, "link": None}
            if is_widget(what, options):
                entry["widget"] = {"name": spec}
            node["inputs"].append(entry)
            if spec in wires:
                entry["link"] = self.wire(wires[spec], number, len(node["inputs"]) - 1)
        node["widgets_values"] = widget_values(specs, values)
        self.place(node, title, colours)

    def place(self, node, title, colours):
        if title:
            node["title"] = title
        if colours:
            node["color"], node["bgcolor"] = colours
        self.nodes.append(node)

    def wire(self, source, target, slot):
        """Join an output to input `slot` of node `target`; returns the link's id."""
        origin = self.nodes[self.ids[source[0]] - 1]
        link = len(self.links) + 1
        origin["outputs"][source[1]]["links"].append(link)
        made = origin["outputs"][source[1]]["type"]
        self.links.append([link, origin["id"], source[1], target, slot, made])
        return link

    def note(self, text, at, size):
        """A text on the canvas."""
        number = len(self.nodes) + 1
        self.place({"id": number, "type": "MarkdownNote", "pos": list(at), "size": list(size), "flags": {},
                    "order": number - 1, "mode": 0, "inputs": [], "outputs": [], "properties": {},
                    "widgets_values": [text]}, "About this workflow", ("#432", "#653"))

    def group(self, title, left, top, width, height, colour=BLUE):
        """A titled frame around nodes."""
        box = [left, top - HEAD, width, height + HEAD]
        self.groups.append({"id": len(self.groups) + 1, "title": title, "bounding": box, "color": colour,
                            "font_size": 24, "flags": {}})

    def file(self):
        """The workflow as the page saves it."""
        return {"id": "", "revision": 0, "last_node_id": len(self.nodes), "last_link_id": len(self.links),
                "nodes": self.nodes, "links": self.links, "groups": self.groups, "config": {}, "extra": {},
                "version": 0.4}


def outputs_of(info):
    """Output sockets of a node, unconnected."""
    pairs = zip(info["output_name"], info["output"])
    return [{"name": name, "type": kind, "links": []} for name, kind in pairs]


def widget_values(specs, values):
    """Saved widget values in the page's order, each with what the page saves behind it: of a seed what happens to it
    after a run, of a file the kind that its button uploads."""
    saved = []
    for name, (kind, options) in specs.items():
        if is_widget(kind, options):
            first = (options.get("options") or [None])[0] if kind == "COMBO" else {"STRING": ""}.get(kind, 0)
            saved.append(values.get(name, options.get("default", first)))
            saved += ["fixed"] if options.get("control_after_generate") else []
            saved += ["image"] if any(options.get(key) for key in UPLOADS) else []
    return saved


def road(graph, prompt, weight_dtype="auto", model=None, negative=True):
    """Loader and prompts, the same in every workflow.

    Args:
        model: name in the loader's list; None: the bundled one. negative: with a second prompt.
    """
    graph.group("Model and prompt", 0, 0, 780, 860 if model else 480)
    chosen = {} if model is None else {"model": model}
    graph.models.update(chosen.values())
    graph.add("load", "SCD_LoadARModel", (20, 50), (330, 130), weight_dtype=weight_dtype, **chosen)
    graph.add("positive", "SCD_TextEncode", (390, 50), (370, 180), "Prompt", GREEN,
              {"ar_text": ("load", 1)}, text=prompt)
    if negative:
        graph.add("negative", "SCD_TextEncode", (390, 280), (370, 180), "Negative (may stay empty)", RED,
                  {"ar_text": ("load", 1)}, text="")


def figures(graph, left, top, sampler="draw", suffix=""):
    """Report and acceptance map of a sampler."""
    graph.add("report" + suffix, "PreviewAny", (left, top), (380, 330), "Report" + suffix,
              wires={"source": (sampler, 1)})
    graph.add("map" + suffix, "PreviewImage", (left + 410, top), (320, 330), "Acceptance map" + suffix,
              wires={"images": (sampler, 2)})


def sampler_wires(negative=True):
    """Wires of a sampler behind `road`."""
    wires = {"model": ("load", 0), "positive": ("positive", 0)}
    return {**wires, "negative": ("negative", 0)} if negative else wires


def enlarged(graph, name, image, at, side=512):
    """Small pictures, larger. image: (node, output)."""
    graph.add(name, "ImageScale", at, (300, 170), "Enlarge", wires={"image": image}, upscale_method="lanczos",
              width=side, height=side, crop="disabled")
