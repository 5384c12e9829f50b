"""Tables that fit a width: text is wrapped, figures are whole."""

from itertools import chain

import pytest

from flagcore.report.formats import fitted, table

HEADINGS = ["trial", "configuration", "tokens/s per device", "reason"]
ROWS = [
    ["0 baseline", "DP 2, MBS 1, recompute full uniform 1, dist-opt", "12,345,678", "-"],
    ["1", "TP 2, MBS 16", "-", "it ran out of memory: tried to allocate 20 GiB on a device that has 16"],
]


@pytest.mark.parametrize("width", [120, 100, 80, 72])
def test_table_fits_and_keeps_every_word_and_figure(width: int) -> None:
    with fitted(width):
        text = table(HEADINGS, ROWS)
    assert max(map(len, text.splitlines())) <= width
    assert "12,345,678" in text
    words = [word for row in (HEADINGS, *ROWS) for cell in row for word in cell.split()]
    shown_words = [word for word in text.split() if set(word) != {"-"} or word == "-"]
    assert sorted(shown_words) == sorted(words)


def test_figures_are_never_cut_however_narrow_the_terminal() -> None:
    figures = [["123,456,789.5", "~0.12345", "1,000"]]
    with fitted(10):
        lines = table(["a", "b", "c"], figures).splitlines()
    assert [line for line in lines if "123" in line] == ["123,456,789.5  ~0.12345", "123,456,789.5  1,000"]


def test_columns_without_room_are_printed_below_with_the_first_one() -> None:
    headings = ["chip", *(f"figure {place}" for place in range(8))]
    rows = [[chip, *(f"{place}{place},000.5" for place in range(8))] for chip in ("one", "two")]
    for width in (30, 40, 60, 80):
        with fitted(width):
            parts = table(headings, rows).split("\n\n")
        assert len(parts) > 1
        assert all(part.startswith("chip") for part in parts)
        assert max(len(line) for part in parts for line in part.splitlines()) <= width
        for row in rows:
            cells_by_row = [line.split()[1:] for part in parts for line in part.splitlines() if line.startswith(row[0])]
            assert list(chain.from_iterable(cells_by_row)) == row[1:]
