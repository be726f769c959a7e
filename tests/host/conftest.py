"""A real ComfyUI with this pack linked, and a page of it in headless Chromium.

Where one of the two is missing its tests are skipped, visibly; with SCD_REQUIRE_HOST=1 or
SCD_REQUIRE_BROWSER=1 (as .ci/run sets them) that is a failure.
"""

import contextlib
import importlib.util
import io
import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import host_api  # noqa: E402
from scd_tests.host.miniatures import fitted, place, place_picture  # noqa: E402

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "msedge")
FLAGS = ["--no-sandbox", "--disable-gpu", "--use-gl=swiftshader", "--disable-quic", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync"]
READY = ("window.app && window.app.graph && window.app.extensionManager && window.LiteGraph && "
         "Object.keys(window.LiteGraph.registered_node_types).length > 50")


def missing(what, variable):
    """Skip, or fail where the environment says that this must be there."""
    if os.environ.get(variable) == "1":
        pytest.fail(f"{what} ({variable}=1)", pytrace=False)
    pytest.skip(what)


class PackHost(host_api.Host):
    """The running server with what its tests ask again and again."""

    def __init__(self, base_url, base):
        super().__init__(base_url)
        self.base = base
        # what the server said before any test provoked an error
        self.startup_log = (base / "server.log").read_text(encoding="utf-8", errors="replace")

    def workflow(self, name):
        """A shipped workflow as the page would load it."""
        return json.loads((ROOT / "workflows" / f"{name}.json").read_text(encoding="utf-8"))

    def prompt(self, name, **sampler_inputs):
        """The API prompt of a shipped workflow, with some inputs of its (first) sampler replaced."""
        prompt = fitted(host_api.to_api(self.workflow(name), self.object_info))
        if sampler_inputs:
            prompt[self.sampler(prompt)]["inputs"].update(sampler_inputs)
        return prompt

    @staticmethod
    def sampler(prompt):
        """Id of the first sampler node in an API prompt."""
        return next(number for number, node in prompt.items() if node["class_type"] == "SCD_Sampler")

    def pictures(self, result):
        """[height, width, 3] uint8 arrays of every still picture that a run wrote."""
        import numpy as np
        from PIL import Image

        files = [item for _, item in result.files() if item["type"] == "output"]  # not the acceptance map
        stills = [item for item in files if item["filename"].lower().endswith(".png")]
        return [np.asarray(Image.open(io.BytesIO(self.view(item))).convert("RGB")) for item in stills]


@contextlib.contextmanager
def serving(base, args=()):
    """A `PackHost` on a free port with a base directory of its own; ended by process group."""
    comfy = pathlib.Path(os.environ.get("COMFYUI_DIR") or ROOT / ".comfy" / "ComfyUI")
    if not (comfy / "main.py").is_file():
        missing(f"no ComfyUI in {comfy}: run make comfy", "SCD_REQUIRE_HOST")
    if importlib.util.find_spec("aiohttp") is None:
        missing("aiohttp is not installed: run make venv", "SCD_REQUIRE_HOST")
    place(base / "models" / "ar_models")
    place_picture(base / "input")
    with host_api.running_host(base, args=args, device="cpu") as running:
        yield PackHost(running.base_url, base)


@pytest.fixture(scope="session")
def host(tmp_path_factory):
    """The server, with the page that its release asks for."""
    with serving(tmp_path_factory.mktemp("comfy")) as running:
        yield running


@pytest.fixture(scope="session")
def newest_host(tmp_path_factory):
    """The same server with the newest page there is (tools/run_comfy.sh install fetches it)."""
    static = ROOT / ".comfy" / "newest_page" / "static"
    if not (static / "index.html").is_file():
        missing("the newest page of ComfyUI is not there: run make comfy with a network", "SCD_REQUIRE_BROWSER")
    with serving(tmp_path_factory.mktemp("newest"), ["--front-end-root", str(static)]) as running:
        yield running


@pytest.fixture(scope="module", params=["pinned", "newest"])
def site(request):
    """The server of each of the two pages; `kind` says which."""
    running = request.getfixturevalue("host" if request.param == "pinned" else "newest_host")
    running.kind = request.param
    return running


@pytest.fixture(scope="module")
def browser():
    """Headless Chromium, for one file of tests: its driver keeps an event loop running in this thread."""
    if importlib.util.find_spec("playwright") is None:
        missing("playwright is not installed: run make venv", "SCD_REQUIRE_BROWSER")
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        missing("no Chromium on PATH: install it, or set CHROMIUM to its program file", "SCD_REQUIRE_BROWSER")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, headless=True, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def page(site, browser):
    """One page of a server for a file of tests, ready to use and cut off from every other address; page.errors
    collects what it complains about."""
    # without this the template dialog covers the canvas on the first visit
    site.fetch("/settings/Comfy.TutorialCompleted", True)
    page = browser.new_page(viewport={"width": 1400, "height": 900})
    page.set_default_timeout(120_000)
    page.errors = []
    page.on("pageerror", lambda error: page.errors.append(str(error)))
    page.route("**/*", lambda route: route.continue_()
               if route.request.url.startswith((site.base_url, "data:", "blob:")) else route.abort())
    page.goto(site.base_url, wait_until="domcontentloaded")
    page.wait_for_function(READY, timeout=120_000)
    page.wait_for_timeout(1000)
    yield page
    page.close()


@pytest.fixture(scope="session")
def screenshots(tmp_path_factory):
    """Folder for pictures of the page."""
    return tmp_path_factory.mktemp("screenshots")


@pytest.fixture
def run_python():
    """Run a piece of Python in a process of its own; returns the finished process."""
    def run(code, *args, cwd=None):
        command = [sys.executable, "-c", code, *map(str, args)]
        return subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    return run
