"""What a MAR makes of the inputs of its golden fixture: conditions, every denoising step, whole generations, pixels."""

import re
from contextlib import suppress
from functools import cached_property

import torch

from .checkpoint import Source
from .checkpoint.files import is_weight
from .continuous.diffusion import Diffusion
from .continuous.family import find_mar
from .continuous.sampler import Run, Settings
from .continuous.schedule import cosine_schedule
from .continuous.side import Cells, Side
from .errors import UserError
from .models.load import open_model

# Tensors that only these fixtures have
OWN = {"encoder_out", "net_x", "timestep_map", "sample_a_out", "sample_b_out", "step_x", "gen_latents"}
PIXELS = {"pixels", "gen_pixels"}  # what the codec is needed for
# kind of number -> (its name in meta.json's tolerances, largest difference, share of the largest number on top of it:
# untrained networks reach hundreds, where fp32 alone rounds more)
LIMITS = {
    "exact": ("", 0.0, 0.0),
    "table": ("", 1e-6, 1e-6),
    "z": ("z", 2e-4, 3e-6),
    "net_out": ("net_out", 2e-4, 3e-6),
    "sampling": ("sampling", 2e-3, 3e-5),
    "pixels": ("pixels", 2e-4, 3e-6),
}


def fits(fixture):
    """Is this `Fixture` one of a MAR?"""
    return bool(OWN & fixture.tensors.keys())


def limit_of(kind, meta, want):
    """Largest difference that counts as equal: the fixture's own wish, never above the table's."""
    word, most, share = LIMITS[kind]
    told = meta.get("tolerance")
    wish = told.get(word) if isinstance(told, dict) else None
    if isinstance(wish, (int, float)) and 0 <= wish < most:
        most = wish
    largest = float(want.double().abs().max()) if want.numel() and bool(want.isfinite().all()) else 0.0
    return most + share * largest


def comparisons(fixture):
    """All that is to be compared: list of (name, () -> the model's own tensor, expected tensor, limit).

    Every file of the folder that holds a MAR is put to the test.

    Raises:
        UserError: there is none, or one cannot be loaded.
    """
    subjects = [Subject(fixture, path) for path in mar_files(fixture.model)]
    if not subjects:
        raise UserError(f"'{fixture.model}' holds no MAR")
    listed = []
    for number, subject in enumerate(subjects):
        mark = f" [{subject.path.name}]" if number else ""
        listed += [subject.comparison(name, want, mark) for name, want in fixture.tensors.items()]
        listed.append((f"facts of meta.json{mark}", subject.facts, torch.zeros(()), 0.0))
    return listed


def mar_files(folder):
    """Weight files below a folder that hold a MAR."""
    found = []
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in filter(lambda path: is_weight(path.name), files):
        with suppress(UserError), Source.open(path) as source:
            if find_mar(source) is not None:
                found.append(path)
    return found


class GivenNoise:
    """A fixture's noise and order where a run expects `NormalNoise`.

    Args:
        order: int64 [n]. cells: int64 [n], the cell of each row of the noise. start: [n, C]. noise: [steps, n, C],
            first denoising step to last.
    """

    def __init__(self, order, cells, start, noise):
        self.order, self.table = order, torch.cat([noise.flip(0), start[None]])
        self.place = torch.empty_like(cells).scatter_(0, cells, torch.arange(len(cells)))

    def orders(self, count):
        return self.order[None].numpy()

    def normal(self, stream, rows, cells, step, channels):
        return self.table[torch.from_numpy(step), self.place[torch.from_numpy(cells)]]


class Subject:
    """A MAR under test, from one file."""

    def __init__(self, fixture, path):
        self.fixture, self.meta, self.path, self.want = fixture, fixture.meta, path, fixture.tensors
        # a width that was never released does not tell its number of heads: a user would write a config.json
        dims = self.meta.get("dims")
        told = {"num_attention_heads": dims["H"]} if isinstance(dims, dict) and "H" in dims else {}
        need = ("decoder", "codec") if PIXELS & self.want.keys() else ("decoder",)
        self.files = open_model(path, need, told)
        self.family = self.files.family
        self.cfg = self.family.decoder_config

    @cached_property
    def net(self):
        return self.files.build("decoder", dtype=torch.float32)

    @cached_property
    def codec(self):
        return self.files.build("codec", dtype=torch.float32)

    @cached_property
    def diffusion(self):
        count = self.meta.get("num_sampling_steps")
        return Diffusion(len(self.want["timestep_map"]) if count is None else int(count))

    def comparison(self, name, want, mark):
        found = next(((kind, make) for pattern, kind, make in TABLE if re.fullmatch(pattern, name)), None)
        if found is None:
            return name + mark, self._unknown, want, 0.0
        kind, make = found
        return name + mark, lambda: make(self, name, want), want, limit_of(kind, self.meta, want)

    def _unknown(self):
        raise UserError("no comparison knows this tensor")

    def told(self, name, word, usual):
        """A number that the fixture's words about a tensor tell, e.g. "cfg 2.9"."""
        found = re.search(rf"{word} (\d+(?:\.\d+)?)", self.fixture.what(name))
        return float(found[1]) if found else usual

    # --- the network ------------------------------------------------------------------------------------------------

    def conditions(self):
        """Class vectors of both streams [2, D]."""
        return self.net.conditions(torch.tensor([int(self.want["class_id"]), -1]))

    def encoded(self):
        return self.net.encode(
            self.want["tokens"].repeat(2, 1, 1), (self.want["mask"] == 0).repeat(2, 1), self.conditions()
        )

    def side(self, cfg, temperature):
        """One side of a run that is guided by `cfg` in all its steps."""
        return Side(
            self.net, torch.zeros(1, dtype=torch.int64), cfg != 1, self.diffusion, torch.tensor([cfg]), temperature,
            lambda part: None, lambda: None, "cpu",
        )  # fmt: skip

    def sampled(self, name):
        """A chain of all denoising steps from given noise."""
        stem = name.removesuffix("_out")
        start, noise, cond = (self.want[f"{stem}_{part}"] for part in ("init", "noise", "cond"))
        zeros = torch.zeros(len(start), dtype=torch.int64).numpy()
        noise = torch.cat([noise.flip(0), start[None]])
        side = self.side(self.told(name, "cfg", 1.0), self.told(name, "temperature", 1.0))
        return side.chain(cond, Cells(zeros, zeros, zeros, zeros), noise).x

    def guided(self, x, times, cond, cfg):
        """(eps, spread) of [conditional, unconditional] rows; the first half of x goes into both."""
        half = len(x) // 2
        eps, spread = self.net.noise(x[:half], times[:half], cond, torch.tensor(cfg))
        other = self.net.noise(x[:half], times[:half], cond[half:])[1]
        return eps.repeat(2, 1), torch.cat([spread, other])

    def single_steps(self, name):
        """Every denoising step by itself."""
        cfg, temperature = self.told(name, "cfg", 1.0), self.told(name, "temperature", 1.0)
        out = []
        for index, (x, noise) in enumerate(zip(self.want["step_x"], self.want["step_noise"])):
            times = self.diffusion.times[index].expand(len(x))
            eps, spread = self.guided(x, times, self.want["step_cond"], cfg)
            law = self.diffusion.step(x, index, eps, spread, temperature)
            out.append(law.draw(noise if index else None))
        return torch.stack(out)

    # --- generation -------------------------------------------------------------------------------------------------

    @cached_property
    def schedule(self):
        return cosine_schedule(self.cfg.tokens, int(self.meta.get("gen_iters", len(self.want["gen_counts"]))))

    def generated(self):
        """A whole picture through the sampler, from the fixture's noise and order -> latents [1, C, h, w]."""
        order, schedule = self.want["order"], self.schedule
        cells = [torch.from_numpy(schedule.cells(order.numpy(), step)) for step in range(schedule.steps)]
        source = GivenNoise(order, torch.cat(cells), self.want["gen_init"], self.want["gen_noise"])
        settings = Settings(
            steps=schedule.steps, diffusion_steps=self.diffusion.count, cfg=self.told("gen_cfg", "scale", 1.0),
            temperature=self.told("gen_latents", "temperature", 1.0),
        )  # fmt: skip
        prompt = self.family.text.encode(str(int(self.want["class_id"])))
        run = Run((self.net, None), self.family, prompt, settings, "cpu", source=source)
        run.loop()
        return run.latents()

    # --- facts ------------------------------------------------------------------------------------------------------

    def facts(self):
        """Sizes of meta.json against the files': zero, or a sentence."""
        meta, cfg, codec = self.meta, self.cfg, self.family.codec_config
        dims, vae = (meta.get(name) if isinstance(meta.get(name), dict) else {} for name in ("dims", "vae"))
        told = {
            "D": (dims.get("D"), cfg.dim),
            "L": (dims.get("L"), cfg.encoder_layers),
            "H": (dims.get("H"), cfg.heads),
            "mlp_ratio": (meta.get("mlp_ratio"), cfg.ffn / cfg.dim),
            "grid": (meta.get("grid"), [cfg.side, cfg.side]),
            "buffer_size": (meta.get("buffer_size"), cfg.buffer),
            "class_num": (meta.get("class_num"), cfg.classes),
            "diffloss_depth": (meta.get("diffloss_depth"), cfg.head_layers),
            "diffloss_width": (meta.get("diffloss_width"), cfg.head_width),
        }
        if codec is not None:
            told |= {
                "vae ch": (vae.get("ch"), codec.ch),
                "vae mult": (vae.get("mult"), list(codec.ch_mult)),
                "vae num_res_blocks": (vae.get("num_res_blocks"), codec.decoder_blocks - 1),
                "vae z": (vae.get("z"), codec.embed),
                "vae scale": (vae.get("scale"), codec.scale),
                "pixels_per_token": (vae.get("pixels_per_token"), codec.factor),
            }
        wrong = [f"{name} is {a} in meta.json and {b} in the model" for name, (a, b) in told.items()
                 if a not in (None, b)]
        if wrong:
            raise UserError("; ".join(wrong))
        return torch.zeros(())


def _given(*uses):
    """An input, which counts when one of the tensors it is needed for is there."""

    def make(s, name, want):
        if not any(use in s.want for use in uses):
            raise UserError(f"nothing is computed from it: none of {', '.join(uses)} is there")
        return want

    return make


def _class(s, name, want):
    if not 0 <= int(want) < s.cfg.classes:
        raise UserError(f"the model's classes are 0 to {s.cfg.classes - 1}")
    return _given("encoder_out", "z", "gen_latents")(s, name, want)


def _mask(s, name, want):
    return _given("encoder_out", "z")(s, name, ((want == 0) | (want == 1)) * want)


def _tokens(s, name, want):
    """Zero where masked: the network does not look there."""
    return _given("encoder_out", "z")(s, name, want * (1 - s.want["mask"])[..., None])


def _halves(s, name, want):
    """Two equal halves: one token, two conditions."""
    return _given("net_out")(s, name, want[: len(want) // 2].repeat(2, *[1] * (want.dim() - 1)))


def _order(s, name, want):
    if want.sort().values.tolist() != list(range(s.cfg.tokens)):
        raise UserError(f"this is no order of {s.cfg.tokens} cells")
    return _given("gen_latents")(s, name, want)


def _guided_net(s, name, want):
    eps, spread = s.guided(s.want["net_x"], s.want["net_t"], s.want["net_c"], s.told(name, "scale", 1.0))
    return torch.cat([eps, spread], -1)


def _guidance(s, name, want):
    scale = s.told(name, "scale", 1.0)
    return torch.tensor([s.schedule.guidance(scale, step) for step in range(s.schedule.steps)])


TABLE = (
    ("class_id", "exact", _class),
    ("mask", "exact", _mask),
    ("tokens", "exact", _tokens),
    ("encoder_out", "z", lambda s, name, want: s.encoded()[0]),
    ("z", "z", lambda s, name, want: s.net.decode(*s.encoded())),
    ("net_[xt]", "exact", _halves),
    ("net_c", "exact", _given("net_out")),
    ("net_out", "net_out", lambda s, name, want: s.net.diffloss["net"](*(s.want[f"net_{n}"] for n in "xtc"))),
    ("net_out_cfg", "net_out", _guided_net),
    ("timestep_map", "exact", lambda s, name, want: s.diffusion.times),
    ("betas", "table", lambda s, name, want: s.diffusion.betas),
    ("log_betas", "table", lambda s, name, want: s.diffusion.log_betas),
    ("posterior_log_variance_clipped", "table", lambda s, name, want: s.diffusion.log_variance),
    ("posterior_mean_coef1", "table", lambda s, name, want: s.diffusion.coef1),
    ("posterior_mean_coef2", "table", lambda s, name, want: s.diffusion.coef2),
    (r"sample_a_(cond|init|noise)", "exact", _given("sample_a_out")),
    (r"sample_b_(cond|init|noise)", "exact", _given("sample_b_out")),
    (r"sample_[ab]_out", "sampling", lambda s, name, want: s.sampled(name)),
    (r"step_(x|cond|noise)", "exact", _given("step_out")),
    ("step_out", "sampling", lambda s, name, want: s.single_steps(name)),
    ("order", "exact", _order),
    ("gen_counts", "exact", lambda s, name, want: torch.tensor(s.schedule.counts)),
    ("gen_cfg", "table", _guidance),
    (r"gen_(init|noise)", "exact", _given("gen_latents")),
    ("gen_latents", "sampling", lambda s, name, want: s.generated()),
    ("latents", "exact", _given("pixels")),
    ("pixels", "pixels", lambda s, name, want: s.codec.decode_raw(s.want["latents"])),
    ("gen_pixels", "pixels", lambda s, name, want: s.codec.decode_raw(s.want["gen_latents"] / s.codec.cfg.scale)),
)
