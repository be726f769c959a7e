"""Reading model files safely: safetensors, shards with or without an index, and weights-only pickles."""

from .names import list_models, resolve_model
from .source import Source, check_keys, save_safetensors

__all__ = ["Source", "check_keys", "list_models", "resolve_model", "save_safetensors"]
