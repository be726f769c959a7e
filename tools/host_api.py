"""Drive a running ComfyUI over HTTP and websocket: queue a prompt, follow it, stop it, fetch its files."""

import argparse
import asyncio
import concurrent.futures
import contextlib
import dataclasses
import json
import os
import pathlib
import struct
import subprocess
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid

from workflow_json import WorkflowError, problems, to_api

__all__ = ["Event", "Host", "HostError", "Result", "WorkflowError", "problems", "running_host", "to_api"]

ROOT = pathlib.Path(__file__).resolve().parents[1]
PREVIEW, PREVIEW_WITH_METADATA = 1, 4
# a proxy from the environment has no business between us and a server on this machine
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class HostError(RuntimeError):
    """The server refused or failed; the message is its own, `details` what it sent along."""

    def __init__(self, message, details=None):
        super().__init__(message)
        self.details = details


@dataclasses.dataclass
class Event:
    """One websocket message: `kind` as ComfyUI names it, `data` its JSON; kind "preview": picture bytes."""

    kind: str
    data: object
    node: str | None
    seconds: float


@dataclasses.dataclass
class Result:
    """How one prompt went. `status` is success, error or interrupted."""

    prompt_id: str
    status: str = ""
    seconds: float = 0.0
    events: list = dataclasses.field(default_factory=list)
    outputs: dict = dataclasses.field(default_factory=dict)
    error: dict | None = None

    def progress(self, node):
        """[(value, maximum)] that one node reported, in order."""
        mine = (e.data for e in self.events if e.kind == "progress" and e.node == node)
        return [(data["value"], data["max"]) for data in mine]

    def previews(self, node=None):
        """The preview pictures (JPEG or PNG bytes) of one node, or of all."""
        return [e.data for e in self.events if e.kind == "preview" and node in (None, e.node)]

    def cached(self):
        """Ids of the nodes that the server did not run again."""
        return {n for e in self.events if e.kind == "execution_cached" for n in e.data["nodes"]}

    def executed(self):
        """Ids of the nodes that ran, in order."""
        return [e.node for e in self.events if e.kind == "executing" and e.node is not None]

    def files(self):
        """[(node id, {filename, subfolder, type})] of everything that was written."""
        return [(node, item) for node, output in self.outputs.items() for items in output.values()
                if isinstance(items, list) for item in items if isinstance(item, dict) and "filename" in item]


class Host:
    """A running ComfyUI at `base_url`, e.g. http://127.0.0.1:8188."""

    def __init__(self, base_url):
        self.base_url = base_url.rstrip("/")
        self._object_info = None

    def fetch(self, path, body=None, timeout=60, **query):
        """Bytes of one reply: GET, or POST of `body` as JSON. HostError carries the server's own words."""
        url = self.base_url + path + ("?" + urllib.parse.urlencode(query) if query else "")
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"} if data else {})
        try:
            with OPENER.open(request, timeout=timeout) as reply:
                return reply.read()
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")
            with contextlib.suppress(ValueError):
                details = json.loads(text)
                raise HostError(f"{path}: {refusal(details)}", details) from None
            raise HostError(f"{path}: status {error.code} {text[:300]}") from None

    def json(self, path, body=None, **query):
        """A reply read as JSON; None where the server sends nothing."""
        return json.loads(self.fetch(path, body, **query) or b"null")

    @property
    def object_info(self):
        """/object_info, asked once."""
        if self._object_info is None:
            self._object_info = self.json("/object_info")
        return self._object_info

    def run(self, prompt, on_event=None, workflow=None, timeout=900):
        """Queue an API prompt and follow it to its end.

        prompt: {node id: {class_type, inputs}}; workflow: the page's file, for the metadata of what is saved;
        on_event(Event): called for each message, e.g. to interrupt. Returns a Result, also for a prompt that
        fails while it runs. Raises HostError if the server refuses it, TimeoutError after `timeout` seconds.
        """
        # a thread of its own, for callers that already are inside an event loop (the browser driver is)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            work = self._follow(prompt, on_event, workflow)
            return pool.submit(asyncio.run, asyncio.wait_for(work, timeout)).result()

    async def _follow(self, prompt, on_event, workflow):
        import aiohttp

        client = uuid.uuid4().hex
        address = self.base_url.replace("http", "ws", 1) + "/ws?clientId=" + client
        async with aiohttp.ClientSession() as session, session.ws_connect(address, max_msg_size=0) as socket:
            # said first: without it previews come without the id of their node
            await socket.send_json({"type": "feature_flags", "data": {"supports_preview_metadata": True}})
            start = time.monotonic()
            extra = {"extra_pnginfo": {"workflow": workflow}} if workflow else {}
            reply = self.json("/prompt", {"prompt": prompt, "client_id": client, "extra_data": extra})
            result = Result(reply["prompt_id"])
            async for message in socket:
                event = read_message(message, time.monotonic() - start)
                if event is None:
                    continue
                result.events.append(event)
                if on_event:
                    await asyncio.to_thread(on_event, event)
                if event.kind in ("execution_success", "execution_error", "execution_interrupted"):
                    result.status = event.kind.removeprefix("execution_")
                    result.error = event.data if result.status == "error" else None
                    break
            else:
                raise HostError("the server closed the connection while the prompt was running")
            result.seconds = time.monotonic() - start
        result.outputs = await asyncio.to_thread(self._outputs, result.prompt_id)
        return result

    def _outputs(self, prompt_id):
        # the end is announced before the history entry is written
        for _ in range(200):
            entry = self.json(f"/history/{prompt_id}").get(prompt_id)
            if entry:
                return entry["outputs"]
            time.sleep(0.05)
        raise HostError(f"the server keeps no history of prompt {prompt_id}")

    def interrupt(self):
        """Stop the prompt that is running now, as Cancel does."""
        self.fetch("/interrupt", {})

    def view(self, item):
        """The bytes of a file from Result.files()."""
        return self.fetch("/view", filename=item["filename"], subfolder=item.get("subfolder", ""),
                          type=item.get("type", "output"))

    def free(self):
        """Unload models and drop caches, as the page's button does."""
        self.fetch("/free", {"unload_models": True, "free_memory": True})


def refusal(details):
    """One sentence out of the server's reply to a prompt it will not run."""
    error = details.get("error") if isinstance(details, dict) else None
    parts = [error.get("message", "") if isinstance(error, dict) else str(error or details)]
    for node, entry in ((details.get("node_errors") or {}) if isinstance(details, dict) else {}).items():
        where = f"node {node} ({entry['class_type']})"
        parts += [f"{where}: {e['message']}: {e['details']}" for e in entry["errors"]]
    return "; ".join(part for part in parts if part)


def read_message(message, seconds):
    """Event of one websocket message, or None for those that say nothing about a prompt."""
    if isinstance(message.data, bytes):
        kind, = struct.unpack(">I", message.data[:4])
        if kind == PREVIEW:
            return Event("preview", message.data[8:], None, seconds)
        if kind == PREVIEW_WITH_METADATA:
            length, = struct.unpack(">I", message.data[4:8])
            about = json.loads(message.data[8:8 + length])
            return Event("preview", message.data[8 + length:], about.get("node_id"), seconds)
        return None
    body = json.loads(message.data)
    if body["type"] in ("status", "feature_flags"):
        return None
    return Event(body["type"], body["data"], body["data"].get("node"), seconds)


@contextlib.contextmanager
def running_host(base, port=0, args=(), device="auto"):
    """Start ComfyUI with this pack linked (tools/run_comfy.sh), yield a Host, end its process group.

    base: folder for models, input, output, temp, user and server.log. Raises HostError if it does not start.
    """
    env = {**os.environ, "BASE": str(base), "PORT": str(port), "DEVICE": device}
    command = ["bash", str(ROOT / "tools" / "run_comfy.sh")]
    try:
        started = subprocess.run([*command, "start", *args], env=env, capture_output=True, text=True)
        if started.returncode:
            raise HostError(started.stderr.strip() or "ComfyUI did not start")
        yield Host(started.stdout.split()[-1])
    finally:
        subprocess.run([*command, "stop"], env=env, check=False)


def object_info_asked_for(description):
    """/object_info for a tool: a saved one if its command line names one, else that of a host started for it."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--object-info", type=pathlib.Path, help="a saved /object_info; default: start a host")
    args = parser.parse_args()
    if args.object_info:
        return json.loads(args.object_info.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as base, running_host(base, device="cpu") as host:
        return host.object_info
