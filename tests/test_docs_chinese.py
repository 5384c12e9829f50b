"""A Chinese page has the links and the snippets of the English one."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CHINESE_PAGES = sorted([*ROOT.glob("*.zh.md"), *(ROOT / "docs").glob("*.zh.md")])
FENCE = re.compile(r"^```\w*\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s#]+)[^)\s]*\)")


def test_pages_for_newcomers_exist_in_chinese() -> None:
    names = {str(twin.relative_to(ROOT)) for twin in CHINESE_PAGES}
    assert names >= {"README.zh.md", "docs/tutorial.zh.md", "docs/tutorial-node.zh.md"}


@pytest.mark.parametrize("twin", CHINESE_PAGES, ids=lambda twin: twin.name)
def test_languages_link_to_each_other(twin: Path) -> None:
    english = _english(twin)
    assert english.name in LINK.findall(twin.read_text(encoding="utf-8"))
    assert twin.name in LINK.findall(english.read_text(encoding="utf-8"))


@pytest.mark.parametrize("twin", CHINESE_PAGES, ids=lambda twin: twin.name)
def test_links_of_the_chinese_page_lead_to_files(twin: Path) -> None:
    targets = [target for target in LINK.findall(twin.read_text(encoding="utf-8")) if "://" not in target]
    assert targets
    assert [target for target in targets if not (twin.parent / target).exists()] == []


@pytest.mark.parametrize("twin", CHINESE_PAGES, ids=lambda twin: twin.name)
def test_chinese_page_has_snippets_of_the_english_one(twin: Path) -> None:
    chinese, english = (_commands(page) for page in (twin, _english(twin)))
    assert chinese & english


def _english(twin: Path) -> Path:
    return twin.with_name(twin.name.replace(".zh.md", ".md"))


def _commands(page: Path) -> set[str]:
    """Return the lines of all snippets that start a program of this project."""
    lines = "".join(FENCE.findall(page.read_text(encoding="utf-8"))).splitlines()
    found = (re.fullmatch(r"(?:\$ )?((?:\.venv/bin/)?(?:flag|make|pip) .*?)(?: *# .*)?", line) for line in lines)
    return {match[1] for match in found if match}
