"""From a file or folder on disk to a model that can draw: find the family, read the parts, check every key."""

import pathlib
from dataclasses import dataclass, field

import torch

from ..checkpoint import Source, check_keys
from ..codecs.conv2d import ConvCodec
from ..errors import UserError
from .bundled import BundledFamily
from .transformer import Decoder

BUNDLED = pathlib.Path(__file__).resolve().parents[1] / "bundled" / "model.safetensors"
FAMILIES = (BundledFamily,)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass
class ModelFiles:
    """An opened model whose tensors are still on disk.

    Attributes:
        source: `Source`. family: the `Family` it belongs to. name: file or folder name, for messages.
    """

    source: Source = field(repr=False)
    family: object
    name: str

    def build(self, part, operations=None, device="cpu", dtype=None):
        """Make one network and give it its weights.

        Args:
            part: "decoder" or "codec".
            operations: namespace of layers; default plain torch.
            dtype: of the weights; None keeps the file's.

        Raises:
            UserError: missing, unexpected or wrongly shaped tensors, by name.
        """
        keys = self.family.keys(self.source, part)
        dtype = dtype or self.source.dtype(next(iter(keys.values())))
        made = {"operations": operations, "dtype": dtype}
        with torch.device("meta"):
            net = self._network(part, **made)
        wanted = {name: tuple(t.shape) for name, t in net.state_dict().items()}
        check_keys(keys, wanted, where=f"the {part} of {self.name}")
        for name, key in keys.items():
            found = self.source.shape(key)
            if tuple(found) != wanted[name]:
                raise UserError(
                    f"{self.name}: tensor {key} has the shape {list(found)}, its configuration asks for "
                    f"{list(wanted[name])}: the configuration and the weights belong to different models"
                )
        state = {name: self.source.read(key, dtype=dtype, device=device) for name, key in keys.items()}
        net.load_state_dict(state, strict=True, assign=True)
        return net.requires_grad_(False).eval()

    def _network(self, part, **made):
        if part == "codec":
            return ConvCodec(self.family.codec_config, **made)
        return Decoder(self.family.decoder_config, **made)

    def parameters(self, part):
        """Number of weights of a part."""
        return sum(_count(self.source.shape(key)) for key in self.family.keys(self.source, part).values())


def _count(shape):
    n = 1
    for size in shape:
        n *= size
    return n


@dataclass
class Model:
    """A loaded model: what the shell and the tests use (a host keeps the parts apart)."""

    name: str
    family: object
    decoder: Decoder = field(repr=False)
    codec: ConvCodec = field(repr=False)
    device: torch.device = torch.device("cpu")


def open_model(path=BUNDLED):
    """Open a checkpoint and find its family.

    Raises:
        UserError: unreadable, or of no supported family (the sentence lists what was found).
    """
    path = pathlib.Path(path)
    source = Source.open(path)
    for family in FAMILIES:
        if family.detect(source):
            return ModelFiles(source, family(source), "the bundled model" if path == BUNDLED else path.name)
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
    decoder = files.build("decoder", device=device, dtype=choose_dtype(dtype, device))
    codec = files.build("codec", device=device, dtype=torch.float32)
    return Model(files.name, files.family, decoder, codec, torch.device(device))
