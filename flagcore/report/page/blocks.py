"""The elements of a page, such as tables and charts, and their rendering as HTML and as plain text.

In plain text, charts become tables. `page.html` draws them as inline SVG: positions are percentages of the chart's
area, so that a chart follows the width of the page without a script, while its text and markers keep their size. Each
series also has its own symbol or dash, for readers without colour.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import version
from importlib.resources import files
from math import ceil, floor, isfinite, log10
from typing import Any, TypeAlias

from flagcore.i18n import _, language
from flagcore.report import formats
from flagcore.report.formats import NAMES, shown, size_text


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


BEST, BASELINE, OTHER = "best", "baseline", "other"
"""The kinds of bars."""
LOG_FROM = 8.0
"""The minimum ratio of the largest to the smallest value for which an axis is logarithmic."""
MAX_TICKS = 6
SYMBOLS = (
    "M-4.5 0a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0 -9 0Z",
    "M0 -6L6 0L0 6L-6 0Z",
    "M-4.5 -4.5H4.5V4.5H-4.5Z",
    "M0 -6L5.5 4.5H-5.5Z",
)
"""The paths of a circle, a diamond, a square and a triangle."""


@dataclass(frozen=True, slots=True)
class ChartAxis:
    """An axis from `low` to `high`."""

    title: str
    low: float
    high: float
    ticks: Sequence[float]
    is_log: bool = False

    def place(self, value: float) -> float:
        """Return the position of a value, in percent of the axis."""
        low, high, value = (log10(each) if self.is_log else each for each in (self.low, self.high, value))
        return _percent((value - low) / (high - low))


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Points `(x, y, name)` with the markers of a style, or with a line in steps. `large` markers stand out."""

    name: str
    points: Sequence[tuple[float, float, str]]
    style: int
    stepped: bool = False
    large: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """Series over two axes. `limits`: vertical lines, as pairs of a name and a value of the x axis."""

    x: ChartAxis
    y: ChartAxis
    series: Sequence[Series]
    limits: Sequence[tuple[str, float]] = ()

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Return the position of a point from the left and from the top, in percent."""
        return self.x.place(x), round(100.0 - self.y.place(y), 2)

    def steps(self, series: Series) -> str:
        """Return the path of a line in steps, in percent: first horizontal, then vertical."""
        (left, top), *others = (self.at(x, y) for x, y, _name in series.points)
        return f"M{left} {top}" + "".join(f"H{x}V{y}" for x, y in others)

    def hover(self, x: float, y: float, name: str) -> str:
        """Return the text of a point for readers who point at it."""
        return f"{name}\n{self.y.title}: {shown(y)}\n{self.x.title}: {shown(x)}"


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar with its value and its range. `kind` is one of `BEST`, `BASELINE` and `OTHER`."""

    label: str
    kind: str
    value: float
    low: float
    high: float

    @property
    def hover(self) -> str:
        """The text of the bar for readers who point at it."""
        values = f"{shown(self.low)} - {shown(self.high)}" if self.low < self.high else shown(self.value)
        return f"{self.label}\n{values}"


@dataclass(frozen=True, slots=True)
class Bars:
    """Horizontal bars, from the top."""

    unit: str
    bars: Sequence[Bar]

    def share(self, value: float) -> float:
        """Return the length of the bar for `value`, in percent of the width."""
        return _percent(value / (max(each.high for each in self.bars) or 1.0))


def _percent(share: float) -> float:
    if not isfinite(share):
        raise ValueError("a chart has a value that is not a finite number")
    return round(100.0 * share, 2)


def linear(title: str, values: Sequence[float], *, from_zero: bool = False) -> ChartAxis:
    """Return a linear axis around `values` that ends at ticks. If all values are equal, it extends to both sides."""
    low, high = 0.0 if from_zero else min(values), max(values)
    if low == high:
        low, high = low - (abs(low) or 1.0) / 10, high + (abs(high) or 1.0) / 10
    rough = (high - low) / (MAX_TICKS - 2)
    power = 10.0 ** floor(log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    ticks = [number * step for number in range(floor(low / step), ceil(high / step) + 1)]
    return ChartAxis(title, ticks[0], ticks[-1], ticks)


def spread(title: str, values: Sequence[float]) -> ChartAxis:
    """Return an axis from 0. For positive values that span more than a factor of `LOG_FROM`, it is logarithmic."""
    low, high = min(values), max(values)
    if low <= 0 or high <= LOG_FROM * low:
        return linear(title, values, from_zero=True)
    decades = range(floor(log10(low)), ceil(log10(high)) + 1)
    ticks = [factor * 10.0**decade for decade in decades for factor in (1, 2, 5)]
    start = max(place for place, tick in enumerate(ticks) if tick <= low)
    end = min(place for place, tick in enumerate(ticks) if tick >= high)
    labelled = ticks[start : end + 1]
    if len(labelled) > MAX_TICKS:
        powers = [10.0**decade for decade in decades if ticks[start] <= 10.0**decade <= ticks[end]]
        labelled = powers[:: ceil(len(powers) / MAX_TICKS)]
    return ChartAxis(title, ticks[start], ticks[end], labelled, is_log=True)
