"""Speculative Coupled Decoding: the pack's entry for ComfyUI.

Outside of ComfyUI the package imports too, without its nodes: the core in scd_core needs no host.
"""

import importlib.util
import sys

WEB_DIRECTORY = "./web"
__all__ = ["WEB_DIRECTORY"]

# ComfyUI has folder_paths loaded before it looks for packs. Asking for the host, instead of catching
# ImportError, leaves every other missing module to speak for itself.
if "folder_paths" in sys.modules or importlib.util.find_spec("folder_paths") is not None:
    from .nodes import comfy_entrypoint

    __all__ += ["comfy_entrypoint"]
