"""Make the pictures of the help pages: each node on the page of a real ComfyUI, after a run.

    python tools/make_help_pictures.py [NODE ...]

Needs what `make venv` installs and a Chromium (on PATH, or named by CHROMIUM). Writes web/docs/pictures/<NODE>.jpg.
"""

import argparse
import io
import json
import os
import pathlib
import shutil
import tempfile

from host_api import ROOT, running_host
from PIL import Image
from playwright.sync_api import sync_playwright

OUT = ROOT / "web" / "docs" / "pictures"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "msedge")
READY = "window.app?.graph && Object.keys(window.LiteGraph?.registered_node_types ?? {}).length > 50"
QUICK = {"SCD_Sampler.window": 64, "SCD_Sampler.tree_nodes": 0}
MARGIN, WIDEST = 16, 900
# node: (workflow, widgets, nodes on the picture, when to take it: "open", "preview" or "ran")
PICTURES = {
    "SCD_LoadARModel": ("SCD text to image", {}, ["SCD_LoadARModel"], "open"),
    "SCD_TextEncode": ("SCD text to image", {}, ["SCD_TextEncode"], "open"),
    "SCD_VQDecode": ("SCD text to image", QUICK, ["SCD_VQDecode", "ImageScale", "SaveImage"], "ran"),
    "SCD_VQEncode": ("SCD inpaint by tokens", QUICK, ["SCD_VQEncode", "SaveImage"], "ran"),
    "SCD_VideoCombine": ("SCD text to video", QUICK, ["SCD_VideoCombine"], "ran"),
    "SCD_Compare": ("SCD compare all methods", {"SCD_Compare.methods": "autoregressive, seed-exact, csd"},
                    ["SCD_Compare", "PreviewImage"], "ran"),
    "SCD_ContinuousSampler": (None, {}, ["SCD_ContinuousSampler"], "ran"),
    # after the others: its second preview comes sooner once the codec has run
    "SCD_Sampler": ("SCD text to image", {**QUICK, "SCD_Sampler.window": 48}, ["SCD_Sampler"], "preview"),
}
# the nodes of a MAR, each beside the one before
CONTINUOUS = """() => {
    const graph = window.app.graph;
    graph.clear();
    const kinds = ["SCD_LoadARModel", "SCD_TextEncode", "SCD_ContinuousSampler", "SCD_VQDecode", "PreviewImage"];
    const [load, text, draw, decode, show] = kinds.map((kind, i) => {
        const node = window.LiteGraph.createNode(kind);
        graph.add(node);
        node.pos = [420 * i, 0];
        return node; });
    const join = (from, slot, to, name) => from.connect(slot, to, to.inputs.findIndex(input => input.name === name));
    join(load, 0, draw, "model"); join(load, 1, text, "ar_text"); join(text, 0, draw, "positive");
    join(draw, 0, decode, "tokens"); join(load, 2, decode, "vq"); join(decode, 0, show, "images");
    load.widgets.find(w => w.name === "model").value = "bundled MAR (one subject)";
    text.widgets.find(w => w.name === "text").value = "fox";
    draw.widgets.find(w => w.name === "seed").value = 7;
    draw.widgets.find(w => w.name === "control_after_generate").value = "fixed"; }"""
WIDGETS = """values => window.app.graph._nodes.forEach(node => (node.widgets ?? []).forEach(widget => {
    const key = `${node.type}.${widget.name}`;
    if (key in values) widget.value = values[key]; }))"""
# bring these nodes into view at full size, away from the page's own bars; where they are on the screen
PLACE = """kinds => {
    const seen = new Set(), canvas = window.app.canvas;
    const nodes = window.app.graph._nodes.filter(n => kinds.includes(n.type) && !seen.has(n.type) && seen.add(n.type));
    const left = Math.min(...nodes.map(n => n.pos[0])), top = Math.min(...nodes.map(n => n.pos[1])) - 30;
    const right = Math.max(...nodes.map(n => n.pos[0] + n.size[0]));
    const bottom = Math.max(...nodes.map(n => n.pos[1] + n.size[1]));
    canvas.deselectAll?.();
    canvas.ds.scale = 1;
    canvas.ds.offset = [200 - left, 150 - top];
    canvas.draw(true, true);
    const box = canvas.canvas.getBoundingClientRect();
    return [200 + box.left, 150 + box.top, right - left, bottom - top]; }"""
PREVIEWS = """() => {
    window.previews = [];
    window.app.api.addEventListener("b_preview_with_metadata", event => window.previews.push(event.detail)); }"""


def ran(page, host, since):
    """Wait for the end of the run that is the first one after the runs `since`."""
    for _ in range(1200):
        fresh = [entry for number, entry in host.json("/history").items() if number not in since]
        if fresh:
            break
        page.wait_for_timeout(250)
    if not fresh or fresh[0]["status"]["status_str"] != "success":
        raise SystemExit(f"the run did not succeed: {fresh and fresh[0]['status']}")
    for _ in range(20):  # the page fetches what it shows, and draws it
        page.evaluate("() => window.app.canvas.draw(true, true)")
        page.wait_for_timeout(150)


def picture(page, host, node):
    """PIL picture of the page's part that shows a node."""
    name, widgets, kinds, moment = PICTURES[node]
    if name is None:
        page.evaluate(CONTINUOUS)
    else:
        workflow = json.loads((ROOT / "workflows" / f"{name}.json").read_text(encoding="utf-8"))
        page.evaluate("async workflow => { await window.app.loadGraphData(workflow); }", workflow)
    page.evaluate(WIDGETS, widgets)
    page.evaluate(PLACE, kinds)
    page.wait_for_timeout(800)
    since = set(host.json("/history"))
    if moment != "open":
        page.evaluate("async () => { window.previews.length = 0; await window.app.queuePrompt(0); }")
    if moment == "preview":
        page.wait_for_function("() => window.previews.length > 1", timeout=300_000, polling=20)
        page.evaluate("() => window.app.canvas.draw(true, true)")
        page.wait_for_timeout(400)
    elif moment == "ran":
        ran(page, host, since)
    x, y, width, height = page.evaluate(PLACE, kinds)
    page.wait_for_timeout(400)
    clip = {"x": x - MARGIN, "y": y - MARGIN, "width": width + 2 * MARGIN, "height": height + 2 * MARGIN}
    taken = Image.open(io.BytesIO(page.screenshot(clip=clip))).convert("RGB")
    if moment == "preview":
        ran(page, host, since)
    taken.thumbnail((WIDEST, WIDEST), Image.Resampling.LANCZOS)
    return taken


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("nodes", nargs="*", choices=[[], *PICTURES], help="default: all")
    nodes = parser.parse_args().nodes or PICTURES
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        raise SystemExit("no Chromium on PATH: install it, or set CHROMIUM to its program file")
    OUT.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as base, running_host(pathlib.Path(base), device="cpu") as host:
        host.fetch("/settings/Comfy.TutorialCompleted", True)
        host.fetch("/settings/Comfy.Minimap.Visible", False)
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox", "--use-gl=swiftshader"])
            page = browser.new_page(viewport={"width": 1900, "height": 1300})
            page.set_default_timeout(120_000)
            page.route("**/*", lambda route: route.continue_()
                       if route.request.url.startswith((host.base_url, "data:", "blob:")) else route.abort())
            page.goto(host.base_url, wait_until="domcontentloaded")
            page.wait_for_function(READY, timeout=120_000)
            page.wait_for_timeout(2000)
            page.evaluate(PREVIEWS)
            for node in nodes:
                taken = picture(page, host, node)
                taken.save(OUT / f"{node}.jpg", quality=80, optimize=True)
                print(f"{node}: {taken.width}x{taken.height}, {(OUT / f'{node}.jpg').stat().st_size} bytes")
            browser.close()


if __name__ == "__main__":
    main()
