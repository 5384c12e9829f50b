"""The timeline of a pipeline keeps what a pipeline must, and lasts as long as the step's formula says."""

from __future__ import annotations

from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from flagcore.domain.passes import Passes
from flagcore.physics.schedules.named import makespan
from flagcore.physics.schedules.paths import StageTimes
from flagcore.report.page.blocks import Table, Text
from flagcore.report.page.run import RunData
from flagcore.report.page.steptime import pipeline
from flagcore.report.page.timeline import fewest, timeline
from flagcore.workloads.megatron.adapter import WORKLOAD
from tests import small

PASSES = Passes(
    schedule="interleaved",
    microbatches=8,
    virtual=1,
    forward_s=(1.0, 1.2, 0.9, 1.4),
    backward_s=(2.0, 2.1, 2.0, 2.6),
    send_s=0.0,
    sender_waits=True,
)
ORDERS = [
    PASSES,
    replace(PASSES, schedule="gpipe"),
    replace(PASSES, virtual=2),
    replace(PASSES, send_s=0.05),
    replace(PASSES, virtual=2, send_s=0.05, sender_waits=False),
    replace(PASSES, microbatches=2),
]


@pytest.mark.parametrize("passes", ORDERS)
def test_a_stage_does_one_thing_at_a_time_and_all_of_it(passes: Passes) -> None:
    done = timeline(passes, passes.microbatches)
    for stage in range(4):
        mine = [each for each in done if each.stage == stage]
        assert len(mine) == 2 * passes.virtual * passes.microbatches
        assert len({(each.part, each.microbatch, each.backward) for each in mine}) == len(mine)
        assert all(before.end_s <= after.start_s + 1e-12 for before, after in pairwise(mine))


@pytest.mark.parametrize("passes", ORDERS)
def test_no_pass_starts_before_its_input_is_there(passes: Passes) -> None:
    found = {(each.part, each.microbatch, each.backward): each for each in timeline(passes, passes.microbatches)}
    last = 4 * passes.virtual - 1
    for (part, microbatch, backward), each in found.items():
        if backward:
            needed = found[(part + 1, microbatch, True) if part < last else (part, microbatch, False)]
        elif part:
            needed = found[part - 1, microbatch, False]
        else:
            continue
        apart = passes.send_s if needed.part != part else 0.0
        assert each.start_s >= needed.end_s + apart - 1e-12


@pytest.mark.parametrize(
    ("passes", "within"), [(ORDERS[0], 1e-9), (ORDERS[1], 1e-9), (ORDERS[2], 0.04), (ORDERS[3], 1e-9)]
)
def test_it_lasts_as_long_as_the_formula_of_the_schedule(passes: Passes, within: float) -> None:
    def column(values: tuple[float, ...]) -> np.ndarray:
        return np.array(values)[:, None]

    times = StageTimes(
        forward=column(passes.forward_s),
        backward_input=column(passes.backward_s),
        backward_weight=np.zeros((4, 1)),
        send=np.array([passes.send_s]),
        blocking=1.0 if passes.sender_waits else 0.0,
    )
    counts = np.array([float(passes.microbatches)]), np.array([float(passes.virtual)])
    formula = float(makespan(passes.schedule, times, *counts)[0])
    whole = max(each.end_s for each in timeline(passes, passes.microbatches))
    assert whole == pytest.approx(formula, rel=within, abs=passes.send_s)


@pytest.mark.parametrize("virtual", [None, 1])
def test_passes_of_a_candidate_make_up_its_predicted_step(virtual: int | None) -> None:
    task = small.task(replace(small.DENSE, num_layers=8), devices=4)
    costs = small.costs(task)
    columns = WORKLOAD.columns(
        task,
        {"pipeline_model_parallel_size": 4, "micro_batch_size": 1, "num_layers_per_virtual_pipeline_stage": virtual},
    )
    passes = WORKLOAD.passes(task, columns, costs)
    assert passes is not None
    assert len(passes.forward_s) == 4
    assert passes.microbatches == 8
    assert passes.virtual == (2 if virtual else 1)
    whole = max(each.end_s for each in timeline(passes, passes.microbatches))
    parts = WORKLOAD.predict(task, columns, costs).time_s
    pipeline = sum(
        float(seconds[0]) for name, seconds in parts.items() if name not in ("dp_comm_exposed_s", "optimizer_s")
    )
    assert whole == pytest.approx(pipeline, rel=0.035)


def test_a_long_step_is_drawn_by_its_first_micro_batches() -> None:
    long = replace(PASSES, microbatches=512)
    assert fewest(long, 3000) == 8
    assert fewest(replace(long, virtual=4), 3000) == 8
    assert fewest(replace(PASSES, microbatches=2), 3000) == 2
    assert fewest(replace(long, forward_s=(1.0,) * 64, backward_s=(1.0,) * 64), 3000) is None


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-1p", "zb-2p", "zb-v", "v-half", "v-min", "dualpipe", "dualpipev"])
def test_a_schedule_that_is_a_formula_is_told_as_one_with_its_stages(schedule: str) -> None:
    found = {"pipeline": asdict(replace(PASSES, schedule=schedule))}
    section = pipeline(RunData(result={}, folder=Path(), called="", insight=found))
    assert section is not None
    said, held = section.blocks
    assert isinstance(said, Text)
    assert f"{schedule}, is predicted by a formula" in said.text
    assert isinstance(held, Table)
    assert [row[1].value for row in held.rows] == list(PASSES.forward_s)


def test_an_order_that_depends_on_times_is_refused() -> None:
    with pytest.raises(ValueError, match="zb-h1"):
        timeline(replace(PASSES, schedule="zb-h1"), 8)
