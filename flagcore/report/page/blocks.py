"""What a page is made of. Blocks hold text as it is; whoever writes them out escapes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from flagcore.report.formats import shown


@dataclass(frozen=True, slots=True)
class Cell:
    """What a table shows at one place. `value` is the figure behind the text, unrounded; `link` an anchor of the page,
    or a file beside it. `kept` marks what reads the same in every language: a value of somebody's, not a word of ours.
    """

    text: str
    value: float | None = None
    link: str = ""
    kept: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows below headings. `sortable` lets a reader of the HTML page order them by any column."""

    caption: str
    headings: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    sortable: bool = False

    @property
    def figures(self) -> tuple[bool, ...]:
        """Whether each column has figures, beside places that have nothing."""
        return tuple(any(row[place].value is not None for row in self.rows) for place in range(len(self.headings)))


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph. `warns` marks one that a reader should not miss."""

    text: str
    warns: bool = False


@dataclass(frozen=True, slots=True)
class Facts:
    """Names with values, the first of them the most important."""

    items: tuple[tuple[str, Cell], ...]


@dataclass(frozen=True, slots=True)
class Code:
    """Text that is shown as it stands: a command, a file, the end of a log."""

    caption: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A chart of plotly's (`traces` and `layout` in its JSON), what it says in one sentence, and its figures."""

    title: str
    says: str
    traces: tuple[Mapping[str, Any], ...]
    layout: Mapping[str, Any]
    table: Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Folded:
    """Blocks that are folded away under a line of text, until somebody wants them."""

    anchor: str
    title: str
    blocks: tuple[Block, ...]


Block: TypeAlias = "Text | Facts | Code | Table | Chart | Folded"


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A heading with blocks; `anchor` is its place in the page."""

    anchor: str
    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """All that is told of a run."""

    title: str
    subtitle: str
    sections: tuple[Section, ...] = field(default=())


def cell(value: Any, text: str | None = None) -> Cell:
    """Return a value as a cell, with four significant digits unless its text is given; `-` for nothing."""
    figure = float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
    if text is None:
        text = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else shown(value)
    return Cell(text if value is not None else "-", figure)


def percent(share: float | None, *, signed: bool = False) -> Cell:
    """Return a share as a cell in percent; `-` for nothing."""
    if share is None:
        return Cell("-")
    return Cell(f"{share:+.1%}" if signed else f"{share:.1%}", share)


def table(caption: str, headings: Sequence[str], rows: Sequence[Sequence[Any]], *, sortable: bool = False) -> Table:
    """Return a table of cells, or of values that become some."""
    cells = tuple(tuple(each if isinstance(each, Cell) else cell(each) for each in row) for row in rows)
    return Table(caption=caption, headings=tuple(headings), rows=cells, sortable=sortable)
