"""Which formats this machine can write: the list of formats is the same everywhere, the encoders are not."""

from ..errors import UserError
from .formats import FORMATS, find_format


def load_av(need):
    """Import and return the av module (PyAV) for `need` (the subject of the sentence, when it is missing).

    Only called where it is needed: the Pillow formats work without PyAV, and importing the pack stays quick.
    """
    try:
        import av
    except ImportError as error:
        raise UserError(
            f"{need} needs the Python package av (PyAV), which cannot be loaded ({error}); install it or use one "
            f"of: {', '.join(working_formats())}."
        ) from error
    return av


def _available():
    try:
        import av
    except ImportError:
        return frozenset()
    return av.codecs_available


def working_formats(sound=False):
    """Names of the formats that can be written here; sound: only those that hold sound."""
    found = _available()
    return [
        name for name, spec in FORMATS.items()
        if {spec.codec, spec.audio_codec} - {""} <= found and (spec.audio_codec or not sound)
    ]


def check_encoders(name, sound=False):
    """Raise UserError when format `name` is unknown, or cannot be written here (with sound, if `sound`).

    Cheap (no frame is touched), so that a graph can be refused before minutes of sampling.
    """
    spec = find_format(name)
    needed = [codec for codec in (spec.codec, spec.audio_codec if sound else "") if codec]
    if not needed:
        return
    lacking = [codec for codec in needed if codec not in load_av(name).codecs_available]
    if lacking:
        raise UserError(
            f"{name} needs the encoder {lacking[0]}, which the installed PyAV lacks; choose one of: "
            f"{', '.join(working_formats(sound))}, or update the Python package av."
        )
