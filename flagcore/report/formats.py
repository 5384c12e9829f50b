"""Formats records as table, JSON, JSON lines, YAML or CSV. Only tables round values."""

import csv
import io
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields, is_dataclass
from itertools import zip_longest
from typing import Any

from flagcore.domain.prediction import Belief, Prediction
from flagcore.domain.records import belief_record, prediction_record
from flagcore.i18n import _, left, pieces, right, wrapped
from flagcore.i18n import columns as columns_of
from flagcore.spec.plain_data import dump_yaml, lookup, package_yaml

BETWEEN = "  "
"""The separator between two columns of a table."""
FIGURE = re.compile(r"-|[~+-]*[\d,]*[.]?[\d,]+(?:e[+-]\d+)?%?")
MIN_TEXT, MAX_WORD = 16, 40
"""The minimum width of a column of wrapped text, and the maximum length of an unbroken word, in characters."""
WIDTH: ContextVar[int | None] = ContextVar("width", default=None)
"""The maximum width of tables in characters. None means no limit."""


WORDS = ("status", "maturity.word", "peak_source", "last", "limit")
"""The keys whose values are translated in tables."""


def render(records: Sequence[Mapping[str, Any]], form: str, columns: Mapping[str, str]) -> str:
    """Return `records` in the format `form`. `columns` maps the headings of table or CSV columns to dotted keys."""
    if form == "json":
        return json.dumps(list(records), indent=2, ensure_ascii=False)
    if form == "jsonl":
        return "\n".join(json.dumps(record, ensure_ascii=False) for record in records)
    if form == "yaml":
        return as_yaml(list(records))
    rows = [[lookup(record, key) for key in columns.values()] for record in records]
    if form == "csv":
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([list(columns), *rows])
        return text.getvalue().rstrip("\n")
    words = [key in WORDS for key in columns.values()]
    cells = [
        [_(str(cell)) if word and cell else shown(cell) for word, cell in zip(words, row, strict=True)] for row in rows
    ]
    return table([_(heading) for heading in columns], cells)


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a plain-text table. Columns of numbers are aligned to the right.

    Inside `fitted`, text and headings are wrapped. Numbers are never cut: columns that do not fit go to a second table
    below, which repeats the first column.
    """
    columns = [_Column([heading, *(str(row[place]) for row in rows)]) for place, heading in enumerate(headings)]
    most = WIDTH.get()
    if most is None:
        return _side_by_side(columns, [each.width for each in columns])
    parts = [columns[:1]]
    for column in columns[1:]:
        if _total([each.least for each in (*parts[-1], column)]) > most and len(parts[-1]) > 1:
            parts.append(columns[:1])
        parts[-1].append(column)
    return "\n\n".join(_side_by_side(part, _narrowed(part, most)) for part in parts)


class _Column:
    """A column of a table, with the heading first. `least` is the minimum width at which no number or word is cut."""

    def __init__(self, cells: list[str]) -> None:
        heading, *others = self.cells = cells
        self.is_figure = bool(others) and all(map(FIGURE.fullmatch, others))
        self.width = max(map(columns_of, cells))
        widest = max(map(columns_of, others), default=0)
        longest = max(map(_longest_word, others), default=0)
        least = widest if self.is_figure else max(min(longest, MAX_WORD), min(MIN_TEXT, widest))
        self.least = max(_longest_word(heading), least)


def _side_by_side(columns: Sequence[_Column], widths: Sequence[int]) -> str:
    """Join columns to the text of a table."""

    def lines(row: Sequence[str]) -> Iterator[str]:
        texts = [wrapped(cell, w) if columns_of(cell) > w else [cell] for cell, w in zip(row, widths, strict=True)]
        for line in zip_longest(*texts, fillvalue=""):
            cells = zip(columns, line, widths, strict=True)
            padded = ((right if each.is_figure else left)(text, width) for each, text, width in cells)
            yield BETWEEN.join(padded).rstrip()

    heading, *rows = zip(*(each.cells for each in columns), strict=True)
    rule = BETWEEN.join("-" * width for width in widths).rstrip()
    return "\n".join([*lines(heading), rule, *(line for row in rows for line in lines(row))])


def _total(widths: Sequence[int]) -> int:
    """Return the width of a table whose columns have these widths."""
    return sum(widths) + len(BETWEEN) * (len(widths) - 1)


def _narrowed(columns: Sequence[_Column], most: int) -> list[int]:
    """Return widths of columns that fit into the width `most` if possible. The widest columns are narrowed first."""
    widths = [each.width for each in columns]
    while _total(widths) > most:
        wide = [place for place, each in enumerate(columns) if widths[place] > each.least]
        if not wide:
            break
        widths[max(wide, key=lambda place: widths[place])] -= 1
    return widths


def _longest_word(text: str) -> int:
    return max((columns_of(piece) for piece in pieces(text) if not piece.isspace()), default=0)


@contextmanager
def fitted(width: int | None) -> Iterator[None]:
    """Fit tables to `width` characters inside the context. None removes the limit."""
    token = WIDTH.set(width)
    try:
        yield
    finally:
        WIDTH.reset(token)


def shown(value: Any) -> str:
    """Format a value for a table cell, with four significant digits. None becomes `-`."""
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return _("yes") if value else _("no")
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)


def size_text(size: float | None) -> str:
    """Format a number of bytes with a suitable unit, such as `8 KiB` or `1.5 GiB`. None becomes `-`."""
    if size is None:
        return "-"
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = min(int(math.log2(abs(size)) // 10), len(units) - 1) if abs(size) >= 1.0 else 0
    return f"{size / 2 ** (10 * power):.4g} {units[power]}" if size else "0"


def hardware_text(devices: int, chips: str) -> str:
    """Return the number of devices and their chip. Several node groups include their own numbers."""
    return chips if " + " in chips else f"{devices} x {chips}"


def as_yaml(data: object) -> str:
    """Return plain data as YAML in the order of its keys."""
    return dump_yaml(json.loads(json.dumps(data))).rstrip("\n")


IF_KNOWN = {"if_known": True}
"""The metadata of a field of a dataclass that plain data leaves out if it is None."""


def as_data(value: Any) -> Any:
    """Return a dataclass as plain data, with the dataclasses in its fields. A field `knobs` is left out."""
    if isinstance(value, (Prediction, Belief)):
        return prediction_record(value) if isinstance(value, Prediction) else belief_record(value)
    if is_dataclass(value):
        field_values = {each.name: getattr(value, each.name) for each in fields(value) if each.name != "knobs"}
        left_out = {
            each.name for each in fields(value) if each.metadata == IF_KNOWN and field_values[each.name] is None
        }
        return {name: as_data(each) for name, each in field_values.items() if name not in left_out}
    if isinstance(value, Mapping):
        return {name: as_data(each) for name, each in value.items()}
    is_several = isinstance(value, Sequence) and not isinstance(value, (str, bytes))
    return [as_data(each) for each in value] if is_several else value


class Notebook:
    """A result that notebooks show as its one-line `repr`, followed by its text."""

    __slots__: tuple[str, ...] = ()

    def as_data(self) -> dict[str, Any]:
        """Return all fields as plain data, except the knobs, which only the text uses."""
        data: dict[str, Any] = as_data(self)
        return data

    def _repr_html_(self) -> str:
        from html import escape  # its table of entities takes long to import

        return f"<pre>{escape(repr(self).strip('<>'))}\n\n{escape(str(self))}</pre>"


_DATA: Any = package_yaml(__package__, "names.yaml")
COLUMNS: dict[str, dict[str, str]] = _DATA.pop("columns")
"""For each table, the headings of its columns with dotted keys of a record."""
NAMES: dict[str, dict[str, str]] = _DATA


def table_columns(*tables: str) -> dict[str, str]:
    """Return the columns of several tables side by side: their headings, and dotted keys of a record."""
    return {heading: key for table in tables for heading, key in COLUMNS[table].items()}


def known_columns(records: Sequence[Mapping[str, Any]], *tables: str) -> dict[str, str]:
    """Return the columns of several tables side by side, without columns for which no record has a value."""
    columns = table_columns(*tables).items()
    return {name: key for name, key in columns if any(lookup(each, key) is not None for each in records)}
