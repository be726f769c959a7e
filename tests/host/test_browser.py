"""The pack as an artist meets it: the ComfyUI page in headless Chromium, the pinned one and the newest."""

import pytest
from host_api import ROOT, to_api

pytestmark = [pytest.mark.host, pytest.mark.browser, pytest.mark.slow]

PACK = "speculative-coupled-decoding"
WORKFLOWS = sorted(path.stem for path in (ROOT / "workflows").glob("*.json"))
HELP = sorted(path.stem for path in (ROOT / "web" / "docs").glob("*.md"))
RUN = 'button[data-testid="queue-button"], [data-testid="queue-button"] button'
READY = "window.app?.graph && Object.keys(window.LiteGraph?.registered_node_types ?? {}).length > 50"
RED = """() => window.app.graph._nodes.filter(
    n => n.has_errors || !(n.type in window.LiteGraph.registered_node_types)).map(n => n.type)"""
TITLE = """type => {
    const node = window.app.graph._nodes.find(n => n.type === type), canvas = window.app.canvas;
    const at = canvas.ds.convertOffsetToCanvas([node.pos[0] + node.size[0] / 2, node.pos[1] - 14]);
    const box = canvas.canvas.getBoundingClientRect();
    return [at[0] + box.left, at[1] + box.top]; }"""
ALONE = """type => {
    window.app.graph.clear();
    window.app.canvas.ds.reset();
    const node = window.LiteGraph.createNode(type);
    window.app.graph.add(node);
    node.pos = [520, 260]; }"""
WIDGETS = """values => window.app.graph._nodes.forEach(node => (node.widgets ?? []).forEach(widget => {
    const key = `${node.type}.${widget.name}`;
    if (key in values) widget.value = values[key]; }))"""
# every node that shows a file has one; the colours of the first picture, as [least, greatest] over all pixels
SHOWN = """() => {
    const shows = ["SaveImage", "PreviewImage", "SCD_VideoCombine"];
    const nodes = window.app.graph._nodes.filter(n => shows.includes(n.type));
    const shown = nodes.map(n => n.widgets?.find(w => w.name === "video-preview")?.element.querySelector("video")
        ?? n.imgs?.[0]);
    const whole = shown.every(s => s && s.src.includes("/view?") && (s.videoWidth || (s.complete && s.naturalWidth)));
    window.app.canvas.draw(true, true);
    if (!nodes.length || !whole) return null;
    const canvas = document.createElement("canvas"), context = canvas.getContext("2d");
    canvas.width = canvas.height = 64;
    context.drawImage(shown[0], 0, 0, 64, 64);
    const data = context.getImageData(0, 0, 64, 64).data;
    return [Math.min(...data), Math.max(...data.filter((_, i) => i % 4 < 3))]; }"""
PREVIEWED = """() => {
    const sampler = window.app.graph._nodes.find(n => n.type === "SCD_Sampler");
    window.app.canvas.draw(true, true);
    return sampler.imgs?.[0]?.src.startsWith("blob:") && sampler.imgs[0].naturalWidth > 0; }"""
DROP = """async ([url, name]) => {
    const data = await (await fetch(url)).blob(), transfer = new DataTransfer();
    window.app.graph.clear();
    transfer.items.add(new File([data], name, {type: data.type}));
    const drop = {dataTransfer: transfer, bubbles: true, cancelable: true, clientX: 700, clientY: 450};
    window.app.canvas.canvas.dispatchEvent(new DragEvent("drop", drop)); }"""
QUICK = {"SCD_Sampler.window": 16, "SCD_Sampler.tree_nodes": 0}
RUNS = {  # widgets that make it short
    "SCD text to image": {**QUICK, "SCD_Sampler.method": "autoregressive", "SCD_Sampler.batch_size": 2},
    "SCD text to video": {**QUICK, "SCD_Sampler.frames": 3},
    "SCD compare all methods": {
        "SCD_Compare.methods": "jacobi, seed-exact", "SCD_Compare.window": 16, "SCD_Compare.cfg": 1.0},
    "SCD inpaint by tokens": QUICK,
}


def command(page, name):
    page.evaluate("name => window.app.extensionManager.command.execute(name)", name)


def opened(page, site, name):
    """Load a shipped workflow and bring all of it into view."""
    page.evaluate("async workflow => { await window.app.loadGraphData(workflow); }", site.workflow(name))
    page.wait_for_timeout(200)
    command(page, "Comfy.Canvas.FitView")
    page.wait_for_timeout(300)


def test_template_list_shows_every_workflow_and_opens_one(page, screenshots):
    command(page, "Comfy.BrowseTemplates")
    for name in WORKFLOWS:
        page.locator(f'[data-testid="template-workflow-{name}"]').wait_for(state="attached")
    page.screenshot(path=str(screenshots / "templates.png"))
    page.locator('[data-testid="template-workflow-SCD text to image"]').click()
    page.wait_for_function("() => window.app.graph._nodes.some(n => n.type === 'SCD_Sampler')")
    page.wait_for_timeout(500)
    assert page.evaluate(RED) == []


@pytest.mark.parametrize("name", WORKFLOWS)
def test_page_and_driver_read_a_workflow_alike(site, page, screenshots, name):
    workflow = site.workflow(name)
    opened(page, site, name)
    page.screenshot(path=str(screenshots / f"{site.kind} {name}.png"))
    assert page.evaluate(RED) == []
    queued = page.evaluate("async () => (await window.app.graphToPrompt()).output")
    ours = to_api(workflow, site.object_info)
    for node in queued.values():  # the page adds the text box in which PreviewAny shows what it got
        if node["class_type"] == "PreviewAny":
            node["inputs"].pop("preview", None)
    assert {number: (node["class_type"], node["inputs"]) for number, node in queued.items()} == {
        number: (node["class_type"], node["inputs"]) for number, node in ours.items()}


def test_workflow_survives_being_saved_by_the_page(site, page):
    """Opening and saving a shipped file changes no widget value and no wire."""
    opened(page, site, WORKFLOWS[-1])
    saved = page.evaluate("() => window.app.graph.serialize()")
    assert to_api(saved, site.object_info) == to_api(site.workflow(WORKFLOWS[-1]), site.object_info)


def prompt_of(page):
    """What Run would send."""
    return page.evaluate("async () => (await window.app.graphToPrompt()).output")


@pytest.mark.parametrize("name, widgets", RUNS.items(), ids=RUNS)
def test_run_shows_the_picture_and_dropping_it_brings_the_graph_back(site, page, screenshots, name, widgets):
    opened(page, site, name)
    page.evaluate(WIDGETS, widgets)
    sent, before = prompt_of(page), set(site.json("/history"))
    page.locator(RUN).first.click()
    if widgets.get("SCD_Sampler.method") == "autoregressive":
        page.wait_for_function(PREVIEWED, polling=100)
        page.screenshot(path=str(screenshots / f"{site.kind} preview.png"))
        assert page.evaluate(SHOWN) is None, "a preview comes while the picture is drawn"
    page.wait_for_function(f"() => ({SHOWN})() !== null", polling=250)
    page.wait_for_timeout(300)
    page.screenshot(path=str(screenshots / f"{site.kind} ran {name}.png"))
    least, greatest = page.evaluate(SHOWN)
    assert greatest - least > 50
    assert page.evaluate(RED) == [] and page.errors == []

    [run] = [entry for number, entry in site.json("/history").items() if number not in before]
    items = [item for output in run["outputs"].values() for item in output.get("images", ())]
    for item in (item for item in items if item["type"] == "output"):
        address = f"/view?filename={item['filename']}&subfolder={item['subfolder']}&type=output"
        page.evaluate(DROP, [address, item["filename"]])
        page.wait_for_function("count => window.app.graph._nodes.length >= count", arg=len(sent))
        for _ in range(50):  # nodes come before their values
            page.wait_for_timeout(200)
            if (back := prompt_of(page)) == sent:
                break
        assert back == sent and page.evaluate(RED) == []


def first_heading(path):
    return next(line.lstrip("# ") for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("#"))


def help_shown(page, name, heading):
    """Click a node's title and its info button as an artist would; wait for the page's heading and its picture."""
    page.evaluate(ALONE, name)
    page.wait_for_timeout(150)
    page.mouse.click(*page.evaluate(TITLE, name))
    page.locator('[data-testid="info-button"]').first.click()
    page.get_by_role("heading", name=heading).first.wait_for()
    page.wait_for_function("""address => [...document.querySelectorAll("img")].some(image =>
        image.src.endsWith(address) && image.complete && image.naturalWidth > 50)""",
        arg=f"/extensions/{PACK}/docs/pictures/{name}.jpg")


def test_help_page_of_every_node_shows_text_and_picture(page, screenshots, site):
    for name in HELP:
        help_shown(page, name, first_heading(ROOT / "web" / "docs" / f"{name}.md"))
        page.screenshot(path=str(screenshots / f"{site.kind} help {name}.png"))
    site.fetch("/settings/Comfy.Locale", "zh")
    try:
        page.reload(wait_until="domcontentloaded")
        page.wait_for_function(READY)
        page.wait_for_timeout(1000)
        help_shown(page, "SCD_VQDecode", first_heading(ROOT / "web" / "docs" / "SCD_VQDecode" / "zh.md"))
        page.screenshot(path=str(screenshots / f"{site.kind} help zh.png"))
    finally:
        site.fetch("/settings/Comfy.Locale", "en")
