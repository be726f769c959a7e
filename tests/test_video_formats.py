"""What is particular to a format: codecs and tags, ten and sixteen bits, alpha, gif palettes, first frames, memory."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from scd_pack.scd_core.errors import UserError
from scd_pack.scd_core.video import FORMATS, read_video, still_path, working_formats, write_frames

av = pytest.importorskip("av")

PNG, PNG16, GIF, WEBP, PRORES = "png sequence", "png sequence (16-bit)", "gif", "webp", "mov (prores 4444)"
AV_FORMATS = [name for name, spec in FORMATS.items() if spec.codec]
METADATA = {"prompt": json.dumps({"1": {"class_type": "x"}}), "workflow": json.dumps({"nodes": []})}


def target(folder, fmt, stem="clip"):
    return folder / f"{stem}{FORMATS[fmt].extension}"


def flat(colour, count=2, height=64, width=64):
    return torch.tensor(colour).expand(count, height, width, len(colour))


def decoded(path):
    """(stream, its frames) of a file, by the library alone."""
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        return stream, list(container.decode(stream))


def plane_means(frame):
    """Mean code value of each plane, on the scale of 8 bits."""
    bits, means = frame.format.components[0].bits, []
    for plane in frame.planes:
        rows = np.frombuffer(bytes(plane), np.uint8 if bits == 8 else np.uint16).reshape(plane.height, -1)
        means.append(rows[:, : plane.width].mean() / 2 ** (bits - 8))
    return means


# ---- codecs, tags, colours ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fmt, codec, tag, pixels",
    [
        ("mp4 (h264)", "h264", "avc1", "yuv420p"), ("webm (vp9)", "vp9", None, "yuv420p"),
        ("mp4 (h265)", "hevc", "hvc1", "yuv420p"), ("mp4 (h265 10-bit)", "hevc", "hvc1", "yuv420p10le"),
        ("mp4 (av1)", "av1", "av01", "yuv420p10le"), ("webm (av1)", "av1", None, "yuv420p10le"),
        ("mov (prores 422 hq)", "prores", "apch", "yuv422p10le"), (PRORES, "prores", "ap4h", "yuv444p10le"),
    ],
)
def test_codec_tag_pixels_and_colour_tags(fmt, codec, tag, pixels, tmp_path):
    path = write_frames(flat((0.5, 0.2, 0.7)), target(tmp_path, fmt), rate=24, fmt=fmt)
    with av.open(str(path)) as container:
        context = container.streams.video[0].codec_context
        assert codec in context.codec.canonical_name and tag in (None, context.codec_tag)
        tags = (context.color_primaries, context.color_trc, context.colorspace, context.color_range)
        before = tuple(map(int, tags))
        frame = next(container.decode(video=0))
        assert context.pix_fmt == pixels or fmt == PRORES  # its decoder always gives 12 bits
        assert (int(frame.colorspace), int(frame.color_range)) == (1, 1)
    # ProRes has no tag for its range in the file: it is video range by definition
    assert before[:3] == (1, 1, 1) and before[3] in ((0, 1) if codec == "prores" else (1,))


def test_every_row_is_covered_and_works_here():
    assert working_formats() == list(FORMATS)
    assert working_formats(sound=True) == AV_FORMATS


@pytest.mark.parametrize("fmt", AV_FORMATS)
def test_planes_hold_bt709_in_video_range(fmt, tmp_path):
    """Against the formula of the recommendation, not against our own reader."""
    for i, (r, g, b) in enumerate([(0.84, 0.63, 0.52), (1.0, 0.0, 0.0), (0.02, 0.9, 0.1), (1.0, 1.0, 1.0)]):
        path = write_frames(flat((r, g, b)), target(tmp_path, fmt, f"c{i}"), rate=24, fmt=fmt, quality=90)
        y = 0.2126 * r + 0.7152 * g + 0.0722 * b
        expected = 16 + 219 * y, 128 + 224 * (b - y) / 1.8556, 128 + 224 * (r - y) / 1.5748
        for found, wanted in zip(plane_means(decoded(path)[1][0]), expected):
            assert abs(found - wanted) < (0.75 if FORMATS[fmt].depth == 8 else 0.5)


@pytest.mark.parametrize("fmt", ["mp4 (h264)", "mp4 (h265)", "mov (prores 422 hq)"])
def test_colour_edges_stay_where_they_are(fmt, tmp_path):
    """Chroma at half size sits where readers look for it: a shift shows as one side of a band gone pale."""
    frames = flat((0.5, 0.5, 0.5), 2).clone()
    frames[:, :, 24:40] = torch.tensor((0.8, 0.3, 0.5))
    path = write_frames(frames, target(tmp_path, fmt), rate=24, fmt=fmt, quality=100)
    red = decoded(path)[1][0].to_ndarray(format="rgb24")[..., 0].mean(axis=0) / 255  # as the host reads clips
    assert np.abs(red - red[::-1]).max() < 0.02, "a band in the middle is its own mirror image"


@pytest.mark.parametrize("fmt", [name for name in AV_FORMATS if FORMATS[name].depth == 16])
def test_ten_bits_keep_what_eight_cannot(fmt, tmp_path):
    steps = torch.linspace(0.4, 0.5, 128)[None, None, :, None].expand(2, 64, 128, 3)
    frames, _ = read_video(write_frames(steps, target(tmp_path, fmt), rate=24, fmt=fmt, quality=100))
    shown = frames[0].mean(dim=(0, 2))
    assert (shown - steps[0, 0, :, 0]).abs().max() * 255 < 0.5
    assert len(np.unique((frames[0, 32, :, 1] * 1023).round().numpy())) > 60  # eight bits have 26 here


@pytest.mark.parametrize("fmt", ["mp4 (h265)", "mp4 (av1)", "webm (av1)"])
def test_frames_under_the_least_size_are_refused(fmt, tmp_path):
    side = FORMATS[fmt].min_side - 1
    with pytest.raises(UserError, match=f"{side}x{side} do not fit {fmt[:3]}.*each side must be {side + 1} to"):
        write_frames(torch.rand(1, side, side, 3), target(tmp_path, fmt), rate=8, fmt=fmt)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("fmt", AV_FORMATS)
def test_encoders_say_nothing_of_their_own(fmt, tmp_path, capfd):
    write_frames(flat((0.2, 0.4, 0.6), 3, 128, 128), target(tmp_path, fmt), rate=24, fmt=fmt)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("fmt", ["mp4 (h265)", "mp4 (av1)", "mov (prores 422 hq)"])
def test_index_and_graph_come_before_the_pictures(fmt, tmp_path):
    data = write_frames(flat((0.5, 0.5, 0.5)), target(tmp_path, fmt), rate=8, fmt=fmt, metadata=METADATA).read_bytes()
    assert data.index(b"moov") < data.index(b"udta") < data.index(b"keys") < data.index(b"mdat")


# ---- alpha and sixteen bits -----------------------------------------------------------------------------


def alpha_of(path, fmt):
    """Alpha of the first frame in 0..1, by a reader that is not ours."""
    if fmt == "webm (vp9)":  # only this decoder knows the second layer of VP9
        decoder = av.CodecContext.create("libvpx-vp9", "r")
        with av.open(str(path)) as container:
            assert container.streams.video[0].metadata["alpha_mode"] == "1"
            frame = next(f for packet in container.demux(video=0) for f in decoder.decode(packet))
        return frame.reformat(format="rgba").to_ndarray()[..., 3] / 255
    if fmt == PRORES:
        frame = decoded(path)[1][0]
        assert frame.format.name.startswith("yuva444p1")
        plane = frame.planes[3]
        rows = np.frombuffer(bytes(plane), np.uint16).reshape(plane.height, -1)[:, : plane.width]
        return rows / (2 ** frame.format.components[3].bits - 1)
    picture = Image.open(path / "clip_00001.png" if path.is_dir() else path).convert("RGBA")
    return np.array(picture)[..., 3] / 255


@pytest.mark.parametrize("fmt", [name for name, spec in FORMATS.items() if spec.alpha_pixel_format])
def test_alpha_is_kept_where_the_format_can(fmt, tmp_path):
    frames = flat((0.9, 0.5, 0.1, 1.0), 2, 64, 96).clone()
    frames[:, :, :48, 3] = 0.3
    found = alpha_of(write_frames(frames, target(tmp_path, fmt), rate=8, fmt=fmt), fmt)
    assert abs(found[:, :40].mean() - (0 if fmt == GIF else 0.3)) < 0.01
    assert abs(found[:, 56:].mean() - 1) < 0.01


@pytest.mark.parametrize("channels, pixels", [(3, "rgb48le"), (4, "rgba64le")])
def test_sixteen_bit_pictures_are_exact(channels, pixels, tmp_path):
    frames = torch.rand(2, 37, 53, channels, generator=torch.Generator().manual_seed(1))
    path = write_frames(frames, tmp_path / "p", rate=8, fmt=PNG16, metadata=METADATA)
    for i, frame in enumerate(frames):
        file = path / f"p_{i + 1:05}.png"
        assert file.read_bytes()[24] == 16, "bits a sample in the header"
        found = decoded(file)[1][0].to_ndarray(format=pixels)
        assert np.array_equal(found.reshape(37, 53, channels), (frame * 65535).round().numpy().astype(np.uint16))
    assert Image.open(path / "p_00001.png").text == METADATA
    assert Image.open(path / "p_00002.png").text == {}


# ---- gif ------------------------------------------------------------------------------------------------


def sky(count=4, side=96):
    """A soft gradient on which a light moves; eight bits are just enough for it."""
    y, x = torch.meshgrid(torch.linspace(0, 1, side), torch.linspace(0, 1, side), indexing="ij")
    base = torch.stack([0.3 + 0.35 * y + 0.1 * x, 0.45 + 0.3 * y, 0.8 + 0.15 * y - 0.1 * x], dim=-1)
    glow = torch.tensor([0.25, 0.15, -0.3])
    spots = [torch.exp(-60 * ((x - 0.3 - 0.1 * i) ** 2 + (y - 0.5) ** 2))[..., None] * glow for i in range(count)]
    return torch.stack([(base + spot).clamp(0, 1) for spot in spots])


def seen_error(found, wanted):
    """RMS error of 255 after a blur: what the eye sees of a dither."""
    off = torch.nn.functional.avg_pool2d((found - wanted).permute(0, 3, 1, 2), 4) * 255
    return float(off.square().mean().sqrt())


def test_gif_diffuses_what_its_palette_cannot_show(tmp_path):
    coarse = torch.rand(1, 3, 6, 6, generator=torch.Generator().manual_seed(2))
    wanted = torch.nn.functional.interpolate(coarse, size=(96, 96), mode="bilinear").permute(0, 2, 3, 1)
    path = write_frames(wanted, tmp_path / "a.gif", rate=8, fmt=GIF)
    with Image.open(path) as image:
        colours = torch.tensor(image.getpalette()).reshape(-1, 3) / 255
    nearest = colours[torch.cdist(wanted.reshape(-1, 3), colours).argmin(dim=1)].reshape(wanted.shape)
    assert seen_error(read_video(path)[0], wanted) < 0.75 * seen_error(nearest, wanted)


def test_gif_has_one_palette_that_knows_the_whole_clip(tmp_path):
    frames = torch.cat([flat((1.0, 0.0, 0.0), 1), flat((0.0, 1.0, 0.0), 1), flat((0.0, 0.0, 1.0), 1)])
    path = write_frames(iter(frames), tmp_path / "a.gif", rate=8, fmt=GIF)
    assert torch.equal(read_video(path)[0], frames)
    data, at = path.read_bytes(), 0
    while (at := data.find(b"\x2c\0\0\0\0\x40\0\x40\0", at + 1)) > 0:  # each picture: no palette of its own
        assert data[at + 9] == 0


def test_gif_stands_still_where_the_clip_does(tmp_path):
    noise = torch.Generator().manual_seed(3)
    frames = sky(1).repeat(6, 1, 1, 1) + torch.randn(6, 96, 96, 3, generator=noise) * 0.5 / 255
    frames[:, 60:80, 60:80] = torch.linspace(0.2, 0.9, 6)[:, None, None, None]
    path = write_frames(frames, tmp_path / "a.gif", rate=8, fmt=GIF)
    found = read_video(path)[0]
    still = (found[1:, :56] == found[:-1, :56]).all(dim=-1).float().mean()
    assert still > 0.99, "neither dither nor noise flickers"
    alone = write_frames(frames[:1], tmp_path / "b.gif", rate=8, fmt=GIF).stat().st_size
    assert path.stat().st_size < 2 * alone


def test_gif_follows_a_slow_fade(tmp_path):
    """What is kept is measured against the colour it was drawn for: small steps add up and are drawn."""
    frames = torch.linspace(0.2, 0.6, 60)[:, None, None, None].expand(60, 32, 32, 3)
    found = read_video(write_frames(frames, tmp_path / "a.gif", rate=8, fmt=GIF))[0]
    assert (found.mean((1, 2, 3)) - frames[:, 0, 0, 0]).abs().max() * 255 < 6


def test_gif_of_one_colour_has_no_holes(tmp_path):
    path = write_frames(flat((0.5, 0.25, 0.125), 3), tmp_path / "a.gif", rate=8, fmt=GIF, quality=0)
    with Image.open(path) as image:
        assert np.array(image.convert("RGBA"))[..., 3].min() == 255
    assert seen_error(read_video(path)[0], flat((0.5, 0.25, 0.125), 3)) < 1


def test_gif_alpha_leaves_nothing_of_the_picture_before(tmp_path):
    frames = torch.zeros(2, 32, 32, 4)
    frames[0, :16] = frames[1, 16:] = 1.0
    path = write_frames(frames, tmp_path / "a.gif", rate=8, fmt=GIF)
    with Image.open(path) as image:
        image.seek(1)
        alpha = np.array(image.convert("RGBA"))[..., 3]
    assert alpha[:16].max() == 0 and alpha[16:].min() == 255


# ---- the first frame beside the clip --------------------------------------------------------------------


@pytest.mark.parametrize("fmt", [GIF, "mp4 (h265)", PRORES])
def test_first_frame_lies_beside_the_clip_with_the_graph(fmt, tmp_path):
    frames = torch.cat([flat((0.2, 0.6, 0.4), 1), flat((0.9, 0.9, 0.9), 2)])
    path = write_frames(frames, target(tmp_path, fmt), rate=8, fmt=fmt, still=True, metadata=METADATA)
    assert sorted(tmp_path.iterdir()) == sorted([path, tmp_path / "clip.png"])
    with Image.open(still_path(path)) as image:
        assert image.text == METADATA and image.size == (64, 64)
        assert np.abs(np.array(image.convert("RGB")).mean((0, 1)) - (51, 153, 102)).max() < 1


@pytest.mark.parametrize("taken", ["clip.png", "clip.gif"])
def test_neither_file_is_written_when_one_name_is_taken(taken, tmp_path):
    settings = {"rate": 8, "fmt": GIF, "still": True}
    (tmp_path / taken).write_bytes(b"mine")
    with pytest.raises(UserError, match=f"{taken}' exists already"):
        write_frames(flat((0.5, 0.5, 0.5)), tmp_path / "clip.gif", **settings)
    (tmp_path / taken).unlink()
    with pytest.raises(UserError, match=f"{taken}' exists already"):  # it appears while the clip is written
        write_frames(flat((0.5, 0.5, 0.5)), tmp_path / "clip.gif", **settings,
                     progress=lambda *told: (tmp_path / taken).write_bytes(b"mine"))
    assert [path.name for path in tmp_path.iterdir()] == [taken]
    assert (tmp_path / taken).read_bytes() == b"mine"


def test_an_error_takes_the_first_frame_along(tmp_path):
    def progress(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_frames(flat((0.5, 0.5, 0.5)), tmp_path / "a.mov", rate=8, fmt=PRORES, still=True, progress=progress)
    assert list(tmp_path.iterdir()) == []


def test_disks_without_second_names_are_written_too(monkeypatch, tmp_path):
    def link(*names):
        raise PermissionError("operation not permitted")

    monkeypatch.setattr(os, "link", link)
    path = write_frames(flat((0.5, 0.5, 0.5)), tmp_path / "a.gif", rate=8, fmt=GIF)
    assert [p.name for p in tmp_path.iterdir()] == ["a.gif"]
    with pytest.raises(UserError, match="exists already"):
        write_frames(flat((0.5, 0.5, 0.5)), path, rate=8, fmt=GIF)


# ---- sound ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype, middle, half", [(torch.uint8, 128, 128), (torch.int16, 0, 2**15),
                                                 (torch.int32, 0, 2**31)])
def test_whole_number_samples_sound_like_floats(dtype, middle, half, tmp_path):
    wave = torch.sin(torch.arange(48_000) * 0.05)[None, None] * 0.5
    whole = (wave.double() * half + middle).round().to(dtype)
    sounds = []
    for name, samples in (("a", wave), ("b", whole)):
        audio = {"waveform": samples, "sample_rate": 48_000}
        path = write_frames(flat((0.5, 0.5, 0.5), 4), tmp_path / f"{name}.mov", rate=8, fmt=PRORES, audio=audio)
        with av.open(str(path)) as container:
            pieces = [frame.to_ndarray() for frame in container.decode(audio=0)]
        sounds.append(np.concatenate(pieces, axis=1).astype(np.float64) / 2**15)
    assert sounds[0].shape == sounds[1].shape == (1, 24_000), "exactly the length of the clip"
    assert np.abs(sounds[0]).max() > 0.49
    assert np.abs(sounds[0] - sounds[1]).max() < 1.5 / (half if dtype == torch.uint8 else 2**15)


# ---- memory ---------------------------------------------------------------------------------------------

GROWTH = """
import json, pathlib, sys, torch
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/tests"]
from memory_run import memory
from scd_core.video import FORMATS, write_frames
folder, count = pathlib.Path(sys.argv[2]), int(sys.argv[3])
frame = torch.rand(8, 8, 3, generator=torch.Generator().manual_seed(0))
frame = frame.repeat_interleave(32, 0).repeat_interleave(32, 1)
for fmt, held in json.loads(sys.argv[4]):
    peaks, pictures = [memory("VmHWM")], []

    def progress(done, total):
        peaks.append(memory("VmHWM"))
        if held:
            pictures.append(frame.mul(255).byte())

    path = folder / f"{fmt} {held}{FORMATS[fmt].extension}"
    write_frames(frame.expand(count, -1, -1, -1), path, rate=24, fmt=fmt, quality=20, progress=progress)
    print(peaks[-1] - peaks[count // 2], peaks[-1] - peaks[0])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_does_not_grow_with_the_clip(root, tmp_path):
    """The second hundred of frames takes nothing; a writer that held its pictures, as bytes, would show by far.

    (2,000 frames of 512x512 as mp4 take 79 MiB above the frames themselves; all of it is there at the 250th.)
    """
    runs = [(GIF, False), ("mp4 (h264)", False), (GIF, True)]  # the most a process ever had only rises
    command = [sys.executable, "-c", GROWTH, root, tmp_path, "200", json.dumps(runs)]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    picture = 256 * 256 * 3
    (gif, most_gif), (mp4, most_mp4), (held, _) = (map(int, line.split()) for line in done.stdout.splitlines())
    assert max(gif, mp4) < 20 * picture < 80 * picture < held
    assert max(most_gif, most_mp4) < 100e6
