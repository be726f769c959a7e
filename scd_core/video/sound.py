"""The sound of a clip: checks and the encoder track that stays exactly as long as the pictures."""

import logging
from fractions import Fraction

import torch

from ..errors import UserError
from .formats import FORMATS

log = logging.getLogger(__name__)

OUT_RATE = 48_000  # editors expect it, and Opus knows no 44.1 kHz
HALF_RANGE = {torch.uint8: 2**7, torch.int16: 2**15, torch.int32: 2**31}
LAYOUTS = {1: "mono", 2: "stereo", 6: "5.1", 8: "7.1"}


def check_sound(audio, name):
    """Return (float32 array [C,S] clipped to -1..1, sample rate) from the host's AUDIO for format `name`.

    Samples may be floats in -1..1, or whole numbers over the full range of uint8, int16 or int32. Raises
    UserError when the format carries no sound, or the dictionary is not one finite sound
    {"waveform": [1,C,S], "sample_rate": Hz} with 1, 2, 6 or 8 channels.
    """
    if not FORMATS[name].audio_codec:
        able = ", ".join(other for other, spec in FORMATS.items() if spec.audio_codec)
        raise UserError(f"{name} cannot hold sound; disconnect audio or choose one of: {able}.")
    try:
        waveform, rate = torch.as_tensor(audio["waveform"]).detach(), int(audio["sample_rate"])
    except (TypeError, KeyError, ValueError) as error:
        raise UserError(
            'Audio must hold "waveform" and "sample_rate", the way a Load Audio node gives it.'
        ) from error
    known = waveform.is_floating_point() or waveform.dtype in HALF_RANGE
    if waveform.ndim != 3 or waveform.shape[0] != 1 or not known:
        raise UserError(
            f"Audio has shape {list(waveform.shape)} and type {waveform.dtype}; expected one sound as floats "
            f"[1, channels, samples]: pick one out of the batch first."
        )
    if waveform.shape[1] not in LAYOUTS:
        raise UserError(f"Audio has {waveform.shape[1]} channels; expected 1, 2, 6 or 8: mix it first.")
    if not 1000 <= rate <= 768_000:
        raise UserError(f"Audio sample rate is {rate} Hz; expected 1000 to 768000.")
    middle, half = 128 if waveform.dtype == torch.uint8 else 0, HALF_RANGE.get(waveform.dtype, 1)
    waveform = (waveform[0].cpu().float() - middle) / half
    if not torch.isfinite(waveform).all():
        raise UserError("Audio holds NaN or Inf samples; look at the step that made it, nothing was written.")
    return waveform.clamp(-1, 1).numpy(), rate


class SoundTrack:
    """Feeds one encoder stream of `container` up to a given time; silence follows where the sound ends."""

    def __init__(self, av, container, spec, sound):
        self.av, self.container = av, container
        self.waveform, self.rate = sound
        self.layout = LAYOUTS[self.waveform.shape[0]]
        self.out_layout = "mono" if self.layout == "mono" else "stereo"
        self.stream = container.add_stream(spec.audio_codec, rate=OUT_RATE, layout=self.out_layout)
        if spec.audio_bit_rate:  # PCM has none to choose
            self.stream.bit_rate = spec.audio_bit_rate
        self.resampler = av.AudioResampler(format="fltp", layout=self.out_layout, rate=OUT_RATE)
        self.fifo = av.AudioFifo()
        self.read = self.written = 0
        self.drained = False

    def advance(self, seconds):
        """Encode all samples up to `seconds` (Fraction) from the start of the clip."""
        count = round(seconds * OUT_RATE) - self.written
        while count > 0 and not self.drained and self.fifo.samples < count:
            self._resample_block()
        if count > 0 and self.fifo.samples:
            frame = self.fifo.read(min(count, self.fifo.samples))
            self._encode(frame)
            count -= frame.samples
        if count > 0:
            self._encode(self._silence(count))

    def finish(self):
        """Flush the encoder and say in the log when sound and pictures differed in length."""
        self.container.mux(self.stream.encode(None))
        gap = self.waveform.shape[1] / self.rate - self.written / OUT_RATE
        if abs(gap) > 0.1:
            log.info("sound was %s by %.2f s to match the clip", "cut" if gap > 0 else "padded", abs(gap))

    def _resample_block(self):
        block = self.waveform[:, self.read : self.read + self.rate]
        self.read += block.shape[1]
        self.drained = block.shape[1] == 0
        if self.drained and self.read == 0:
            return
        frame = None
        if not self.drained:
            frame = self.av.AudioFrame.from_ndarray(block.copy(), format="fltp", layout=self.layout)
            frame.sample_rate = self.rate
        for piece in self.resampler.resample(frame):
            piece.pts = None
            self.fifo.write(piece)

    def _silence(self, count):
        frame = self.av.AudioFrame(format="fltp", layout=self.out_layout, samples=count)
        frame.sample_rate = OUT_RATE
        for plane in frame.planes:
            plane.update(bytes(plane.buffer_size))
        return frame

    def _encode(self, frame):
        frame.pts, frame.time_base = self.written, Fraction(1, OUT_RATE)
        self.written += frame.samples
        self.container.mux(self.stream.encode(frame))
