"""Reading model files safely: safetensors, shards with or without an index, and weights-only pickles."""

from .beside import SideFile
from .names import list_models, resolve_model
from .source import Source, check_keys
from .writer import save_safetensors, stream_safetensors

__all__ = ["SideFile", "Source", "check_keys", "list_models", "resolve_model", "save_safetensors", "stream_safetensors"]
