"""Whole runs, watched: no network is asked, no program started, nothing written but what was asked for."""

import json
import os
import subprocess
import sys

from scd_tests.test_detection import lay_out

# Python reports what it is about to do to such a hook, whichever module or library asks for it.
WATCHED = """
import importlib.util, json, os, pathlib, sys

out, root, *models = map(pathlib.Path, sys.argv[1:])
seen, written = [], []
STARTS = ("socket.", "urllib.", "http.", "ftplib.", "smtplib.", "subprocess.", "os.system", "os.exec", "os.posix_spawn",
          "os.spawn", "os.fork", "os.kill", "os.putenv", "ctypes.dlopen", "webbrowser.")
MADE = ("os.mkdir", "os.rename", "os.link", "os.symlink", "os.remove", "os.rmdir", "os.truncate", "os.chmod")

def watch(event, given):
    if event == "open" and isinstance(given[0], (str, bytes)):
        mode, flags = given[1] or "", given[2] or 0
        if set(str(mode)) & set("wax+") or flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            written.append(os.fsdecode(given[0]))
    elif event in MADE:
        written.extend(os.fsdecode(path) for path in given[:2] if isinstance(path, (str, bytes)))
    elif event.startswith(STARTS):
        seen.append(f"{event} {given!r}"[:300])

import av, numpy, PIL.Image, safetensors.torch, tokenizers, torch  # the host's, not ours

torch.set_num_threads(1)
sys.addaudithook(watch)
spec = importlib.util.spec_from_file_location("scd_pack", root / "__init__.py", submodule_search_locations=[str(root)])
pack = sys.modules["scd_pack"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(pack)
main = importlib.import_module("scd_pack.scd_core.__main__").main
quick = ["--temperature", "0", "--cfg", "1", "--window", "64", "--dtype", "fp32", "--out", str(out)]
codes = [main(["generate", "fox on snow", "--frames", "2", *quick])]
for model in models:
    codes += [main(["info", str(model)]), main(["generate", "a fox", "--model", str(model), *quick])]
elsewhere = [path for path in written if not os.path.abspath(path).startswith((str(out), os.devnull))]
json.dump({"codes": codes, "seen": seen, "elsewhere": elsewhere, "files": len(list(out.iterdir()))}, sys.stderr)
"""


def test_whole_runs_stay_at_home(tmp_path, root):
    place = tmp_path / "host" / "models" / "ar_models"
    place.mkdir(parents=True)
    models = [lay_out(name, place) for name in ("janus-pro-hf",)]
    env = {key: value for key, value in os.environ.items() if "OFFLINE" not in key}
    env |= {"HF_HOME": "/proc/none", "HOME": "/proc/none", "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    (tmp_path / "out").mkdir()
    done = subprocess.run([sys.executable, "-c", WATCHED, tmp_path / "out", root, *models], cwd="/", env=env,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stderr[done.stderr.rindex('{"codes"'):])
    assert told["codes"] == [0] * 3 and told["files"] == 2
    assert told["seen"] == [] and told["elsewhere"] == []
