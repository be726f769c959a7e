"""Ctrl-C in the shell: once to stop early and keep, twice to give up."""

import signal
from contextlib import contextmanager


@contextmanager
def first_press(active):
    """Inside of the block the first Ctrl-C raises nothing; the yielded function tells whether it came.

    The second one is as ever. active: False changes nothing.
    """
    pressed, before = [], signal.getsignal(signal.SIGINT) or signal.default_int_handler

    def note(number, frame):
        pressed.append(number)
        signal.signal(signal.SIGINT, before)

    if active:
        signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(pressed)
    finally:
        if active:
            signal.signal(signal.SIGINT, before)
