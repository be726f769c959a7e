"""The wall plug: all that the nodes need from ComfyUI. No other file here touches the host beyond `comfy_api`."""

import dataclasses
import json
import logging
import math
import os

import comfy.model_management as mm
import comfy.model_patcher
import comfy.ops
import comfy.utils
import folder_paths
import torch
from comfy.cli_args import args
from comfy_api.latest import io

from ..scd_core.checkpoint import list_models, resolve_model
from ..scd_core.errors import UserError
from ..scd_core.models.load import DTYPES, SHIPPED, choose_dtype, native_bf16
from .naming import portable

FOLDER = "ar_models"
# what comes with the pack: names in the list, and in `SHIPPED`
BUNDLED_NAMES = {
    "bundled (pictures and clips)": "bundled",
    "bundled MAR (one subject)": "mar",
    "bundled MAR draft (one subject)": "mar-draft",
}

Interrupted = mm.InterruptProcessingException  # the host's layers raise it too, in the middle of a pass
log = logging.getLogger(__name__)

OutOfMemory = (mm.OOM_EXCEPTION,) if mm.OOM_EXCEPTION is not Exception else (torch.OutOfMemoryError,)
check_interrupt = mm.throw_exception_if_processing_interrupted


def newer(**fields):
    """Those schema fields that this host knows: one unknown name would keep the whole pack from loading."""
    known = {field.name for field in dataclasses.fields(io.Schema)}
    return {name: value for name, value in fields.items() if name in known}


# --- model folders ---------------------------------------------------------------------------------------------


def register_model_folder():
    """Add models/ar_models to the host's folders, beside those that extra_model_paths.yaml gave already."""
    folder_paths.add_model_folder_path(FOLDER, os.path.join(folder_paths.models_dir, FOLDER))
    roots, endings = folder_paths.folder_names_and_paths[FOLDER]
    folder_paths.folder_names_and_paths[FOLDER] = (roots, set(endings) | {".safetensors", ".sft"})


def model_roots():
    """All folders that may hold models, [] if the host lost ours."""
    return list(folder_paths.folder_names_and_paths.get(FOLDER, ([], ()))[0])


def model_names():
    """What Load AR Model offers: the bundled models, then whatever lies in the folders. Never raises."""
    return [*BUNDLED_NAMES, *list_models(model_roots())]


def model_path(name):
    """Path of a listed model, also when the name was written on another machine. Raises UserError."""
    return SHIPPED[BUNDLED_NAMES[name]] if name in BUNDLED_NAMES else resolve_model(name, model_roots())


# --- devices, number formats, weights --------------------------------------------------------------------------


def weight_dtype(choice, parameters):
    """Weight dtype for a widget value ("auto" or a key of DTYPES) and a number of weights."""
    device = mm.get_torch_device()
    if choice != "auto" or mm.is_device_cpu(device):
        return choose_dtype(choice, device)
    allowed = list(DTYPES.values())
    chosen = mm.unet_dtype(device=device, model_params=parameters, supported_dtypes=allowed)
    if chosen not in allowed:  # a start flag asks for fp8 or fp64
        chosen = mm.unet_manual_cast(chosen, device, allowed) or torch.float32
    return chosen


def compute_dtype(weights):
    """Dtype that the device computes in when the weights are stored as `weights`."""
    device = mm.get_torch_device()
    if mm.is_device_cpu(device):  # the host's rule knows no CPU with bf16 arithmetic
        return weights if weights == torch.bfloat16 and native_bf16(device) else torch.float32
    return mm.unet_manual_cast(weights, device, list(DTYPES.values())) or weights


def decoder_devices():
    """(device to compute on, device to rest on) of a language model."""
    return mm.get_torch_device(), mm.unet_offload_device()


def codec_devices():
    """(device to compute on, device to rest on) of a picture codec."""
    return mm.vae_device(), mm.vae_offload_device()


def operations(weights, compute, device):
    """The host's layers: they cast, offload and patch weights as they are used."""
    return comfy.ops.pick_operations(weights, compute, load_device=device)


def fp8_operations():
    """The host's layers for scaled fp8 weights, which stay in 8 bits until they are used; None: it has none."""
    make = getattr(comfy.ops, "scaled_fp8_ops", None)
    return make and make(fp8_matrix_mult=False, override_dtype=torch.float8_e4m3fn)


def patcher(net, devices):
    """Hand a network over to the host's memory management."""
    # asked for at call time: the host may have put another class in its place by then
    kind = getattr(comfy.model_patcher, "CoreModelPatcher", comfy.model_patcher.ModelPatcher)
    return kind(net, load_device=devices[0], offload_device=devices[1])


def load(patchers, memory, smaller="a smaller batch, window or size"):
    """Bring weights to their device, with room for `memory` bytes more. smaller: what would need less.

    Raises:
        UserError: the work alone needs more than the device has.
    """
    device = patchers[0].load_device
    total = mm.get_total_memory(device)
    if memory > total:
        raise UserError(
            f"this run needs about {memory / 2**30:.1f} GB beside the weights, {device} has {total / 2**30:.1f} GB: "
            f"use {smaller}"
        )
    mm.load_models_gpu(patchers, memory_required=memory)


def is_cpu(device):
    """Whether a device is the processor itself."""
    return mm.is_device_cpu(device)


def output_device():
    """Where pictures between nodes live."""
    return mm.intermediate_device()


# --- progress ----------------------------------------------------------------------------------------------------


class Progress:
    """The progress bar of the running node, with an optional picture; asks for interrupts on every call."""

    def __init__(self, total):
        self.bar = comfy.utils.ProgressBar(max(total, 1))

    def __call__(self, done, total=None, picture=None):
        """done of total; picture: PIL image or None."""
        check_interrupt()
        preview = None if picture is None else ("JPEG", picture, 512)  # 512: longest side that is sent
        self.bar.update_absolute(done, total, preview)


def in_parts(items, chunk, work):
    """work(part) of `items`, `chunk` at a time, as a generator of its results.

    A part that does not fit into memory is halved; one item that does not fit raises the host's own error.
    """
    done = 0
    while done < len(items):
        try:
            part = work(items[done : done + chunk])
        except OutOfMemory:
            if chunk == 1:
                raise
            chunk //= 2
            continue
        yield part
        done += len(part)


def with_codec(handle, doing, work):
    """work(net, device, alone) with a `CodecHandle`'s network; on the processor when its device has no room.

    Args:
        doing: what for the log, such as "decode one picture". work: (net, device, alone) -> result; `alone` asks for
            one picture at a time.
    """
    device = handle.patcher.load_device
    try:
        return work(handle.net, device, False)
    except OutOfMemory:
        if is_cpu(device):
            raise
    log.warning("not enough memory on %s to %s: using the CPU", device, doing)
    net = handle.files.build("codec", device="cpu", dtype=torch.float32, callback=lambda *_: check_interrupt())
    return work(net, "cpu", True)


# --- files -------------------------------------------------------------------------------------------------------


def _inside(folder, path):
    """Does `path` lie somewhere below `folder`? Both absolute."""
    try:
        return path != folder and os.path.commonpath([folder, os.path.dirname(path)]) == folder
    except ValueError:  # another drive
        return False


def output_path(prefix, ending, width, height, keep):
    """A free file name in the output (or temp) folder.

    Args:
        prefix: the user's file name prefix, with subfolders and the host's %variables%.
        ending: of the file ("" for a folder). width, height: of the pictures. keep: False takes the temp folder.

    Returns:
        (path, file name, subfolder, "output" or "temp").

    Raises:
        UserError: the prefix leads out of the folder, or names nothing.
    """
    base = os.path.abspath(folder_paths.get_output_directory() if keep else folder_paths.get_temp_directory())
    name = portable(prefix)
    target = os.path.abspath(os.path.join(base, name or os.sep))
    if not _inside(base, target):
        raise UserError(
            f"filename_prefix {prefix!r} is no name inside the output folder: use a plain name, with subfolders if "
            "you like (SCD/clip)"
        )
    # looked for where links lead, and the name itself is new: no link can stand in its place
    if not _inside(os.path.realpath(base), os.path.join(os.path.realpath(os.path.dirname(target)), "file")):
        raise UserError(
            f"filename_prefix {prefix!r} goes through a link out of the output folder: use another subfolder, or start "
            "ComfyUI with --output-directory to write elsewhere"
        )
    folder, name, counter, subfolder, _ = folder_paths.get_save_image_path(name, base, width, height)
    tail = f"_{ending}" if ending else ""  # a folder needs no mark that its number ends here
    while os.path.lexists(os.path.join(folder, f"{name}_{counter:05}{tail}")):
        counter += 1
    file = f"{name}_{counter:05}{tail}"
    return os.path.join(folder, file), file, subfolder, "output" if keep else "temp"


def metadata(hidden):
    """{key: JSON} that brings the graph back when the file is dropped on the page; {} with --disable-metadata."""
    if args.disable_metadata or hidden is None:
        return {}
    found = {"prompt": hidden.prompt, **(hidden.extra_pnginfo or {})}
    return {key: plain_json(value) for key, value in found.items() if value is not None}


def plain_json(value):
    """JSON without NaN and infinity, which the page cannot read back."""
    return json.dumps(_finite(value), allow_nan=False)


def _finite(value):
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value
