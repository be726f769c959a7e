"""Clips are written, opened again and measured: counts, colours, tags, sound, metadata, and failures."""

import gc
import json
import math
import sys
import weakref
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from PIL import Image
from scd_pack.scd_core.errors import UserError
from scd_pack.scd_core.video import FORMATS, read_video, working_formats, write_frames
from scd_pack.scd_core.video.formats import check_settings, frame_rate

av = pytest.importorskip("av")

MP4, WEBM, PNG = "mp4 (h264)", "webm (vp9)", "png sequence"
ALL = list(FORMATS)
AV_FORMATS = [name for name, spec in FORMATS.items() if spec.codec]
LOOPS_IN_FILE = ["gif", "webp", "webp (lossless)"]


def target(folder, fmt, stem="clip"):
    return folder / f"{stem}{FORMATS[fmt].extension}"


def read_any(path):
    """Frames of a clip file, or of a folder of PNG pictures."""
    if not path.is_dir():
        return read_video(path)[0]
    pictures = [np.array(Image.open(p).convert("RGB")) for p in sorted(path.iterdir())]
    return torch.from_numpy(np.stack(pictures)).float() / 255


def ramp(count, height=64, width=96):
    """Frames that can be told apart by their mean: frame i has the grey (i + 1) / 10."""
    return torch.stack([torch.full((height, width, 3), (i + 1) / 10) for i in range(count)])


def order(frames):
    """The number of each ramp frame, read back from its mean."""
    return [round(float(frame.mean()) * 10) - 1 for frame in frames]


def flat(colour, count=2, height=64, width=96):
    return torch.tensor(colour).expand(count, height, width, 3)


def tone(seconds, rate=44100, channels=1):
    wave = torch.sin(torch.arange(int(seconds * rate)) / rate * 440 * 2 * math.pi) * 0.5
    return {"waveform": wave.expand(1, channels, -1), "sample_rate": rate}


def decoded_sound(path):
    """(float array [C,S], sample rate), whatever form the samples have in the file."""
    with av.open(str(path)) as container:
        stream = container.streams.audio[0]
        rate, floats = stream.rate, av.AudioResampler(format="fltp")
        pieces = [part.to_ndarray() for frame in container.decode(stream) for part in floats.resample(frame)]
    return np.concatenate(pieces, axis=1), rate


# ---- what is written can be read back -----------------------------------------------------------------


@pytest.mark.parametrize("fmt", ALL)
def test_frames_come_back_in_order_with_size_and_rate(fmt, tmp_path):
    path = write_frames(ramp(5), target(tmp_path, fmt), rate=24, fmt=fmt)
    frames = read_any(path)
    assert tuple(frames.shape) == (5, 64, 96, 3)
    assert order(frames) == [0, 1, 2, 3, 4]
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    if fmt in AV_FORMATS:
        assert read_video(path)[1] == 24
    elif not path.is_dir():
        assert float(read_video(path)[1]) == pytest.approx(24, rel=0.05)


@pytest.mark.parametrize("fmt", ALL)
def test_colours_stay_true(fmt, tmp_path):
    for i, colour in enumerate([(0.84, 0.63, 0.52), (1.0, 0.0, 0.0), (0.08, 0.78, 0.35), (0.0, 0.0, 1.0)]):
        path = write_frames(flat(colour), target(tmp_path, fmt, f"c{i}"), rate=8, fmt=fmt)
        error = (read_any(path).mean((0, 1, 2)) - torch.tensor(colour)).abs().max() * 255
        assert error < 3, (colour, float(error))


def test_five_rounds_of_saving_do_not_drift(tmp_path):
    frames = flat((0.84, 0.63, 0.52))
    for i in range(5):
        frames, _ = read_video(write_frames(frames, tmp_path / f"{i}.mp4", rate=8, fmt=MP4))
    assert (frames.mean((0, 1, 2)) - torch.tensor((0.84, 0.63, 0.52))).abs().max() * 255 <= 3


def test_values_are_rounded_and_clipped(tmp_path):
    values = torch.tensor([0.5, -3.0, 7.0, 127.4 / 255]).reshape(1, 2, 2, 1).expand(-1, -1, -1, 3)
    path = write_frames(values, tmp_path / "p", rate=8, fmt=PNG)
    assert np.array(Image.open(path / "p_00001.png"))[..., 0].tolist() == [[128, 0], [255, 127]]


def test_mp4_has_its_index_first(tmp_path):
    data = write_frames(ramp(3), tmp_path / "a.mp4", rate=8, fmt=MP4).read_bytes()
    assert 0 < data.index(b"moov") < data.index(b"mdat")


GROWS = {"yuv420p": (2, 2), "yuv420p10le": (2, 2), "yuv422p10le": (1, 2)}  # rows, columns


@pytest.mark.parametrize("fmt", ALL)
def test_odd_sizes_and_single_frames(fmt, tmp_path):
    least = FORMATS[fmt].min_side
    for height, width in ((95, 127), (least, least), (least, 65)):
        source = torch.rand(1, height, width, 3) * 0.1 + 0.4
        path = write_frames(source, target(tmp_path, fmt, f"{height}x{width}"), rate=12, fmt=fmt)
        frames = read_any(path)
        rows, columns = GROWS.get(FORMATS[fmt].pixel_format, (1, 1))
        assert tuple(frames.shape) == (1, height + -height % rows, width + -width % columns, 3)
        assert (frames.mean() - source.mean()).abs() < 0.02


def test_padding_repeats_the_edge(tmp_path):
    frames = flat((0.2, 0.2, 0.2), 1, 31, 47).clone()
    frames[:, -9:, -9:] = 0.9
    back, _ = read_video(write_frames(frames, tmp_path / "a.mp4", rate=8, fmt=MP4, quality=100))
    assert abs(back[0, -1, -1].mean() - 0.9) < 0.02
    assert abs(back[0, -1, 0].mean() - 0.2) < 0.02


@pytest.mark.parametrize("fmt", [name for name, spec in FORMATS.items() if not spec.alpha_pixel_format])
def test_alpha_is_laid_over_black_elsewhere(fmt, tmp_path):
    frames = torch.cat([flat((0.8, 0.8, 0.8)), torch.full((2, 64, 96, 1), 0.5)], dim=-1)
    path = write_frames(frames, target(tmp_path, fmt), rate=8, fmt=fmt)
    assert abs(read_any(path).mean() - 0.4) < 0.02


def test_quality_changes_the_size_of_the_file(tmp_path):
    torch.manual_seed(0)
    noise = torch.rand(3, 64, 64, 3)
    for fmt in [name for name, spec in FORMATS.items() if spec.quality_range and name != "webp (lossless)"]:
        sizes = []
        for quality in (0, 50, 100):
            path = target(tmp_path, fmt, f"{fmt} {quality}")
            write_frames(noise, path, rate=8, fmt=fmt, quality=quality)
            sizes.append(path.stat().st_size)
        assert sizes[0] < sizes[1] < sizes[2], fmt


@pytest.mark.parametrize("fmt, quality", [("webp", 100), ("webp (lossless)", 0)])
def test_lossless_webp_loses_nothing(fmt, quality, tmp_path):
    noise = (torch.rand(2, 16, 16, 3) * 255).round() / 255
    path = write_frames(noise, tmp_path / "a.webp", rate=8, fmt=fmt, quality=quality)
    assert torch.equal(read_any(path), noise)


# ---- time: rates, loops, order ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given, exact",
    [
        (29.97, Fraction(30000, 1001)), (23.976, Fraction(24000, 1001)), (59.94, Fraction(60000, 1001)),
        (24, Fraction(24)), (30.0, Fraction(30)), (12.5, Fraction(25, 2)), (0.5, Fraction(1, 2)),
        (Fraction(2997, 100), Fraction(2997, 100)), (240, Fraction(240)),
    ],
)
def test_rates_are_exact_fractions(given, exact):
    assert frame_rate(given) == exact


@pytest.mark.parametrize("rate", [0, -1, 241, math.nan, math.inf, "24", None, True])
def test_bad_rates_are_refused(rate, tmp_path):
    with pytest.raises(UserError, match="Frame rate"):
        write_frames(ramp(1), tmp_path / "a.gif", rate=rate, fmt="gif")


@pytest.mark.parametrize("fmt", AV_FORMATS)
@pytest.mark.parametrize("given, exact", [(29.97, Fraction(30000, 1001)), (23.976, Fraction(24000, 1001))])
def test_broadcast_rate_survives_the_file(fmt, given, exact, tmp_path):
    path = write_frames(ramp(4), target(tmp_path, fmt), rate=given, fmt=fmt)
    assert read_video(path)[1] == exact


@pytest.mark.parametrize("fmt, rate, ticks", [("gif", 30, 100), ("gif", 29.97, 100), ("webp", 29.97, 1000)])
def test_delays_follow_the_clock_without_drift(fmt, rate, ticks, tmp_path):
    path = write_frames(flat((0.5, 0.5, 0.5), 60, 8, 8), target(tmp_path, fmt), rate=rate, fmt=fmt)
    spent = 0
    with Image.open(path) as image:
        assert image.n_frames == 60, "equal frames must not be merged"
        for i in range(60):
            image.seek(i)
            image.load()
            spent += image.info["duration"] / 1000 * ticks
            assert abs(spent - (i + 1) / rate * ticks) <= 0.51


def test_rates_that_players_slow_down_are_refused(tmp_path):
    with pytest.raises(UserError, match="too fast for gif"):
        write_frames(ramp(1), tmp_path / "a.gif", rate=60, fmt="gif")


@pytest.mark.parametrize("source", [lambda f: f, list, iter], ids=["tensor", "list", "iterator"])
@pytest.mark.parametrize("fmt", [MP4, "gif", PNG])
def test_pingpong_and_repetitions(fmt, source, tmp_path):
    once = [0, 1, 2, 3, 2, 1]
    path = write_frames(
        source(ramp(4)), target(tmp_path, fmt), rate=8, fmt=fmt, pingpong=True, loop_count=1
    )
    assert order(read_any(path)) == (once if fmt in LOOPS_IN_FILE else once * 2)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_pingpong_of_short_clips_repeats_no_end(tmp_path):
    for count in (1, 2, 3):
        path = write_frames(ramp(count), tmp_path / f"{count}.webp", rate=8, fmt="webp", pingpong=True)
        assert order(read_any(path)) == [[0], [0, 1], [0, 1, 2, 1]][count - 1]


@pytest.mark.parametrize("fmt, loops, stored", [("gif", 0, 0), ("gif", 3, 3), ("webp", 0, 0), ("webp", 3, 4)])
def test_loop_count_is_stored(fmt, loops, stored, tmp_path):
    # GIF counts repetitions, WebP counts plays.
    path = write_frames(ramp(2), target(tmp_path, fmt), rate=8, fmt=fmt, loop_count=loops)
    with Image.open(path) as image:
        assert image.info["loop"] == stored


# ---- metadata -----------------------------------------------------------------------------------------

GRAPH = {"1": {"class_type": "Tést", "inputs": {"text": 'a "red" \\ bird 🐦 :} {'}}}
METADATA = {"prompt": json.dumps(GRAPH, ensure_ascii=False), "workflow": json.dumps({"nodes": ["x"] * 300})}


def read_metadata(path, fmt):
    if fmt in AV_FORMATS:
        with av.open(str(path)) as container:
            return {key.lower(): value for key, value in container.metadata.items()}
    if path.is_dir():
        return Image.open(sorted(path.iterdir())[0]).text
    with Image.open(path) as image:
        if fmt == "gif":
            lines = image.info["comment"].decode("ascii").split("\n")
        else:
            exif = image.getexif()
            lines = [exif[0x0110], exif[0x010F]]
            assert lines[0].startswith("prompt:")
    return dict(line.split(":", 1) for line in lines)


@pytest.mark.parametrize(
    "fmt, sound", [(fmt, None) for fmt in ALL] + [(fmt, tone(0.25)) for fmt in AV_FORMATS]
)
def test_metadata_restores_the_graph(fmt, sound, tmp_path):
    path = write_frames(ramp(2), target(tmp_path, fmt), rate=8, fmt=fmt, metadata=METADATA, audio=sound)
    stored = read_metadata(path, fmt)
    assert json.loads(stored["prompt"]) == GRAPH
    # the page's reader of WebM counts braces, also those inside of strings
    assert stored["prompt"].count("{") == stored["prompt"].count("}") == 3
    assert json.loads(stored["workflow"]) == {"nodes": ["x"] * 300}


def test_webp_chunks_have_even_lengths(tmp_path):
    # The page's reader steps by bare chunk length, without the pad byte: after an odd one it finds no EXIF.
    frames = torch.rand(12, 15, 17, 3)
    data = write_frames(frames, tmp_path / "a.webp", rate=8, fmt="webp", metadata=METADATA).read_bytes()
    at, names = 12, []
    while at < len(data):
        names.append(data[at : at + 4])
        at += 8 + int.from_bytes(data[at + 4 : at + 8], "little")
    assert names == [b"VP8X", b"ANIM"] + [b"ANMF"] * 12 + [b"EXIF"]
    assert int.from_bytes(data[4:8], "little") + 8 == len(data)


def test_metadata_must_be_text(tmp_path):
    with pytest.raises(UserError, match="must be text"):
        write_frames(ramp(1), tmp_path / "a.gif", rate=8, fmt="gif", metadata={"prompt": GRAPH})


# ---- sound --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", AV_FORMATS)
@pytest.mark.parametrize(
    "seconds, rate, channels", [(0.0, 44100, 1), (2.5, 44100, 2), (0.5, 8000, 6)]
)
def test_sound_is_as_long_as_the_clip(fmt, seconds, rate, channels, tmp_path):
    path = write_frames(
        ramp(9), target(tmp_path, fmt), rate=8, fmt=fmt, audio=tone(seconds, rate, channels)
    )
    sound, out_rate = decoded_sound(path)
    assert sound.shape[0] == (1 if channels == 1 else 2)
    assert abs(sound.shape[1] / out_rate - 9 / 8) < 0.05
    middle = out_rate // 2
    early, late = (np.abs(part).mean() for part in (sound[:, : middle - 4800], sound[:, middle + 4800 :]))
    assert (early > 0.1) == (seconds > 0)
    assert (late > 0.1) == (seconds > 1), "silence after the end of the sound"
    assert order(read_any(path)) == list(range(9))


@pytest.mark.parametrize("fmt", [name for name, spec in FORMATS.items() if not spec.audio_codec])
def test_formats_without_sound_say_so(fmt, tmp_path):
    with pytest.raises(UserError, match=r"cannot hold sound.*mp4 \(h264\), webm \(vp9\)"):
        write_frames(ramp(1), target(tmp_path, fmt), rate=8, fmt=fmt, audio=tone(1))


@pytest.mark.parametrize(
    "audio, words",
    [
        ({"waveform": torch.full((1, 1, 9), math.nan), "sample_rate": 8000}, "NaN"),
        ({"waveform": torch.zeros(2, 1, 9), "sample_rate": 8000}, "one sound"),
        ({"waveform": torch.zeros(1, 3, 9), "sample_rate": 8000}, "3 channels"),
        ({"waveform": torch.zeros(1, 1, 9), "sample_rate": 0}, "sample rate is 0"),
        ({"waveform": torch.zeros(1, 1, 9)}, "sample_rate"),
    ],
)
def test_bad_sound_is_refused(audio, words, tmp_path):
    with pytest.raises(UserError, match=words):
        write_frames(ramp(1), tmp_path / "a.mp4", rate=8, fmt=MP4, audio=audio)


# ---- streaming ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fmt, count, pingpong", [(MP4, 300, False), (WEBM, 100, True), ("gif", 100, False), ("webp", 100, False)]
)
def test_a_stream_is_not_held(fmt, count, pingpong, tmp_path):
    alive, most, seen = weakref.WeakSet(), 0, []

    def stream():
        for i in range(count):
            frame = torch.full((64, 64, 3), i / count)
            alive.add(frame)
            yield frame

    def progress(done, total):
        nonlocal most
        most = max(most, len(alive))
        seen.append((done, total))

    path = write_frames(
        stream(), target(tmp_path, fmt), rate=24, fmt=fmt, pingpong=pingpong, progress=progress, quality=20
    )
    gc.collect()
    assert most <= 4
    assert len(alive) == 0
    played = 2 * count - 2 if pingpong else count
    spooled = pingpong or fmt == "gif"  # read to its end before the first picture is written
    assert seen == [(i + 1, played if spooled else None) for i in range(played)]
    assert len(read_any(path)) == played


def test_progress_knows_the_total_of_a_tensor(tmp_path):
    seen = []

    def progress(*told):
        seen.append(told)

    path = tmp_path / "a.mp4"
    write_frames(ramp(3), path, rate=8, fmt=MP4, pingpong=True, loop_count=1, progress=progress)
    assert seen == [(i + 1, 8) for i in range(8)]


def test_half_precision_and_inference_tensors(tmp_path):
    with torch.inference_mode():
        frames = ramp(2).to(torch.bfloat16)
        path = write_frames(frames, tmp_path / "a.mp4", rate=8, fmt=MP4)
    assert order(read_any(path)) == [0, 1]


# ---- failures leave nothing ---------------------------------------------------------------------------


class Cancelled(BaseException):
    """Stands for the host's interrupt."""


@pytest.mark.parametrize("where", ["progress", "source"])
@pytest.mark.parametrize("fmt", ALL)
def test_an_interrupt_leaves_nothing(fmt, where, tmp_path):
    def progress(done, total):
        if where == "progress" and done == 3:
            raise Cancelled

    def source():
        for i, frame in enumerate(ramp(5)):
            if where == "source" and i == 3:
                raise Cancelled
            yield frame

    path = target(tmp_path, fmt)
    sound = tone(1) if FORMATS[fmt].audio_codec else None
    with pytest.raises(Cancelled):
        write_frames(source(), path, rate=8, fmt=fmt, progress=progress, audio=sound, pingpong=True)
    assert list(tmp_path.iterdir()) == []
    write_frames(ramp(2), path, rate=8, fmt=fmt)
    assert order(read_any(path)) == [0, 1]


@pytest.mark.parametrize("fmt", ALL)
def test_existing_files_are_never_overwritten(fmt, tmp_path):
    path = target(tmp_path, fmt)
    path.write_bytes(b"mine")
    with pytest.raises(UserError, match="exists already"):
        write_frames(ramp(1), path, rate=8, fmt=fmt)
    assert path.read_bytes() == b"mine"
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_a_file_that_appears_meanwhile_is_kept(tmp_path):
    path = tmp_path / "a.gif"
    with pytest.raises(UserError, match="exists already"):
        write_frames(ramp(2), path, rate=8, fmt="gif", progress=lambda *_: path.write_bytes(b"other"))
    assert path.read_bytes() == b"other"
    assert [p.name for p in tmp_path.iterdir()] == ["a.gif"]


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("fmt", ALL)
def test_broken_values_are_refused_with_the_frame_number(fmt, value, tmp_path):
    frames = ramp(4)
    frames[2, 5, 6, 1] = value
    with pytest.raises(UserError, match=r"Frame 3 .*NaN or Inf"):
        write_frames(frames, target(tmp_path, fmt), rate=8, fmt=fmt)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "frames, words",
    [
        ([], "no frames"),
        (torch.zeros(0, 8, 8, 3), "no frames"),
        ([torch.zeros(8, 8, 3), torch.zeros(8, 9, 3)], "Frame 2 is 9x8 .*began with 8x8"),
        ([torch.zeros(8, 8, 3), torch.zeros(8, 8, 4)], "Frame 2 .*4 channels"),
        (torch.zeros(2, 8, 8, 2), "shape"),
        (torch.zeros(2, 8, 8, 3, dtype=torch.uint8), "uint8"),
        (torch.zeros(8, 8, 3), "shape"),
        (torch.zeros(1, 0, 8, 3), "8x0"),
        (torch.zeros(1, 1, 1, 3).expand(1, 1, 16384, 3), "16384x1 do not fit webp"),
    ],
)
def test_bad_frames_are_refused(frames, words, tmp_path):
    with pytest.raises(UserError, match=words):
        write_frames(frames, tmp_path / "a.webp", rate=8, fmt="webp")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "change, words",
    [
        ({"fmt": "mp4 (nvenc)"}, "unknown; choose one of: mp4"),
        ({"quality": 101}, "quality"), ({"quality": 50.0}, "quality"), ({"loop_count": -1}, "Loop count"),
        ({"path": "a.webm"}, "must end in .mp4"), ({"path": "none/a.mp4"}, "does not exist"),
    ],
)
def test_bad_settings_are_refused(change, words, tmp_path):
    settings = {"path": "a.mp4", "rate": 8, "fmt": MP4, **change}
    settings["path"] = tmp_path / settings["path"]
    with pytest.raises(UserError, match=words):
        write_frames(ramp(1), **settings)
    assert list(tmp_path.iterdir()) == []


def test_default_quality_fits_every_row():
    for name, spec in FORMATS.items():
        check_settings(name, spec, Fraction(24), 80, 0)
        known = {MP4: 19, WEBM: 22, "gif": 217, "webp": 80, "webp (lossless)": 100, "mp4 (h265)": 22,
                 "mp4 (h265 10-bit)": 22, "mp4 (av1)": 27, "webm (av1)": 27}
        assert spec.level(80) == known.get(name)


# ---- encoders -----------------------------------------------------------------------------------------


def test_an_encoder_that_is_not_built_in_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(FORMATS, MP4, replace(FORMATS[MP4], codec="libnothing"))
    source = iter(ramp(1))
    with pytest.raises(UserError, match=r"needs the encoder libnothing.*choose one of: webm \(vp9\), gif"):
        write_frames(source, tmp_path / "a.mp4", rate=8, fmt=MP4)
    assert list(tmp_path.iterdir()) == []
    assert len(list(source)) == 1, "refused before any frame is made"
    assert MP4 not in working_formats() and WEBM in working_formats()


def test_the_words_of_a_failing_encoder_are_passed_on(monkeypatch, tmp_path):
    monkeypatch.setitem(FORMATS, MP4, replace(FORMATS[MP4], codec_options={"preset": "impossible"}))
    with pytest.raises(UserError, match=r"libx264 gave up on 96x64 .*; try another") as caught:
        write_frames(ramp(1), tmp_path / "a.mp4", rate=8, fmt=MP4)
    assert isinstance(caught.value.__cause__, av.FFmpegError)
    assert list(tmp_path.iterdir()) == []


def test_without_pyav_the_pillow_formats_work(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "av", None)
    monkeypatch.delitem(sys.modules, "scd_pack.scd_core.video.av_writer", raising=False)
    monkeypatch.delattr(sys.modules["scd_pack.scd_core.video"], "av_writer", raising=False)
    for fmt in ALL:
        if fmt in AV_FORMATS:
            with pytest.raises(UserError, match=r"needs the Python package av.*: gif, webp, png sequence"):
                write_frames(ramp(1), target(tmp_path, fmt), rate=8, fmt=fmt)
        else:
            path = write_frames(ramp(2), target(tmp_path, fmt, fmt), rate=8, fmt=fmt)
            assert order(read_any(path)) == [0, 1]


def test_reading_says_what_is_wrong(tmp_path):
    with pytest.raises(UserError, match="not there"):
        read_video(tmp_path / "none.mp4")
    broken = tmp_path / "broken.mp4"
    broken.write_bytes(b"not a clip" * 50)
    with pytest.raises(UserError, match="cannot be read"):
        read_video(broken)
