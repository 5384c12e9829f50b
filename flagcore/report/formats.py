"""Records as table, JSON, JSON lines, YAML or CSV: the same data, only the table rounds."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import zip_longest
from typing import Any

from flagcore.i18n import foreign, keep, said
from flagcore.i18n.width import columns as columns_of
from flagcore.i18n.width import left, right, words, wrapped

FORMATS = ("table", "json", "jsonl", "yaml", "csv")
BETWEEN = "  "
"""Between two columns of a table."""
LEAST_TEXT, MOST_WORD = 16, 40
"""A column of text is wrapped to no fewer characters than the first, and words longer than the second are broken."""
WIDTH: ContextVar[int | None] = ContextVar("width", default=None)
"""The columns of text that tables have to fit; None is without end."""
TOLD: ContextVar[bool] = ContextVar("told", default=False)
"""Whether tables are for the person at the terminal, in that person's language; what is kept is not."""


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

    Inside `fitted` text and headings are wrapped where the table is too wide. A figure is never cut: columns that still
    have no room stand in a table below, beside the first column again.
    """
    figures = [bool(rows) and all(_is_figure(row[place]) for row in rows) for place in range(len(headings))]
    headings, rows = in_words(headings), [in_words(row) for row in rows]
    most, everything = WIDTH.get(), list(range(len(headings)))
    if most is None:
        return _lines(headings, rows, figures, None)
    parts = [
        _lines(
            [headings[place] for place in part],
            [[row[place] for place in part] for row in rows],
            [figures[place] for place in part],
            most,
        )
        for part in _parts(everything, _least(headings, rows, figures), most)
    ]
    return "\n\n".join(parts)


def fits(records: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> bool:
    """Return whether one table of `records` has room for all `columns`, with no word of a heading cut."""
    most = WIDTH.get()
    if most is None:
        return True
    with fitted(None, told=TOLD.get()):
        whole = render(records, "table", columns)
    return max(map(columns_of, whole.splitlines()), default=0) <= most


def _lines(headings: Sequence[str], rows: Sequence[Sequence[str]], figures: Sequence[bool], most: int | None) -> str:
    """Return a table of at most so many columns of text, or as near to it as its figures allow."""
    widths = [max(columns_of(str(row[place])) for row in (headings, *rows)) for place in range(len(headings))]
    if most is not None:
        widths = _narrowed(widths, _least(headings, rows, figures), most - len(BETWEEN) * (len(widths) - 1))

    def lines(cells: Sequence[str]) -> list[str]:
        wrapped = [_wrapped(str(cell), width) for cell, width in zip(cells, widths, strict=True)]
        padded = [
            [right(c, w) if f else left(c, w) for c, w, f in zip(each, widths, figures, strict=True)]
            for each in zip_longest(*wrapped, fillvalue="")
        ]
        return [BETWEEN.join(each).rstrip() for each in padded]

    rule = BETWEEN.join("-" * width for width in widths).rstrip()
    return "\n".join(finished([*lines(headings), rule, *(line for row in rows for line in lines(row))]))


def _parts(places: Sequence[int], least: Sequence[int], most: int) -> list[list[int]]:
    """Return which columns stand side by side: all of them, or groups that each begin with the first column."""
    parts = [[*places[:1]]]
    for place in places[1:]:
        wide = sum(least[each] + len(BETWEEN) for each in parts[-1]) + least[place]
        if wide > most and len(parts[-1]) > 1:
            parts.append([*places[:1]])
        parts[-1].append(place)
    return parts


@contextmanager
def fitted(width: int | None, told: bool = False) -> Iterator[None]:
    """Make tables fit `width` columns of text meanwhile, where they can; None lets them be as wide as they are.

    `told` has them in the language of the person at the terminal.
    """
    token, before = WIDTH.set(width), TOLD.set(told)
    try:
        yield
    finally:
        WIDTH.reset(token)
        TOLD.reset(before)


def in_words(cells: Sequence[str]) -> Sequence[str]:
    """Return cells in the language of the person at the terminal, if they are for one."""
    return [said(str(cell)) for cell in cells] if TOLD.get() and foreign() else cells


def finished(lines: list[str]) -> list[str]:
    """Return lines that are in that language, and that are left as they are when they are printed."""
    return keep(lines) if TOLD.get() else lines


def _least(headings: Sequence[str], rows: Sequence[Sequence[str]], figures: Sequence[bool]) -> list[int]:
    """Return how narrow each column may be: its figures whole, text down to `LEAST_TEXT` and its longest word."""
    least = []
    for place, heading in enumerate(headings):
        longest_word = max(map(columns_of, words(heading)), default=0)
        cells = [str(row[place]) for row in rows]
        if figures[place]:
            least.append(max(longest_word, *map(columns_of, cells)))
        else:
            longest = max((columns_of(word) for cell in cells for word in words(cell)), default=0)
            widest = max(map(columns_of, cells), default=0)
            least.append(max(longest_word, min(longest, MOST_WORD), min(LEAST_TEXT, widest)))
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
    return wrapped(cell, width) if columns_of(cell) > width else [cell]


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
