"""Records as HTML for notebooks: a heading and a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from flagcore.report.formats import lookup, shown


def as_html(heading: str, records: Sequence[Mapping[str, Any]], columns: Mapping[str, str], below: str = "") -> str:
    """Return a heading, a table of `records` with `columns` (headings to dotted keys), and plain text below it."""
    lines = [f"<p><b>{escape(heading)}</b></p>"]
    if records:
        rows = [[shown(lookup(record, key)) for key in columns.values()] for record in records]
        body = "".join(f"<tr>{_cells('td', row)}</tr>" for row in rows)
        lines.append(f"<table><thead><tr>{_cells('th', list(columns))}</tr></thead><tbody>{body}</tbody></table>")
    return "\n".join([*lines, *([f"<pre>{escape(below)}</pre>"] if below else [])])


def _cells(tag: str, texts: Sequence[str]) -> str:
    return "".join(f"<{tag}>{escape(text)}</{tag}>" for text in texts)
