"""VQ Encode: pictures to tokens that the sampler keeps; what a mask or a region covers is drawn anew."""

import torch
from comfy_api.latest import io

from ..scd_core.budget import codec_bytes
from ..scd_core.errors import UserError
from ..scd_core.given import ENDS, FITS, REGIONS, Reading, prepare
from . import host
from .sockets import TOKENS, VQ, Tokens

PIXELS = 1 << 21  # encoded at once where memory allows: 8 pictures of 512x512
KINDS = ("pictures", "clip")


def _inputs():
    """All inputs, in the order that saved graphs rely on: only ever append."""
    return [
        VQ.Input("vq", tooltip="AR_VQ of the Load AR Model that shall draw on."),
        io.Image.Input("image", tooltip="A picture, a batch of pictures, or the frames of a clip."),
        io.Combo.Input(
            "images_are", display_name="images are", options=list(KINDS), default=KINDS[0],
            tooltip="pictures: each is a picture of its own. clip: they are the first frames of one clip, which the "
            "sampler continues.",
        ),
        io.Int.Input(
            "width", default=0, min=0, max=8192, step=8,
            tooltip="Pixels. 0: the size of the model that is nearest to the picture's proportions.",
        ),
        io.Int.Input(
            "height", default=0, min=0, max=8192, step=8,
            tooltip="Pixels. 0: the size of the model that is nearest to the picture's proportions.",
        ),
        io.Combo.Input(
            "fit", options=list(FITS), default=FITS[0],
            tooltip="Pictures of other proportions. crop: their middle. stretch: distorted. pad: whole, and the model "
            "draws the border around them.",
        ),
        io.Combo.Input(
            "redraw", options=list(REGIONS), default=next(iter(REGIONS)),
            tooltip="What the sampler draws anew, beside what the mask says. The model looks at what is above and to "
            "the left of a token, never at what comes after it.",
        ),
        io.Int.Input(
            "frames", default=0, min=0, max=1024,
            tooltip="clip: how many frames are kept. 0: all that are given, as far as the model can take them. The "
            "last one is repeated where the model needs more.",
        ),
        io.Combo.Input(
            "frames_from", display_name="frames from", options=list(ENDS), default=ENDS[0],
            tooltip="clip: which frames are kept when there are more. end: go on where the clip stops. auto: as the "
            "model was made to, Cosmos from the end, others from the start.",
        ),
        io.Mask.Input(
            "mask", optional=True,
            tooltip="1 (white) is drawn anew, 0 is kept, as with the other inpainting nodes. A token is drawn anew as "
            "soon as one of its pixels is masked. One mask for all pictures, or one for each.",
        ),
    ]


class VQEncode(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="SCD_VQEncode",
            display_name="VQ Encode",
            category="SCD",
            description="Turns pictures into tokens that the sampler keeps: to complete a picture, to redraw a part of "
            "it, or to continue a clip.",
            inputs=_inputs(),
            outputs=[
                TOKENS.Output(display_name="AR_TOKENS", tooltip="The tokens, for kept of the sampler."),
                io.Image.Output(display_name="IMAGE", tooltip="The pictures at the size that is drawn."),
                io.Mask.Output(display_name="MASK", tooltip="1 where the sampler draws anew, in whole tokens."),
            ],
            **host.newer(search_aliases=["vae encode", "inpaint", "outpaint", "tokenize", "image to image"]),
        )

    @classmethod
    def execute(cls, vq, image, images_are=KINDS[0], width=0, height=0, fit=FITS[0], redraw="nothing", frames=0,
                frames_from=ENDS[0], mask=None):
        if images_are not in KINDS:
            raise UserError(f"'images are' is {images_are!r}: choose {' or '.join(KINDS)}")
        clip, cfg = images_are == "clip", vq.net.cfg
        need_encoder(vq)
        how = Reading(width, height, fit, clip, frames, frames_from, redraw)
        given = prepare(image.cpu(), None if mask is None else mask.cpu(), vq.family, cfg, how)
        codes = run(vq, given.frames, clip)
        tokens = Tokens(codes, given.width, given.height, cfg.codes, vq.name, vq.family.title, given.kept, vq.book)
        place = host.output_device()
        return io.NodeOutput(tokens, given.frames.to(place), given.pixels(cfg).to(place))


def need_encoder(vq):
    """Refuse a codec that can only draw, or that knows no tokens.

    Raises:
        UserError: it names the file, and what would have the encoder.
    """
    if vq.family.continuous:
        raise UserError(f"{vq.name} ({vq.family.title}) draws without tokens, so there are none to keep")
    if getattr(vq.net.cfg, "encoder", True):
        return
    found = sorted({str(file) for ref in vq.family.refs("codec").values() for file in ref.source.files})
    raise UserError(
        f"{vq.name} can draw but not read pictures, because its image tokenizer ({', '.join(found)}) has no encoder: "
        f"put {vq.family.encoder_file} there and load the model again"
    )


def run(vq, frames, clip):
    """Frames [N, H, W, 3] -> codes int64 [N, 1, h, w], or [1, T, h, w] of one clip, on the CPU.

    Without room on the device for one picture (or for the clip) the processor does the work.
    """
    cfg = vq.net.cfg
    whole = clip and cfg.compression > 1  # its frames hang together
    height, width = frames.shape[1:3]
    chunk = len(frames) if whole else max(1, min(len(frames), PIXELS // (width * height)))
    host.load([vq.patcher], codec_bytes(cfg, width, height, chunk, whole))
    bar = host.Progress(len(frames))
    codes = host.with_codec(
        vq, "encode one picture",
        lambda net, device, alone: encode(net, frames, 1 if alone and not whole else chunk, device, bar, whole),
    )
    return codes[None] if clip else codes[:, None]


def encode(net, frames, chunk, device, progress, whole=False):
    """Frames [N, H, W, 3] in 0..1 -> codes int64 [N, h, w] ([T, h, w] with `whole`) on the CPU.

    A chunk that does not fit into memory is halved; one picture that does not fit raises the host's own error.
    """
    if whole:
        codes = net.encode_clip(frames.to(device)).cpu()
        progress(len(frames))
        return codes
    codes, done = [], 0
    for part in host.in_parts(frames, chunk, lambda some: net.encode(some.to(device))):
        codes.append(part.cpu())
        done += len(part)
        progress(done)
    return torch.cat(codes)
