"""Step 2: turn composed pictures and clips into token shards with the frozen codec.

    python tools/train_bundled/encode_data.py --data .data --vq .data/vq.pt --pictures 40000 --clips 16000

Each shard (.data/tokens/KIND_NNN.npz) holds tokens uint16, a subject mask and the captions as word lists.
"""

import argparse
import pathlib

import numpy as np
import torch
from common import load_codec
from data import Scene, assets, sample_clips, sample_pictures

SHARD = 2000


@torch.inference_mode()
def encode(net, frames):
    """uint8 [N,H,W,3] -> uint16 [N,h,w]."""
    x = torch.from_numpy(frames).permute(0, 3, 1, 2).float() / 127.5 - 1
    with torch.autocast("cpu", torch.bfloat16):
        z = net.features(x.contiguous(memory_format=torch.channels_last))
    return net.nearest(z.float()).numpy().astype(np.uint16)


def shard(net, scene, rng, kind, count):
    tokens, masks, captions = [], [], []
    for start in range(0, count, 100):
        n = min(100, count - start)
        if kind == "pictures":
            frames, mask, words = sample_pictures(scene, rng, n)
            codes = encode(net, frames)[:, None]
            mask = mask[:, None]
        else:
            frames, mask, words = sample_clips(scene, rng, n)
            codes = encode(net, frames.reshape(-1, *frames.shape[2:]))
            codes = codes.reshape(n, -1, *codes.shape[1:])
        tokens.append(codes)
        masks.append(mask)
        captions += [" ".join(w) for w in words]
    return {"tokens": np.concatenate(tokens), "mask": np.concatenate(masks), "captions": np.array(captions)}


def main(args):
    net = load_codec(args.vq)
    scene = Scene(assets(args.data))
    out = pathlib.Path(args.data) / "tokens"
    out.mkdir(parents=True, exist_ok=True)
    # alternate the kinds so that training may start while this still runs
    jobs = [(kind, i) for kind in ("pictures", "clips") for i in range(getattr(args, kind) // SHARD)]
    for kind, i in sorted(jobs, key=lambda job: job[1] / (getattr(args, job[0]) // SHARD)):
        path = out / f"{kind}_{i:03}.npz"
        if path.exists():
            continue
        rng = np.random.default_rng([args.seed, kind == "clips", i])
        part = path.with_suffix(".part.npz")
        np.savez(part, **shard(net, scene, rng, kind, SHARD))
        part.rename(path)
        print(path.name, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default=".data")
    parser.add_argument("--vq", default=".data/vq.pt")
    parser.add_argument("--pictures", type=int, default=40000)
    parser.add_argument("--clips", type=int, default=16000)
    parser.add_argument("--seed", type=int, default=11)
    main(parser.parse_args())
