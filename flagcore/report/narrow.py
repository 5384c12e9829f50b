"""A table of candidates that fits into a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from flagcore.language.width import columns
from flagcore.report.formats import WIDTH, render
from flagcore.report.text import values_text


def candidates_table(records: Sequence[Mapping[str, Any]], knobs: Mapping[str, str], figures: Mapping[str, str]) -> str:
    """Return a table of numbered records with columns for `knobs` and `figures`.

    Where it would be wider than tables may be, configurations stand in lines of their own below it, and the last
    figures are left out that still do not fit.
    """
    number, width = {"#": "number"}, WIDTH.get()
    whole = render(records, "table", {**number, **knobs, **figures})
    if width is None or _width(whole) <= width:
        return whole
    kept = list(figures)
    while _width(text := render(records, "table", {**number, **{name: figures[name] for name in kept}})) > width:
        if len(kept) == 1:
            break
        kept.pop()
    indent = len(str(len(records))) + 2
    lines = [
        textwrap.fill(
            f"{record['number']:<{indent}}{values_text(record['candidate'])}",
            width,
            subsequent_indent=" " * indent,
            break_long_words=False,
        )
        for record in records
    ]
    return "\n".join([text, "", *lines])


def _width(text: str) -> int:
    return max(map(columns, text.splitlines()), default=0)
