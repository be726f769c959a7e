"""The shell's road to continuous models (MAR): its options, one run, and which options belong to whom."""

from functools import partial

from .continuous.cspd import MODES
from .continuous.sampler import Settings, check_pair, resolve, sample
from .errors import UserError

OWN = Settings()
# of the command line, beside those for all models
OPTIONS = ("draft", "mode", "gamma", "prefill", "tau", "steps", "diffusion_steps")
COMMON = {"prompt", "seed", "temperature", "cfg", "batch", "dtype", "device", "model", "json", "out"}


def add_options(parser):
    """What only continuous models have. Unset options are None, so that they can be told from chosen ones."""
    group = parser.add_argument_group("continuous models (MAR)")
    group.add_argument("--draft", help="smaller model of the same release that runs ahead: 'mar-draft', or a path")
    group.add_argument("--mode", choices=list(MODES), help=f"how drafts are judged (default {OWN.mode})")
    group.add_argument("--gamma", type=int, help=f"steps that the draft runs ahead (default {OWN.gamma})")
    group.add_argument("--prefill", type=float, help=f"share of steps without drafts (default {OWN.prefill})")
    group.add_argument("--tau", type=float, help="flattens the test of a draft; 1: the published formula (default)")
    group.add_argument("--steps", type=int, help="passes over the picture; 0: 64, or one a token (default)")
    group.add_argument("--diffusion-steps", type=int, help="denoising steps of a token; 0: the model's own (default)")


def check_options(args, continuous, default_of):
    """Refuse options that do nothing for the chosen model.

    Args:
        args: parsed command line. continuous: the kind of its model. default_of: name -> value of an unset option.

    Raises:
        UserError: naming them.
    """
    known = {name: value for name, value in vars(args).items() if default_of(name) != value}
    foreign = known.keys() - COMMON - set(OPTIONS) if continuous else known.keys() & set(OPTIONS)
    wrong = sorted("--" + name.replace("_", "-") for name in foreign - {"command", "run", "default_of"})
    if wrong:
        kind = "draws continuous tokens" if continuous else "draws discrete tokens"
        raise UserError(f"{', '.join(wrong)}: of no use here, since {args.model} {kind}; leave it out")


def settings_of(args):
    """Command line -> `Settings`."""
    chosen = {name: getattr(args, name) for name in OPTIONS if name != "draft" and getattr(args, name) is not None}
    return Settings(seed=args.seed, batch=args.batch, temperature=args.temperature, cfg=args.cfg, **chosen)


def draw(model, args, load, callback):
    """One run -> `continuous.sampler.Drawn`.

    Args:
        model: `Model`. load: name -> `Model` of the draft. callback: (label, `Progress`).

    Raises:
        UserError: settings or models that do not fit.
    """
    prompt = model.family.text.encode(args.prompt)
    settings = resolve(settings_of(args), model.family)
    draft = load(args.draft) if args.draft else None
    check_pair(model.family, draft and draft.family)
    pair = draft and (draft.decoder, draft.family)
    return sample(model.decoder, model.family, prompt, settings, pair, model.device, partial(callback, settings.mode))
