"""The elements of a page, and their rendering as HTML and as plain text. In plain text, charts become tables.

The HTML file opens offline: style, script and charts are inline. Elements contain unescaped text, which jinja2 escapes.
A content security policy blocks network access and all other scripts.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import version
from importlib.resources import files
from typing import Any, TypeAlias

from flagcore.i18n import _, language
from flagcore.report import formats
from flagcore.report.formats import NAMES, shown, size_text
from flagcore.report.page.charts import SYMBOLS, Bars, Plot


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of a table.

    `value`: the unrounded number. `link`: an anchor of the page or a relative path. `note`: less important text after
    the text of the cell.
    """

    text: str
    value: float | None = None
    link: str = ""
    note: str = ""

    @property
    def whole(self) -> str:
        """The text of the cell with its note."""
        return f"{self.text} {self.note}" if self.note else self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table. If it is `sortable`, readers of the HTML page can sort it by any column."""

    caption: str
    headings: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    sortable: bool = False

    @property
    def figures(self) -> tuple[bool, ...]:
        """For each column, whether it contains only numbers and empty cells."""
        return tuple(any(row[place].value is not None for row in self.rows) for place in range(len(self.headings)))


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph. If it is a `warning`, it is highlighted."""

    text: str
    warning: bool = False


@dataclass(frozen=True, slots=True)
class Facts:
    """Names with values, the most important first. With `lead`, they are shown large, as the page's main result."""

    items: Sequence[tuple[str, Cell]]
    lead: bool = False


@dataclass(frozen=True, slots=True)
class Code:
    """Preformatted text, such as a command, a file or the end of a log. With `copied`, a button copies the text."""

    caption: str
    text: str
    copied: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A drawing with a summary in one sentence, and with its data as a table."""

    title: str
    summary: str
    drawing: Bars | Plot
    table: Table


@dataclass(frozen=True, slots=True)
class Collapsed:
    """Blocks without charts that are hidden until the user clicks on a line of text."""

    anchor: str
    title: str
    blocks: Sequence[Block]


Block: TypeAlias = Text | Facts | Code | Table | Chart | Collapsed


@dataclass(frozen=True, slots=True)
class Section:
    """A heading with blocks. `anchor` is its id in the page."""

    anchor: str
    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """The report of a run."""

    title: str
    subtitle: str
    sections: tuple[Section, ...] = ()


def cell(value: Any, mark: str = "") -> Cell:
    """Return a value as a cell. Numbers get four significant digits and a mark before them. None becomes `-`.

    The mark `~` means predicted or partly modelled.
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return Cell(mark + (f"{value:,}" if isinstance(value, int) else shown(value)), float(value))
    return Cell(shown(value))


def percent(share: float | None, mark: str = "", *, signed: bool = False) -> Cell:
    """Return a share in percent as a cell with a mark before it. None becomes `-`."""
    return Cell("-") if share is None else Cell(mark + (f"{share:+.1%}" if signed else f"{share:.1%}"), share)


def size(count: float | None) -> Cell:
    """Return a number of bytes as a cell in a suitable unit, which is sorted by GiB. None becomes `-`."""
    return Cell("-") if count is None else Cell(size_text(count), count / 2**30)


def table(caption: str, headings: Sequence[str], rows: Sequence[Sequence[Any]], *, sortable: bool = False) -> Table:
    """Return a table. Values that are not cells are converted to cells."""
    cells = tuple(tuple(each if isinstance(each, Cell) else cell(each) for each in row) for row in rows)
    return Table(caption=caption, headings=tuple(headings), rows=cells, sortable=sortable)


TEMPLATES = files("flagcore.report.page") / "templates"
TAGS = {"en": "en", "zh": "zh-CN"}
"""The HTML language tags."""


def as_html(page: Page) -> str:
    """Return a page as HTML."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

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
        description_of=description_of,
    )


def plain_text(block: Block | None) -> Iterator[str]:
    """Yield the paragraphs of a block as plain text. Code and collapsed blocks have none."""
    if isinstance(block, Text):
        yield block.text
    elif isinstance(block, Facts):
        lines = [f"  {name}: {cell.whole}" for name, cell in block.items]
        yield "\n".join([lines[0].lstrip(), *lines[1:]] if block.lead else lines)
    elif isinstance(block, Chart):
        yield f"{block.summary}\n{plain_table(block.table)}"
    elif isinstance(block, Table):
        yield f"{block.caption}:\n{plain_table(block)}"


def plain_table(table: Table) -> str:
    """Return a table as plain text."""
    return formats.table(table.headings, [[cell.text for cell in row] for row in table.rows])
