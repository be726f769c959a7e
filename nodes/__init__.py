"""The pack's nodes: thin doors into scd_core. ComfyUI is imported in this folder only."""

from comfy_api.latest import ComfyExtension

from . import host
from .compare import CompareMethods
from .continuous_sampler import ContinuousSpeculativeSampler
from .load_model import LoadARModel
from .sampler import SpeculativeCoupledSampler
from .text_encode import TextEncode
from .video_combine import VideoCombine
from .vq_decode import VQDecode
from .vq_encode import VQEncode

NODES = [
    LoadARModel, TextEncode, SpeculativeCoupledSampler, VQDecode, VideoCombine, VQEncode, ContinuousSpeculativeSampler,
    CompareMethods,
]  # fmt: skip


class SCDExtension(ComfyExtension):
    """What the host asks for nodes."""

    async def get_node_list(self):
        return NODES


async def comfy_entrypoint():
    """Called by the host once, while it loads its packs."""
    host.register_model_folder()
    return SCDExtension()
