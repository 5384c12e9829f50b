"""A table of candidates that fits into a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from flagcore.report.formats import render
from flagcore.report.text import values_text


def fitted(
    records: Sequence[Mapping[str, Any]], knobs: Mapping[str, str], figures: Mapping[str, str], width: int
) -> str:
    """Return a table of numbered records with columns for `knobs` and `figures`, no wider than `width`; 0: no limit.

    Where it would be wider, configurations stand in lines of their own below it, and the last figures are left out
    that still do not fit.
    """
    number = {"#": "number"}
    whole = render(records, "table", {**number, **knobs, **figures})
    if not width or _width(whole) <= width:
        return whole
    kept = list(figures)
    while _width(text := render(records, "table", {**number, **{name: figures[name] for name in kept}})) > width:
        if len(kept) == 1:
            break
        kept.pop()
    indent = " " * (len(str(len(records))) + 2)
    lines = [
        textwrap.fill(
            f"{record['number']}{indent[len(str(record['number'])) :]}{values_text(record['candidate'])}",
            width,
            subsequent_indent=indent,
            break_long_words=False,
        )
        for record in records
    ]
    return "\n".join([text, "", *lines])


def _width(text: str) -> int:
    return max(map(len, text.splitlines()), default=0)
