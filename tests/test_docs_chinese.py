"""A page and its Chinese twin say the same: what can be compared without knowing both languages is compared.

A change of one that adds or drops a heading, an item, a snippet, a name in code, a link or a figure must come with the
same change of the other. Snippets may differ in their comments only.
"""

import re
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TWINS = [file for folder in (ROOT, ROOT / "docs") for file in sorted(folder.glob("*.zh.md"))]

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
HEADING = re.compile(r"^(#+) .*$", re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`]+)`")
FIGURE = re.compile(r"(?<![A-Za-z0-9_.])\d+(?:[.,]\d+)*%?")
HAN = re.compile(r"[\u4e00-\u9fff]")


def test_the_pages_that_a_newcomer_reads_first_are_in_chinese_too() -> None:
    names = {str(twin.relative_to(ROOT)) for twin in TWINS}
    assert names >= {"README.zh.md", "docs/tutorial.zh.md", "docs/tutorial-node.zh.md"}


@pytest.mark.parametrize("twin", TWINS, ids=lambda twin: twin.name)
def test_each_language_leads_to_the_other_at_the_top(twin: Path) -> None:
    english = _english(twin)
    assert _head(twin.read_text(encoding="utf-8"))[1] == f"[English]({english.name}) | 中文"
    assert _head(english.read_text(encoding="utf-8"))[1] == f"English | [中文]({twin.name})"


@pytest.mark.parametrize("twin", TWINS, ids=lambda twin: twin.name)
def test_headings_and_snippets_are_those_of_the_english_page(twin: Path) -> None:
    chinese, english = (page.read_text(encoding="utf-8") for page in (twin, _english(twin)))
    assert [len(level) for level in HEADING.findall(FENCE.sub("", chinese))] == [
        len(level) for level in HEADING.findall(FENCE.sub("", english))
    ]
    assert [_without_comments(*block) for block in FENCE.findall(chinese)] == [
        _without_comments(*block) for block in FENCE.findall(english)
    ]


@pytest.mark.parametrize("twin", TWINS, ids=lambda twin: twin.name)
def test_each_section_names_and_counts_what_the_english_one_does(twin: Path) -> None:
    chinese, english = (_sections(page) for page in (twin, _english(twin)))
    for (heading, ours), (_, theirs) in zip(chinese, english, strict=True):
        assert _blocks(ours) == _blocks(theirs), heading
        assert _links(ours) == _links(theirs), heading
        assert _code(ours) == _code(theirs), heading
        assert _figures(ours) == _figures(theirs), heading


@pytest.mark.parametrize("twin", TWINS, ids=lambda twin: twin.name)
def test_a_chinese_page_links_chinese_pages_where_there_are_any_and_is_chinese(twin: Path) -> None:
    text = FENCE.sub("", twin.read_text(encoding="utf-8"))
    targets = {target.partition("#")[0] for target in LINK.findall(text)} - {_english(twin).name}
    inside = {target for target in targets if target.endswith(".md") and not target.endswith(".zh.md")}
    assert {name for name in inside if (twin.parent / name).with_suffix(".zh.md").exists()} == set()
    prose = [part for part in text.split("\n\n") if part.strip() and not part.strip().startswith(("# ", "**`", "<!--"))]
    assert [part for part in prose if not HAN.search(part)] == []


def _english(twin: Path) -> Path:
    return twin.with_name(twin.name.replace(".zh.md", ".md"))


def _head(text: str) -> list[str]:
    return text.split("\n\n")


def _without_comments(language: str, block: str) -> tuple[str, list[str]]:
    return language, [line for line in block.splitlines() if not line.startswith("# ")]


def _sections(page: Path) -> list[tuple[str, str]]:
    """Return each heading with its text, the snippets left out, the line that leads to the other language too."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    text = "\n\n".join(
        part for part in text.split("\n\n") if not part.endswith(("| 中文", "(" + _twin_name(page) + ")"))
    )
    starts = [*(found.start() for found in HEADING.finditer(text)), len(text)]
    parts = [text[start:end] for start, end in pairwise(starts)]
    return [(part.partition("\n")[0], part.partition("\n")[2]) for part in parts]


def _twin_name(page: Path) -> str:
    return page.name.replace(".md", ".zh.md")


def _blocks(text: str) -> dict[str, int]:
    """Return how many paragraphs and how many items of lists a section has."""
    items = len(re.findall(r"^(?:-|\d\.) ", text, re.MULTILINE))
    parts = [part.strip() for part in text.split("\n\n")]
    return {"items": items, "paragraphs": sum(bool(part) and not part.startswith("- ") for part in parts)}


def _links(text: str) -> Counter[str]:
    """Return where the links lead: the page, without its language, since anchors are headings."""
    return Counter(target.partition("#")[0].replace(".zh.md", ".md") for target in LINK.findall(text))


def _code(text: str) -> Counter[str]:
    return Counter(" ".join(span.split()) for span in CODE.findall(text))


def _figures(text: str) -> Counter[str]:
    return Counter(FIGURE.findall(re.sub(r"^\d\. ", "", CODE.sub("", LINK.sub("", text)), flags=re.MULTILINE)))
