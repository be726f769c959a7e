"""VQ Decode: tokens to pictures, a few at a time."""

import torch
from comfy_api.latest import io

from ..scd_core.budget import codec_bytes
from ..scd_core.codecs.book import same_book
from ..scd_core.errors import UserError
from . import host
from .sockets import LATENTS, TOKENS, VQ, Latents

PIXELS = 1 << 21  # decoded at once where memory allows: 8 pictures of 512x512


class VQDecode(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="SCD_VQDecode",
            display_name="VQ Decode",
            category="SCD",
            description="Turns the sampler's tokens into pictures. A clip comes out as its frames, in order.",
            inputs=[
                io.MultiType.Input(
                    "tokens", types=[TOKENS, LATENTS],
                    tooltip="AR_TOKENS of the sampler, or AR_LATENTS of the Continuous Speculative Sampler.",
                ),
                VQ.Input("vq", tooltip="AR_VQ of the Load AR Model that drew the tokens."),
            ],
            outputs=[
                io.Image.Output(display_name="IMAGE", tooltip="The pictures, or the frames of all clips in order."),
            ],
            **host.newer(search_aliases=["vae decode", "vqgan", "detokenize"]),
        )

    @classmethod
    def execute(cls, tokens, vq):
        check(tokens, vq)
        cfg, codes, pixels = vq.net.cfg, tokens.codes, tokens.width * tokens.height
        if codes.shape[1] > 1 and cfg.compression > 1:  # the frames of a clip hang together
            work, chunk = decode_clips, max(1, min(codes.shape[1], PIXELS // (pixels * cfg.compression)))
            count = cfg.frames(codes.shape[1])
            host.load([vq.patcher], codec_bytes(cfg, tokens.width, tokens.height, count, clip=True))
            bar = host.Progress(len(codes) * count)
        else:
            work, codes = decode, codes.flatten(0, 1)
            chunk = max(1, min(len(codes), PIXELS // pixels))
            host.load([vq.patcher], codec_bytes(cfg, tokens.width, tokens.height, chunk))
            bar = host.Progress(len(codes))
        return io.NodeOutput(host.with_codec(
            vq, "decode one picture",
            lambda net, device, alone: work(net, codes, 1 if alone else chunk, device, bar),
        ))


def check(tokens, vq):
    """Refuse tokens that this codec did not make. Its own model may use a part of its codebook.

    Raises:
        UserError: another codebook, another grid, or cells without a token.
    """
    codes, cfg, name = tokens.codes, vq.net.cfg, vq.name
    factor = cfg.factor
    continuous = isinstance(tokens, Latents)
    if continuous != vq.family.continuous or (continuous and codes.shape[2] != cfg.embed):
        raise UserError(
            f"the tokens come from {tokens.model} ({tokens.family}), this AR_VQ ({name}) belongs to "
            f"{vq.family.title}: wire AR_VQ of the Load AR Model that drew them"
        )
    if continuous:
        return
    if tokens.kept is not None and not tokens.kept.all():
        missing = int((~tokens.kept.expand_as(codes)).sum())
        raise UserError(
            f"{missing} of these {codes.numel()} tokens are still to be drawn: wire VQ Encode into kept of the "
            "sampler, and AR_TOKENS of the sampler into VQ Decode"
        )
    own = tokens.family == vq.family.title
    if tokens.vocab > cfg.codes or (tokens.vocab < cfg.codes and not own):
        raise UserError(
            f"the tokens come from {tokens.model} with a codebook of {tokens.vocab}, this AR_VQ ({name}) has "
            f"{cfg.codes}: wire AR_VQ of the Load AR Model that drew them"
        )
    if not same_book(tokens.book, vq.book):
        raise UserError(
            f"the tokens come from {tokens.model}, whose image tokenizer has another codebook than this AR_VQ ({name}):"
            " wire AR_VQ of the Load AR Model that drew them"
        )
    size = (codes.shape[3] * factor, codes.shape[2] * factor)
    if size != (tokens.width, tokens.height):
        raise UserError(
            f"the tokens come from {tokens.model} and stand for {tokens.width}x{tokens.height} pixels, this AR_VQ "
            f"({name}) would make {size[0]}x{size[1]} of them: wire AR_VQ of the Load AR Model that drew them"
        )
    if codes.numel() and not 0 <= int(codes.min()) <= int(codes.max()) < cfg.codes:
        raise UserError(
            f"the tokens reach from {int(codes.min())} to {int(codes.max())}, the codebook from 0 to {cfg.codes - 1}: "
            "draw the missing ones with the sampler first"
        )


def decode(net, codes, chunk, device, progress):
    """Codes int64 [N, rows, cols] -> frames float32 [N, H, W, 3] in 0..1 on the host's output device.

    A chunk that does not fit into memory is halved; one picture that does not fit raises the host's own error.

    Raises:
        UserError: pixels that are no numbers.
    """
    frames, done = None, 0
    for part in host.in_parts(codes, chunk, lambda some: net.decode(some.to(device))):
        frames = place(part, frames, len(codes), done)
        done += len(part)
        progress(done)
    return frames


def decode_clips(net, codes, grids, device, progress):
    """Codes int64 [N, T, rows, cols] of clips -> their frames float32 [N * F, H, W, 3], as `decode`.

    Args:
        grids: token grids of a clip that are decoded in one step. A step that does not fit into memory is halved, and
            the clip begun again, since its steps hang together.
    """
    count = net.cfg.frames(codes.shape[1])
    frames, number = None, 0
    while number < len(codes):
        done = number * count
        try:
            for part in steps(net, codes[number].to(device), grids):
                frames = place(part, frames, len(codes) * count, done)
                done += len(part)
                progress(done)
        except host.OutOfMemory:
            if grids == 1:
                raise
            grids //= 2
            continue
        number += 1
    return frames


def steps(net, codes, grids):
    """Frames of one clip, part by part where the codec can."""
    return net.decode_steps(codes, grids) if hasattr(net, "decode_steps") else [net.decode_clip(codes)]


def place(part, frames, count, done):
    """Put decoded pictures behind the `done` first ones of `count` (`frames`, None: make them).

    Raises:
        UserError: pixels that are no numbers.
    """
    if part.isnan().any():
        raise UserError(
            f"the codec made pixels that are not numbers in picture {done + 1} or one of the {len(part) - 1} after "
            "it: the model file is damaged, load it again or download it again"
        )
    if frames is None:
        frames = torch.empty(count, *part.shape[1:], device=host.output_device())
    frames[done : done + len(part)] = part
    return frames
