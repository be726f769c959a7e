"""Libraries that a host may lack, or have in a version that no longer fits: only what needs one stops, and names it."""

import json
import subprocess
import sys

WITHOUT = """
import importlib, json, pathlib, sys

root, out = map(pathlib.Path, sys.argv[1:])
import numpy, PIL.Image, safetensors.torch, torch  # what no host goes without

torch.set_num_threads(1)
BARRED = ("av", "tokenizers", "transformers", "sentencepiece", "einops", "flash_attn", "xformers", "triton",
          "matplotlib", "scipy", "tqdm", "ray", "yaml", "cv2", "torchvision", "torchaudio", "imageio_ffmpeg")
for name in BARRED:
    sys.modules[name] = None
sys.path.insert(0, str(root / "tests"))
importlib.import_module("conftest")
fake = importlib.import_module("scd_tests.fake_host")
with fake.pack(out) as module:
    listed = module("nodes.load_model").LoadARModel.define_schema().inputs[0][2]["options"]
    combine = module("nodes.video_combine").VideoCombine
    told = [combine.validate_inputs(format=name) for name in ("mp4 (h264)", "webp")]
main = importlib.import_module("scd_pack.scd_core.__main__").main
sys.stderr.isatty = lambda: True  # a progress bar is wanted, but no condition
quick = ["--temperature", "0", "--cfg", "1", "--window", "64", "--dtype", "fp32", "--out", str(out / "made")]
codes = [main(["generate", "fox on snow", *quick])]
json.dump({"codes": codes, "listed": listed, "told": told}, sys.stderr)
"""


def test_pictures_need_none_of_them(tmp_path, root):
    done = subprocess.run([sys.executable, "-c", WITHOUT, root, tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stderr[done.stderr.rindex('{"codes"'):])
    assert told["codes"] == [0] and [file.suffix for file in (tmp_path / "made").iterdir()] == [".png"]
    assert told["listed"][0] == "bundled (pictures and clips)"
    assert "PyAV" in told["told"][0] and told["told"][1] is True
