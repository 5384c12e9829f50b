"""The kinds of chips of a mixed cluster: stages, layers, memory and idle times are those of timeline and plan."""

from dataclasses import asdict

import pytest

from flagcore import api
from flagcore.domain.prediction import Passes
from flagcore.report.page.timeline import kinds
from tests.report.page.conftest import Runs
from tests.report.page.reading import run_data


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


def test_each_kind_is_as_idle_as_an_estimate_says(runs: Runs) -> None:
    made = runs("mixed")
    mixing = api.estimate(made.folder / "spec.yaml").mixing
    assert mixing is not None
    assert mixing["mixed"]["candidate"] == made.result["best"]["candidate"]
    rows = {row["chip"].text: row for row in made.page.rows("kinds", "Each kind")}
    assert {name: row["~idle, %"].value for name, row in rows.items()} == pytest.approx(mixing["idle"])
    assert [rows[name]["stages"].value for name in ("new", "old")] == [1, 2]
    assert sum(row["devices"].value or 0 for row in rows.values()) == 4


def test_kinds_with_pipelines_of_their_own_idle_until_the_slowest_ends() -> None:
    fast, slow = (
        Passes(
            schedule="1f1b",
            microbatches=count,
            virtual=1,
            forward_s=(seconds,),
            backward_s=(2.0 * seconds,),
            send_s=0.0,
            sender_waits=False,
            groups=(group,),
            layers=(4,),
            predicted_s=3.0 * seconds * count,
        )
        for group, count, seconds in ((0, 6, 1.0), (1, 2, 4.0))
    )
    chips = [{"name": name, "nodes": 1, "devices_per_node": 8} for name in ("a", "b")]
    insight = {"chips": chips, "pipelines": [asdict(fast), asdict(slow)]}
    best = {"number": 0, "candidate": {}}
    section = kinds(run_data(insight, best=best, trials=[best]))
    assert section is not None
    rows = section.blocks[-1].rows  # type: ignore[union-attr]
    assert [(row[0].text, row[4].value) for row in rows] == [("a", pytest.approx(0.25)), ("b", pytest.approx(0.0))]
