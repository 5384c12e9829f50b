"""Records as table, JSON, JSON lines, YAML or CSV: the same data, only the table rounds."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

FORMATS = ("table", "json", "jsonl", "yaml", "csv")


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
    """Return a plain text table; columns of figures are aligned to the right."""
    widths = [max(len(str(row[place])) for row in (headings, *rows)) for place in range(len(headings))]
    right = [bool(rows) and all(_is_figure(row[place]) for row in rows) for place in range(len(headings))]

    def line(cells: Sequence[str]) -> str:
        padded = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(cells, widths, right, strict=True))
        return "  ".join(padded).rstrip()

    return "\n".join([line(headings), line(["-" * width for width in widths]), *(line(row) for row in rows)])


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
