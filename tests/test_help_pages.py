"""Help pages: every node has one in English and Chinese, with a picture, every input, values and common errors."""

import json
import pathlib
import re

import pytest
from PIL import Image

ROOT = pathlib.Path(__file__).resolve().parents[1]
DOCS = ROOT / "web" / "docs"
# headings that every page has, and how each language leads to its page
PARTS = {"en": ("## Typical values", "## When something is wrong"), "zh": ("## 常用值", "## 出错时")}
WORDS = {
    language: json.loads((ROOT / "locales" / language / "nodeDefs.json").read_text(encoding="utf-8"))
    for language in ("en", "zh", "ja")
}
NODES = sorted(WORDS["en"])


def page(node, language):
    return (DOCS / f"{node}.md" if language == "en" else DOCS / node / f"{language}.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("language", PARTS)
@pytest.mark.parametrize("node", NODES)
def test_page_names_every_input_as_the_node_does(node, language):
    text, words = page(node, language), WORDS[language][node]
    assert text.startswith(f"# {words['display_name']}\n")
    assert [heading for heading in PARTS[language] if f"\n{heading}\n" not in text] == []
    named = {word for span in re.findall(r"\*\*(.+?)\*\*|^\| ([^|]+) \|", text, re.M) for word in span if word}
    named = {word.strip(" `") for span in named for word in re.split("[,、，：:]", span)}
    assert {entry["name"] for entry in words["inputs"].values()} - named == set(), "inputs without a word"


@pytest.mark.parametrize("language", PARTS)
@pytest.mark.parametrize("node", NODES)
def test_page_has_its_picture(node, language):
    pictures = re.findall(r"!\[([^\]]+)\]\(([^)]+)\)", page(node, language))
    assert pictures and all(alt.strip() for alt, _ in pictures), "a picture with words for those who cannot see it"
    for _, address in pictures:  # the host serves all pages' addresses from web/docs
        with Image.open(DOCS / address) as picture:
            assert min(picture.size) >= 150, address


def test_pages_and_pictures_belong_to_nodes_and_are_small():
    files = [path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*") if path.is_file()]
    known = [name for node in NODES for name in (f"{node}.md", f"{node}/zh.md", f"pictures/{node}.jpg")]
    assert sorted(files) == sorted(known)
    assert sum(path.stat().st_size for path in (DOCS / "pictures").iterdir()) < 600_000


@pytest.mark.parametrize("language", ["zh", "ja"])
def test_languages_have_the_same_nodes_inputs_and_outputs(language):
    for node, words in WORDS["en"].items():
        other = WORDS[language][node]
        for part in ("inputs", "outputs"):
            assert set(other[part]) == set(words[part]), (node, part)
        entries = [*other["inputs"].values(), *other["outputs"].values()]
        assert all(entry["name"] and entry["tooltip"] for entry in entries) and other["description"]
        own = [entry["tooltip"] for entry in entries if any("\u3040" <= c <= "\u9fff" for c in entry["tooltip"])]
        assert len(own) == len(entries), "a tooltip that is not translated"
    assert set(WORDS[language]) == set(WORDS["en"])
