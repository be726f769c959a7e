"""Comparisons that only clips need: start tokens, positions in time, attended text. Used by `golden` and `verify`.

Cosmos' numbers have one row for every token that is read, the last one of the clip included.
"""

import torch

from .errors import UserError
from .models.rope import angles_3d_grid
from .prompt import Prompt


def token_grids(meta):
    """Token grids of the fixture's clip; 1 for a picture."""
    grid = meta["grid"]
    return int(grid[0]) if len(grid) == 3 else 1


def told(meta):
    """What a user would write into a config.json that is missing."""
    return {"video_latent_shape": meta["latent_shape"]} if "latent_shape" in meta else {}


def reads_all(subject):
    """Do the fixture's numbers go on behind the last token? Then how many rows from the end it has, else None."""
    tokens = subject.fixture.get("tokens")
    return None if tokens is None else len(tokens)


def attended(subject):
    """`Prompt` of the text that the fixture attends to; its zero rows are the family's business.

    The fixture's number of rows stands for the release's.
    """
    context = subject.fixture.get("context")
    if context is None:
        return Prompt(text="")
    subject.family.text_slots = context.shape[1]
    rows = context[0]
    words = int(rows.ne(0).any(1).nonzero().max()) + 1 if rows.any() else 0
    return Prompt(text="", features=rows[:words] if words else None)


def tokens(subject, name, want):
    """The visible tokens of the prompt, then the clip's."""
    stream = subject.streams[0]
    start = stream.ids if stream.mask is None else stream.ids[stream.mask]
    return torch.cat([start, subject.sequence(subject.fixture.tensors["codes"])])


def angles(subject, name, want):
    """Rotary angles of the tokens; those that the network turns by must be the same but for whole turns."""
    family, plan = subject.family, subject.plan
    net, cfg = family.network, family.decoder_config
    found = angles_3d_grid(plan.frames, plan.rows, plan.cols, cfg.head_dim, net.theta, net.yarn, start_token=True)
    used = subject.positions
    if (found.cos() - used.cos).abs().max() > 1e-6 or (found.sin() - used.sin).abs().max() > 1e-6:
        raise UserError("the network turns by other angles")
    return found[-reads_all(subject) :]


def absolute(subject, name, want):
    """Vectors that are added before every layer."""
    vectors = subject.positions.absolute
    return None if vectors is None else vectors[-reads_all(subject) :].float()


def context(subject, name, want):
    """The text as the layers get it."""
    return subject.streams[0].context[None]


def context_mask(subject, name, want):
    """Nothing of the text is hidden."""
    return torch.ones(1, 1, 1, len(subject.streams[0].context), dtype=torch.bool)


# name, what it needs, kind of number, what the model makes of it (see `verify.Check`)
ROWS = (
    (r"tokens", "decoder", "exact", tokens),
    (r"rope_angles", "decoder", "logits", angles),
    (r"abs_pos", "decoder", "exact", absolute),
    (r"context", "decoder", "exact", context),
    (r"context_mask", "decoder", "exact", context_mask),
)
# Facts of meta.json: name -> what the model has
FACTS = {
    "latent_shape": lambda s: [s.plan.frames, s.plan.rows, s.plan.cols],
    "rope_theta": lambda s: s.family.network.theta,
    "bov_id": lambda s: s.family.network.start,
    "embedding_rows": lambda s: s.decoder.cfg.vocab,
    "key_prefix": lambda s: s.family.network.prefix,
}


def facts(meta):
    """Facts that this fixture tells about a clip."""
    return {name: have for name, have in FACTS.items() if name in meta} if "latent_shape" in meta else {}
