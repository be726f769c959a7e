"""Step 1: train the bundled picture codec (64x64 -> 16x16 codes of 1,024) on composed emoji pictures.

    python tools/train_bundled/train_vq.py --data .data --out .data/vq.pt --minutes 15

The learning rate follows the clock, so the run ends well whatever the machine's speed. Restarting continues.
"""

import argparse
import math
import queue
import threading
from dataclasses import asdict

import numpy as np
import torch
import torch.nn.functional as F
from common import Clock, init_weights, save
from data import Scene, assets, sample_clips, sample_pictures

from scd_core.codecs.conv2d import ConvCodec, ConvCodecConfig

CODES = 1024
CONFIG = ConvCodecConfig(
    codes=CODES,
    code_dim=8,
    z_channels=32,
    ch=32,
    ch_mult=(1, 2, 4),
    encoder_blocks=1,
    decoder_blocks=1,
    groups=8,
)


def to_input(pictures):
    """uint8 [N,H,W,3] -> float [N,3,H,W] in -1..1, channels last."""
    x = torch.from_numpy(pictures).permute(0, 3, 1, 2).float() / 127.5 - 1
    return x.contiguous(memory_format=torch.channels_last)


class Codebook:
    """Exponential-moving-average codebook with dead codes replaced by encoder outputs."""

    def __init__(self, weight, decay=0.99):
        self.weight, self.decay = weight, decay
        self.count = torch.ones(len(weight))
        self.total = weight.clone()

    @torch.no_grad()
    def fill(self, z):
        pick = torch.randperm(len(z))[: len(self.weight)]
        pick = pick.repeat(-(-len(self.weight) // len(pick)))[: len(self.weight)]
        self.weight.copy_(z[pick])
        self.total.copy_(self.weight)
        self.count.fill_(1.0)

    @torch.no_grad()
    def update(self, z, codes):
        used = torch.bincount(codes, minlength=len(self.weight)).float()
        sums = torch.zeros_like(self.total).index_add_(0, codes, z)
        self.count.mul_(self.decay).add_(used, alpha=1 - self.decay)
        self.total.mul_(self.decay).add_(sums, alpha=1 - self.decay)
        dead = self.count < 0.02
        if dead.any():
            pick = z[torch.randint(len(z), (int(dead.sum()),))]
            self.total[dead], self.count[dead] = pick, 1.0
        self.weight.copy_(self.total / self.count[:, None])


def picture_loss(out, want, mask):
    """L1, squared error and L1 of gradients at full and half size: keeps edges without a perceptual network.

    `mask` [N,1,h,w] marks the subject's cells, which count three times: nobody misses a blade of grass.
    """
    weight = F.interpolate(1 + 2 * mask, size=out.shape[-2:])
    weight = weight / weight.mean()
    error = out - want
    loss = (weight * (error.abs() + 2 * error.square())).mean()
    for scale in (1, 2):
        e, w = (error, weight) if scale == 1 else (F.avg_pool2d(error, 2), F.avg_pool2d(weight, 2))
        loss = loss + 0.5 * (w[:, :, 1:] * e.diff(dim=2)).abs().mean() + 0.5 * (w[..., 1:] * e.diff(dim=3)).abs().mean()
    return loss


def batches(scene, size, seed):
    """Endless (frames, masks) from a thread of their own: pictures and clip frames in turn."""
    out = queue.Queue(maxsize=4)

    def work():
        rng, i = np.random.default_rng(seed), 0
        while True:
            if i % 2:
                clips, masks, _ = sample_clips(scene, rng, size // 2)
                pick = rng.permutation(clips.shape[0] * clips.shape[1])[: size * 2]
                out.put((clips.reshape(-1, *clips.shape[2:])[pick], masks.reshape(-1, *masks.shape[2:])[pick]))
            else:
                out.put(sample_pictures(scene, rng, size)[:2])
            i += 1

    threading.Thread(target=work, daemon=True).start()
    while True:
        yield out.get()


def train(args):
    torch.manual_seed(0)
    net = ConvCodec(CONFIG, dtype=torch.float32)
    init_weights(net)
    if args.resume:
        net.load_state_dict(torch.load(args.resume, weights_only=True)["state"])
    net = net.to(memory_format=torch.channels_last)
    weight = net.quantize["embedding"].weight
    weight.requires_grad_(False)
    book = Codebook(weight.data)
    params = [p for p in net.parameters() if p.requires_grad]
    opt = torch.optim.AdamW(params, lr=args.lr, betas=(0.9, 0.99), weight_decay=1e-4)
    clock, step = Clock(args.minutes * 60), 0
    warm = -1 if args.resume else 40  # steps before the codebook takes part
    feed = batches(Scene(assets(args.data)), args.batch, seed=1)
    while clock.progress < 1:
        frames, mask = next(feed)
        x, mask = to_input(frames), torch.from_numpy(mask)[:, None].float()
        rate = args.lr * min(1, (step + 1) / 50) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * clock.progress)))
        for group in opt.param_groups:
            group["lr"] = rate
        with torch.autocast("cpu", torch.bfloat16):
            z = net.features(x).float()
            flat = z.permute(0, 2, 3, 1).reshape(-1, CONFIG.code_dim)
            if step == warm:
                book.fill(flat.detach())
            if step >= warm:
                codes = net.nearest(z.detach()).reshape(-1)
                zq = weight[codes].reshape(z.shape[0], *z.shape[2:], -1).permute(0, 3, 1, 2)
                commit = (z - zq).square().mean()
                z = z + (zq - z).detach()
            else:
                commit = 0.01 * flat.square().mean()
            out = net.decode_features(z)
        loss = picture_loss(out.float(), x, mask) + 0.25 * commit
        opt.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        opt.step()
        if step >= warm and clock.progress < 0.95:  # the last steps refine the networks under fixed tokens
            book.update(flat.detach(), codes)
        if step % 50 == 0:
            psnr = -10 * math.log10(float(((out.float().clamp(-1, 1) - x) / 2).square().mean()))
            used = len(torch.unique(codes)) if step >= warm else 0
            print(f"{clock.used:7.0f}s step {step} loss {float(loss):.4f} psnr {psnr:.2f} used {used}", flush=True)
        if step % 200 == 0 and step:
            save({"config": asdict(CONFIG), "state": net.state_dict(), "step": step}, args.out)
        step += 1
    save({"config": asdict(CONFIG), "state": net.state_dict(), "step": step}, args.out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default=".data")
    parser.add_argument("--out", default=".data/vq.pt")
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--resume", help="checkpoint to start from")
    parser.add_argument("--lr", type=float, default=2e-3)
    train(parser.parse_args())
