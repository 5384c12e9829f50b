"""The page of a Chinese reader: all that flagcore says is Chinese, and nothing else is changed."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from flagcore import api, i18n
from flagcore.i18n import choose
from tests.report.page.conftest import KINDS, Runs
from tests.report.page.reading import Element, read

ENGLISH = re.compile(r"[a-z]{3,} [a-z]{2,}")
"""Two English words: names of units, components and knobs stand alone."""
SPOKEN = ("h1", "h2", "h3", "caption", "figcaption", "dt", "button", "nav")
"""What has no values of the user's, which stay as they are."""

every_kind = pytest.mark.parametrize("kind", KINDS)


@every_kind
def test_what_flagcore_says_is_chinese(runs: Runs, kind: str) -> None:
    page = read(runs.chinese(kind))
    (html,) = page.root.every("html")
    assert html.attributes["lang"] == "zh-CN"
    told = [each.text for each in html.every(*SPOKEN)]
    told += [each.attributes["aria-label"] for each in html.every() if "aria-label" in each.attributes]
    told += [text for chart in page.charts for text in _texts(chart)]
    assert [
        text for text in told if ENGLISH.search(text.replace("layers/virtual stage", "").replace("<br>", " "))
    ] == []


def _texts(chart: object, key: str = "") -> Iterator[str]:
    """Yield names of series and titles of axes."""
    if isinstance(chart, dict):
        for name, value in chart.items():
            yield from _texts(value, name)
    elif isinstance(chart, list):
        for each in chart:
            yield from _texts(each)
    elif key in ("name", "text") and isinstance(chart, str):
        yield chart


@every_kind
def test_figures_places_and_what_is_quoted_are_those_of_the_english_page(runs: Runs, kind: str) -> None:
    english, chinese = runs(kind).page.root, read(runs.chinese(kind)).root
    for kept in (_figures, _anchors, _quoted, _marks):
        assert kept(chinese) == kept(english)


def _figures(page: Element) -> list[str]:
    return [each.attributes["data-value"] for each in page.every() if "data-value" in each.attributes]


def _anchors(page: Element) -> list[str]:
    return [each.attributes[name] for each in page.every() for name in ("id", "href") if name in each.attributes]


def _quoted(page: Element) -> list[str]:
    return [each.text for each in page.every("code", "pre")]


def _marks(page: Element) -> list[str]:
    return [each.tag for each in page.every()]


def test_a_runs_name_stays(runs: Runs, tmp_path: Path) -> None:
    folder = shutil.copytree(runs("dense").folder, tmp_path / "baseline")
    choose("zh")
    try:
        assert api.report(folder, "markdown").startswith("# 2 x cpu 上的训练：baseline\n")
    finally:
        choose("")


@pytest.mark.parametrize("kind", ["dense", "serving"])
def test_markdown_is_told_too(runs: Runs, kind: str) -> None:
    told, english = runs.chinese(kind, "markdown"), runs(kind).markdown
    heads = [line for line in told.splitlines() if line.startswith(("#", "|", "- "))]
    assert len(heads) == sum(line.startswith(("#", "|", "- ")) for line in english.splitlines())
    assert "## 结论" in told
    assert "- 最优配置：**" in told
    assert re.findall(r"```.*?```", told, re.DOTALL) == re.findall(r"```.*?```", english, re.DOTALL)


@pytest.mark.parametrize(("asked", "lang"), [("zh_CN.UTF-8", "zh-CN"), ("en", "en"), ("", "en"), ("xx", "en")])
def test_from_python_the_environment_says_the_language(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, asked: str, lang: str
) -> None:
    folder = runs("dense").folder
    monkeypatch.setattr(i18n, "_name", "")
    monkeypatch.setattr(i18n, "_phrases", None)
    monkeypatch.setenv("FLAGCORE_LANG", asked)
    assert f'<html lang="{lang}">' in api.report(folder)


def test_the_english_page_is_english_again(runs: Runs) -> None:
    runs.chinese("dense")
    assert api.report(runs("dense").folder) == runs("dense").html
