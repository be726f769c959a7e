"""Where people keep Cosmos' discrete video codec: beside or around the language models that speak its codes.

The release is a folder with encoder.jit and decoder.jit; others keep the same weights as safetensors, in one file or
two.
"""

from ..checkpoint import check_keys
from ..codecs.dv_layouts import dv_layout, find_dv, find_dv_encoder
from ..errors import UserError
from .parts import Part

DECODERS = (
    "decoder.safetensors",
    "decoder.jit",
    "*[Dd][Vv]8x16x16*.safetensors",
    "*[Cc]osmos*[Tt]okeni*.safetensors",
    "vq.safetensors",
    "autoencoder.jit",
)
ENCODERS = ("encoder.safetensors", "encoder.jit")
FACTOR, COMPRESSION = 16, 8  # pixels and frames a token of all language models that use it
GET = "decoder.jit and encoder.jit of nvidia/Cosmos-1.0-Tokenizer-DV8x16x16 in a folder beside the model"


def find_video_codec(source, codes, name):
    """The codec of a language model: inside its weights' folder, or around it.

    Args:
        source: `Source` of the language model. codes: that it draws, at most as many as the codec has.
        name: of the model, for messages.

    Returns:
        (`CodecLayout` or None, `Part`).

    Raises:
        UserError: a codec in the model's own folder does not fit, or holds tensors that nothing uses.
    """

    def fits(found):
        if find_dv(found) is None:
            return False
        _check(dv_layout(found, find_dv(found)).config, codes, f"{name}: the video tokenizer in '{found.files[0]}'")
        return True

    found = source.part("vq", *DECODERS, fits=fits)
    looked = f"decoder.safetensors or decoder.jit in '{source.root}' and the folders around it"
    if found is None:
        return None, Part("video tokenizer", None, looked, GET)
    return video_codec(found, source), Part("video tokenizer", found.files[0], looked, GET)


def video_codec(decoder, source):
    """`CodecLayout` of a codec whose encoder may be a file of its own.

    Args:
        decoder: `Source` of the decoder. source: the `Source` that the encoder is a part of; it lies by the decoder.

    Raises:
        UserError: weights of the decoder are missing, or a file holds tensors that nothing uses.
    """
    prefix, encoder = find_dv(decoder), None
    if find_dv_encoder(decoder) is None:

        def fits(found):
            return found.root == decoder.root and find_dv_encoder(found) is not None

        encoder = source.part("vq_encoder", *ENCODERS, fits=fits)
    layout = dv_layout(decoder, prefix, encoder)
    used = {ref.key for ref in layout.refs.values() if ref.source is decoder}
    extra = [key for key in decoder.keys() if key.startswith(prefix) and key not in used]
    check_keys(extra, (), layout.ignored, f"the video tokenizer '{decoder.files[0]}'")
    return layout


def _check(config, codes, where):
    """Raises UserError when a codec cannot speak a language model's tokens."""
    if config.codes < codes:
        raise UserError(f"{where} has {config.codes} codes, the language model draws {codes}: take {GET}")
    if (config.factor, config.compression) != (FACTOR, COMPRESSION):
        raise UserError(
            f"{where} makes {config.compression}x{config.factor}x{config.factor} frames and pixels of a token, the "
            f"language model counts on {COMPRESSION}x{FACTOR}x{FACTOR}: take {GET}"
        )
