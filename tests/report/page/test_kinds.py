"""The kinds of chips of a mixed cluster: stages, layers, memory and idle times are those of timeline and plan."""

import pytest

from tests.report.page.conftest import Runs


def test_each_stage_has_the_chip_and_the_idle_time_of_the_timeline(runs: Runs) -> None:
    page = runs("mixed").page
    plan, timeline, memory = (
        page.rows(anchor, caption)
        for anchor, caption in (
            ("kinds", "Each stage"),
            ("pipeline", "Seconds per"),
            ("memory", "Memory of a device of"),
        )
    )
    assert [row["chip"].text for row in plan] == ["old", "old", "new"]
    assert sum(row["layers"].value or 0 for row in plan) == 4
    idle = [row["~idle, %"].value for row in plan]
    assert idle == pytest.approx([row["~idle, %"].value for row in timeline])
    assert [row["~in use"].value for row in plan] == [row["~in use"].value for row in memory]
    assert len({row["~in use"].value for row in plan}) == 3
