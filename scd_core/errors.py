"""The one exception type whose message is written for the person at the screen, and how a lack of memory is told."""

import re

import torch

CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+")  # names and values from files may hold them
OutOfMemory = getattr(torch, "OutOfMemoryError", torch.cuda.OutOfMemoryError)
RAN_OUT = ("out of memory", "not enough memory", "allocate memory")  # as torch says it, by device


class UserError(ValueError):
    """Bad input, told in one sentence on one line: what, where, found, expected, what to do."""

    def __init__(self, message):
        super().__init__(CONTROL.sub(" ", message))


def ran_out(error):
    """Does an exception mean that memory was short? Devices other than CUDA's have no class of their own for it."""
    return isinstance(error, OutOfMemory) or any(words in str(error) for words in RAN_OUT)


def or_what_fits(work, advice):
    """work(), or `OutOfMemory` with the sentence of advice() where memory was short.

    The advice is asked for outside of the handler: the error holds the frames that hold the tensors of the work.
    """
    try:
        return work()
    except RuntimeError as error:
        if not ran_out(error):
            raise
        short = str(error).partition("\n")[0]
    raise OutOfMemory(f"{advice()} ({short})")
