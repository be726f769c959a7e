"""From a file or folder on disk to a model that can draw: find the family, read the parts, check every key."""

import math
import pathlib
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from ..checkpoint import Source, check_keys
from ..codecs.conv2d import ConvCodec
from ..codecs.dv_layouts import find_dv
from ..codecs.kl import find_kl
from ..codecs.layouts import find_codec
from ..errors import UserError
from .families import FAMILIES
from .spatial_heads import HeadFile
from .transformer import Decoder

BUNDLED = pathlib.Path(__file__).resolve().parents[1] / "bundled" / "model.safetensors"
# what comes with the pack, by the names of the shell
SHIPPED = {
    "bundled": BUNDLED,
    "mar": BUNDLED.with_name("mar.safetensors"),
    "mar-draft": BUNDLED.with_name("mar_draft.safetensors"),
}
PARTS = ("decoder", "codec")
SCALE = ".scale_weight"
MISFITS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
SHARE = 16  # a part in so many of the stored weights may stay mapped after it was copied
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@contextmanager
def fitting(name):
    """What damaged files make of our reading of them, as one sentence.

    Settings and shapes that nobody foresaw fail somewhere in the middle; the error's own words stay in it.
    """
    try:
        yield
    except UserError:
        raise
    except MISFITS as error:
        told = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
        raise UserError(
            f"the files of {name} do not fit together ({told}): a tensor has another shape or "
            "a setting is of another kind than in all supported models; download the model again"
        ) from error


@dataclass
class ModelFiles:
    """An opened model whose tensors are still on disk.

    Attributes:
        source: `Source`. family: the `Family` it belongs to. name: file or folder name, for messages.
    """

    source: Source = field(repr=False)
    family: object
    name: str

    def build(self, part, operations=None, device="cpu", dtype=None, keep_fp8=False, callback=None):
        """Make one network and give it its weights.

        Args:
            part: "decoder" or "codec".
            operations: namespace of layers; default plain torch.
            dtype: of the weights; None keeps the file's.
            keep_fp8: the layers of `operations` multiply scaled fp8 weights themselves (they have a `scale_weight`),
                so such weights stay in 8 bits; otherwise they are multiplied as they are read.
            callback: called with (bytes read, bytes in all) before every tensor and at the end; what it raises ends the
                reading, and nothing of the network stays.

        Raises:
            UserError: missing, unexpected or wrongly shaped tensors, by name.
        """
        refs = self.family.refs(part)
        dtype = dtype or next(iter(refs.values())).dtype
        config = getattr(self.family, part + "_config")
        with torch.device("meta"), fitting(self.name):
            net = config.network(config, operations=operations, dtype=dtype)
        wanted = {name: tuple(t.shape) for name, t in net.state_dict().items()}
        scales = {name for name in wanted if keep_fp8 and name.endswith(SCALE)}
        check_keys(refs, wanted.keys() - scales, where=f"the {part} of {self.name}")
        for name, ref in refs.items():
            if tuple(ref.shape) != wanted[name]:
                raise UserError(
                    f"{self.name}: tensor {ref.key} has the shape {list(ref.shape)}, its configuration asks for "
                    f"{list(wanted[name])}: the configuration and the weights belong to different models"
                )
        net.load_state_dict(read_state(refs, scales, dtype, device, callback), strict=True, assign=True)
        return net.requires_grad_(False).eval()

    def check(self, need=PARTS):
        """Every part is there, and every tensor of the file is used by a part or known to be useless.

        Args:
            need: parts that must be there; another one is left out of account when it is missing.

        Raises:
            UserError: missing parts; left-over tensors, by name.
        """
        used = set()
        for part in PARTS:
            try:
                refs = self.family.refs(part)
            except UserError:
                if part in need:
                    raise
                continue
            used |= {ref.key for ref in refs.values() if ref.source is self.source}
        found = [key for key in self.source.keys() if key not in used]
        check_keys(found, (), self.family.ignored, self.name)

    def parameters(self, part):
        """Number of weights of a part."""
        return sum(math.prod(ref.shape) for ref in self.family.refs(part).values())

    def scaled(self, part):
        """Does a part hold scaled fp8 weights?"""
        return any(ref.scaled for ref in self.family.refs(part).values())


def read_state(refs, scales, dtype, device, callback=None):
    """Tensors of a network by name. What is copied while it is read leaves the mapped file soon after.

    Args:
        refs: {name: `Ref`}. scales: names of scales that the layers have beside their weights.
        callback: see `ModelFiles.build`.
    """
    state, copied = {name: torch.ones((), device=device) for name in scales}, 0
    read, total = 0, sum(ref.bytes for ref in refs.values())
    most, tell = total // SHARE, callback or (lambda read, total: None)
    for name, ref in refs.items():
        tell(read, total)
        scale = name.removesuffix(".weight") + SCALE
        if scale in scales and ref.scaled:
            state[name], state[scale] = ref.read_scaled(device)
        else:
            state[name] = ref.read(dtype, device)
        read += ref.bytes
        copied += 0 if ref.dtype == dtype and not ref.scaled and str(device) == "cpu" else ref.bytes
        if copied > most:  # or the peak would be the weights twice: as they are stored and as they are wanted
            copied = 0
            for source in {id(r.source): r.source for r in refs.values()}.values():
                source.release()
    tell(read, total)
    return state


@dataclass
class Model:
    """A loaded model: what the shell and the tests use (a host keeps the parts apart)."""

    name: str
    family: object
    decoder: Decoder = field(repr=False)
    codec: ConvCodec = field(repr=False)
    device: torch.device = torch.device("cpu")


def open_model(path=BUNDLED, need=PARTS, config=None):
    """Open a checkpoint and find its family.

    Args:
        need: parts that must be complete.
        config: stands in for the configuration of files that have none.

    Raises:
        UserError: unreadable, or of no supported family (the sentence lists what was found).
    """
    path = pathlib.Path(path)
    source = Source.open(path)
    if source.config.keys() <= {"scd"}:  # what our own converter notes is no configuration
        source.config = {**(config or {}), **source.config}
    name = "the bundled model" if path == BUNDLED else path.name
    for family in FAMILIES:
        with fitting(name):
            if family.detect(source):
                found = family(source)
                found.file, found.heads = name, HeadFile(path, name)
                files = ModelFiles(found.source or source, found, name)
                files.check(need)
                return files
    if any(find(source) is not None for find in (find_codec, find_kl, find_dv)):
        raise UserError(
            f"{path.name} holds an image tokenizer and no language model, so it cannot draw: put it beside the "
            "language model it belongs to, and select that one"
        )
    keys = sorted(source.keys())
    raise UserError(
        f"{path.name} is no model of a supported family: {len(keys)} tensors were found, the first are "
        f"{', '.join(keys[:4]) or 'none'}; supported: {', '.join(f.title for f in FAMILIES)}"
    )


def native_bf16(device):
    """True where bf16 arithmetic is in hardware."""
    device = torch.device(device)
    if device.type == "cpu":
        known = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
        return any(bool(check()) for check in known if check is not None)
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type in ("xpu", "mps", "npu")


def choose_dtype(name, device):
    """"auto" -> bf16 where the device has it in hardware, else fp32; other names as they are.

    Raises:
        UserError: unknown name.
    """
    if name == "auto":
        return torch.bfloat16 if native_bf16(device) else torch.float32
    if name not in DTYPES:
        raise UserError(f"unknown dtype {name!r}: choose auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def load_model(path=BUNDLED, dtype="auto", device="cpu"):
    """Load all parts of a model onto one device. The codec computes in fp32."""
    files = open_model(path)
    dtype = files.family.auto_dtype or dtype if dtype == "auto" else dtype
    decoder = files.build("decoder", device=device, dtype=choose_dtype(dtype, device))
    codec = files.build("codec", device=device, dtype=torch.float32)
    return Model(files.name, files.family, decoder, codec, torch.device(device))
