"""Optional: refine the codec's decoder under the fixed tokens (encoder and codebook stay as they are).

    python tools/train_bundled/refine_decoder.py --data .data --vq .data/vq.pt --out .data/vq_refined.pt --minutes 10

Tokens keep their meaning, so the language model is not touched; only the picture a token stands for gets better.
"""

import argparse
import math

import torch
from common import Clock, load_codec, save
from data import Scene, assets
from train_vq import batches, picture_loss, to_input


def train(args):
    torch.manual_seed(1)
    saved = torch.load(args.vq, weights_only=True)
    net = load_codec(args.vq).train()
    params = [p for n, p in net.named_parameters() if n.startswith(("decoder.", "post_quant_conv."))]
    for p in net.parameters():
        p.requires_grad_(False)
    for p in params:
        p.requires_grad_(True)
    opt = torch.optim.AdamW(params, lr=args.lr, betas=(0.9, 0.99), weight_decay=1e-4)
    clock, step, shown = Clock(args.minutes * 60), 0, 0.0
    feed = batches(Scene(assets(args.data), seed=7), args.batch, seed=23)
    while clock.progress < 1:
        frames, mask = next(feed)
        x, mask = to_input(frames), torch.from_numpy(mask)[:, None].float()
        for group in opt.param_groups:
            group["lr"] = args.lr * min(1, (step + 1) / 50) * (0.02 + 0.49 * (1 + math.cos(math.pi * clock.progress)))
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                codes = net.nearest(net.features(x).float())
            zq = net.quantize["embedding"](codes).permute(0, 3, 1, 2)
            out = net.decode_features(zq.contiguous(memory_format=torch.channels_last))
        loss = picture_loss(out.float(), x, mask)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        opt.step()
        step += 1
        shown += 0.02 * (loss.item() - shown)
        if step % 50 == 0:
            print(f"{clock.used:7.0f}s step {step} loss {shown:.4f}", flush=True)
    save({**saved, "state": net.state_dict()}, args.out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default=".data")
    parser.add_argument("--vq", default=".data/vq.pt")
    parser.add_argument("--out", default=".data/vq_refined.pt")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--lr", type=float, default=1e-3)
    train(parser.parse_args())
