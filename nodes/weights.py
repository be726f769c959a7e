"""Weights shared by all loader nodes that ask for the same file, and let go with the last of them."""

import os
import weakref

import torch

from ..scd_core.codecs.book import book_of
from ..scd_core.errors import UserError
from ..scd_core.models.load import open_model
from . import host
from .sockets import CodecHandle, ModelHandle

_decoders = weakref.WeakValueDictionary()  # (stamp, dtype, devices) -> ModelHandle
_codecs = weakref.WeakValueDictionary()  # (stamp, devices) -> CodecHandle
_others = {}  # real path of a model -> (what its own folder looked like, files that it reads from elsewhere)


def stamp(path):
    """Tells whether a model changed on disk: real path, and time and size of each of its files.

    Image and text tokenizers that lie outside of its folder count too; which they are is asked once, and again when
    the folder has changed or one of them is gone.
    """
    real = os.path.realpath(path)
    own = _stats([real] if os.path.isfile(real) else sorted(e.path for e in os.scandir(real) if e.is_file()))
    known, others = _others.get(real, (None, ()))
    found = _stats(others)
    if known != own or any(size is None for *_, size in found):
        others = _other_files(path, own)
        if others is None:
            return (real, *own)
        found = _stats(others)
        _others[real] = (own, others)
    return (real, *own, *found)


def _stats(files):
    """((path, time, size), ...); None for the time and size of a file that is gone."""
    found = []
    for file in files:
        try:
            stat = os.stat(file)
        except OSError:
            found.append((file, None, None))
        else:
            found.append((file, stat.st_mtime_ns, stat.st_size))
    return tuple(found)


def _other_files(path, own):
    """Files that a model reads beside those of `own`; None: it cannot be opened, which loading will tell."""
    try:
        files = open_model(path).source.all_files()
    except UserError:
        return None
    known = {file for file, *_ in own}
    return tuple(str(file) for file in files if os.path.realpath(file) not in known and str(file) not in known)


def load(path, choice):
    """(ModelHandle, CodecHandle) of the model at `path` with weights in the dtype named `choice`.

    Raises:
        UserError: unreadable, of no supported family, or with weights missing.
    """
    key = stamp(path)
    codec_key = (key, host.codec_devices())
    codec, files = _codecs.get(codec_key), None
    if codec is None:
        files = open_model(path)
        codec = _codecs[codec_key] = _load_codec(files)
    files = files or codec.files
    choice = files.family.auto_dtype or choice if choice == "auto" else choice
    dtype = host.weight_dtype(choice, files.parameters("decoder"))
    fp8 = host.fp8_operations() if choice == "auto" and files.scaled("decoder") else None
    decoder_key = (key, dtype, fp8 is not None, host.decoder_devices())
    decoder = _decoders.get(decoder_key)
    if decoder is None:
        decoder = _decoders[decoder_key] = _load_decoder(files, dtype, codec, fp8)
    return decoder, codec


def _load_codec(files):
    """Codecs stay in fp32: they are small, and half precision shows in the picture."""
    devices = host.codec_devices()
    ops = host.operations(torch.float32, torch.float32, devices[0])
    net = files.build("codec", operations=ops, device=devices[1], dtype=torch.float32, callback=host.Progress(1))
    return CodecHandle(files.name, files.family, host.patcher(net, devices), files, book_of(net))


def _load_decoder(files, dtype, codec, fp8=None):
    """fp8: layers that multiply scaled fp8 weights themselves, or None."""
    devices, compute = host.decoder_devices(), host.compute_dtype(dtype)
    ops = fp8 or host.operations(dtype, compute, devices[0])
    net = files.build(
        "decoder", operations=ops, device=devices[1], dtype=dtype, keep_fp8=fp8 is not None, callback=host.Progress(1)
    )
    if compute != dtype:
        net.compute_dtype = compute
    if not files.family.continuous:
        net.embed.device = devices[0]  # its tables may rest elsewhere
    return ModelHandle(files.name, files.family, host.patcher(net, devices), codec)
