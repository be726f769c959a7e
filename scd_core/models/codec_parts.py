"""Image tokenizers that people keep apart from the language model: beside it, or in the folder of another release."""

import re
from dataclasses import dataclass

from ..checkpoint import check_keys
from ..codecs.layouts import codec_layout, find_codec
from ..errors import UserError
from .parts import Part


@dataclass(frozen=True)
class CodecFiles:
    """How people have the image tokenizer of a family.

    Attributes:
        names: of files, best first, as `Source.part` takes them.
        mark: regular expression of file names that claim to be one.
        looked: what is looked for, and get: where users get it, for messages.
        foreign: regular expression of file names that are passed over: codecs of others that may fit in every shape.
    """

    names: tuple
    mark: str
    looked: str
    get: str
    foreign: str


def around(source):
    return f"in '{source.root}' and the folders around it"


def find_vq(source, files, codes, factor, name):
    """Image tokenizer of a model: in its own weights, beside them or around them.

    Args:
        files: `CodecFiles`. codes: picture codes of the vocabulary, None: unknown.
        factor: pixels a code must stand for, None: any. name: of the model, for messages.

    Returns:
        (`CodecLayout` or None, the `Source` it is in, `Part`).

    Raises:
        UserError: a file of the model's own does not fit, or holds tensors that nothing uses.
    """

    def fits(found):
        file = found.files[0]
        if re.search(files.foreign, file.name, re.IGNORECASE):
            return False
        if find_codec(found) is not None:
            _fitting(found, files, codes, factor, name)
            return True
        # a folder's other weights are of no interest, a file that says it is one is
        if re.search(files.mark, file.name, re.IGNORECASE):
            raise UserError(f"{name}: '{file}' holds no image tokenizer that can draw; take {files.get}")
        return False

    inside = find_codec(source) is not None
    found = source if inside else source.part("vq", *files.names, fits=fits)
    part = Part("image tokenizer", found and found.files[-1], f"{files.looked} {around(source)}", files.get)
    if found is None:
        return None, None, part
    layout, prefix = _fitting(found, files, codes, factor, name), find_codec(found)
    if not inside:
        used = {ref.key for ref in layout.refs.values()}
        extra = [key for key in found.keys() if key.startswith(prefix) and key not in used]
        check_keys(extra, (), layout.ignored, f"the image tokenizer '{found.files[-1]}'")
    return layout, found, part


def _fitting(found, files, codes, factor, name):
    """`CodecLayout` of a codec that speaks the vocabulary's codes at the size of picture that its tokens stand for.

    Raises:
        UserError: it does not, or is incomplete.
    """
    where, prefix = f"{name}: the image tokenizer in '{found.files[-1]}'", find_codec(found)
    has = found.shape(prefix + "quantize.embedding.weight")[0]
    if codes is not None and has != codes:
        raise UserError(
            f"{where} has {has} codes, the token map names {codes}: they belong to different models; take {files.get}"
        )
    layout = codec_layout(found, prefix)
    if factor is not None and layout.config.factor != factor:
        raise UserError(
            f"{where} draws {layout.config.factor} pixels a code, the size tokens count on {factor}: it belongs to "
            f"another model; take {files.get}"
        )
    return layout
