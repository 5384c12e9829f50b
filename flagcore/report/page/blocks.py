"""The elements of a page, the traces and layouts of its charts, and their rendering as HTML and as plain text.

Charts are readable without colour: each series also has its own symbol or dash. In plain text, charts become tables.

The HTML file opens offline: style, script and plotly's library are inline. Elements contain unescaped text. jinja2
escapes it; the data of charts is escaped so that it cannot close its script element. A content security policy blocks
network access and all other scripts.
"""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import version
from importlib.resources import files
from typing import Any, TypeAlias

from flagcore.i18n import _, columns, language, pieces
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
    """A plotly chart: `traces` and `layout` in plotly's JSON, a summary in one sentence, and the data as a table."""

    title: str
    summary: str
    traces: Sequence[Mapping[str, Any]]
    layout: Mapping[str, Any]
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


def size(gib: float | None) -> Cell:
    """Return a size in GiB as a cell in a suitable unit. None becomes `-`."""
    return Cell("-") if gib is None else Cell(size_text(gib), float(gib))


def table(caption: str, headings: Sequence[str], rows: Sequence[Sequence[Any]], *, sortable: bool = False) -> Table:
    """Return a table. Values that are not cells are converted to cells."""
    cells = tuple(tuple(each if isinstance(each, Cell) else cell(each) for each in row) for row in rows)
    return Table(caption=caption, headings=tuple(headings), rows=cells, sortable=sortable)


COLOURS = ("#2B87D1", "#CC7A00", "#1A9E77", "#C45E96", "#8A7DD9", "#D9541E", "#8A8A8A", "#9A8F00")
"""Contrast at least 3:1 on light and dark backgrounds (WCAG 2.2, 1.4.11); after Okabe and Ito 2008."""
SYMBOLS = ("circle", "diamond-open", "square", "triangle-up-open")
MARGIN = {"l": 10, "r": 16, "t": 10, "b": 10}
"""Margins in pixels; axes add space for their labels."""
LOG_FROM = 8.0
"""The minimum ratio of the largest to the smallest value for which an axis is logarithmic."""
DASHES = ("solid", "dash", "dot", "dashdot")
TEXTS = {"name": 40, "text": 60, "hovertext": 60, "x": 22, "y": 22, "categoryarray": 22}
"""Keys of a trace or layout that contain text, and the width at which it is wrapped."""


def points(name: str, series: int, x: Sequence[Any], y: Sequence[Any], **more: Any) -> dict[str, Any]:
    """Return the plotly trace of a series of markers. `mode` in `more` may add lines between them."""
    colour = COLOURS[series]
    marker = {"color": colour, "symbol": SYMBOLS[series], "size": 9, "line": {"width": 1.5}}
    trace = {"type": "scatter", "mode": "markers", "name": name, "x": list(x), "y": list(y), "marker": marker}
    return {**trace, "line": {"color": colour, "dash": DASHES[series]}, **more}


def line(name: str, series: int, x: Sequence[Any], y: Sequence[Any], **more: Any) -> dict[str, Any]:
    """Return the plotly trace of a line without markers."""
    return points(name, series, x, y, mode="lines", **more)


def limit_line(name: str, x: float) -> dict[str, Any]:
    """Return a vertical line at `x` for the `shapes` of a plotly layout. It has an entry in the legend."""
    style = {"color": COLOURS[5], "width": 2, "dash": "dash"}
    coordinates = {"x0": x, "x1": x, "yref": "paper", "y0": 0, "y1": 1}
    return {"type": "line", "name": name, "showlegend": True, "line": style, **coordinates}


def layout(x: str, y: str, *, height: int = 380, **more: Any) -> dict[str, Any]:
    """Return a plotly layout with a title for each axis. `more` overrides the defaults, and merges those of axes."""
    axes = {
        "xaxis": {"title": {"text": x}, "automargin": True, "tickangle": 0, **more.pop("xaxis", {})},
        "yaxis": {"title": {"text": y}, "automargin": True, **more.pop("yaxis", {})},
    }
    legend = {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "traceorder": "normal"}
    return {"height": height, "margin": MARGIN, "legend": legend, "dragmode": False, **axes, **more}


def spread_axis(values: Sequence[float]) -> dict[str, Any]:
    """Return an axis from 0. For positive values that span more than a factor of `LOG_FROM`, it is logarithmic."""
    is_wide = bool(values) and min(values) > 0 and max(values) > LOG_FROM * min(values)
    return {"type": "log"} if is_wide else {"rangemode": "tozero"}


def drawn(data: Any, width: int | None = None) -> Any:
    """Return plotly traces or a layout, with all texts escaped and wrapped as by `label`."""
    if isinstance(data, Mapping):
        return {key: drawn(value, TEXTS.get(key)) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [drawn(each, width) for each in data]
    return label(data, width) if width and isinstance(data, str) else data


def label(text: str, width: int = TEXTS["y"]) -> str:
    """Return text for plotly: tags and entities are escaped, long lines are wrapped."""
    lines, line = [], ""
    for piece in (part for whole in pieces(text) for part in re.split("(?<=_)", whole)):
        if line.strip() and not piece.isspace() and columns(line + piece) > width:
            lines.append(line.rstrip())
            line = ""
        line += piece
    lines.append(line)
    return "<br>".join(each.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;") for each in lines)


TEMPLATES = files("flagcore.report.page") / "templates"
TAGS = {"en": "en", "zh": "zh-CN"}
"""The HTML language tags."""


def as_html(page: Page) -> str:
    """Return a page as HTML."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs

    charts = [block for section in page.sections for block in section.blocks if isinstance(block, Chart)]
    script = (TEMPLATES / "page.js").read_text(encoding="utf-8")
    library = get_plotlyjs() if charts else ""
    environment = Environment(autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True)
    template = environment.from_string((TEMPLATES / "page.html").read_text(encoding="utf-8"))
    data = [drawn({"traces": chart.traces, "layout": chart.layout}) for chart in charts]
    numbers = {id(chart): number for number, chart in enumerate(charts)}

    def description_of(chart: Chart) -> str:
        return _("Chart: {title}. {summary} The table below shows its data.", title=chart.title, summary=chart.summary)

    return template.render(
        page=page,
        language=TAGS[language()],
        words={name: _(text).replace("{version}", version("flagcore")) for name, text in NAMES["html"].items()},
        version=version("flagcore"),
        policy=_policy([library, script] if charts else [script]),
        style=Markup((TEMPLATES / "page.css").read_text(encoding="utf-8")),
        charts=Markup(_inside_script(json.dumps(data, allow_nan=False))),
        charted=bool(charts),
        plotly=Markup(library),
        script=Markup(script),
        kind_of=lambda block: type(block).__name__,
        number_of=lambda block: numbers[id(block)],
        description_of=description_of,
    )


def _policy(scripts: list[str]) -> str:
    hashes = " ".join(f"'sha256-{b64encode(sha256(each.encode()).digest()).decode()}'" for each in scripts)
    return f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'"


def _inside_script(text: str) -> str:
    """Return JSON that cannot end the enclosing script element or start a comment."""
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


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
