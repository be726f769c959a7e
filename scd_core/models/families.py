"""All families, in the order they are asked whether a checkpoint is theirs."""

from ..continuous.bundled import BundledMarFamily
from ..continuous.family import MarFamily
from .bundled import BundledFamily
from .chameleon import AnoleFamily, LuminaFamily
from .cosmos import CosmosFamily
from .emu3 import Emu3Family
from .janus import JanusFamily
from .llamagen import LlamaGenFamily
from .lumina2 import Lumina2Family
from .simplear import SimpleARFamily

FAMILIES = (
    BundledFamily,
    JanusFamily,
    LlamaGenFamily,
    BundledMarFamily,
    MarFamily,
    LuminaFamily,
    Lumina2Family,
    AnoleFamily,
    Emu3Family,
    CosmosFamily,
    SimpleARFamily,
)
