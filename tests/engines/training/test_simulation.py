"""A simulated pipeline keeps what a pipeline must, and lasts as long as the step's formula says."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from flagcore.domain.prediction import Passes
from flagcore.engines.megatron.adapter import WORKLOAD
from flagcore.engines.training.schedules import pipeline_seconds
from flagcore.physics.pipelines import SCHEDULES
from tests import small
from tests.engines.training.simulation import pipe_of, simulate, step_seconds

EXECUTABLE = ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2"]

PASSES = Passes(
    schedule="interleaved",
    microbatches=8,
    virtual=1,
    forward_s=(1.0, 1.2, 0.9, 1.4),
    backward_s=(2.0, 2.1, 2.0, 2.6),
    weight_s=(0.8, 0.9, 0.8, 1.1),
    send_s=0.0,
    sender_waits=True,
)


def named(schedule: str, **changes: Any) -> Passes:
    return replace(PASSES, schedule=schedule, **changes)


ORDERS = [
    *map(named, EXECUTABLE),
    *[named(schedule, send_s=0.05) for schedule in EXECUTABLE],
    *[named(schedule, send_s=0.05, sender_waits=False, microbatches=11) for schedule in EXECUTABLE],
    *[named(schedule, microbatches=2) for schedule in EXECUTABLE],
    replace(PASSES, virtual=2),
    replace(PASSES, virtual=2, send_s=0.05, sender_waits=False),
    named("zb-h1", weight_s=(0.0,) * 4),
]


@pytest.mark.parametrize("passes", ORDERS, ids=lambda passes: passes.schedule)
def test_a_device_runs_passes_one_at_a_time_and_completely(passes: Passes) -> None:
    simulated_passes = simulate(passes, passes.microbatches)
    work = {(letter, each.part, each.microbatch) for each in simulated_passes for letter in each.kind}
    assert len(work) == sum(len(each.kind) for each in simulated_passes)
    parts = SCHEDULES[passes.schedule].parts or passes.virtual
    assert len(work) == 3 * 4 * parts * passes.microbatches
    for device in range(4):
        device_passes = [each for each in simulated_passes if each.device == device]
        assert all(before.end_s <= after.start_s + 1e-12 for before, after in pairwise(device_passes))


@pytest.mark.parametrize("passes", ORDERS, ids=lambda passes: passes.schedule)
def test_no_pass_starts_before_its_input_is_there(passes: Passes) -> None:
    done, pipe = simulate(passes, passes.microbatches), pipe_of(passes)
    passes_by_key = {(letter, each.part, each.microbatch): each for each in done for letter in each.kind}
    for (kind, part, microbatch), each in passes_by_key.items():
        place, needed_pass = part, each
        if kind == "F" and place:
            needed_pass = passes_by_key["F", part - 1, microbatch]
        elif kind == "B":
            needed_pass = passes_by_key["F", part, microbatch]
            if place < len(pipe.devices) - 1:
                needed_pass = passes_by_key["B", part + 1, microbatch]
        elif kind == "W" and each.kind == "W":
            needed_pass = passes_by_key["B", part, microbatch]
        if needed_pass is not each:
            delay_s = 0.0 if needed_pass.device == each.device or passes.sender_waits else passes.send_s
            assert each.start_s >= needed_pass.end_s + delay_s - 1e-12


@pytest.mark.parametrize("schedule", EXECUTABLE)
@pytest.mark.parametrize("send", [0.0, 0.05])
def test_the_simulation_has_the_duration_of_the_schedules_formula(schedule: str, send: float) -> None:
    for count in (8, 16, 40):
        passes = named(schedule, send_s=send, microbatches=count)
        simulated_s = step_seconds(passes, simulate(passes, count))
        is_exact = schedule in ("1f1b", "gpipe", "interleaved")
        assert simulated_s == pytest.approx(pipeline_seconds(passes), rel=1e-9 if is_exact else 0.02)


def candidate(schedule: str, virtual: int | None = None) -> tuple[Passes, float]:
    """Return the passes of a candidate on four stages, and the seconds that its prediction says of its pipeline."""
    settings = {} if schedule == "interleaved" else {"pipeline_schedule": schedule}
    task = small.task(replace(small.EXPERTS, num_layers=8), devices=4, settings=settings, global_batch_size=16)
    costs = small.costs(task)
    columns = WORKLOAD.columns(
        task,
        {"pipeline_model_parallel_size": 4, "micro_batch_size": 1, "num_layers_per_virtual_pipeline_stage": virtual},
    )
    (passes,) = WORKLOAD.pipelines(task, columns, costs)
    assert passes is not None
    parts = WORKLOAD.predict(task, columns, costs).time_s
    parts_s = [float(seconds[0]) for name, seconds in parts.items() if name not in ("dp_comm_exposed_s", "optimizer_s")]
    return passes, sum(parts_s)


@pytest.mark.parametrize(
    ("schedule", "virtual"), [("interleaved", 1), *[(name, None) for name in SCHEDULES if name != "1f1b"]]
)
def test_passes_of_a_candidate_make_up_its_predicted_step(schedule: str, virtual: int | None) -> None:
    passes, pipeline_s = candidate(schedule, virtual)
    assert passes.schedule == schedule
    assert len(passes.forward_s) == 4
    assert passes.microbatches == 16
    assert passes.virtual == (2 if virtual else 1)
    assert bool(passes.paired_s) is schedule.startswith("dualpipe")
    assert passes.predicted_s == pytest.approx(pipeline_s, rel=1e-6)
    if schedule in EXECUTABLE:
        simulated_s = step_seconds(passes, simulate(passes, passes.microbatches))
        assert simulated_s == pytest.approx(pipeline_s, rel=0.035)
