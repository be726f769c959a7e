"""What the writers that need Pillow alone share: the file and the running clock.

Pillow's own animation savers keep every frame in memory until the end. In gif_writer and webp_writer Pillow
compresses one picture at a time and the picture's data goes straight into our container, so memory does not grow
with the clip, and delays are taken from the running clock (29.97 does not drift).
"""


class Clock:
    """Whole ticks between frames whose running sum is never more than half a tick off."""

    def __init__(self, rate, ticks_per_second):
        self.step = ticks_per_second / rate
        self.frames = self.spent = 0

    def next_delay(self):
        """Ticks that the next frame is shown."""
        self.frames += 1
        delay = round(self.frames * self.step) - self.spent
        self.spent += delay
        return delay


class FileWriter:
    """A binary file that is opened on creation and closed on exit; `finish` runs only without an error."""

    def __init__(self, target, job):
        self.job = job
        self.file = open(target, "wb")  # noqa: SIM115 - closed in __exit__

    def __enter__(self):
        return self

    def __exit__(self, exc_type, exc, trace):
        with self.file:
            if exc_type is None:
                self.finish()
