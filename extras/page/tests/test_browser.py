"""The page in a real browser: nothing fails, nothing is cut, and charts, tables and links do what they should.

`make test-browser` runs these; they want Chromium, of the system or named by `CHROMIUM`.
"""

import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from extras.page.tests.conftest import KINDS, Runs

pytestmark = pytest.mark.long

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
CHINESE = [(kind, "zh") for kind in ("dense", "pipeline", "serving", "failed")]


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    driver = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: `make test-browser`")
    chromium = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if not chromium:
        pytest.skip("no Chromium is installed: install one, such as Debian's package chromium, or name it in CHROMIUM")
    with driver.sync_playwright() as simulate:
        browser_started = simulate.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser_started
        browser_started.close()


@dataclass
class Opened:
    """An open page, what was wrong with it, and the addresses that it requested."""

    page: Any
    errors: list[str] = field(default_factory=list)
    urls: list[str] = field(default_factory=list)


Open = Callable[..., Opened]


@pytest.fixture
def opened(browser: Any, runs: Runs, tmp_path: Path) -> Iterator[Open]:
    contexts = []

    def go(kind: str, width: int = 1400, *, anchor: str = "", language: str = "en", **arguments: Any) -> Opened:
        file = tmp_path / f"{kind}.html"
        html = arguments.pop("html", "") or (runs(kind).html if language == "en" else runs.chinese(kind))
        file.write_text(html, encoding="utf-8")
        context = browser.new_context(viewport={"width": width, "height": 900}, offline=True, **arguments)
        contexts.append(context)
        browser_page = Opened(context.new_page())
        browser_page.page.on("console", lambda message: browser_page.errors.append(f"{message.type}: {message.text}"))
        browser_page.page.on("pageerror", lambda error: browser_page.errors.append(str(error)))
        browser_page.page.on("request", lambda request: browser_page.urls.append(request.url))
        browser_page.page.goto(file.as_uri() + anchor)
        return browser_page

    yield go
    for context in contexts:
        context.close()


@pytest.mark.parametrize("width", [360, 1400])
@pytest.mark.parametrize(("kind", "language"), [*((kind, "en") for kind in KINDS), *CHINESE])
def test_nothing_fails_and_nothing_is_cut(opened: Open, kind: str, language: str, width: int) -> None:
    browser_page = opened(kind, width, language=language, color_scheme="light")
    for scheme in ("light", "dark"):
        browser_page.page.emulate_media(color_scheme=scheme)
        browser_page.page.wait_for_timeout(300)
        assert browser_page.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert browser_page.page.evaluate(OUTSIDE) == []
    assert browser_page.errors == []
    assert all(url.startswith(("file:", "data:", "blob:")) for url in browser_page.urls)


BROKEN_WORDS = """[...document.querySelectorAll("th, td")].flatMap((cell) => {
  const words = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT), broken = [], range = document.createRange();
  while (words.nextNode())
    for (const word of words.currentNode.data.matchAll(/\\w+/g)) {
      range.setStart(words.currentNode, word.index);
      range.setEnd(words.currentNode, word.index + word[0].length);
      if (new Set([...range.getClientRects()].map((place) => place.top)).size > 1) broken.push(word[0]);
    }
  return broken;
})"""
OUTSIDE = """() => {
  const held = (each) => each.closest(".wide, pre, nav ul, .unseen, .skip");
  return [...document.querySelectorAll("body *, svg text")].filter((each) => {
    const box = each.getBoundingClientRect();
    return box.width && !held(each) && (box.right > innerWidth + 1 || box.left < -1);
  }).map((each) => each.tagName + ": " + each.textContent.slice(0, 60));
}"""
"""What reaches beyond the page on its left or right, apart from scrolled boxes."""


@pytest.mark.parametrize(("kind", "language"), [("dense", "en"), ("pipeline", "en"), ("serving", "en"), *CHINESE])
@pytest.mark.parametrize("width", [360, 1400])
def test_labels_of_charts_are_inside_their_charts_and_apart(opened: Open, kind: str, language: str, width: int) -> None:
    assert opened(kind, width, language=language).page.evaluate(LABELS) == []


LABELS = """() => [...document.querySelectorAll(".plot")].flatMap((plot) => {
  const room = plot.getBoundingClientRect();
  const boxes = [...plot.querySelectorAll(".frame text, .bar text, .legend li, .axis, .bar span")]
    .map((each) => ({ text: each.textContent, box: each.getBoundingClientRect() })).filter((each) => each.box.width);
  const out = boxes.filter(({ box }) => box.left < room.left - 1 || box.right > room.right + 1);
  const over = boxes.filter((one, i) => boxes.slice(i + 1).some((other) =>
    Math.min(one.box.right, other.box.right) - Math.max(one.box.left, other.box.left) > 3 &&
    Math.min(one.box.bottom, other.box.bottom) - Math.max(one.box.top, other.box.top) > 4));
  return [...out.map((each) => "out: " + each.text), ...over.map((each) => "over: " + each.text)];
})"""


@pytest.mark.parametrize("kind", ["dense", "serving"])
def test_a_chart_follows_the_width_of_the_page(opened: Open, kind: str) -> None:
    page = opened(kind, 1400).page
    for width in (1400, 360):
        page.set_viewport_size({"width": width, "height": 780})
        sizes = page.evaluate(SIZES)
        assert sizes
        assert all(abs(drawn - place) <= 1 for drawn, place in sizes)
        assert min(place for _drawn, place in sizes) > (0.6 if width < 1000 else 0.3) * width  # two side by side


SIZES = """() => [...document.querySelectorAll(".frame > svg, .bar > svg")].map((svg) => {
  const style = getComputedStyle(svg.parentElement);
  const padding = parseFloat(style.paddingLeft) + parseFloat(style.paddingRight);
  return [svg.clientWidth, svg.parentElement.clientWidth - padding].map(Math.round);
})"""
"""Of each drawing its width, and that of its place."""


def test_a_table_is_sortable_by_keyboard_with_an_announcement(opened: Open) -> None:
    page = opened("dense").page
    heading = page.locator("#trials th", has_text="step s").first
    heading.get_by_role("button").focus()

    def column() -> list[float]:
        place = heading.evaluate("each => each.cellIndex")
        rows = page.locator("#trials tbody tr").all()
        return [float(row.locator("th, td").nth(place).get_attribute("data-value")) for row in rows]

    page.keyboard.press("Enter")
    assert column() == sorted(column())
    assert heading.get_attribute("aria-sort") == "ascending"
    page.keyboard.press("Enter")
    assert column() == sorted(column(), reverse=True)
    assert heading.get_attribute("aria-sort") == "descending"
    assert "descending" in page.locator("[role=status]").inner_text()


def test_a_table_of_trials_is_filtered_by_words_with_an_announcement(opened: Open) -> None:
    page = opened("dense").page
    rows = page.locator("#trials > .wide tbody tr")
    page.get_by_role("searchbox").fill("baseline MEASURED")
    assert [row.is_visible() for row in rows.all()] == ["baseline" in row.inner_text() for row in rows.all()]
    assert page.locator("[role=status]").inner_text() == f"1 of {rows.count()} trials"
    page.get_by_role("searchbox").fill("")
    assert all(row.is_visible() for row in rows.all())


def test_a_link_to_a_trial_opens_it(opened: Open) -> None:
    page = opened("failed", anchor="#trial-1").page
    assert page.locator("#trial-1").evaluate("each => each.open")
    page.locator("#trials table a").first.click()
    assert page.locator("#trial-0").evaluate("each => each.open")
    assert page.locator("#trial-0 pre").first.is_visible()


def test_the_command_is_copied_without_more(opened: Open) -> None:
    page = opened("dense", permissions=["clipboard-read", "clipboard-write"]).page
    page.get_by_role("button", name="Copy").first.click()
    page.get_by_role("button", name="Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == "flag run ."


def test_text_has_contrast_in_light_and_dark_themes(opened: Open) -> None:
    for scheme in ("light", "dark"):
        assert opened("dense", color_scheme=scheme).page.evaluate(CONTRAST) == []


CONTRAST = """() => {
  const part = (v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = (c) => {
    const [r, g, b] = c.match(/[\\d.]+/g).map(Number);
    return 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
  };
  const paper = (each) => {
    for (; each; each = each.parentElement) {
      const c = getComputedStyle(each).backgroundColor;
      if (!/, 0\\)$/.test(c)) return c;
    }
    return "rgb(255, 255, 255)";
  };
  const written = "h1, h2, h3, p, dt, dd, td, th, a, summary, caption, pre, button";
  return [...document.querySelectorAll(written)].filter((each) => {
    const [a, b] = [light(getComputedStyle(each).color), light(paper(each))];
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05) < 4.5;
  }).map((each) => each.tagName + " " + each.textContent.slice(0, 40));
}"""
"""What is written with less contrast than 4.5:1 (WCAG 2.2, 1.4.3)."""


def test_it_prints_on_light_paper_with_its_charts(opened: Open, tmp_path: Path) -> None:
    page = opened("dense", color_scheme="dark").page
    assert page.pdf(format="A4").startswith(b"%PDF")
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    page.set_viewport_size({"width": 733, "height": 1000})  # A4 without its margins
    assert page.evaluate(BROKEN_WORDS) == []


def test_charts_and_tables_need_no_script(opened: Open) -> None:
    page = opened("dense", java_script_enabled=False).page
    assert page.locator("#summary .lead").is_visible()
    assert page.locator("#progress .frame > svg").is_visible()
    page.locator("#progress summary").first.click()
    assert page.locator("#progress table").first.is_visible()


def test_the_page_is_accessible_to_screen_readers(opened: Open) -> None:
    page = opened("dense").page
    assert page.get_by_role("main").count() == 1
    assert page.get_by_role("navigation", name="Contents").count() == 1
    for section in page.locator("section").all():
        assert page.get_by_role("region", name=section.locator("h2").inner_text(), exact=True).count() >= 1
    assert page.get_by_role("img", name=re.compile(r"^Chart: .+")).count() == page.locator(".plot").count() > 0
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the summary"
