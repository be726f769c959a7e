"""VQ Decode: tokens to pictures, a few at a time."""

import logging

import torch
from comfy_api.latest import io

from ..scd_core.budget import codec_bytes
from ..scd_core.errors import UserError
from . import host
from .sockets import TOKENS, VQ

log = logging.getLogger(__name__)

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
                TOKENS.Input("tokens", tooltip="AR_TOKENS of the sampler."),
                VQ.Input("vq", tooltip="AR_VQ of the Load AR Model that drew the tokens."),
            ],
            outputs=[
                io.Image.Output(display_name="IMAGE", tooltip="The pictures, or the frames of all clips in order."),
            ],
            **host.newer(search_aliases=["vae decode", "vqgan", "detokenize"]),
        )

    @classmethod
    def execute(cls, tokens, vq):
        check(tokens, vq.net.cfg, vq.name)
        codes = tokens.codes.flatten(0, 1)
        chunk = max(1, min(len(codes), PIXELS // (tokens.width * tokens.height)))
        host.load([vq.patcher], codec_bytes(vq.net.cfg, tokens.width, tokens.height, chunk))
        bar = host.Progress(len(codes))
        try:
            return io.NodeOutput(decode(vq.net, codes, chunk, vq.patcher.load_device, bar))
        except host.OutOfMemory:
            if host.is_cpu(vq.patcher.load_device):
                raise
        log.warning("not enough memory on %s to decode one picture: decoding on the CPU", vq.patcher.load_device)
        net = vq.files.build("codec", device="cpu", dtype=torch.float32)
        return io.NodeOutput(decode(net, codes, 1, "cpu", bar))


def check(tokens, cfg, name):
    """Refuse tokens that this codec did not make.

    Raises:
        UserError: another codebook, another grid, or cells without a token.
    """
    codes, factor = tokens.codes, cfg.factor
    if tokens.vocab != cfg.codes:
        raise UserError(
            f"the tokens come from {tokens.model} with a codebook of {tokens.vocab}, this AR_VQ ({name}) has "
            f"{cfg.codes}: wire AR_VQ of the Load AR Model that drew them"
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
    while done < len(codes):
        try:
            part = net.decode(codes[done : done + chunk].to(device))
        except host.OutOfMemory:
            if chunk == 1:
                raise
            chunk //= 2
            continue
        if part.isnan().any():
            raise UserError(
                f"the codec made pixels that are not numbers in picture {done + 1} or one of the {len(part) - 1} after "
                "it: the model file is damaged, load it again or download it again"
            )
        if frames is None:
            frames = torch.empty(len(codes), *part.shape[1:], device=host.output_device())
        frames[done : done + len(part)] = part
        done += len(part)
        progress(done)
    return frames
