"""Starting, failing and stopping, against a stand-in for ComfyUI's main.py."""

import os
import socket
import subprocess
import sys

import pytest
from host_api import ROOT, HostError, running_host

SERVER = """
import http.server, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
port = int(sys.argv[sys.argv.index("--port") + 1])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b"{}")
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def comfy(tmp_path, monkeypatch):
    """Writes a main.py and makes run_comfy.sh use it."""
    def write(main):
        (tmp_path / "comfy").mkdir()
        (tmp_path / "comfy" / "main.py").write_text(main, encoding="utf-8")
        monkeypatch.setenv("COMFYUI_DIR", str(tmp_path / "comfy"))
        monkeypatch.setenv("COMFYUI_PYTHON", sys.executable)
        return tmp_path / "base"
    return write


def alive(pid):
    listed = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
    state = listed.stdout.strip()
    return bool(state) and not state.startswith("Z")


def test_start_links_the_pack_and_stop_ends_the_children_too(comfy):
    base = comfy(SERVER)
    with running_host(base, device="cpu") as host:
        assert host.json("/anything") == {}
        assert (base / "custom_nodes" / "speculative-coupled-decoding").resolve() == ROOT
        child = int((base / "server.log").read_text().split("child ")[1].split()[0])
        server = int((base / "server.pid").read_text())
        assert alive(server) and alive(child)
    assert not alive(server) and not alive(child)
    assert not (base / "server.pid").exists()


def test_second_start_finds_the_running_server(comfy):
    base = comfy(SERVER)
    with running_host(base, device="cpu") as host:
        env = {**os.environ, "BASE": str(base), "DEVICE": "cpu"}
        command = ["bash", ROOT / "tools" / "run_comfy.sh", "start"]
        again = subprocess.run(command, env=env, capture_output=True, text=True)
        assert again.stdout.strip() == host.base_url


def test_failed_start_shows_the_log_and_leaves_nothing_running(comfy):
    base = comfy("raise SystemExit('no such card')")
    with pytest.raises(HostError) as raised, running_host(base, device="cpu"):
        pass
    assert "no such card" in str(raised.value) and "did not start" in str(raised.value)
    assert not (base / "server.pid").exists()


def test_port_in_use_is_said(comfy):
    base = comfy(SERVER)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(HostError, match=f"port {port} is in use"), running_host(base, port, device="cpu"):
            pass


def test_another_copy_of_the_pack_is_not_touched(comfy):
    base = comfy(SERVER)
    other = base / "custom_nodes" / "speculative-coupled-decoding"
    other.mkdir(parents=True)
    with pytest.raises(HostError, match="another copy of this pack"), running_host(base, device="cpu"):
        pass
    assert list(other.iterdir()) == []


def test_demo_without_a_comfyui_says_so_and_fails(comfy, tmp_path):
    comfy(SERVER)
    env = {**os.environ, "COMFYUI_DIR": str(tmp_path / "none")}
    command = [sys.executable, ROOT / "tools" / "demo.py", "--out", tmp_path / "out"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("demo: ") and "COMFYUI_DIR" in done.stderr
    assert "Traceback" not in done.stderr
