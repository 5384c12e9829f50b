"""The stages of a mixed cluster: their chips, layers, memory and idle times."""

from tests.report.page.conftest import Runs


def test_each_stage_has_its_chip_and_layers(runs: Runs) -> None:
    page = runs("mixed").page
    timeline, memory = page.rows("pipeline", "Seconds per"), page.rows("memory", "Memory of a device of")
    assert [row["chip"].text for row in timeline] == ["old", "old", "new"]
    assert sum(row["layers"].value or 0 for row in timeline) == 4
    assert all(0 <= (row["~idle, %"].value or 0) < 1 for row in timeline)
    assert len({row["~in use"].value for row in memory}) == 3
