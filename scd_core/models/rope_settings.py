"""What a configuration in transformers' form says about the rotary: its base and its scaling."""

from ..errors import UserError


def rope_settings(config, where, name):
    """(theta, factor): base of the wavelengths, and what positions are divided by.

    Both spellings are read: `rope_theta` with `rope_scaling`, and transformers 5's `rope_parameters` with everything
    in it; what is told in both counts as transformers counts it.

    Args:
        config: dict of the language model's settings. where, name: file or folder and model, for messages.

    Raises:
        UserError: another scaling than the linear one, which no release of this family has.
    """
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    factor = rope.get("factor", 1.0) if kind == "linear" else 1.0
    if kind not in ("default", "linear") or not isinstance(factor, (int, float)) or factor < 1:
        told = f"a rotary of kind {kind!r}" + (f" with factor {factor!r}" if kind == "linear" else "")
        raise UserError(
            f"{name}: the configuration in '{where}' asks for {told}; only the plain one and 'linear' with a factor "
            "of at least 1 are known for models of this family: get config.json from the model's page again"
        )
    return float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0), float(factor)
