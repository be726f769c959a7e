"""Toy models with laws that can be written down, stand-ins for the session that serve them, and a tiny transformer."""

import torch
from scd_pack.scd_core import loop
from scd_pack.scd_core.law import LawSettings, token_law
from scd_pack.scd_core.models.family import Family
from scd_pack.scd_core.models.rope import rope_1d
from scd_pack.scd_core.models.transformer import Decoder, DecoderConfig, Positions
from scd_pack.scd_core.plan import TokenPlan
from scd_pack.scd_core.prompt import Stream

UNKNOWN = -99  # a token that the loop never fed


class ToyHeads:
    """Heads for the method ssd that say something definite and mostly wrong, by offset and token at the source."""

    right, down = 2, 4

    def __init__(self, vocab=0):
        self.vocab = vocab

    def reach(self, decoder):
        return self.right, self.down

    def sizes(self, decoder):
        return 8, self.right + self.down

    def load(self, decoder, device):
        return type(self)(decoder.cfg.head_rows if hasattr(decoder, "cfg") else decoder.plan.vocab)

    def logits(self, hidden, token, right, down):
        place = (token + torch.from_numpy(2 * right + 3 * down + 1))[:, None, :, None]
        logits = 1.5 * torch.sin(1.7 * place * torch.arange(1, self.vocab + 1))
        return logits.expand(-1, hidden.shape[2], -1, -1)


class ToyFamily(Family):
    """Rotary by slot, logits guided as they are."""

    name = "the toy"
    heads = ToyHeads()

    def positions(self, decoder, plan, prompt_length, device):
        return Positions(*rope_1d(prompt_length + plan.length, decoder.cfg.head_dim, device=device))


class Toy:
    """A model in closed form.

    Attributes:
        plan: `TokenPlan`.
        logits: (known tokens [A, N], positions [A, W]) -> fp32 [A, W, V]; may read only tokens left of a position.
    """

    dtype = torch.float32

    def __init__(self, plan, logits):
        self.plan, self.logits = plan, logits


class ToySession:
    """What the loop asks of a session, with a board of fed tokens for a cache: what was never fed is UNKNOWN."""

    def __init__(self, decoder, family, plan, streams, fixed, prefix, device, scratch=0):
        self.toy, self.dtype, self.plan = decoder, decoder.dtype, plan
        self.known = torch.full((len(fixed), plan.length + 1), UNKNOWN)
        self.known[:, :prefix] = fixed[:, :prefix]
        self.beside = torch.full((len(fixed), scratch), UNKNOWN)  # tokens of rows beside the window

    def window(self, tokens, before, length, opening, visible=None):
        spare = self.known.shape[1] - 1
        where = torch.where(before >= 0, before, spare)
        if visible is not None and visible.nodes is not None:
            where = torch.where(visible.nodes < 0, where, spare)
            assert visible.sees.sum(2).max() <= 1, "a board has no place for paths of more than one token"
        self.known[: len(tokens)].scatter_(1, where, tokens)
        self.known[:, spare] = UNKNOWN
        self.states = torch.zeros(*before.shape, 1)  # nothing that heads could read
        known, positions = self.known[: len(tokens)], (before + 1).clamp(max=self.plan.length - 1)
        if visible is None:
            return self.toy.logits(known, positions)[:, None]
        # every input sees a board of its own; padding has none, and position 0 asks for none
        positions = torch.where(before < spare, positions, 0)
        column = torch.arange(spare)
        inside = column <= visible.top[..., None]
        if visible.floor is not None:
            inside &= visible.settled[:, None] | (column >= visible.floor[..., None])
        seen = torch.where(inside, known[:, None, :spare], UNKNOWN)
        seen = torch.cat([seen, torch.full((*before.shape, 1), UNKNOWN)], 2)
        if visible.nodes is not None:  # a row beside the window sees its own token too
            row, lane = torch.nonzero(visible.nodes >= 0, as_tuple=True)
            seen[row, lane, before[row, lane]] = tokens[row, lane]
            self.beside[row, visible.nodes[row, lane]] = tokens[row, lane]
        lanes = range(before.shape[1])
        return torch.cat([self.toy.logits(seen[:, i], positions[:, i : i + 1]) for i in lanes], 1)[:, None]

    def settle(self, samples, nodes, positions):
        self.known[samples, positions] = self.beside[samples, nodes]

    def move(self, source, target):
        self.known[target] = self.known[source]


def run(toy, method="seed-exact", variant=None, kept=None, callback=None, law=None, **settings):
    """The real decode loop on a toy: (codes [B, N], report). `variant`: a `Method` of the test's own."""
    settings = loop.Settings(method=method, law=law or LawSettings(), **settings)
    real, loop.Session = loop.Session, ToySession
    try:
        tokens, report = loop.decode(
            toy, ToyFamily(), toy.plan, (None,), settings, kept=kept, callback=callback, method=variant
        )
    finally:
        loop.Session = real
    return tokens - toy.plan.base, report


# enumerable chains ---------------------------------------------------------------------------


class Chain(Toy):
    """Every prefix has its own logits: `tables[j]` fp32 [V**j, V], prefixes in base V, first token leading."""

    def __init__(self, tables, shape=None):
        self.vocab = tables[0].shape[1]
        super().__init__(TokenPlan(*(shape or (1, 1, len(tables))), self.vocab), self._logits)
        self.tables, self.flat = tables, torch.cat(tables)
        sizes = torch.tensor([0] + [len(t) for t in tables])
        self.starts = sizes.cumsum(0)[:-1]

    def _logits(self, known, positions):
        code, codes = torch.zeros(len(known), dtype=torch.int64), []
        for j in range(self.plan.length):
            codes.append(code)
            code = code * self.vocab + known[:, j]
        index = torch.stack(codes, 1).gather(1, positions) + self.starts[positions]
        return self.flat[index]  # an UNKNOWN token left of a position makes the index negative or wrong

    def joint(self, law=None, given=None):
        """Law of all V**N sequences, float64 [V**N], computed by plain enumeration.

        Args:
            given: {position: token} of tokens that are not drawn.
        """
        joint = torch.ones(1, dtype=torch.float64)
        for j, table in enumerate(self.tables):
            p = plain_law(table.double(), law or LawSettings())
            if given and j in given:
                p = torch.nn.functional.one_hot(torch.tensor(given[j]), self.vocab).double().expand_as(p)
            joint = (joint[:, None] * p).reshape(-1)
        return joint

    def index(self, codes):
        """Sequences [S, N] -> index into `joint`."""
        powers = self.vocab ** torch.arange(codes.shape[1] - 1, -1, -1)
        return (codes * powers).sum(1)


def plain_law(logits, law):
    """Temperature, top-k and softmax in float64, the long way."""
    p = logits / law.temperature
    if 0 < law.top_k < logits.shape[-1]:
        rank = p.argsort(-1, descending=True).argsort(-1)
        p = torch.where(rank < law.top_k, p, -torch.inf)
    return p.softmax(-1)


def prefix_tables(vocab, length, seed, scale=1.2, shape=None):
    """E1: independent logits for every prefix. `shape`: (frames, rows, cols) of the plan."""
    g = torch.Generator().manual_seed(seed)
    return Chain([scale * torch.randn(vocab**j, vocab, generator=g) for j in range(length)], shape)


class Pairs(Chain):
    """Logits summed over pairs; an UNKNOWN token adds nothing, so rows may be drawn with gaps.

    Attributes:
        bias: [N, V]. weights: weights[j][i] fp32 [V, V], what token i adds to the logits of position j.
    """

    def __init__(self, tables, bias, weights, shape):
        super().__init__(tables, shape)
        self.bias, self.weights = torch.stack(bias), weights

    def _logits(self, known, positions):
        n, nothing = self.plan.length, torch.zeros(1, self.vocab)
        columns = torch.where(known[:, :n] >= 0, known[:, :n], self.vocab)
        everywhere = self.bias[None].repeat(len(known), 1, 1)
        for j in range(n):
            for i, w in enumerate(self.weights[j]):
                everywhere[:, j] += torch.cat([w, nothing])[columns[:, i]]
        return everywhere.gather(1, positions[..., None].expand(-1, -1, self.vocab))


def pairs_in_rows(vocab=3, shape=(1, 2, 3), seed=7, scale=1.3):
    """E2 in rows: b_j + sum over i < j of W_ji[x_i], drawn with whatever is known of the x_i."""
    g, length = torch.Generator().manual_seed(seed), shape[0] * shape[1] * shape[2]
    tables, biases, weights = [], [], []
    for j in range(length):
        biases.append(0.4 * torch.randn(vocab, generator=g))
        weights.append([scale / length**0.5 * torch.randn(vocab, vocab, generator=g) for _ in range(j)])
        logits = biases[j].expand(1, -1)
        for w in weights[j]:
            logits = (logits[:, None] + w).reshape(-1, vocab)
        tables.append(logits.contiguous())
    return Pairs(tables, biases, weights, shape)


def pairwise(vocab=4, length=5, seed=7):
    """E2: logits b_j + sum over i < j of W_ji[x_i]."""
    g = torch.Generator().manual_seed(seed)
    tables = []
    for j in range(length):
        logits = 0.4 * torch.randn(vocab, generator=g).expand(1, -1)
        for _ in range(j):
            w = 1.3 / length**0.5 * torch.randn(vocab, vocab, generator=g)
            logits = (logits[:, None] + w).reshape(-1, vocab)
        tables.append(logits.contiguous())
    return Chain(tables)


# grid G ----------------------------------------------------------------------------------------

NEIGHBOURS = {(0, -1): 1.0, (-1, 0): 1.0, (-1, -1): 0.6, (-1, 1): 0.6, (0, -2): 0.4, (-2, 0): 0.4}


def grid(side=16, vocab=64, kappa=0.35, seed=0, neighbours=None):
    """Image-like toy: every cell's logits are a sum over earlier neighbours, six unless others are given.

    A neighbour that nobody fed adds nothing.
    """
    neighbours = neighbours or NEIGHBOURS
    g = torch.Generator().manual_seed(seed)
    embed = torch.randn(vocab, 12, generator=g)
    tables = []
    for strength in neighbours.values():
        m = kappa * strength * 3 / 12**0.5 * embed @ torch.randn(vocab, 12, generator=g).t()
        tables.append(torch.cat([m - m.mean(0), torch.zeros(1, vocab)]))  # last row: no neighbour
    tables = torch.stack(tables)
    steps = torch.tensor(list(neighbours))

    def logits(known, positions):
        r, c = positions // side, positions % side
        row, col = r[..., None] + steps[:, 0], c[..., None] + steps[:, 1]
        there = (row >= 0) & (col >= 0) & (col < side)
        where = torch.where(there, row * side + col, 0)
        token = torch.where(there, known.gather(1, where.flatten(1)).view(where.shape), vocab)
        token = torch.where(token >= 0, token, vocab)
        return sum(tables[o][token[..., o]] for o in range(len(steps)))

    return Toy(TokenPlan(1, side, side, vocab), logits)


# a tiny transformer -------------------------------------------------------------------------------------------------

WORDS = 4  # prompt tokens behind the image tokens


def tiny_config(vocab=12, **changes):
    values = {"dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 48}
    values.update(vocab=vocab + WORDS, head_rows=vocab)
    return DecoderConfig(**{**values, **changes})


def initialise(module, seed=1):
    """Fan-in normal weights; vectors get noise too, so that no norm weight or bias goes untested."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in module.named_parameters():
            noise = torch.randn(p.shape, generator=g)
            if p.dim() >= 2 and "norm" not in name:
                p.copy_(noise * p[0].numel() ** -0.5)
            else:
                p.copy_(0.1 * noise + (0.0 if name.endswith("bias") else 1.0))
    return module.requires_grad_(False).eval()


def tiny_decoder(vocab=12, gain=2.0, seed=1, **changes):
    """Random decoder with laws of moderate entropy."""
    decoder = initialise(Decoder(tiny_config(vocab, **changes), dtype=torch.float32), seed)
    if hasattr(decoder, "lm_head"):
        decoder.lm_head.weight.mul_(gain)
    return decoder


def word_streams(vocab=12):
    """Conditional prompt of three tokens, unconditional of one."""
    return Stream(ids=torch.tensor([vocab, vocab + 1, vocab + 2])), Stream(ids=torch.tensor([vocab + 3]))


def row_end_plan(rows=4, cols=5, vocab=12, base=0, end=None):
    """A picture whose rows end in a forced format token (by default an id outside the picture's)."""
    end = base + vocab + 1 if end is None else end
    cells = torch.full((rows, cols + 1), -1)
    cells[:, :cols] = torch.arange(rows * cols).view(rows, cols)
    forced = torch.where(cells < 0, end, -1)
    return TokenPlan(1, rows, cols, vocab, base=base, forced=forced.flatten(), cells=cells.flatten())


@torch.inference_mode()
def draw(decoder, plan, streams=None, kept=None, callback=None, family=None, variant=None, method="seed-exact",
         law=None, keep_on=(), **settings):
    """The real decode loop on a real decoder: (tokens, report)."""
    streams = streams or word_streams(plan.vocab)
    settings = loop.Settings(method=method, law=law or LawSettings(), **settings)
    return loop.decode(
        decoder, family or ToyFamily(), plan, streams, settings, kept=kept, callback=callback, method=variant,
        keep_on=keep_on,
    )


def position_rows(decoder, positions, length):
    """What the decoder wants to know of the first `length` slots."""
    return positions.ready(decoder.cfg.rope_pairing, torch.float32).rows(torch.arange(length)[None])


@torch.inference_mode()
def teacher_log_law(decoder, family, plan, streams, tokens, law):
    """log p fp32 [B, N, V] of finished sequences by one causal forward without any cache."""
    streams = streams[:1] if law.cfg == 1 else streams
    longest = max(stream.length for stream in streams)
    positions, logits = family.positions(decoder, plan, longest, "cpu"), []
    for stream in streams:
        prompt = decoder.embed.prompt(stream, torch.float32).expand(len(tokens), -1, -1)
        x = torch.cat([prompt, decoder.embed.image(tokens, torch.float32)], 1)[:, :-1]
        rows = positions.ready(decoder.cfg.rope_pairing, torch.float32).rows(torch.arange(x.shape[1])[None])
        hidden = decoder.hidden(x, rows)
        logits.append(decoder.logits(hidden[:, stream.length - 1 :]))
    return token_law(torch.stack(logits, 1), law, family.guidance, plan.allowed)
