"""The elements of a page. Their text is not escaped; the renderers do that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from flagcore.report.formats import shown, size_text


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of a table. `value` is the unrounded number, `link` an anchor of the page or a relative path.

    `note` is less important text after it.
    """

    text: str
    value: float | None = None
    link: str = ""
    note: str = ""

    @property
    def whole(self) -> str:
        """The text with its note."""
        return f"{self.text} {self.note}" if self.note else self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table. `sortable` lets readers of the HTML page sort it by any column."""

    caption: str
    headings: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    sortable: bool = False

    @property
    def figures(self) -> tuple[bool, ...]:
        """For each column: whether it has only numbers and empty cells."""
        return tuple(any(row[place].value is not None for row in self.rows) for place in range(len(self.headings)))


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph; `warning` highlights it."""

    text: str
    warning: bool = False


@dataclass(frozen=True, slots=True)
class Facts:
    """Names with values, the most important first. `lead` shows them large, as the answer of the page."""

    items: tuple[tuple[str, Cell], ...]
    lead: bool = False


@dataclass(frozen=True, slots=True)
class Code:
    """Preformatted text: a command, a file, the end of a log. `copied` adds a button that copies the text."""

    caption: str
    text: str
    copied: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A plotly chart (`traces` and `layout` in its JSON), its summary in one sentence, and its data as a table."""

    title: str
    summary: str
    traces: tuple[Mapping[str, Any], ...]
    layout: Mapping[str, Any]
    table: Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Collapsed:
    """Blocks that are hidden until a click on a line of text."""

    anchor: str
    title: str
    blocks: tuple[Block, ...]


Block: TypeAlias = "Text | Facts | Code | Table | Chart | Collapsed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A heading with blocks; `anchor` is its id in the page."""

    anchor: str
    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """The report of a run."""

    title: str
    subtitle: str
    sections: tuple[Section, ...] = field(default=())


def cell(value: Any, text: str | None = None) -> Cell:
    """Return a value as a cell, with four significant digits unless its text is given; `-` for None."""
    figure = float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
    if text is None:
        text = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else shown(value)
    return Cell(text if value is not None else "-", figure)


def highlighted(value: float | None, mark: str = "~") -> Cell:
    """Return a number with a mark before it as a cell: `~` is predicted or partly modelled; `-` for None."""
    highlighted_cell = cell(value)
    return highlighted_cell if value is None else Cell(mark + highlighted_cell.text, highlighted_cell.value)


def percent(share: float | None, mark: str = "", *, signed: bool = False) -> Cell:
    """Return a share in percent with a mark before it as a cell; `-` for None."""
    return Cell("-") if share is None else Cell(mark + (f"{share:+.1%}" if signed else f"{share:.1%}"), share)


def size(gib: float | None, mark: str = "") -> Cell:
    """Return a size in GiB with a mark before it as a cell, in the unit that fits; `-` for None."""
    return Cell("-") if gib is None else Cell(mark + size_text(gib), float(gib))


def table(caption: str, headings: Sequence[str], rows: Sequence[Sequence[Any]], *, sortable: bool = False) -> Table:
    """Return a table of cells, or of values that are converted to cells."""
    cells = tuple(tuple(each if isinstance(each, Cell) else cell(each) for each in row) for row in rows)
    return Table(caption=caption, headings=tuple(headings), rows=cells, sortable=sortable)
