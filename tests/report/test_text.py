"""What a person reads, in tables that fit a width."""

from itertools import chain

import pytest

from flagcore.domain.knob import Effect, Knob
from flagcore.report.candidate_report import differs_text
from flagcore.report.formats import fitted, render, table
from flagcore.report.text import candidate_columns, values_text


def test_without_the_engine_names_are_unchanged() -> None:
    values = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "recompute_method": None, "eager": False}
    assert values_text(values, {}) == "tensor_model_parallel_size 2, sequence_parallel"


def test_a_plugins_knob_has_its_label() -> None:
    knobs = {"acme_overlap": Knob(name="acme_overlap", label="overlap", neutral=False, effects={True: Effect()})}
    assert values_text({"acme_overlap": True}, knobs) == "overlap"
    assert candidate_columns([{"candidate": {"acme_overlap": True}}], knobs) == {"overlap": "candidate.acme_overlap"}
    assert differs_text({"acme_overlap": (False, True)}, knobs) == "overlap off -> on"


def test_each_format_has_the_same_figures() -> None:
    records = [{"id": "x", "time": {"s": 0.123456789}}]
    columns = {"id": "id", "s": "time.s"}
    assert "0.123456789" in render(records, "json", columns)
    assert render(records, "jsonl", columns) == '{"id": "x", "time": {"s": 0.123456789}}'
    assert render(records, "csv", columns) == "id,s\nx,0.123456789"
    assert "s: 0.123456789" in render(records, "yaml", columns)
    assert "0.1235" in render(records, "table", columns)


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
    assert sorted([word for word in text.split() if set(word) != {"-"} or word == "-"]) == sorted(words)


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
