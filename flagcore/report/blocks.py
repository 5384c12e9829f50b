"""The elements of the result of a run, such as tables and paragraphs, and their plain text.

`flagcore-page` renders them as HTML, with further elements that only a page has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from flagcore.report import formats
from flagcore.report.formats import shown


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


Block: TypeAlias = Text | Facts | Table


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


def table(caption: str, headings: Sequence[str], rows: Sequence[Sequence[Any]], *, sortable: bool = False) -> Table:
    """Return a table. Values that are not cells are converted to cells."""
    cells = tuple(tuple(each if isinstance(each, Cell) else cell(each) for each in row) for row in rows)
    return Table(caption=caption, headings=tuple(headings), rows=cells, sortable=sortable)


def plain_text(block: Block | None) -> Iterator[str]:
    """Yield the paragraphs of a block as plain text."""
    if isinstance(block, Text):
        yield block.text
    elif isinstance(block, Facts):
        lines = [f"  {name}: {cell.whole}" for name, cell in block.items]
        yield "\n".join([lines[0].lstrip(), *lines[1:]] if block.lead else lines)
    elif isinstance(block, Table):
        yield f"{block.caption}:\n{plain_table(block)}"


def plain_table(table: Table) -> str:
    """Return a table as plain text."""
    return formats.table(table.headings, [[cell.text for cell in row] for row in table.rows])
