"""Tables of candidates in terminals of any width."""

from __future__ import annotations

from flagcore.report.formats import fitted
from flagcore.report.text import candidates_table

RECORDS = [
    {
        "number": n,
        "candidate": {"max_num_batched_tokens": 2048 * n, "enforce_eager": eager},
        "rate": 1234.5,
        "used": 7.5,
    }
    for n, eager in enumerate((None, False, True), start=1)
]
FIGURES = {"~output tok/s": "rate", "~used GiB": "used"}


def told(width: int | None) -> str:
    with fitted(width):
        return candidates_table(RECORDS, FIGURES, {})


def test_a_table_that_fits_has_a_column_a_knob() -> None:
    assert told(None) == told(200)
    assert "max_num_batched_tokens" in told(None).splitlines()[0]


def test_a_narrow_terminal_gets_configurations_below_the_figures() -> None:
    for width in (20, 30, 40):
        lines = told(width).splitlines()
        assert max(map(len, lines)) <= max(width, len("   max_num_batched_tokens"))
        assert all(f"{record['number']}" in told(width) for record in RECORDS)
        assert "max_num_batched_tokens 4096" in " ".join(told(width).split())
        assert all(f"{heading.split()[-1]}" in told(width) for heading in FIGURES)


def test_candidates_that_differ_have_rows_that_differ() -> None:
    two = [
        {**each, "candidate": {"enforce_eager": value}} for each, value in zip(RECORDS[:2], (None, False), strict=True)
    ]
    rows = {line[1:] for line in candidates_table(two, FIGURES, {}).splitlines()[2:]}
    assert len(rows) == 2
