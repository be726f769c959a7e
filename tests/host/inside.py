"""A ComfyUI inside this process, for checks that need to see its memory. Run by test_nodes.py:

    python inside.py COMFYUI_DIR BASE_DIR CHECKS.py ...

Starts the host without a server, loads the pack, runs every function check_* of the files with an `Inside`
and prints one JSON line a check: {"check": name, "error": null or the traceback, "seconds"}.
"""

import asyncio
import contextlib
import importlib.util
import json
import pathlib
import sys
import time
import traceback
import uuid

ROOT = pathlib.Path(__file__).resolve().parents[2]


class Server:
    """What the executor and the nodes ask of the host's server."""

    client_id = "inside"
    last_node_id = last_prompt_id = None

    def __init__(self):
        self.events = []
        self.sockets_metadata = {"inside": {"feature_flags": {"supports_preview_metadata": True}}}

    def send_sync(self, event, data, sid=None):
        self.events.append((event, data))


class Inside:
    """The host with the pack in it.

    Attributes:
        nodes: {node id: class}. pack: the pack's own module. base: the base directory.
        mm, execution: the host's modules. progress: [(value, total, preview or None)] of the last runs.
    """

    def __init__(self, comfy, base):
        self.base = pathlib.Path(base)
        sys.argv = ["main.py", "--cpu", "--base-directory", str(base)]
        sys.path.insert(0, str(comfy))
        import comfy.options
        import utils.install_util  # noqa: F401 - before anything else claims the name `utils`

        comfy.options.enable_args_parsing()
        import comfy.model_management
        import comfy.utils
        import execution

        import nodes

        self.mm, self.execution, self.server, self.progress = comfy.model_management, execution, Server(), []
        self.on_progress = None
        comfy.utils.set_progress_bar_global_hook(self.hook)
        folder = self.base / "custom_nodes" / "speculative-coupled-decoding"
        folder.parent.mkdir(parents=True, exist_ok=True)
        if not folder.exists():
            folder.symlink_to(ROOT, target_is_directory=True)
        assert asyncio.run(nodes.load_custom_node(str(folder), set(nodes.NODE_CLASS_MAPPINGS)))
        self.nodes = nodes.NODE_CLASS_MAPPINGS
        name = self.nodes["SCD_Sampler"].__module__.removesuffix(".nodes.sampler")
        self.pack = sys.modules[name]
        self.executor = self.fresh_executor()

    def module(self, name):
        """A module of the pack, e.g. "nodes.weights"."""
        return importlib.import_module(f"{self.pack.__name__}.{name}")

    def hook(self, value, total, preview, prompt_id=None, node_id=None):
        self.progress.append((value, total, preview))
        if self.on_progress:
            self.on_progress(value, total)
        self.mm.throw_exception_if_processing_interrupted()

    def fresh_executor(self):
        return self.execution.PromptExecutor(self.server, cache_type=False, cache_args={"lru": 0, "ram": 0})

    def run(self, prompt):
        """Validate and execute an API prompt; returns the list of node ids that ran."""
        number = str(uuid.uuid4())
        valid, error, outputs, node_errors = asyncio.run(self.execution.validate_prompt(number, prompt, None))
        assert valid, (error, node_errors)
        self.server.events.clear()
        self.progress.clear()
        self.executor.execute(prompt, number, {"client_id": "inside"}, outputs)
        return [data["node"] for kind, data in self.server.events if kind == "executing" and data["node"]]

    def outcome(self):
        """Name and data of the event that ended the last run."""
        ends = ("execution_success", "execution_error", "execution_interrupted")
        return next(event for event in reversed(self.server.events) if event[0] in ends)

    def call(self, node, **inputs):
        """Outputs of one node, called as the host calls it."""
        import torch

        made = self.nodes[node].PREPARE_CLASS_CLONE({})
        with torch.inference_mode():
            return made.EXECUTE_NORMALIZED(**inputs)


def main():
    comfy, base, *files = sys.argv[1:]
    checks = {}
    for file in files:
        spec = importlib.util.spec_from_file_location(pathlib.Path(file).stem, file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        checks |= {name: check for name, check in vars(module).items() if name.startswith("check_")}
    out, sys.stdout = sys.stdout, sys.stderr  # the answers alone go to stdout
    inside = Inside(pathlib.Path(comfy).resolve(), base)
    for name, check in checks.items():
        error, start = None, time.monotonic()
        try:
            check(inside)
        except Exception:
            error = traceback.format_exc()
        inside.on_progress = None
        with contextlib.suppress(inside.mm.InterruptProcessingException):  # take back what a check asked for
            inside.mm.throw_exception_if_processing_interrupted()
        line = {"check": name, "error": error, "seconds": round(time.monotonic() - start, 1)}
        out.write(json.dumps(line) + "\n")
        out.flush()


if __name__ == "__main__":
    main()
