"""What a model family is: a description of configuration, keys, prompts, grids, guidance and defaults."""

import math
from dataclasses import dataclass

from ..errors import UserError


@dataclass(frozen=True)
class Defaults:
    """A family's own sampling settings; a user's -1 stands for these."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    cfg: float = 1.0


@dataclass(frozen=True)
class Size:
    """A picture or clip size that a model can draw."""

    width: int
    height: int
    frames: int = 1

    def __str__(self):
        return f"{self.width}x{self.height}" + (f", {self.frames} frames" if self.frames > 1 else "")


def nearest(sizes, width, height):
    """The size nearest to a wish in both sides; 0 leaves a side open."""
    asked = (width or height or 1, height or width or 1)
    return min(sizes, key=lambda s: abs(math.log(s.width / asked[0])) + abs(math.log(s.height / asked[1])))


class Family:
    """Base of all families. Subclasses fill in the blanks; none touches the transformer's code."""

    name = ""  # in messages
    title = ""  # in lists of what is supported
    ignored = ()  # regular expressions of keys that its files hold and image generation does not need
    networks = ("decoder", "codec")  # parts that refs() knows
    ending = ()  # token ids that the format puts behind the plan's; nobody needs to draw them
    marks = {}  # what was concluded from names of files or folders; a one-file form keeps it as config["scd"]
    file = ""  # name of the file or folder that it was read from, for reports
    text = None  # encoder: .encode(text) -> Prompt
    source = None  # `Source` of the weights, where it is another view of the file than the one that was detected
    continuous = False  # its tokens are vectors, drawn by a road of their own (see continuous/)
    auto_dtype = None  # dtype that "auto" stands for; None: what suits the device
    heads = None  # `HeadFile`: where heads for the method ssd lie, whether there are any or not
    reads = None  # `FeatureReader`: text features from elsewhere that it takes for words; None: it reads words alone
    frame_rate = 8  # frames a second of its clips
    context_end = "start"  # which end of a longer clip its own pipeline goes on from: "start" or "end"
    contexts = ()  # numbers of frames that it was trained to go on from; (): any that its codec can hold
    encoder_file = "the complete image tokenizer"  # what a codec without an encoder lacks, for messages
    guidance = "logits"  # what the guidance formula mixes: "logits" or "logprobs" (SimpleAR)
    defaults = Defaults()
    sizes = ()  # `Size`s in order of preference; the first still and the first clip are the defaults

    @staticmethod
    def detect(source):
        """Is this checkpoint `Source` one of ours? By its configuration first, then by keys and shapes."""
        raise AssertionError("each family knows its files")

    def refs(self, part):
        """{name inside the network: `Ref`} for part "decoder" or "codec"."""
        raise AssertionError("each family knows its keys")

    def size(self, width=0, height=0, frames=1):
        """The size asked for, with 0 filled in from the family's own.

        Raises:
            UserError: the model cannot draw it; the sentence lists what it can.
        """
        for size in self.sizes:
            fits = (width in (0, size.width)) and (height in (0, size.height)) and frames == size.frames
            if fits:
                return size
        known = "; ".join(str(size) for size in self.sizes)
        asked = f"{width or 'any'}x{height or 'any'}" + (f" with {frames} frames" if frames != 1 else "")
        raise UserError(f"{self.name} cannot draw {asked}: choose one of {known} (0 takes the model's own size)")

    def plan(self, size):
        """`Size` -> `TokenPlan`."""
        raise AssertionError("each family defines its plan")

    def streams(self, prompt, negative, plan):
        """(conditional `Stream`, unconditional `Stream`) of a run; `negative` may be None."""
        raise AssertionError("each family defines its streams")

    def positions(self, decoder, plan, prompt_length, device):
        """`Positions` tables covering prompt_length + plan.length slots."""
        raise AssertionError("each family defines its positions")
