"""How many bytes a continuous run needs, and what would fit when they were not there."""

from dataclasses import replace

from ..budget import FLOAT, GB, SPARE
from .schedule import cosine_schedule
from .side import CONTEXTS, STATES

ACTIVE = 8  # vectors of the head's width that one noisy token has alive


def working_bytes(config, settings, item_size, drafted):
    """Estimate of what a run needs beside the weights.

    Args:
        config: `MarConfig` of the larger network. settings: resolved `Settings`. item_size: bytes of a number in the
            compute dtype. drafted: whether a draft runs ahead.
    """
    streams, coupled = 1 if settings.cfg == 1 else 2, drafted and settings.mode == "exact"
    prefixes = settings.gamma + 1 if drafted and settings.mode != "block" else 1
    contexts = streams * settings.batch * prefixes
    slots = config.buffer + config.tokens
    alive = min(contexts, CONTEXTS) * slots * (4 * config.dim + 2 * max(config.ffn, config.decoder_ffn))
    conditions = contexts * config.tokens * config.decoder_dim
    cells = settings.batch * _most_cells(config.tokens, settings, drafted)
    states = cells * settings.diffusion_steps
    noisy = streams * max(cells, min(STATES, states) if coupled else 0)
    head = noisy * (ACTIVE * config.head_width + config.decoder_dim)
    # noise of a chain; where its steps are coupled, states and laws of the draft and laws of the target, also in fp64
    numbers = states * config.channels * (1 + (15 if coupled else 0))
    # the parts of a pass lie beside one another when they are joined, the last part's own work is done by then
    return item_size * (conditions + max(alive, conditions, head)) + FLOAT * numbers


def _most_cells(tokens, settings, drafted):
    """Cells of a picture that one round draws at most."""
    masked, ahead = cosine_schedule(tokens, settings.steps).masked, settings.gamma if drafted else 1
    return max(before - masked[min(at + ahead, settings.steps)] for at, before in enumerate(masked))


def advice(need, settings, drafted, weights, free):
    """A sentence on what would fit, after a run that did not.

    Args:
        need: (`Settings`, drafted) -> bytes beside the weights. settings, drafted: of the run. weights: bytes of the
            draft model's, which leave with it. free: bytes that are left.
    """
    needed = need(settings, drafted)
    room = min(free, SPARE * needed)

    def first(told):
        """The first of [(words, changes, with a draft)] that fits, as a list of one sentence at most."""
        for words, changes, ahead in told:
            cost = need(replace(settings, **changes), ahead)
            if cost - (weights if drafted and not ahead else 0) <= room:
                return [f"{words} (about {cost / GB:.2g} GB)"]
        return []

    smaller = [(f"batch size {b}", {"batch": b}, drafted) for b in range(settings.batch - 1, 0, -1)]
    nearer = [(f"gamma {g}", {"gamma": g}, True) for g in range(settings.gamma - 1, 0, -1)] if drafted else []
    alone = [("no draft model", {}, False)] if drafted else []
    plain = [("cfg 1", {"cfg": 1}, drafted)] if settings.cfg != 1 else []
    fits = [offer for told in (smaller, nearer, alone, plain) for offer in first(told)]
    least = {"batch": 1, "cfg": 1}
    together = [("batch size 1 with cfg 1", least, drafted), ("batch size 1, cfg 1 and no draft model", least, False)]
    fits = fits or first(together[: 1 + drafted])
    used = f"batch size {settings.batch}, cfg {settings.cfg:g}"
    used += f" and a draft model (mode {settings.mode}, gamma {settings.gamma})" if drafted else ""
    return (
        f"not enough memory for {used}, which needs about {needed / GB:.2g} GB beside the weights: try "
        f"{' or '.join(fits) or 'a smaller model'}"
    )
