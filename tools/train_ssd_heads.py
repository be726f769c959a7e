"""Train heads for the method ssd: networks that guess the hidden states of cells to the right and below.

    python tools/train_ssd_heads.py MODEL --prompts prompts.txt

The model stays as it is and draws its own data with seed-exact: half of the pictures with its own settings, half with
plain sampling (temperature 1, no top-k, cfg 1). The file lands beside the model, where the method looks for it. Printed
for each head is the held-out chance that a first draft stands (the overlap of its law with the model's), beside that of
the law at the cell that it starts from, which costs nothing.
"""

import argparse
import pathlib
import random
import sys
import time

import numpy as np
import torch
import torch.nn.functional as F

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scd_core.checkpoint import save_safetensors  # noqa: E402
from scd_core.errors import UserError  # noqa: E402
from scd_core.generate import Request, generate, law_settings  # noqa: E402
from scd_core.law import token_scores  # noqa: E402
from scd_core.models.load import BUNDLED, DTYPES, load_model  # noqa: E402
from scd_core.models.session import Session  # noqa: E402
from scd_core.models.spatial_heads import SpatialHeads, pack_heads  # noqa: E402

CHUNK = 64  # positions whose hidden states are computed at a time
HELD_OUT = 0.125
PLAIN = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "cfg": 1.0}
LAW_SHARE = 0.3  # weight of the law beside that of the hidden state


# data -------------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def states_of(decoder, family, plan, streams, tokens, device="cpu"):
    """Hidden states that finished sequences were drawn from.

    Args:
        tokens: int64 [B, N] ids.

    Returns:
        fp16 or bf16 [B, N, S, dim] on the CPU, before the last norm; entry j is the state that token j was drawn from.
    """
    tokens, parts = tokens.to(device), []
    session = Session(decoder, family, plan, streams, torch.full_like(tokens, -1, device="cpu"), 0, device)
    store = torch.float16 if decoder.dtype == torch.float32 else decoder.dtype
    for first in range(0, plan.length, CHUNK):
        before = torch.arange(first, min(first + CHUNK, plan.length), device=device) - 1
        session.window(
            tokens[:, before.clamp(min=0)], before.repeat(len(tokens), 1), int(before[-1]) + 1, first == 0
        )
        parts.append(session.states.unflatten(0, (len(tokens), -1)).transpose(1, 2).to("cpu", store))
    return torch.cat(parts, 1)


def self_generated(model, prompts, pictures, batch=16, window=16, seed=0, size=(0, 0), told=print):
    """What a model draws for prompts in turn, seed after seed.

    Args:
        size: width and height in pixels, 0: the model's own.

    Returns:
        (plan, token ids int64 [P, N], states [P, N, S, dim], plain bool [P]: drawn without the model's own settings).
    """
    plan, tokens, states, plain, begin = None, [], [], [], time.perf_counter()
    for number in range(-(-pictures // batch)):
        prompt = model.family.text.encode(prompts[number % len(prompts)])
        changes = PLAIN if number % 2 else {}
        count = min(batch, pictures - number * batch)
        request = Request(
            seed=seed + number, batch=count, window=window, nodes=0, width=size[0], height=size[1], **changes
        )
        drawn = generate(model.decoder, model.family, prompt, request=request, device=model.device)
        plan = drawn.plan
        ids = plan.fixed(len(drawn.codes), drawn.codes)
        streams = model.family.streams(prompt, None, plan)
        tokens.append(ids)
        states.append(states_of(model.decoder, model.family, plan, streams, ids, model.device))
        plain += [bool(number % 2)] * len(ids)
        told(f"{sum(map(len, tokens))} of {pictures} pictures, {time.perf_counter() - begin:.0f} s")
    return plan, torch.cat(tokens), torch.cat(states), torch.tensor(plain)


def pairs(plan, right, down):
    """Positions (sources, targets) int64 [K] of all cells of a still and those so far to the right or below."""
    drawn = (plan.cells >= 0).nonzero()[:, 0]
    grid = torch.empty(plan.rows * plan.cols, dtype=torch.int64)
    grid[plan.cells[drawn]] = drawn
    grid = grid.view(plan.rows, plan.cols)
    return grid[: plan.rows - down, : plan.cols - right].flatten(), grid[down:, right:].flatten()


# training -----------------------------------------------------------------------------------------------------------


def prepare(heads, seed):
    """First weights: a head repeats the hidden state that it is given."""
    g = torch.Generator().manual_seed(seed)
    for head in [*heads.horizontal, *heads.vertical]:
        for weight in (head.w0.weight, head.w1.weight, head.w2.weight):
            weight.data = torch.randn(weight.shape, generator=g) * weight.shape[1] ** -0.5
        dim = len(head.w0.weight)
        head.w0.weight.data.mul_(0.02)[:, :dim] += torch.eye(dim)
        head.norm.weight.data.fill_(1.0)
        head.w3.weight.data.zero_()
    return heads


def loss_of(heads, guess, want):
    """Distance of guessed hidden states [K, dim] from the true ones, and of the laws that the decoder makes of both."""
    decoder = heads.decoder
    with torch.no_grad():
        log_p = decoder.logits(decoder.norm(want.to(decoder.dtype))).float().log_softmax(-1)
    log_q = decoder.logits(decoder.norm(guess.to(decoder.dtype))).float().log_softmax(-1)
    return F.smooth_l1_loss(guess, want) + LAW_SHARE * (log_p.exp() * (log_p - log_q)).sum(-1).mean()


def train_head(heads, head, data, where, steps, rate, batch, seed):
    """Train one head; returns its losses, one a step.

    Args:
        data: (token ids [P, N], states [P, N, S, dim]). where: (sources, targets) int64 [K].
    """
    tokens, states = data
    device = head.w0.weight.device
    streams, g, losses = states.shape[2], torch.Generator().manual_seed(seed), []
    optimizer = torch.optim.AdamW(head.parameters(), lr=rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps, pct_start=0.1)
    for _ in range(steps):
        picture, pair, stream = (torch.randint(n, (batch,), generator=g) for n in (len(tokens), len(where[0]), streams))
        source, target = where[0][pair], where[1][pair]
        hidden, want = (states[picture, p, stream].to(device, torch.float32) for p in (source, target))
        embedded = heads.decoder.embed.image(tokens[picture, source].to(device), torch.float32)
        loss = loss_of(heads, head(torch.cat([hidden, embedded], -1)), want)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


@torch.inference_mode()
def overlap(decoder, guess, want, law, guidance, allowed):
    """Mean overlap of the laws of hidden states [A, M, S, dim], guessed and true: the chance that a draft stands."""

    def p(hidden):
        logits = decoder.logits(decoder.norm(hidden.to(decoder.dtype))).transpose(1, 2)
        streams = 1 if law.cfg == 1 else logits.shape[1]
        return token_scores(logits[:, :streams], law, guidance, allowed).softmax(-1)

    return float(torch.minimum(p(guess), p(want)).sum(-1).mean())


def agreement(heads, family, plan, data, where, right, down, law, most=64):
    """(overlap of a head's law with the model's, overlap of the law at the source) on held-out pictures."""
    decoder, tokens, states = heads.decoder, *(part[:most] for part in data)
    device, (source, target) = decoder.norm.weight.device, where
    allowed = None if plan.allowed is None else plan.allowed.to(device)
    guessed, copied = [], []
    for ids, hidden in zip(tokens, states):
        old, want = (hidden[p][None].to(device, torch.float32) for p in (source, target))
        steps = (np.full((1, len(source)), n) for n in (right, down))
        guess = heads.states(old, ids[source][None].to(device), *steps)
        for found, hidden in ((guessed, guess), (copied, old)):
            found.append(overlap(decoder, hidden, want, law, family.guidance, allowed))
    return sum(guessed) / len(guessed), sum(copied) / len(copied)


def train(model, data, horizontal=5, vertical=2, width=0, steps=2000, rate=0.0, batch=512, seed=0, told=print):
    """Heads for a model, trained on what it drew.

    Args:
        data: as `self_generated` returns. width: of the SwiGLU, 0: that of the hidden states.
        rate: largest step size, 0: 0.03 / sqrt(width of the hidden states).

    Returns:
        (`SpatialHeads` in fp32, {(right, down): losses}).
    """
    plan, tokens, states, plain = data
    decoder, dim = model.decoder, model.decoder.cfg.dim
    heads = prepare(SpatialHeads(decoder, width or dim, horizontal, vertical), seed).to(model.device)
    kept = max(1, round(HELD_OUT * len(tokens)))
    seen, unseen, free = (tokens[kept:], states[kept:]), (tokens[:kept], states[:kept]), plain[:kept]
    losses = {}
    for number, head in enumerate([*heads.horizontal, *heads.vertical]):
        right, down = (number + 1, 0) if number < horizontal else (0, number + 1 - horizontal)
        where = pairs(plan, right, down)
        losses[right, down] = train_head(
            heads, head, seen, where, steps, rate or 0.03 * dim**-0.5, batch, seed + number
        )
        line = [f"{right} right, {down} down: loss {losses[right, down][0]:.3f} -> {losses[right, down][-1]:.3f}"]
        for name, chosen, changes in (("own settings", ~free, {}), ("plain", free, PLAIN)):
            if chosen.any():
                law = law_settings(Request(**changes), model.family)
                ours, copied = agreement(
                    heads, model.family, plan, tuple(part[chosen] for part in unseen), where, right, down, law
                )
                line.append(f"{name} {ours:.3f} (law at the source {copied:.3f})")
        told("; ".join(line))
    return heads.eval(), losses


# shell --------------------------------------------------------------------------------------------------------------


def prompts_of(args, seed):
    """Lines of the file of prompts, or what the bundled model knows, in random order.

    Raises:
        UserError: no prompts for another model.
    """
    if args.prompts is not None:
        found = [line.strip() for line in args.prompts.read_text("utf-8").splitlines() if line.strip()]
    elif args.model == "bundled":
        sys.path.insert(0, str(ROOT / "tools" / "train_bundled"))
        from subjects import BACKGROUNDS, SUBJECTS

        found = [f"{subject.name} on {ground}" for subject in SUBJECTS for ground in BACKGROUNDS]
    else:
        found = []
    if not found:
        raise UserError("what should the model draw? give --prompts a text file with one prompt a line")
    random.Random(seed).shuffle(found)
    return found


def options():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help="'bundled', a model file or a model folder")
    parser.add_argument("--prompts", type=pathlib.Path, help="text file, one prompt a line")
    parser.add_argument("--out", type=pathlib.Path, help="default: where the method looks for it")
    parser.add_argument("--overwrite", action="store_true")
    parser.add_argument("--pictures", type=int, default=1024)
    parser.add_argument("--size", type=int, nargs=2, default=(0, 0), help="width and height; 0 0: the model's own")
    parser.add_argument("--batch", type=int, default=16, help="pictures drawn at a time, of one prompt")
    parser.add_argument("--window", type=int, default=16, help="of the drawing; changes its speed only")
    parser.add_argument("--horizontal", type=int, default=5)
    parser.add_argument("--vertical", type=int, default=2)
    parser.add_argument("--width", type=int, default=0, help="of the heads; 0: that of the hidden states")
    parser.add_argument("--steps", type=int, default=2000, help="of each head")
    parser.add_argument("--rate", type=float, default=0.0, help="largest step size; 0: by the width")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="auto", choices=["auto", *DTYPES])
    parser.add_argument("--device", default="cpu")
    return parser


def main(argv=None):
    args = options().parse_args(argv)
    try:
        prompts = prompts_of(args, args.seed)
        model = load_model(BUNDLED if args.model == "bundled" else args.model, args.dtype, args.device)
        out = args.out or model.family.heads.places()[-1 if args.model == "bundled" else 0]
        if out.exists() and not args.overwrite:
            raise UserError(f"{out} exists already: choose another --out, or --overwrite")
        data = self_generated(model, prompts, args.pictures, args.batch, args.window, args.seed, args.size)
        heads, _ = train(
            model, data, args.horizontal, args.vertical, args.width, args.steps, args.rate, seed=args.seed
        )
        tensors, metadata = pack_heads(heads, model.name)
        save_safetensors(tensors, out, metadata, args.overwrite)
        print(f"{out}: {out.stat().st_size / 1e6:.1f} MB")
    except UserError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
