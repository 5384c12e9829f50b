"""Records as table, JSON, JSON lines, YAML or CSV. Only tables round values."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from html import escape
from importlib.resources import files
from itertools import zip_longest
from typing import Any

import yaml

from flagcore.i18n import _
from flagcore.i18n.width import columns as columns_of
from flagcore.i18n.width import left, pieces, right, wrapped

BETWEEN = "  "
"""Separator of two columns of a table."""
MIN_TEXT, MAX_WORD = 16, 40
"""Minimum width of a column of wrapped text, and maximum length of an unbroken word, in characters."""
WIDTH: ContextVar[int | None] = ContextVar("width", default=None)
"""Maximum width of tables; None for no limit."""


WORDS = ("status", "maturity.word", "peak_source")
"""Keys whose values are translated in tables."""


def render(records: Sequence[Mapping[str, Any]], form: str, columns: Mapping[str, str]) -> str:
    """Return `records` in `form`. `columns` maps the heading of a table or CSV column to a dotted key."""
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
    """Return a plain text table with columns of numbers aligned to the right.

    Inside `fitted`, text and headings are wrapped. Numbers are never cut: columns that do not fit go to a second table
    below, which repeats the first column.
    """
    figures = [bool(rows) and all(_is_figure(row[place]) for row in rows) for place in range(len(headings))]
    max_width, all_columns = WIDTH.get(), list(range(len(headings)))
    if max_width is None:
        return _table_lines(headings, rows, figures, None)
    parts = [
        _table_lines(
            [headings[place] for place in part],
            [[row[place] for place in part] for row in rows],
            [figures[place] for place in part],
            max_width,
        )
        for part in _split_columns(all_columns, _min_widths(headings, rows, figures), max_width)
    ]
    return "\n\n".join(parts)


def _table_lines(
    headings: Sequence[str], rows: Sequence[Sequence[str]], figures: Sequence[bool], most: int | None
) -> str:
    """Return a table of width `most`, or wider if its numbers need more."""
    widths = [max(columns_of(str(row[place])) for row in (headings, *rows)) for place in range(len(headings))]
    if most is not None:
        widths = _narrow_widths(widths, _min_widths(headings, rows, figures), most - len(BETWEEN) * (len(widths) - 1))

    def lines(cells: Sequence[str]) -> list[str]:
        texts = [
            wrapped(str(cell), width) if columns_of(str(cell)) > width else [str(cell)]
            for cell, width in zip(cells, widths, strict=True)
        ]
        padded = [
            [right(c, w) if f else left(c, w) for c, w, f in zip(each, widths, figures, strict=True)]
            for each in zip_longest(*texts, fillvalue="")
        ]
        return [BETWEEN.join(each).rstrip() for each in padded]

    rule = BETWEEN.join("-" * width for width in widths).rstrip()
    return "\n".join([*lines(headings), rule, *(line for row in rows for line in lines(row))])


def _split_columns(places: Sequence[int], least: Sequence[int], most: int) -> list[list[int]]:
    """Split columns into groups that fit side by side; each starts with the first column."""
    parts = [[*places[:1]]]
    for place in places[1:]:
        new_width = sum(least[each] + len(BETWEEN) for each in parts[-1]) + least[place]
        if new_width > most and len(parts[-1]) > 1:
            parts.append([*places[:1]])
        parts[-1].append(place)
    return parts


@contextmanager
def fitted(width: int | None) -> Iterator[None]:
    """Fit tables to `width` inside the context; None removes the limit."""
    token = WIDTH.set(width)
    try:
        yield
    finally:
        WIDTH.reset(token)


def _min_widths(headings: Sequence[str], rows: Sequence[Sequence[str]], figures: Sequence[bool]) -> list[int]:
    """Return the minimum width of each column: complete numbers, text with at least `MIN_TEXT` and its longest word."""
    min_widths = []
    for place, heading in enumerate(headings):
        longest_word = _longest_word(heading)
        cells = [str(row[place]) for row in rows]
        if figures[place]:
            min_widths.append(max(longest_word, *map(columns_of, cells)))
        else:
            longest = max(map(_longest_word, cells), default=0)
            widest = max(map(columns_of, cells), default=0)
            min_widths.append(max(longest_word, min(longest, MAX_WORD), min(MIN_TEXT, widest)))
    return min_widths


def _longest_word(text: str) -> int:
    return max((columns_of(piece) for piece in pieces(text) if not piece.isspace()), default=0)


def _narrow_widths(widths: Sequence[int], least: Sequence[int], most: int) -> list[int]:
    """Narrow the widest columns until the sum is `most` or every column has its minimum width."""
    result = list(widths)
    while sum(result) > most:
        shrinkable = [place for place, width in enumerate(result) if width > least[place]]
        if not shrinkable:
            return result
        result[max(shrinkable, key=lambda place: result[place])] -= 1
    return result


def shown(value: Any) -> str:
    """Return a value as the text of a table cell: four significant digits, `-` for none."""
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return _("yes") if value else _("no")
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)


def size_text(gib: float | None) -> str:
    """Return a size in GiB as text in the unit that fits: `8 KiB`, `1.5 GiB`; `-` for none."""
    if gib is None:
        return "-"
    size, units = abs(gib) * 2**30, ("B", "KiB", "MiB", "GiB", "TiB")
    power = min(int(math.log2(size) // 10), len(units) - 1) if size >= 1.0 else 0
    return f"{gib * 2**30 / 2 ** (10 * power):.4g} {units[power]}" if size else "0"


def hardware_text(devices: int, chips: str) -> str:
    """Return the number of devices and their chip; several node groups have numbers of their own."""
    return chips if " + " in chips else f"{devices} x {chips}"


def energy_text(kwh: float) -> str:
    """Return an energy in kWh as text in the unit that fits: `12 Wh`, `1.5 MWh`."""
    hours, units = kwh * 1000.0, ("Wh", "kWh", "MWh", "GWh")
    power = min(int(math.log10(hours) // 3), len(units) - 1) if hours >= 1.0 else 0
    return f"{shown(hours / 1000.0**power)} {units[power]}"


def lookup(record: Mapping[str, Any], key: str) -> Any:
    """Return the value at a dotted key, None if a part is missing."""
    value: Any = record
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def as_yaml(data: object) -> str:
    """Return plain data as YAML in the order of its keys."""
    from flagcore.spec.data_file import dump_yaml

    return dump_yaml(json.loads(json.dumps(data))).rstrip("\n")


def _is_figure(cell: str) -> bool:
    digits = (
        cell.lstrip("~+-").replace(",", "").replace("%", "").replace("e+", "").replace("e-", "").replace(".", "", 1)
    )
    return cell == "-" or digits.isdigit()


class Notebook:
    """A result that a notebook shows as its one-line `repr`, followed by its text."""

    __slots__: tuple[str, ...] = ()

    def as_data(self) -> dict[str, Any]:
        """Return all fields except the knobs, which only the text uses."""
        return {name: getattr(self, name) for name in self.__slots__ if name != "knobs"}

    def _repr_html_(self) -> str:
        return f"<pre>{escape(repr(self).strip('<>'))}\n\n{escape(str(self))}</pre>"


NAMES: dict[str, dict[str, str]]
COLUMNS: dict[str, dict[str, str]]
"""By table: the headings of columns, and dotted keys of a record."""

_DATA: Any = yaml.safe_load(files(__package__).joinpath("names.yaml").read_text(encoding="utf-8"))
COLUMNS = _DATA.pop("columns")
NAMES = _DATA


def table_columns(*tables: str) -> dict[str, str]:
    """Return the columns of tables side by side: headings, and dotted keys of a record."""
    return {heading: key for table in tables for heading, key in COLUMNS[table].items()}
