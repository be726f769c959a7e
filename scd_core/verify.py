"""`python -m scd_core verify FOLDER`: a model against the numbers of its family's own code, tensor by tensor.

Every tensor of the fixture must be compared, or serve as the input of a comparison; one that no row of `TABLE` knows is
a failure. So a new family, or a new kind of number, adds rows here.
"""

import math
import re
from dataclasses import dataclass

import torch

from . import golden_dv, golden_mar, golden_video
from . import golden_format as form
from .errors import UserError
from .golden import Fixture, Subject

# Largest differences that count as equal. A fixture may ask for others, up to the cap.
LIMITS = {"exact": 0.0, "logits": 2e-4, "probs": 2e-4, "pixels": 1e-4}
CAPS = {"exact": 0.0, "logits": 3e-4, "probs": 3e-4, "pixels": 2e-4}
TOLD = {"logits": "fp32 logits", "pixels": "pixels"}  # names of the limits in meta.json
BF16_TYPICAL, BF16_SHARE, BF16_WIDEST = 2.0, 0.03, 32.0  # see compare_bf16
FAULTS = (ValueError, RuntimeError, IndexError, KeyError, TypeError, AttributeError)


@dataclass(frozen=True)
class Row:
    """One line of the answer; `error` and `limit` are numbers, infinite where nothing could be compared."""

    what: str
    error: float
    limit: float
    ok: bool
    note: str = ""


UNLISTED = Row("expected.safetensors", math.inf, 0.0, False, "its sha256 is not the one that meta.json lists")


@dataclass(frozen=True)
class Check:
    """How one kind of tensor is compared.

    Attributes:
        pattern: regular expression of whole tensor names. part: what it needs, "decoder", "codec", "text" (a tokenizer)
            or "input" (nothing).
        kind: a key of LIMITS, or "bf16". make: (subject, name, expected) -> the model's own tensor.
    """

    pattern: str
    part: str
    kind: str
    make: object


def _codes(s, name="codes"):
    return s.fixture.tensors[name]


def _stream(name):
    return 1 if "uncond" in name else 0


def _ids(s, name, want):
    return s.streams[_stream(name)].ids


def _text_ids(s, name, want):
    """The conditional ids up to where both streams end alike: the picture's head is not text."""
    cond, uncond = (stream.ids for stream in s.streams)
    same = 0
    while same < min(len(cond), len(uncond)) and cond[-1 - same] == uncond[-1 - same]:
        same += 1
    return cond[: len(cond) - same]


def _token_sample(s, name, want):
    text = re.search(r"ids of '(.*?)' \(", s.fixture.what(name), re.DOTALL)
    if text is None or s.tokenizer is None:
        raise UserError("meta.json does not tell the text" if text is None else "there is no tokenizer in the folder")
    return torch.tensor(s.tokenizer.tokenizer.encode(text[1], add_special_tokens=False).ids)


def _class_ids(s, name, want):
    return torch.cat([stream.ids for stream in s.streams])


def _slots(s, name, want):
    """Slots that the prompt and all codes but the last are read at."""
    return torch.arange(s.streams[_stream(name)].length + s.plan.length - 1)


def _rope(s, name, want):
    return torch.stack([s.positions.cos, s.positions.sin], -1)


def _given_codes(s, name, want):
    """Codes go in as they are; they must be codes, and the same as in the token sequence."""
    sequence = s.fixture.get("image_seq_ids")
    if not s.alone and sequence is not None:
        free = (s.plan.cells >= 0).nonzero()[:, 0]
        return sequence[free] - s.plan.base
    book = s.family.codec_config.codes if s.alone else s.plan.vocab
    cells = math.prod(s.grid) * (1 if s.alone else s.plan.frames)
    if want.numel() != cells or int(want.min()) < 0 or int(want.max()) >= book:
        raise UserError(f"these are not {cells} codes from 0 to {book - 1}")
    return want


def _given(*uses):
    """An input, which counts when one of the tensors it is needed for is there."""

    def make(s, name, want):
        if not any(s.fixture.get(use) is not None for use in uses):
            raise UserError(f"nothing is computed from it: none of {', '.join(uses)} is there")
        return want

    return make


def _given_mask(s, name, want):
    """A mask goes in as it is; anything but 0 and 1 is none."""
    return _given("caption")(s, name, ((want == 0) | (want == 1)) * want)


def _caption_mask(s, name, want):
    masks = [torch.ones(x.length, dtype=torch.bool) if x.mask is None else x.mask for x in s.streams]
    if not torch.equal(*masks):
        raise UserError("the two streams have different masks")
    return masks[0][None].float()


def _cond_embeds(s, name, want):
    return torch.stack([s.decoder.embed.prompt(stream, torch.float32) for stream in s.streams])


def _image_embeds(s, name, want):
    return s.decoder.embed.image(_codes(s) + s.plan.base, torch.float32)


def _hidden(s, name, want):
    """Both streams at all positions, or one from the first position that predicts a code."""
    hidden = s.forced(_codes(s)).hidden
    if name == "hidden":
        return torch.stack(hidden)[:, : s.streams[0].length + s.plan.length - 1]
    row = _stream(name)
    first = s.streams[row].length - 1
    return hidden[row][first : first + len(want)]


def _logits(s, name, want):
    """Rows and columns as the fixture has them: one stream or both, picture codes or the whole vocabulary."""
    dtype = torch.bfloat16 if name.endswith("_bf16_compute") else torch.float32
    forced = s.forced(_codes(s), dtype)
    wide = forced.full is not None and want.shape[-1] == forced.full.shape[-1]
    found = forced.full if wide else forced.logits
    both = name.startswith("logits") and "cond" not in name and s.family.defaults.cfg != 1  # 1: no second stream
    found = found if both else found[_stream(name)]
    return found[: len(want)] if name.endswith("_first") else found


def _logsumexp(s, name, want):
    return s.forced(_codes(s)).full.logsumexp(-1)


def _text_max(s, name, want):
    """The largest guided score of what is no picture code; the originals that leave those in are told by it."""
    scores = s.guided(_codes(s), wide=True)
    scores[:, s.plan.base : s.plan.base + s.plan.vocab] = -math.inf
    return scores.amax(-1)


TABLE = (
    Check(r"prompt_ids_(un)?cond", "decoder", "exact", _ids),
    Check(r"prompt_ids_text", "decoder", "exact", _text_ids),
    Check(r"tok_\d+", "text", "exact", _token_sample),
    Check(r"class_ids", "decoder", "exact", _class_ids),
    Check(r"positions(_(un)?cond)?", "decoder", "exact", _slots),
    Check(r"rope_table", "decoder", "logits", _rope),
    Check(r"text_features", "decoder", "exact", _given("caption")),
    Check(r"text_mask", "decoder", "exact", _given_mask),
    Check(r"caption", "decoder", "exact", lambda s, name, want: s.streams[0].features[None]),
    Check(r"caption_mask", "decoder", "exact", _caption_mask),
    Check(r"cond_embeds", "decoder", "logits", _cond_embeds),
    Check(r"codes", "input", "exact", _given_codes),
    Check(r"image_seq_ids", "decoder", "exact", lambda s, name, want: s.sequence(_codes(s))),
    Check(r"forced", "decoder", "exact", form.forced),
    Check(r"pixels_\d+frames", "codec", "pixels", form.frames),
    Check(r"image_embeds", "decoder", "logits", _image_embeds),
    Check(r"hidden(_(un)?cond)?", "decoder", "logits", _hidden),
    Check(r"logits(_(un)?cond(_full_first)?)?", "decoder", "logits", _logits),
    Check(r"logits(_(un)?cond)?_bf16_compute", "decoder", "bf16", _logits),
    Check(r"logsumexp", "decoder", "logits", _logsumexp),
    Check(r"cfg_logits", "decoder", "logits", lambda s, name, want: s.guided(_codes(s))),
    Check(r"probs(_\w+)?", "decoder", "probs", lambda s, name, want: s.law(_codes(s), name)),
    Check(r"greedy_codes", "decoder", "exact", lambda s, name, want: s.greedy()),
    Check(r"greedy_seq_ids", "decoder", "exact", lambda s, name, want: s.sequence(s.greedy())),
    Check(r"greedy_cfg_logits", "decoder", "logits", lambda s, name, want: s.guided(s.greedy())),
    Check(r"pixels", "codec", "pixels", lambda s, name, want: s.pixels(_codes(s))),
    Check(r"greedy_pixels", "codec", "pixels", lambda s, name, want: s.pixels(s.greedy())),
    Check(r"picture", "input", "exact", _given("encoder_codes", "encoder_latent")),
    Check(r"encoder_latent", "codec", "logits", lambda s, name, want: s.latent(_codes(s, "picture"))),
    Check(r"encoder_codes", "codec", "exact", lambda s, name, want: s.encoded(_codes(s, "picture"))),
    Check(r"cfg_logits_text_max", "decoder", "logits", _text_max),
    *(Check(*row) for row in (*golden_dv.ROWS, *golden_video.ROWS)),
)


# Facts of meta.json that the files tell as well: name -> what the model has.
FACTS = {
    "grid": lambda s: [s.plan.rows, s.plan.cols] if s.plan.frames == 1 else [s.plan.frames, s.plan.rows, s.plan.cols],
    "codebook": lambda s: s.plan.vocab,
    "image_id_offset": lambda s: s.plan.base,
    "head_dim": lambda s: s.decoder.cfg.head_dim,
    "norm_eps": lambda s: s.decoder.cfg.eps,
    "rms_norm_eps": lambda s: s.decoder.cfg.eps,
}
DIMS = {"D": "dim", "L": "layers", "H": "heads", "KV": "kv_heads", "F": "ffn"}


def verify(folder):
    """Compare a model with the numbers of its fixture.

    Args:
        folder: holds model/, expected.safetensors and meta.json.

    Returns:
        list of `Row`, one a tensor and a few more.

    Raises:
        UserError: the fixture is damaged, or the model cannot be loaded.
    """
    fixture = Fixture(folder)
    unlisted = [] if fixture.as_listed else [UNLISTED]
    if golden_mar.fits(fixture):
        return [attempt(*each) for each in golden_mar.comparisons(fixture)] + unlisted
    checks = {name: find_check(name) for name in fixture.tensors}
    subject = Subject(fixture, {check.part for check in checks.values() if check})
    rows = [run_check(subject, name, check) for name, check in checks.items()]
    if "greedy_codes" in checks:
        rows.append(same_codes(subject))
    if not subject.alone or golden_dv.facts(fixture.meta):
        rows.append(facts(subject))
    if subject.tokenizer is not None and fixture.meta.get("tokenizer_samples"):
        rows.append(tokenizer_samples(subject))
    return rows + unlisted


def attempt(name, make, want, limit):
    """One comparison -> `Row`; whatever goes wrong in `make` is a failure with its reason."""
    try:
        with torch.inference_mode():
            return compare(name, make(), want, limit)
    except FAULTS as error:
        return Row(name, math.inf, limit, False, reason(error))


def find_check(name):
    """The row of the table for a tensor's name, or None."""
    return next((check for check in TABLE if re.fullmatch(check.pattern, name)), None)


def run_check(subject, name, check):
    """One comparison -> `Row`; whatever goes wrong on the way is a failure with its reason."""
    want = subject.fixture.tensors[name]
    if check is None:
        return Row(name, math.inf, 0.0, False, "no comparison knows this tensor")
    limit, relative = limit_of(check.kind, subject.meta)
    try:
        with torch.inference_mode():
            got = check.make(subject, name, want)
            if check.kind == "bf16":
                base = name.removesuffix("_bf16_compute")
                exact = subject.fixture.get(base)
                return compare_bf16(name, got, want, _logits(subject, base, want) if exact is None else exact)
        return compare(name, got, want, limit, relative)
    except FAULTS as error:
        return Row(name, math.inf, limit, False, reason(error))


def reason(error):
    """An exception as one line."""
    told = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    return " ".join(told.split())


def limit_of(kind, meta):
    """(limit, is it relative) for a kind of number: the fixture's own wish, never above the cap."""
    told = meta.get("tolerance")
    told = told if isinstance(told, dict) else {}
    word = TOLD.get(kind, "")
    wishes = [value for name, value in told.items() if word and word in name and isinstance(value, (int, float))]
    relative = any("relative" in name for name in told if word and word in name)
    wish = min((value for value in wishes if value >= 0), default=LIMITS.get(kind, 0.0))
    return min(wish, CAPS.get(kind, 0.0)), relative


def compare(name, got, want, limit, relative=False):
    """Largest difference of two tensors against a limit; other shapes or kinds, NaN and infinities are failures."""
    problem = mismatch(got, want)
    if problem:
        return Row(name, math.inf, limit, False, problem)
    error = (got.double() - want.double()).abs()
    error = float(error.max()) if error.numel() else 0.0
    if relative:
        error /= max(float(want.double().abs().max()), 1e-12)
    return Row(name, error, limit, error <= limit, "relative" if relative else "")


def mismatch(got, want):
    """Why two tensors cannot be compared, or an empty text."""
    if got is None:
        return "the model has no such thing"
    if tuple(got.shape) != tuple(want.shape):
        return f"the model gives the shape {list(got.shape)}, expected is {list(want.shape)}"
    if got.is_floating_point() != want.is_floating_point():
        return f"the model gives {got.dtype}, expected is {want.dtype}"
    if not got.isfinite().all():
        return "the model gives numbers that are not finite"
    return "" if want.isfinite().all() else "expected are numbers that are not finite"


def compare_bf16(name, got, want, exact):
    """Two computations in bf16 differ as much from one another as each does from fp32 (`exact`).

    The typical difference is taken from the fixture, but not above a share of the numbers' spread; the mean may be
    `BF16_TYPICAL` times, one number `BF16_WIDEST` times as large.
    """
    problem = mismatch(got, want) or mismatch(exact, want)
    if problem:
        return Row(name, math.inf, 0.0, False, problem)
    typical = min(float((want - exact).abs().mean()), BF16_SHARE * float(exact.std()))
    error, limit = max(float((got - want).abs().max()), float((want - exact).abs().max())), BF16_WIDEST * typical
    mean = float((got - want).abs().mean())
    ok = error <= limit and mean <= BF16_TYPICAL * typical
    return Row(name, error, limit, ok, f"on average {mean:.2g} from it, bf16 itself {typical:.2g}")


def same_codes(subject):
    """Seed-exact decoding draws what token-by-token decoding draws."""
    try:
        return compare("greedy codes, seed-exact", subject.greedy("seed-exact"), subject.greedy(), 0.0)
    except FAULTS as error:
        return Row("greedy codes, seed-exact", math.inf, 0.0, False, str(error))


def facts(subject):
    """Grid, codebook, sizes and the like: what meta.json says and what the model has."""
    wrong, count = [], 0
    known = {} if subject.alone else FACTS
    told = {name: (subject.meta[name], have) for name, have in known.items() if subject.meta.get(name) is not None}
    told |= golden_dv.facts(subject.meta)
    told |= {name: (subject.meta[name], have) for name, have in golden_video.facts(subject.meta).items()}
    told |= form.facts(subject)
    dims = subject.meta.get("dims")
    for short, value in (dims.items() if isinstance(dims, dict) else ()):
        if short in DIMS:
            told[f"dims {short}"] = (value, lambda s, field=DIMS[short]: getattr(s.decoder.cfg, field))
    for name, (value, have) in told.items():
        count += 1
        try:
            found = have(subject)
        except FAULTS as error:
            found = str(error)
        if found != value:
            wrong.append(f"{name} is {value} in meta.json and {found} in the model")
    return Row(f"{count} facts of meta.json", float(len(wrong)), 0.0, not wrong, "; ".join(wrong))


def tokenizer_samples(subject):
    """Texts of meta.json through the tokenizer, special tokens by name included, without automatic extras."""
    samples, wrong = subject.meta["tokenizer_samples"], []
    for sample in samples:
        ids = subject.tokenizer.tokenizer.encode(sample["text"], add_special_tokens=False).ids
        if ids != sample["ids"]:
            wrong.append(repr(sample["text"]))
    note = f"other ids for {', '.join(wrong)}" if wrong else ""
    return Row(f"{len(samples)} tokenizer samples", float(len(wrong)), 0.0, not wrong, note)


def table(rows):
    """Rows as aligned text."""

    def number(value):
        return "-" if math.isinf(value) else f"{value:.2g}"

    lines = [("what", "largest error", "limit", "ok", "")]
    lines += [(r.what, number(r.error), number(r.limit), "yes" if r.ok else "NO", r.note) for r in rows]
    widths = [max(len(line[i]) for line in lines) for i in range(4)]
    return "\n".join(
        ("  ".join(cell.ljust(w) for cell, w in zip(line, widths)) + "  " + line[4]).rstrip() for line in lines
    )
