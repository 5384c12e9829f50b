"""The elements that only a page has, such as charts, code and sections, and the rendering of a page as HTML.

Charts are bars, stacked bars, plots and their axes. `page.html` draws them as inline SVG: positions are percentages of
the chart's area, so that a chart follows the width of the page without a script, while its text and markers keep their
size. Each series also has its own symbol or dash, for readers without colour.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import version
from importlib.resources import files
from math import ceil, floor, isfinite, log1p, log10
from string import ascii_uppercase
from typing import TypeAlias

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from flagcore.i18n import _, language
from flagcore.report.blocks import Cell, Facts, Table, Text
from flagcore.report.formats import NAMES, shown, size_text

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
    """Points `(x, y, name)` with the markers of a style, or with a line in steps. `large` markers stand out.

    `ranges`: the lowest and the highest y of each point, if they are shown.
    """

    name: str
    points: Sequence[tuple[float, float, str]]
    style: int
    stepped: bool = False
    large: bool = False
    ranges: Sequence[tuple[float, float]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """Series over two axes. `limits`: vertical lines, as pairs of a name and a value of the x axis.

    `diagonal`: the name of the line on which x and y are equal, for two equal axes. Empty means no such line.
    """

    x: ChartAxis
    y: ChartAxis
    series: Sequence[Series]
    limits: Sequence[tuple[str, float]] = ()
    diagonal: str = ""

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Return the position of a point from the left and from the top, in percent."""
        return self.x.place(x), round(100.0 - self.y.place(y), 1)

    def steps(self, series: Series) -> str:
        """Return the path of a line in steps, in percent: first horizontal, then vertical."""
        (left, top), *others = (self.at(x, y) for x, y, _name in series.points)
        return f"M{left} {top}" + "".join(f"H{x}V{y}" for x, y in others)

    def hover(self, x: float, y: float, name: str) -> str:
        """Return the text of a point for readers who point at it."""
        return f"{name}\n{self.y.title}: {shown(y)}\n{self.x.title}: {shown(x)}"


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar with its value and its range. `kind` is one of `BEST`, `BASELINE` and `OTHER`.

    `text`: shown instead of the value, if any.
    """

    label: str
    kind: str
    value: float
    low: float
    high: float
    text: str = ""

    @property
    def hover(self) -> str:
        """The text of the bar for readers who point at it."""
        values = f"{shown(self.low)} - {shown(self.high)}" if self.low < self.high else shown(self.value)
        return f"{self.label}\n{values}"


@dataclass(frozen=True, slots=True)
class Bars:
    """Horizontal bars, from the top. If `is_log`, the length is the logarithm of one more than the value."""

    unit: str
    bars: Sequence[Bar]
    is_log: bool = False

    def share(self, value: float) -> float:
        """Return the length of the bar for `value`, in percent of the width."""
        value, whole = (log1p(each) if self.is_log else each for each in (value, max(each.high for each in self.bars)))
        return _percent(value / (whole or 1.0))


@dataclass(frozen=True, slots=True)
class Stack:
    """A bar of parts, by name, from the left, with its sum as text. `mark`: a measured value on the same scale."""

    label: str
    parts: Mapping[str, float]
    text: str
    mark: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stacks:
    """Stacked horizontal bars, from the top. `mark`: what the marks are. `limit`: a name and a value."""

    stacks: Sequence[Stack]
    mark: str
    limit: tuple[str, float] | None = None

    @property
    def names(self) -> list[str]:
        """The names of all parts, in the order of their styles."""
        return list(dict.fromkeys(name for each in self.stacks for name in each.parts))

    def share(self, value: float) -> float:
        """Return a length, in percent of the width."""
        values = [max(sum(each.parts.values()), each.mark or 0.0) for each in self.stacks]
        return _percent(value / (max([*values, self.limit[1] if self.limit else 0.0]) or 1.0))

    def spans(self, stack: Stack) -> Iterator[tuple[int, float, float, str]]:
        """Yield the style, the start and the width of each part in percent, and its name with its share."""
        start, names, total = 0.0, self.names, sum(stack.parts.values()) or 1.0
        for name, value in stack.parts.items():
            yield names.index(name), self.share(start), self.share(value), f"{name}: {value / total:.1%}"
            start += value


def _percent(share: float) -> float:
    if not isfinite(share):
        raise ValueError("a chart has a value that is not a finite number")
    return round(100.0 * share, 1)


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
