"""Records as table, JSON, JSON lines, YAML or CSV: the same data, only the table rounds."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import zip_longest
from textwrap import wrap
from typing import Any

FORMATS = ("table", "json", "jsonl", "yaml", "csv")
BETWEEN = "  "
"""Between two columns of a table."""
LEAST_TEXT, MOST_WORD = 16, 40
"""A column of text is wrapped to no fewer characters than the first, and words longer than the second are broken."""
WIDTH: ContextVar[int | None] = ContextVar("width", default=None)
"""The columns of text that tables have to fit; None is without end."""


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
    return table(list(columns), [[shown(cell) for cell in row] for row in rows])


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a plain text table; columns of figures are aligned to the right.

    Inside `fitted` text and headings are wrapped where the table is too wide; a figure is never cut.
    """
    figures = [bool(rows) and all(_is_figure(row[place]) for row in rows) for place in range(len(headings))]
    widths = [max(len(str(row[place])) for row in (headings, *rows)) for place in range(len(headings))]
    most = WIDTH.get()
    if most is not None:
        widths = _narrowed(widths, _least(headings, rows, figures), most - len(BETWEEN) * (len(widths) - 1))

    def lines(cells: Sequence[str]) -> list[str]:
        wrapped = [_wrapped(str(cell), width) for cell, width in zip(cells, widths, strict=True)]
        padded = [
            [c.rjust(w) if f else c.ljust(w) for c, w, f in zip(each, widths, figures, strict=True)]
            for each in zip_longest(*wrapped, fillvalue="")
        ]
        return [BETWEEN.join(each).rstrip() for each in padded]

    rule = BETWEEN.join("-" * width for width in widths).rstrip()
    return "\n".join([*lines(headings), rule, *(line for row in rows for line in lines(row))])


@contextmanager
def fitted(width: int | None) -> Iterator[None]:
    """Make tables fit `width` columns of text meanwhile, where they can; None lets them be as wide as they are."""
    token = WIDTH.set(width)
    try:
        yield
    finally:
        WIDTH.reset(token)


def _least(headings: Sequence[str], rows: Sequence[Sequence[str]], figures: Sequence[bool]) -> list[int]:
    """Return how narrow each column may be: its figures whole, text down to `LEAST_TEXT` and its longest word."""
    least = []
    for place, heading in enumerate(headings):
        words = max((len(word) for word in heading.split()), default=0)
        cells = [str(row[place]) for row in rows]
        if figures[place]:
            least.append(max(words, *map(len, cells)))
        else:
            longest = max((len(word) for cell in cells for word in cell.split()), default=0)
            least.append(max(words, min(longest, MOST_WORD), min(LEAST_TEXT, max(map(len, cells), default=0))))
    return least


def _narrowed(widths: Sequence[int], least: Sequence[int], most: int) -> list[int]:
    """Return widths whose sum is `most`, or as near to it as `least` allows: the widest columns give way first."""
    result = list(widths)
    while sum(result) > most:
        spare = [place for place, width in enumerate(result) if width > least[place]]
        if not spare:
            return result
        result[max(spare, key=lambda place: result[place])] -= 1
    return result


def _wrapped(cell: str, width: int) -> list[str]:
    return wrap(cell, width, break_on_hyphens=False) if len(cell) > width else [cell]


def shown(value: Any) -> str:
    """Return a value for a table cell: four significant digits, `-` for nothing."""
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)


def lookup(record: Mapping[str, Any], key: str) -> Any:
    """Return what a dotted key leads to, None where it leads to nothing."""
    found: Any = record
    for part in key.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def as_yaml(data: object) -> str:
    """Return plain data as YAML, keys in their order."""
    import yaml

    text: str = yaml.safe_dump(data, sort_keys=False, allow_unicode=True)
    return text.rstrip("\n")


def _is_figure(cell: str) -> bool:
    bare = cell.lstrip("~+-").replace(",", "").replace("%", "").replace("e+", "").replace("e-", "").replace(".", "", 1)
    return cell == "-" or bare.isdigit()
