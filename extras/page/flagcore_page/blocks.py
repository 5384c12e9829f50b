"""The elements that only a page has, such as charts, code and sections, and the rendering of a page as HTML."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import version
from importlib.resources import files
from string import ascii_uppercase
from typing import TypeAlias

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from flagcore.i18n import _, language
from flagcore.report.blocks import Cell, Facts, Table, Text
from flagcore.report.formats import NAMES, shown, size_text
from flagcore_page.charts import SYMBOLS, Bars, Plot, Stacks

TEMPLATES = files("flagcore_page") / "templates"
TAGS = {"en": "en", "zh": "zh-CN"}
"""The HTML language tags."""


@dataclass(frozen=True, slots=True)
class Code:
    """Preformatted text, such as a command, a file or the end of a log. With `copied`, a button copies the text."""

    caption: str
    text: str
    copied: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A drawing with a summary in one sentence, and with its data as tables, which are folded."""

    title: str
    summary: str
    drawing: Bars | Plot | Stacks
    tables: Sequence[Table]


@dataclass(frozen=True, slots=True)
class Collapsed:
    """Blocks without charts that are hidden until the user clicks on a line of text."""

    anchor: str
    title: str
    blocks: Sequence[Block]


Block: TypeAlias = Text | Facts | Table | Code | Chart | Collapsed


@dataclass(frozen=True, slots=True)
class Section:
    """A heading with blocks. `anchor` is its id in the page. If `half`, it shares the width with another section."""

    anchor: str
    title: str
    blocks: Sequence[Block]
    half: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """The report of a run."""

    title: str
    subtitle: str
    sections: tuple[Section, ...] = ()


def size(count: float | None) -> Cell:
    """Return a number of bytes as a cell in a suitable unit, which is sorted by GiB. None becomes `-`."""
    return Cell("-") if count is None else Cell(size_text(count), count / 2**30)


def render(page: Page) -> str:
    """Return a page as HTML."""
    script = (TEMPLATES / "page.js").read_text(encoding="utf-8")
    digest = b64encode(sha256(script.encode()).digest()).decode()
    environment = Environment(autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True)
    environment.filters["shown"] = shown
    template = environment.from_string((TEMPLATES / "page.html").read_text(encoding="utf-8"))

    def description_of(chart: Chart) -> str:
        return _("Chart: {title}. {summary} The table below shows its data.", title=chart.title, summary=chart.summary)

    return template.render(
        page=page,
        language=TAGS[language()],
        words={name: _(text).replace("{version}", version("flagcore")) for name, text in NAMES["html"].items()},
        version=version("flagcore"),
        policy=f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; base-uri 'none'",
        style=Markup((TEMPLATES / "page.css").read_text(encoding="utf-8")),
        script=Markup(script),
        kind_of=lambda block: type(block).__name__,
        symbols=SYMBOLS,
        letters=ascii_uppercase,
        description_of=description_of,
    )
