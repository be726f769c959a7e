"""The pack as an artist meets it: the ComfyUI page in headless Chromium."""

import pytest
from host_api import ROOT, to_api

pytestmark = [pytest.mark.host, pytest.mark.browser, pytest.mark.slow]

WORKFLOWS = sorted(path.stem for path in (ROOT / "workflows").glob("*.json"))
PICTURE = "SCD text to image"
RED = """() => window.app.graph._nodes.filter(
    n => n.has_errors || !(n.type in window.LiteGraph.registered_node_types)).map(n => n.type)"""
TITLE = """(type) => {
    const node = window.app.graph._nodes.find(n => n.type === type), canvas = window.app.canvas;
    const at = canvas.ds.convertOffsetToCanvas([node.pos[0] + node.size[0] / 2, node.pos[1] - 14]);
    const box = canvas.canvas.getBoundingClientRect();
    return [at[0] + box.left, at[1] + box.top]; }"""
# the colours of the first picture that a node shows, as [least, greatest] over all pixels
SHOWN = """() => {
    const node = window.app.graph._nodes.find(n => n.type === "SaveImage");
    const image = node && node.imgs && node.imgs[0];
    if (!image || !image.complete || !image.naturalWidth || !image.src.includes("/view?")) return null;
    const canvas = document.createElement("canvas");
    canvas.width = image.naturalWidth; canvas.height = image.naturalHeight;
    const context = canvas.getContext("2d");
    context.drawImage(image, 0, 0);
    const data = context.getImageData(0, 0, canvas.width, canvas.height).data;
    let least = 255, greatest = 0;
    for (let i = 0; i < data.length; i += 4) {
        least = Math.min(least, data[i]); greatest = Math.max(greatest, data[i]); }
    return [least, greatest]; }"""


def command(page, name):
    page.evaluate("name => window.app.extensionManager.command.execute(name)", name)


def open_template(page, name):
    command(page, "Comfy.BrowseTemplates")
    page.locator(f'[data-testid="template-workflow-{name}"]').click()
    page.wait_for_function("() => window.app.graph._nodes.some(n => n.type === 'SCD_Sampler')")
    page.wait_for_timeout(1000)
    command(page, "Comfy.Canvas.FitView")
    page.wait_for_timeout(700)


def test_open_run_and_see_the_picture(host, page, screenshots):
    open_template(page, PICTURE)
    assert page.evaluate(RED) == []
    page.locator('[data-testid="queue-button"] button').first.click()
    page.wait_for_function(f"() => ({SHOWN})() !== null", timeout=120_000)
    page.wait_for_timeout(500)
    page.screenshot(path=str(screenshots / "picture.png"))
    least, greatest = page.evaluate(SHOWN)
    assert greatest - least > 50
    assert page.evaluate(RED) == []
    assert page.errors == []


def test_help_page_opens_from_the_node(page, screenshots):
    open_template(page, PICTURE)
    for name in ("SCD_LoadARModel", "SCD_TextEncode", "SCD_Sampler", "SCD_VQDecode"):
        page.mouse.click(*page.evaluate(TITLE, name))
        page.locator('[data-testid="info-button"]').first.click()
        first = next(line.lstrip("# ") for line in (ROOT / "web" / "docs" / f"{name}.md").read_text(
            encoding="utf-8").splitlines() if line.startswith("#"))
        page.get_by_role("heading", name=first).first.wait_for(timeout=10_000)
        page.screenshot(path=str(screenshots / f"help {name}.png"))


@pytest.mark.parametrize("name", WORKFLOWS)
def test_page_and_driver_read_a_workflow_alike(host, page, screenshots, name):
    workflow = host.workflow(name)
    page.evaluate("async workflow => { await window.app.loadGraphData(workflow); }", workflow)
    page.wait_for_timeout(500)
    command(page, "Comfy.Canvas.FitView")
    page.wait_for_timeout(700)
    page.screenshot(path=str(screenshots / f"{name}.png"))
    assert page.evaluate(RED) == []
    queued = page.evaluate("async () => (await window.app.graphToPrompt()).output")
    ours = to_api(workflow, host.object_info)
    for node in queued.values():  # the page adds the text box in which PreviewAny shows what it got
        if node["class_type"] == "PreviewAny":
            node["inputs"].pop("preview", None)
    assert {number: (node["class_type"], node["inputs"]) for number, node in queued.items()} == {
        number: (node["class_type"], node["inputs"]) for number, node in ours.items()}


def test_workflow_survives_being_saved_by_the_page(host, page):
    """Opening and saving a shipped file changes no widget value and no wire."""
    workflow = host.workflow(PICTURE)
    page.evaluate("async workflow => { await window.app.loadGraphData(workflow); }", workflow)
    page.wait_for_timeout(500)
    saved = page.evaluate("() => window.app.graph.serialize()")
    assert to_api(saved, host.object_info) == to_api(workflow, host.object_info)
