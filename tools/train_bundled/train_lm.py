"""Step 3: train the bundled language model on the token shards, pictures and clips mixed.

    python tools/train_bundled/train_lm.py --data .data --out .data/lm.pt --minutes 90

The rates follow the clock (constant, then linear decay to 2 %), so a run of any length ends well. A second
start with the same --out continues. Shards that appear while it runs are taken in.
"""

import argparse
import pathlib
from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from common import Clock, init_weights, save
from data import vocabulary
from train_vq import CONFIG as CODEC

from scd_core.models.bundled import SLOTS, BundledFamily
from scd_core.models.transformer import Decoder, DecoderConfig

WORDS = vocabulary()
DECODER = DecoderConfig(
    dim=256,
    layers=6,
    heads=4,
    kv_heads=4,
    head_dim=64,
    ffn=640,
    vocab=CODEC.codes + 3 + len(WORDS),
    head_rows=CODEC.codes,
    abs_pos="input",
    grid_embed=(9, 16, 16),
)
CONFIG = {"family": "bundled", "codec": asdict(CODEC), "decoder": asdict(DECODER), "words": WORDS}


class Shards:
    """Token shards in memory, re-scanned now and then; draws weighted batches of one kind."""

    def __init__(self, folder, family, seed):
        self.folder, self.family = pathlib.Path(folder), family
        self.rng = np.random.default_rng(seed)
        self.seen, self.parts = set(), {"pictures": [], "clips": []}
        self.scan()

    def scan(self):
        for path in sorted(self.folder.glob("*_???.npz")):
            if path.name not in self.seen:
                self.seen.add(path.name)
                with np.load(path) as z:
                    n = len(z["tokens"])
                    ids = torch.stack([self.family.text.ids_of(str(c)) for c in z["captions"]])
                    tokens = torch.from_numpy(z["tokens"].astype(np.int16).reshape(n, -1))
                    mask = torch.from_numpy(z["mask"].reshape(n, -1))
                self.parts[path.name.split("_")[0]].append((tokens, mask, ids))

    def batch(self, kind, size):
        """(prompt ids [size, SLOTS+1], tokens [size, N], subject mask [size, N])."""
        parts = self.parts[kind]
        tokens, mask, ids = parts[self.rng.integers(len(parts))]
        pick = torch.from_numpy(self.rng.integers(len(tokens), size=size))
        ids = ids[pick].clone()
        ids[torch.from_numpy(self.rng.random(size) < 0.1)] = self.family.pad  # for guidance
        start = self.family.start_clip if kind == "clips" else self.family.start_picture
        prompt = torch.cat([ids, torch.full((size, 1), start)], dim=1)
        return prompt, tokens[pick].long(), mask[pick]


def forward(net, family, plan, prompt, tokens):
    """Teacher-forced logits [B, N, V] of the image tokens."""
    where = family.positions(net, plan, SLOTS + 1, "cpu").ready(net.cfg.rope_pairing, torch.float32)
    n = prompt.shape[1] + tokens.shape[1] - 1
    rows = where.rows(torch.arange(n)[None])
    x = net.embed.image(torch.cat([prompt, tokens[:, :-1]], dim=1), torch.float32)
    return net.logits(net.hidden(x, rows)[:, prompt.shape[1] - 1 :])


def optimizers(net, lr):
    """Muon for the matrices of the blocks, AdamW for tables, norms and the head."""
    matrix = [p for n, p in net.named_parameters() if n.startswith("layers.") and p.dim() == 2]
    rest = [p for n, p in net.named_parameters() if not (n.startswith("layers.") and p.dim() == 2)]
    return [
        torch.optim.Muon(matrix, lr=0.02 * lr, momentum=0.95, weight_decay=0.02, adjust_lr_fn="original"),
        torch.optim.AdamW(rest, lr=3e-3 * lr, betas=(0.9, 0.98), weight_decay=0.01),
    ]


def rate(progress, step, decay):
    return min(1, (step + 1) / 100) * (1 if progress < decay else 0.02 + 0.98 * (1 - progress) / (1 - decay))


def train(args):
    torch.manual_seed(0)
    family = BundledFamily(SimpleNamespace(config=CONFIG))
    net = Decoder(DECODER, dtype=torch.float32)
    init_weights(net)
    with torch.no_grad():
        for table in (net.embed.embed_tokens, net.frame_embed, net.row_embed, net.col_embed):
            table.weight.mul_(0.02 * DECODER.dim**0.5)
        for block in net.layers:
            for out in (block.self_attn.o_proj, block.mlp.down_proj):
                out.weight.mul_((2 * DECODER.layers) ** -0.5)
    if args.init:
        net.load_state_dict(torch.load(args.init, weights_only=True)["state"])
    opts = optimizers(net, args.lr)
    clock, step = Clock(args.minutes * 60), 0
    path = pathlib.Path(args.out)
    if path.exists():
        saved = torch.load(path, weights_only=True)
        net.load_state_dict(saved["state"])
        for opt, state in zip(opts, saved["opts"]):
            opt.load_state_dict(state)
        step, clock = saved["step"], Clock(args.minutes * 60, saved["used"])
    shards = Shards(pathlib.Path(args.data) / "tokens", family, seed=step + 1)
    plans = {"pictures": family.plan(family.size()), "clips": family.plan(family.size(frames=8))}
    mean, last = {}, clock.used
    base = [[g["lr"] for g in opt.param_groups] for opt in opts]
    if path.exists():
        base = [[0.02 * args.lr], [3e-3 * args.lr]]
    while clock.progress < 1:
        share = args.clips if clock.progress > args.pictures_first else 0.0
        kind = "clips" if shards.rng.random() < share else "pictures"
        prompt, tokens, mask = shards.batch(kind, args.batch if kind == "pictures" else args.batch // 2)
        factor = rate(clock.progress, step, args.decay)
        for opt, lrs in zip(opts, base):
            for group, lr in zip(opt.param_groups, lrs):
                group["lr"] = lr * factor
        with torch.autocast("cpu", torch.bfloat16):
            logits = forward(net, family, plans[kind], prompt, tokens)
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens.flatten(), reduction="none")
        weight = torch.where(mask.flatten(), 1.0, 0.35)
        for opt in opts:
            opt.zero_grad(set_to_none=True)
        ((loss * weight).sum() / weight.sum()).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        for opt in opts:
            opt.step()
        with torch.no_grad():
            for key, part in ((kind, loss), (kind + " subject", loss[mask.flatten()])):
                mean[key] = 0.98 * mean.get(key, float(part.mean())) + 0.02 * float(part.mean())
        step += 1
        if step % 100 == 0:
            shown = " ".join(f"{k} {v:.3f}" for k, v in mean.items())
            print(f"{clock.used:7.0f}s step {step} rate {factor:.2f} {shown}", flush=True)
            shards.scan()
        if clock.used - last > 240 or clock.progress >= 1:
            last = clock.used
            opt_state = [opt.state_dict() for opt in opts]
            save({"state": net.state_dict(), "opts": opt_state, "step": step, "used": clock.used}, path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default=".data")
    parser.add_argument("--out", default=".data/lm.pt")
    parser.add_argument("--init", help="checkpoint whose weights a new run starts from")
    parser.add_argument("--minutes", type=float, default=90)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--lr", type=float, default=1.0, help="factor on both learning rates")
    parser.add_argument("--pictures-first", type=float, default=0.45, help="share of the time without clips")
    parser.add_argument("--clips", type=float, default=0.45, help="share of clip batches afterwards")
    parser.add_argument("--decay", type=float, default=0.55, help="when the linear decay starts")
    train(parser.parse_args())
