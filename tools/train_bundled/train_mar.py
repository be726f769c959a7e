"""MAR, step 2: train the target or its draft on the latents.

    python tools/train_bundled/train_mar.py --out .data/mar.pt --minutes 57 --decay 0.65
    python tools/train_bundled/train_mar.py --out .data/draft.pt --target .data/mar.pt --minutes 11 --everywhere 0

With --target the draft is trained: it has the target's diffusion head, and learns the conditions that the target gives
that head.
The rates follow the clock, so a run of any length ends well; a run that was cut off goes on when it is started again.
"""

import argparse
import math
import pathlib
from dataclasses import asdict, replace
from functools import partial

import torch
from common import Clock, init_weights, save
from mar_data import CLASSES, NUMBERS
from torch.nn.attention import SDPBackend, sdpa_kernel
from train_lm import rate

from scd_core.continuous.diffusion import TRAINED, Diffusion
from scd_core.continuous.mar import Mar, MarConfig

TARGET = MarConfig(
    dim=128, decoder_dim=128, encoder_layers=2, decoder_layers=4, heads=4, decoder_heads=4, ffn=384, decoder_ffn=384,
    tokens=64, channels=NUMBERS, buffer=4, classes=len(CLASSES), head_layers=3, head_width=128, waves=64,
)  # fmt: skip
DRAFT = replace(TARGET, dim=64, encoder_layers=1, decoder_layers=1, ffn=192)
NOISES = 3  # noisy versions of every masked token in a step
BACKGROUND = 0.5  # weight of a token without a part of the subject
AVERAGE = 0.995  # of the weights that are kept in the end


def start_weights(net):
    """Usual weights, small tables, quiet branches: every block begins as nothing."""
    init_weights(net)
    with torch.no_grad():
        for name in ("class_emb.weight", "fake_latent", "mask_token", "encoder_pos_embed_learned",
                     "decoder_pos_embed_learned", "diffusion_pos_embed_learned"):  # fmt: skip
            net.get_parameter(name).normal_(0, 0.02)
        depth = len(net.encoder_blocks) + len(net.decoder_blocks)
        for block in (*net.encoder_blocks, *net.decoder_blocks):
            for out in (block.attn.proj, block.mlp.fc2):
                out.weight.mul_((2 * depth) ** -0.5)
        head = net.diffloss["net"]
        for part in (*head.res_blocks, head.final_layer):
            part.adaLN_modulation[1].weight.zero_()
        head.final_layer.linear.weight.zero_()


def optimizers(net, lr):
    """Muon for the matrices of the blocks, AdamW for all else."""
    named = [(n, p) for n, p in net.named_parameters() if p.requires_grad]
    matrix = [p for n, p in named if "_blocks." in n and "diffloss" not in n and p.dim() == 2]
    rest = [p for n, p in named if not any(p is m for m in matrix)]
    return [
        torch.optim.Muon(matrix, lr=0.02 * lr, momentum=0.95, weight_decay=0.02, adjust_lr_fn="original"),
        torch.optim.AdamW(rest, lr=2e-3 * lr, betas=(0.9, 0.98), weight_decay=0.01),
    ]


def start_draft(net, saved):
    """Weights of the target where both nets have them; its head stays as it is. Returns the target."""
    target = Mar(MarConfig(**saved["config"]), dtype=torch.float32)
    target.load_state_dict(saved["state"])
    own = net.state_dict()
    shared = {n: t for n, t in saved["state"].items() if n in own and own[n].shape == t.shape}
    net.load_state_dict(shared, strict=False)
    net.diffloss.requires_grad_(False)
    return target.requires_grad_(False)


def masking(z, share):
    """bool [B, n] of known tokens: all but a share, at random places, in all pictures alike in number."""
    b, n = z.shape[:2]
    order = torch.rand(b, n).argsort(1)
    return torch.ones(b, n, dtype=torch.bool).scatter(1, order[:, : max(1, math.ceil(share * n))], False)


def draft_loss(net, target, z, weight, classes, known):
    """How far the conditions of the draft's masked tokens are from the target's: (share of their variance, 0)."""
    w, want = weight[~known][:, None], target(z, known, target.conditions(classes))[~known].float()
    error = w * (net(z, known, net.conditions(classes))[~known].float() - want).square()
    return error.mean() / (w * (want - want.mean(0)).square()).mean(), torch.zeros(())


def target_loss(net, diffusion, z, weight, classes, known):
    """Diffusion loss of the masked tokens.

    Args:
        z: fp32 [B, n, C]. weight: fp32 [B, n]. classes: int64 [B], -1 for none. known: bool [B, n].

    Returns:
        (mean squared error of the noise, divergence of the reverse step in bits): scalars.
    """
    cond = net(z, known, net.conditions(classes))[~known].repeat(NOISES, 1)
    x0, w = z[~known].repeat(NOISES, 1), weight[~known].repeat(NOISES)
    times, noise = torch.randint(TRAINED, (len(x0),)), torch.randn_like(x0)
    size = diffusion.recip[times][:, None]  # 1 / sqrt of what is kept
    x = (x0 + diffusion.recip_minus[times][:, None] * noise) / size
    eps, spread = net.noise(x, times, cond)
    error = (eps - noise).square().mean(1)
    # the spread learns from the exact reverse step, the mean does not (improved DDPM)
    mine = diffusion.step(x, times, eps.detach(), spread)
    mean = diffusion.coef1[times][:, None] * x0 + diffusion.coef2[times][:, None] * x
    log_variance = diffusion.log_variance[times][:, None]
    apart = log_variance - 2 * mine.log_sigma
    bits = 0.5 * (apart.exp() - 1 - apart + (mean - mine.mean).square() * (-2 * mine.log_sigma).exp()) / math.log(2)
    return (w * error).sum() / w.sum(), (w * bits.mean(1)).sum() / w.sum()


class Average:
    """Running mean of the weights, which draws better than the last ones."""

    def __init__(self, net):
        self.state = {name: t.detach().clone() for name, t in net.state_dict().items()}

    @torch.no_grad()
    def update(self, net, step):
        keep = min(AVERAGE, (1 + step) / (10 + step))
        for name, t in net.state_dict().items():
            self.state[name].lerp_(t, 1 - keep)


def train(args):
    torch.manual_seed(0)
    cfg, path = DRAFT if args.target else TARGET, pathlib.Path(args.out)
    data = torch.load(args.data, weights_only=True)
    everywhere, middle = torch.arange(len(data["places"])), (data["places"] == 0).nonzero()[:, 0]
    net = Mar(cfg, dtype=torch.float32)
    start_weights(net)
    if args.target:
        loss_of = partial(draft_loss, net, start_draft(net, torch.load(args.target, weights_only=True)))
    else:
        loss_of = partial(target_loss, net, Diffusion(TRAINED))
    opts, average = optimizers(net, args.lr), Average(net)
    base = [[group["lr"] for group in opt.param_groups] for opt in opts]
    clock, step = Clock(args.minutes * 60), 0
    if path.exists():
        saved = torch.load(path, weights_only=True)
        net.load_state_dict(saved["raw"])
        average.state = saved["state"]
        for opt, state in zip(opts, saved["opts"]):
            opt.load_state_dict(state)
        clock, step = Clock(args.minutes * 60, saved["used"]), saved["step"]
    torch.manual_seed(step)
    count, means, last = sum(p.numel() for p in net.parameters()), None, clock.used
    print(f"{count:,} weights", flush=True)
    while clock.progress < 1:
        shown = everywhere if clock.progress < args.everywhere else middle
        pick = shown[torch.randint(len(shown), (args.batch,))]
        classes = torch.where(torch.rand(args.batch) < 0.1, -1, data["classes"][pick])  # for guidance
        weight = torch.where(data["subject"][pick], 1.0, BACKGROUND)
        # masked as often as the cosine schedule will ask for it, evenly spread over the steps
        share = math.cos(math.pi / 2 * (step * 0.6180339887 % 1))
        for opt, rates in zip(opts, base):
            for group, lr in zip(opt.param_groups, rates):
                group["lr"] = lr * rate(clock.progress, step, args.decay)
        # the plain attention: the fused one's backward pass is slow on processors
        with torch.autocast("cpu", torch.bfloat16), sdpa_kernel(SDPBackend.MATH):
            z = data["tokens"][pick].float()
            error, bits = loss_of(z, weight, classes, masking(z, share))
            for opt in opts:
                opt.zero_grad(set_to_none=True)
            (error + bits).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        for opt in opts:
            opt.step()
        average.update(net, step)
        now = (error.item(), bits.item())
        means = now if means is None else tuple(0.99 * m + 0.01 * v for m, v in zip(means, now))
        step += 1
        if step % 50 == 0:
            print(f"{clock.used:6.0f}s step {step} error {means[0]:.4f} bits {means[1]:.4f}", flush=True)
        if clock.used - last > 150 or clock.progress >= 1:
            last = clock.used
            state = {"config": asdict(cfg), "state": average.state, "raw": net.state_dict(), "step": step}
            save({**state, "opts": [opt.state_dict() for opt in opts], "used": clock.used}, path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default=".data/mar_latents.pt")
    parser.add_argument("--target", help="checkpoint of the target: train its draft")
    parser.add_argument("--out", required=True)
    parser.add_argument("--minutes", type=float, default=40)
    parser.add_argument("--batch", type=int, default=48)
    parser.add_argument("--lr", type=float, default=1.0, help="factor on both learning rates")
    parser.add_argument("--everywhere", type=float, default=0.45, help="share of the run before subjects stay in place")
    parser.add_argument("--decay", type=float, default=0.5, help="when the linear decay starts")
    train(parser.parse_args())
