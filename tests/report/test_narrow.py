"""Tables of candidates in terminals of any width."""

from __future__ import annotations

from typing import Any

from flagcore.report.formats import fitted, render
from flagcore.report.text import candidate_columns

RECORDS: list[dict[str, Any]] = [
    {
        "number": n,
        "candidate": {"max_num_batched_tokens": 2048 * n, "enforce_eager": eager},
        "rate": 1234.5,
        "used": 7.5,
    }
    for n, eager in enumerate((None, False, True), start=1)
]
FIGURES = {"~output tok/s": "rate", "~used GiB": "used"}


def candidates_table(records: list[dict[str, Any]]) -> str:
    return render(records, "table", {"#": "number", **candidate_columns(records, {}), **FIGURES})


def reported(width: int | None) -> str:
    with fitted(width):
        return candidates_table(RECORDS)


def test_a_table_that_fits_has_a_column_a_knob() -> None:
    assert reported(None) == reported(200)
    assert "max_num_batched_tokens" in reported(None).splitlines()[0]


def test_a_narrow_terminal_gets_several_tables_with_the_number_in_each() -> None:
    for width in (20, 30, 40):
        text = reported(width)
        assert max(map(len, text.splitlines())) <= max(width, len("#  max_num_batched_tokens"))
        assert all(table.startswith("#") for table in text.split("\n\n"))
        assert "4096" in text
        assert all(heading.split()[-1] in text for heading in FIGURES)


def test_candidates_that_differ_have_rows_that_differ() -> None:
    two_records = [
        {**each, "candidate": {"enforce_eager": value}} for each, value in zip(RECORDS[:2], (None, False), strict=True)
    ]
    rows = {line[1:] for line in candidates_table(two_records).splitlines()[2:]}
    assert len(rows) == 2
