"""How Cosmos models are told what to draw: frames alone, or a text beside them that every layer attends to."""

from ..errors import UserError
from ..prompt import Prompt
from ..text_features import FeatureReader
from .parts import Part, require
from .t5 import T5Text

TOKENS = 512  # the release pads every text to so many rows of zeros and hides none of them
FILES = ("model.safetensors.index.json", "model.safetensors", "pytorch_model.bin.index.json", "pytorch_model.bin")
FOLDERS = ("t5-11b", "text_encoder")
GET = (
    "google-t5/t5-11b: config.json, tokenizer.json and the weights; or connect the CONDITIONING of CLIP Text Encode to "
    "conditioning of Text Encode, with oldt5_xxl and type cosmos in the CLIP loader"
)
FEATURES = "load oldt5_xxl (T5-11B) with type cosmos in the CLIP loader"


class FramesOnly:
    """The base models' way to read prompts: not at all."""

    def __init__(self, name):
        self.name = name

    def encode(self, text):
        """Text -> `Prompt`; a text that says something gets a note that nobody will read it."""
        note = f"{self.name} reads no prompts, it continues the frames that it is given: the text was left out"
        return Prompt(text=text, encoder=self, notes=(note,) if text.strip() else ())


def find_text(source, width, name, parts):
    """(`T5Text`, `FeatureReader`) of a video2world model.

    Args:
        source: `Source` of the language model. width: numbers a token of the features that it attends to.
        name: of the model, for messages. parts: `Part`s that were found so far.

    Raises:
        UserError: a T5 in the model's own folder makes features of another width.
    """

    def fits(found):
        if found.config.get("model_type") != "t5":
            return False
        if found.config.get("d_model") != width:
            raise UserError(
                f"{name}: the text encoder in '{found.root}' gives features {found.config.get('d_model')} wide, the "
                f"model reads {width}: use google-t5/t5-11b"
            )
        return True

    def missing():
        looked = f"a folder {' or '.join(FOLDERS)} in '{source.root}' and the folders around it"
        require([*parts, Part("text encoder", None, looked, GET)], name)

    found = source.part("t5", *(f"{folder}/{file}" for folder in FOLDERS for file in FILES), fits=fits)
    return T5Text(found, TOKENS, missing, as_written=True), FeatureReader(width, TOKENS, FEATURES)
