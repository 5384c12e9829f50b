"""A table of candidates that fits a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from flagcore.report.formats import WIDTH, fits, render
from flagcore.report.text import values_text


def candidates_table(records: Sequence[Mapping[str, Any]], knobs: Mapping[str, str], figures: Mapping[str, str]) -> str:
    """Return a table of numbered records with columns for `knobs` and `figures`.

    If it does not fit, knobs go to separate lines below it.
    """
    number, width = {"#": "number"}, WIDTH.get()
    whole = {**number, **knobs, **figures}
    if width is None or fits(records, whole):
        return render(records, "table", whole)
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
    return "\n".join([render(records, "table", {**number, **figures}), "", *lines])
