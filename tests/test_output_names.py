"""Names of written files: inside the output folder, whatever a graph or a prompt holds, and alike on every system."""

import os

import pytest
from scd_tests import fake_host


@pytest.fixture(scope="module")
def modules(tmp_path_factory):
    with fake_host.pack(tmp_path_factory.mktemp("host")) as module:
        yield module("nodes.host"), module("nodes.naming")


@pytest.fixture
def place(modules, tmp_path, monkeypatch):
    """output_path over an output folder in tmp_path, with prefixes filled in as Video Combine does."""
    host, naming = modules
    (tmp_path / "output").mkdir()
    monkeypatch.setattr(host.folder_paths, "get_output_directory", lambda: str(tmp_path / "output"))

    def call(prefix, ending=".mp4", **values):
        prompt = {"1": {"class_type": "T", "inputs": values}}
        return host.output_path(naming.expand(prefix, prompt), ending, 64, 32, True)

    return call


OUTSIDE = [
    "../x", "..", ".", "", "a/..", "a/../../x", "/etc/x", "//server/share/x", "\\\\server\\share\\x", "\\x", "..\\x",
    "a\\..\\..\\x", "C:\\x", "c:/x", "C:x", "%date:../../yyyy%", "%date:..%/../x", "a/%date:../..%/x", "/", "\\",
]  # fmt: skip


@pytest.mark.parametrize("prefix", OUTSIDE)
def test_no_prefix_leads_out(place, tmp_path, prefix):
    with pytest.raises(ValueError, match=r"filename_prefix .* is no name inside the output folder"):
        place(prefix)
    assert sorted(tmp_path.rglob("*")) == [tmp_path / "output"]


@pytest.mark.parametrize("prefix, inside", [
    ("SCD/clip", "SCD/clip"), ("SCD\\clip", "SCD/clip"), ("a/./b//c", "a/b/c"), ("a/../b", "b"), ("猫 é/x", "猫 é/x"),
    ("a\0b", "a_b"), ("what? <a|b>: \"c\"*", "what_ _a_b__ _c__"), ("line\nbreak", "line_break"), ("ab:c", "ab_c"),
    (".. /x", "_/x"), ("... /x", "_/x"), ("a. ", "a"), ("\ud800x", "_x"),
    ("NUL/x", "NUL_/x"), ("x/con", "x/con_"), ("com1.txt/x", "com1_.txt/x"), ("console/aux1", "console/aux1"),
    ("%T.text%", ".._.._up"), ("%T.drive%/x", "D__x/x"), ("%width%x%height%", "64x32"),
    ("~/x", "~/x"), ("$HOME", "$HOME"),
])  # fmt: skip
def test_every_other_prefix_is_a_file_below(place, tmp_path, prefix, inside):
    path, file, subfolder, kind = place(prefix, text="../../up", drive="D:\\x")
    assert path == str(tmp_path / "output" / f"{inside}_00001_.mp4") and kind == "output"
    assert os.path.join(tmp_path / "output", subfolder, file) == path
    with open(path, "xb") as written:  # a file system takes it
        written.write(b"x")
    assert place(prefix, text="../../up", drive="D:\\x")[0] == str(tmp_path / "output" / f"{inside}_00002_.mp4")


@pytest.mark.parametrize("letter", ["a", "é", "猫", "🦊"])
def test_a_whole_prompt_may_be_the_name(place, letter):
    path = place("%T.text%/%T.text%", text=letter * 4096)[0]
    open(path, "xb").close()
    name = os.path.basename(path)
    assert name.startswith(letter * 40) and 200 < len(os.fsencode(name)) < 255


@pytest.mark.parametrize("ending", [".mp4", ""])
def test_links_out_of_the_folder_are_not_followed(place, tmp_path, ending):
    (tmp_path / "elsewhere" / "deep").mkdir(parents=True)
    (tmp_path / "output" / "out").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "output" / "gone").symlink_to(tmp_path / "nowhere")
    (tmp_path / "output" / "within").symlink_to(tmp_path / "output")
    for prefix in ("out/x", "out/deep/x", "out/new/x", "gone/x", "within/out/x"):
        with pytest.raises(ValueError, match="goes through a link out of the output folder"):
            place(prefix, ending)
    assert not list((tmp_path / "elsewhere").rglob("x*")) and not (tmp_path / "nowhere").exists()
    assert place("within/x", ending)[0].startswith(str(tmp_path / "output" / "within" / "x_00001"))
    for number in (1, 2):  # a link under the very name that comes next, dangling or not
        tail = f"_{ending}" if ending else ""
        (tmp_path / "output" / f"trap_0000{number}{tail}").symlink_to(tmp_path / ("stolen", "elsewhere")[number - 1])
    assert place("trap", ending)[1].startswith("trap_00003")


def test_the_output_folder_itself_may_be_a_link(place, tmp_path):
    (tmp_path / "output").rmdir()
    (tmp_path / "big drive").mkdir()
    (tmp_path / "output").symlink_to(tmp_path / "big drive")
    assert place("a/x")[0] == str(tmp_path / "output" / "a" / "x_00001_.mp4")
    assert (tmp_path / "big drive" / "a").is_dir()
