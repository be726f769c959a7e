"""Video Combine on the page: what its node shows for each kind of file, and that dropped files bring the graph back."""

import pytest

pytestmark = [pytest.mark.host, pytest.mark.browser, pytest.mark.slow]

# a graph that needs no model: three grey frames
BUILD = """() => {
    const graph = window.app.graph, make = window.LiteGraph.createNode.bind(window.LiteGraph);
    graph.clear();
    const frames = make("EmptyImage"), save = make("SCD_VideoCombine");
    graph.add(frames); graph.add(save);
    frames.pos = [50, 100]; save.pos = [450, 100];
    frames.connect(0, save, save.inputs.findIndex(input => input.name === "images"));
    const set = (node, values) => node.widgets.forEach(w => { if (w.name in values) w.value = values[w.name]; });
    set(frames, {width: 64, height: 64, batch_size: 3, color: 8421504});
    set(save, {filename_prefix: "player/%date:yyyy%_%EmptyImage.batch_size%"}); }"""
FORMAT = """name => { const save = window.app.graph._nodes.find(n => n.type === "SCD_VideoCombine");
    save.widgets.find(w => w.name === "format").value = name; }"""
# what the node shows: the kind of element and the file in it, the sentence
SHOWN = """() => {
    const node = window.app.graph._nodes.find(n => n.type === "SCD_VideoCombine");
    const widget = name => node.widgets.find(w => w.name === name);
    const video = widget("video-preview")?.element.querySelector("video");
    const moving = widget("$$comfy_animation_preview")?.element.querySelector("img");
    const still = widget("$$canvas-image-preview") ? node.imgs?.[0] : null;
    const shown = video ?? moving ?? still;
    if (!shown || !(shown.videoWidth || shown.naturalWidth)) return null;
    return {kind: video ? "video" : moving ? "moving" : "still", note: widget("scd-note")?.element.textContent ?? "",
            file: new URL(shown.src).searchParams.get("filename"),
            width: shown.videoWidth || shown.naturalWidth}; }"""
SAVED = """() => window.app.graph._nodes.find(n => n.type === "SCD_VideoCombine").serialize().widgets_values"""
DROP = """async ([url, name, type]) => {
    const data = await (await fetch(url)).blob(), transfer = new DataTransfer();
    window.app.graph.clear();
    transfer.items.add(new File([data], name, {type}));
    const drop = {dataTransfer: transfer, bubbles: true, cancelable: true, clientX: 700, clientY: 450};
    window.app.canvas.canvas.dispatchEvent(new DragEvent("drop", drop)); }"""
RESTORED = """() => window.app.graph._nodes.map(n => n.type).sort().join() === "EmptyImage,SCD_VideoCombine" """
TYPES = {"mp4": "video/mp4", "webm": "video/webm", "mov": "video/quicktime", "webp": "image/webp", "png": "image/png"}
ORDER = [  # from one kind to another and back: the page keeps a node that showed a video a video node
    ("mp4 (h264)", "video"), ("gif", "moving"), ("webm (vp9)", "video"), ("mov (prores 4444)", "still"),
    ("webp (lossless)", "moving"), ("mp4 (h265)", "still"), ("png sequence (16-bit)", "still"), ("webm (av1)", "video"),
]
SHORT = [ORDER[i] for i in (0, 2, 4, 3)]


def run(page, name):
    """Run the graph with a format; returns what the node shows once the new file is there."""
    before = (page.evaluate(SHOWN) or {}).get("file")
    page.evaluate(FORMAT, name)
    page.evaluate("async () => { await window.app.queuePrompt(0); }")
    page.wait_for_function(f"before => {{ const s = ({SHOWN})(); window.app.canvas.draw(true, true); "
                           "return s !== null && s.file !== before; }", arg=before)
    page.wait_for_timeout(300)
    return page.evaluate(SHOWN)


def test_each_kind_of_file_is_shown_and_brings_the_graph_back(site, page, screenshots):
    page.evaluate(BUILD)
    saved = page.evaluate(SAVED)
    for name, kind in ORDER if site.kind == "pinned" else SHORT:
        shown = run(page, name)
        page.screenshot(path=str(screenshots / f"{site.kind} player {name}.png"))
        assert (shown["kind"], shown["width"]) == (kind, 64), name
        unplayable = name in ("mov (prores 4444)", "mp4 (h265)")
        assert shown["note"].startswith("First frame of ") == unplayable and (name in shown["note"]) == unplayable
        assert page.evaluate(SAVED) == [*saved[:3], name, *saved[4:]], "no player or sentence among the saved values"
    assert page.errors == []

    files = sorted(path for path in (site.base / "output" / "player").rglob("*") if path.is_file())
    assert all(path.name.startswith(f"{path.name[:4]}_3_") and path.name[:4].isdigit() for path in files)
    tried = set()
    for path in files:
        ending = path.suffix[1:]
        if ending == "gif" or (path.parent.name != "player" and not path.stem.endswith("_00001")):
            continue  # the page reads no gif, hence the picture beside it; of a sequence only the first holds the graph
        subfolder = path.parent.relative_to(site.base / "output").as_posix()
        url = f"/view?filename={path.name}&subfolder={subfolder}&type=output"
        page.evaluate(DROP, [url, path.name, TYPES[ending]])
        page.wait_for_function(RESTORED)
        tried.add(ending)
    assert tried == set(TYPES)
