"""All families, in the order they are asked whether a checkpoint is theirs."""

from .bundled import BundledFamily
from .chameleon import AnoleFamily, LuminaFamily
from .janus import JanusFamily
from .llamagen import LlamaGenFamily

FAMILIES = (BundledFamily, JanusFamily, LlamaGenFamily, LuminaFamily, AnoleFamily)
