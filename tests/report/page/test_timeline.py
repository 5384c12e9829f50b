"""The timeline of a pipeline keeps what a pipeline must, lasts as long as the step's formula says, and is drawn so."""

from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any

import pytest

from flagcore.domain.prediction import Passes
from flagcore.engines.megatron.adapter import WORKLOAD
from flagcore.engines.training.schedules import pipeline_seconds
from flagcore.physics.pipelines import SCHEDULES, ExecutedPass, pipe_of, simulate, step_seconds
from flagcore.report.page.blocks import Chart, Section, Table, Text
from flagcore.report.page.timeline import KINDS, Timeline, pipeline
from tests import small
from tests.report.page.reading import run_data

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
def test_the_timeline_has_the_duration_of_the_schedules_formula(schedule: str, send: float) -> None:
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


def test_only_the_first_micro_batches_of_a_long_step_are_drawn() -> None:
    def drawn_of(passes: Passes) -> int | None:
        return Timeline(passes).microbatches_to_show()

    long_passes = replace(PASSES, microbatches=512)
    assert drawn_of(long_passes) == drawn_of(replace(long_passes, virtual=4)) == 8
    assert drawn_of(replace(PASSES, microbatches=2)) == 2
    assert drawn_of(replace(long_passes, forward_s=(1.0,) * 64, backward_s=(1.0,) * 64)) is None
    sixteen_batches = {"forward_s": (1.0,) * 16, "backward_s": (2.0,) * 16, "weight_s": (1.0,) * 16}
    assert all(drawn_of(replace(long_passes, schedule=name, **sixteen_batches)) == 32 for name in SCHEDULES)


def section_of(passes: Passes) -> Section:
    as_read = {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(passes).items()}
    section = pipeline(run_data({"pipelines": [as_read]}))
    assert section is not None
    return section


def drawn_of(chart: Chart) -> list[tuple[str, str, float, float, str]]:
    """Return row, kind, start, length and number of each bar."""
    return [
        (row, trace["name"], start, length, number)
        for trace in chart.traces
        for row, start, length, number in zip(trace["y"], trace["base"], trace["x"], trace["text"], strict=True)
    ]


@pytest.mark.parametrize("schedule", EXECUTABLE)
def test_each_schedule_is_drawn_pass_by_pass_with_its_figures(schedule: str) -> None:
    passes = named(schedule)
    (chart,) = section_of(passes).blocks
    assert isinstance(chart, Chart)
    simulated_passes = simulate(passes, 8)

    def bar(each: ExecutedPass) -> tuple[str, str, float, float, str]:
        return f"stage {each.device}", KINDS[each.kind], each.start_s, each.end_s - each.start_s, f"{each.microbatch}"

    assert sorted(drawn_of(chart)) == sorted(map(bar, simulated_passes))
    assert ("W" in {each.kind for each in simulated_passes}) is SCHEDULES[schedule].splits_backward
    assert len({trace["marker"]["pattern"]["shape"] for trace in chart.traces}) == len(chart.traces)
    busy_s = [sum(each.end_s - each.start_s for each in simulated_passes if each.device == r) for r in range(4)]
    place = chart.table.headings.index("~busy, s")
    assert [each[place].value for each in chart.table.rows] == pytest.approx(busy_s)
    assert f"Schedule: {'1f1b' if schedule == 'interleaved' else schedule}," in chart.summary, (
        "one virtual stage is 1F1B"
    )
    assert ("longest stage" in chart.summary) is SCHEDULES[schedule].post_validation


def test_the_number_of_drawn_micro_batches_is_shown() -> None:
    (chart,) = section_of(named("zb-h1", microbatches=400)).blocks
    assert isinstance(chart, Chart)
    assert ", 400 micro-batches." in chart.summary
    assert "a step of 8 micro-batches" in chart.summary
    (chart,) = section_of(named("zb-h1", microbatches=40_000)).blocks
    assert isinstance(chart, Chart)
    assert "8 of 40000 micro-batches" in chart.summary
    assert "formula" not in chart.summary


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name not in EXECUTABLE])
def test_a_schedule_with_another_order_has_its_simulated_time(schedule: str) -> None:
    reason, seconds = section_of(named(schedule)).blocks
    assert isinstance(reason, Text)
    assert schedule in reason.text
    assert isinstance(seconds, Table)
    assert [row[1].value for row in seconds.rows] == list(PASSES.forward_s)


def test_a_missing_chart_has_a_reason() -> None:
    long_times = dict.fromkeys(("forward_s", "backward_s", "weight_s"), (1.0,) * 64)
    message, _ = section_of(replace(named("zb-h1", microbatches=512), **long_times)).blocks
    assert isinstance(message, Text)
    assert "too many passes" in message.text
