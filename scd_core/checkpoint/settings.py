"""Are the numbers in a configuration numbers that a model can have? Looked at once, before anybody computes with them.

Only names that some family reads are judged; what other programs keep under other names is their own business.
"""

from ..errors import UserError
from .header import AGAIN

MODEL = "model"  # may be a name of something else in other programs' settings
INSIDE = (  # objects whose settings are read
    "text_config", "language_config", "vision_config", "gen_vision_config", "vq_config", "params", "rope_scaling",
    "rope_parameters", "scd", MODEL,
)  # fmt: skip
LAYERS, SIZE, PIXELS = (1, 1024), (1, 1 << 20), (1, 1 << 28)
NUMBERS = {
    **dict.fromkeys(("num_hidden_layers", "n_layers"), LAYERS),
    **dict.fromkeys(
        ("num_attention_heads", "n_heads", "n_head", "num_key_value_heads", "n_kv_heads", "head_dim", "hidden_size",
         "dim", "intermediate_size", "ffn_hidden_size", "d_model", "d_kv", "d_ff", "image_size", "patch_size", "grid",
         "num_video_frames", "video_height", "video_width"), SIZE),
    **dict.fromkeys(("max_position_embeddings", "block_size", "image_area"), PIXELS),
}  # fmt: skip
REALS = {
    **dict.fromkeys(("rms_norm_eps", "norm_eps", "layer_norm_epsilon"), 1.0),
    **dict.fromkeys(("rope_theta", "rope_base"), 1e12),
    **dict.fromkeys(("factor", "yarn_scale", "yarn_beta_fast", "yarn_beta_slow"), 1e6),
}
NAMES = "vocabulary_map"  # {name: token id}


def check_settings(config, where):
    """Refuse settings that no model has; null stands for a setting that is not told.

    Args:
        config: dict. where: for messages.

    Returns:
        `config`.

    Raises:
        UserError: naming the first one.
    """
    for name, value in config.items():
        expected = None if value is None else _expected(name, value)
        if expected:
            told = repr(value) if len(repr(value)) < 60 else repr(value)[:57] + "..."
            raise UserError(f"{where} tells {name} {told} where {expected} is expected; {AGAIN} or undo the last edit.")
        if name in INSIDE and isinstance(value, dict):
            check_settings(value, where)
    return config


def _expected(name, value):
    """What a setting should be, in words; None when it is that, or nothing is known of it."""
    if name == NAMES:
        fine, words = isinstance(value, dict) and _numbered(value), "an object {...} of names and token ids"
    elif name in INSIDE and name != MODEL:
        fine, words = isinstance(value, dict), "an object {...}"
    elif name in NUMBERS:
        low, high = NUMBERS[name]
        fine, words = type(value) is int and low <= value <= high, f"a whole number from {low} to {high:,}"
    elif name in REALS:
        fine = type(value) in (int, float) and 0 < value <= REALS[name]
        words = f"a number above 0 and up to {REALS[name]:g}"
    else:
        return None
    return None if fine else words


def _numbered(names):
    return all(type(id) is int and 0 <= id < 1 << 31 for id in names.values())
