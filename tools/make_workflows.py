"""Write the shipped workflows from named values, so that no value can land in the wrong box.

    python tools/make_workflows.py [--object-info FILE]

Widget order, sockets and types come from a running host (started for this) or from a saved /object_info.
Needed after an input was added to a node; the layout is below.
"""

import argparse
import json
import pathlib
import sys
import tempfile
import uuid

from host_api import ROOT, problems, running_host
from workflow_json import input_specs, is_widget

VERSION = "0.1.0"
REGISTRY_ID = "speculative-coupled-decoding"
GREEN, RED = ("#232", "#353"), ("#322", "#533")
HEAD = 36  # room for the title of a group above its nodes
BLUE, GREY = "#3f789e", "#8a8a8a"


class Graph:
    """A litegraph file in the making: nodes by name, wires by socket name."""

    def __init__(self, object_info):
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
                entry["link"] = self.wire(wires[spec], number, len(node["inputs"]) - 1, what)
        node["widgets_values"] = widget_values(specs, values)
        self.place(node, title, colours)

    def place(self, node, title, colours):
        if title:
            node["title"] = title
        if colours:
            node["color"], node["bgcolor"] = colours
        self.nodes.append(node)

    def wire(self, source, target, slot, kind):
        """Join an output to input `slot` of node `target`; returns the link's id."""
        origin = self.nodes[self.ids[source[0]] - 1]
        link = len(self.links) + 1
        origin["outputs"][source[1]]["links"].append(link)
        made = origin["outputs"][source[1]]["type"]
        self.links.append([link, origin["id"], source[1], target, slot, made if kind == "*" else kind])
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
    """Saved widget values in the page's order; a seed is followed by what happens to it after a run."""
    saved = []
    for name, (kind, options) in specs.items():
        if is_widget(kind, options):
            first = (options.get("options") or [None])[0] if kind == "COMBO" else {"STRING": ""}.get(kind, 0)
            saved.append(values.get(name, options.get("default", first)))
            saved += ["fixed"] if options.get("control_after_generate") else []
    return saved


def road(graph, prompt, weight_dtype="auto"):
    """Loader and prompts, the same in every workflow."""
    graph.group("Model and prompt", 0, 0, 780, 480)
    graph.add("load", "SCD_LoadARModel", (20, 50), (330, 130), weight_dtype=weight_dtype)
    graph.add("positive", "SCD_TextEncode", (390, 50), (370, 180), "Prompt", GREEN,
              {"ar_text": ("load", 1)}, text=prompt)
    graph.add("negative", "SCD_TextEncode", (390, 280), (370, 180), "Negative (may stay empty)", RED,
              {"ar_text": ("load", 1)}, text="")


def figures(graph, left, top, sampler="draw", suffix=""):
    """Report and acceptance map of a sampler."""
    graph.add("report" + suffix, "PreviewAny", (left, top), (380, 330), "Report" + suffix,
              wires={"source": (sampler, 1)})
    graph.add("map" + suffix, "PreviewImage", (left + 410, top), (320, 330), "Acceptance map" + suffix,
              wires={"images": (sampler, 2)})


def sampler_wires():
    return {"model": ("load", 0), "positive": ("positive", 0), "negative": ("negative", 0)}


def text_to_image(info):
    graph = Graph(info)
    road(graph, "fox on snow")
    graph.note("Press **Run**: the bundled model draws a small picture from its own word list, nothing needs to be "
               "downloaded.\n\nThe tokens are those of one-at-a-time sampling with this seed; the report says in how "
               "many fewer passes they were drawn, the map where the model had to look more often.",
               (20, 230), (330, 230))
    graph.group("Draw", 810, 0, 390, 860)
    graph.add("draw", "SCD_Sampler", (830, 50), (350, 780), wires=sampler_wires(), seed=1)
    graph.group("Picture", 1230, 0, 770, 480)
    graph.add("decode", "SCD_VQDecode", (1250, 50), (300, 60), wires={"tokens": ("draw", 0), "vq": ("load", 2)})
    graph.add("scale", "ImageScale", (1250, 170), (300, 170), "Enlarge", wires={"image": ("decode", 0)},
              upscale_method="lanczos", width=512, height=512, crop="disabled")
    graph.add("save", "SaveImage", (1580, 50), (400, 410), wires={"images": ("scale", 0)},
              filename_prefix="SCD/picture")
    graph.group("How it went", 1230, 530, 770, 400, GREY)
    figures(graph, 1250, 580)
    return graph.file()


def text_to_video(info):
    graph = Graph(info)
    road(graph, "red car moving right on sand")
    graph.note("Eight frames, drawn as one sequence of tokens and enlarged; each frame is first guessed from the one "
               "before it, so a clip needs even fewer passes than a picture.\n\nVideo Combine writes the file and "
               "plays it; drop the file on the canvas to get this graph back.",
               (20, 230), (330, 230))
    graph.group("Draw", 810, 0, 390, 860)
    graph.add("draw", "SCD_Sampler", (830, 50), (350, 780), wires=sampler_wires(), seed=1, frames=8)
    graph.group("Clip", 1230, 0, 770, 720)
    graph.add("decode", "SCD_VQDecode", (1250, 50), (300, 60), wires={"tokens": ("draw", 0), "vq": ("load", 2)})
    graph.add("scale", "ImageScale", (1250, 170), (300, 170), "Enlarge", wires={"image": ("decode", 0)},
              upscale_method="lanczos", width=256, height=256, crop="disabled")
    graph.add("save", "SCD_VideoCombine", (1580, 50), (340, 640), wires={"images": ("scale", 0)}, frame_rate=8.0)
    graph.group("How it went", 1230, 760, 770, 400, GREY)
    figures(graph, 1250, 810)
    return graph.file()


def compare_methods(info):
    graph = Graph(info)
    road(graph, "owl on tree", weight_dtype="fp32")
    graph.note("Both samplers get the same prompt and seed, in fp32: **autoregressive** takes a pass for every token, "
               "**seed-exact** far fewer, and both draw the same tokens (compare the sha256 in the reports).\n\n"
               "Change the method of the second one to see the others: equally lawful, but other pictures.",
               (20, 230), (330, 230))
    graph.group("One seed for both", 0, 530, 780, 170)
    graph.add("seed", "PrimitiveInt", (20, 580), (330, 90), "Seed", value=1)
    for column, method in enumerate(("autoregressive", "seed-exact")):
        left = 830 + column * 1240
        graph.group(method, left - 20, 0, 1200, 900)
        graph.add(method, "SCD_Sampler", (left, 50), (350, 780), method, method=method, window=32,
                  wires={**sampler_wires(), "seed": ("seed", 0)})
        decoded, large = f"decode {method}", f"scale {method}"
        graph.add(decoded, "SCD_VQDecode", (left + 380, 50), (300, 60),
                  wires={"tokens": (method, 0), "vq": ("load", 2)})
        graph.add(large, "ImageScale", (left + 380, 170), (300, 170), "Enlarge", wires={"image": (decoded, 0)},
                  upscale_method="lanczos", width=512, height=512, crop="disabled")
        graph.add(f"show {method}", "PreviewImage", (left + 710, 50), (430, 460), f"Picture, {method}",
                  wires={"images": (large, 0)})
        figures(graph, left + 380, 550, method, f", {method}")
    return graph.file()


WORKFLOWS = {
    "SCD text to image": text_to_image,
    "SCD text to video": text_to_video,
    "SCD compare methods": compare_methods,
}


def write(object_info, folder):
    """Make and check every workflow; returns the paths written."""
    paths = []
    for name, make in WORKFLOWS.items():
        workflow = make(object_info)
        workflow["id"] = str(uuid.uuid5(uuid.NAMESPACE_DNS, f"{REGISTRY_ID} {name}"))
        wrong = problems(workflow, object_info)
        if wrong:
            raise SystemExit(f"{name}: {'; '.join(wrong)}")
        paths.append(folder / f"{name}.json")
        paths[-1].write_text(json.dumps(workflow, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return paths


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--object-info", type=pathlib.Path, help="a saved /object_info; default: start a host")
    args = parser.parse_args()
    if args.object_info:
        info = json.loads(args.object_info.read_text(encoding="utf-8"))
    else:
        with tempfile.TemporaryDirectory() as base, running_host(base, device="cpu") as host:
            info = host.object_info
    for path in write(info, ROOT / "workflows"):
        print(path.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
