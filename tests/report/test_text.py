"""What a person reads of a run, of servers and their limits, and of one candidate, in tables that fit a width."""

import dataclasses
import json
import re
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from flagcore.domain.knob import Effect, Knob
from flagcore.domain.metrics import HighestLoad
from flagcore.domain.plan import Counts, Plan, failed_repeats
from flagcore.domain.prediction import Labels
from flagcore.domain.records import GIB, read_prediction
from flagcore.domain.trial import Role, Trial, TrialState
from flagcore.report.candidate_report import differs_text
from flagcore.report.explanation import causes_text, differences_text, memory_parts, needs_text, prediction_text
from flagcore.report.formats import fitted, render, table
from flagcore.report.result import Result, TrialResult
from flagcore.report.run import RunData
from flagcore.report.run_text import result_text
from flagcore.report.summary import MAX_RIVALS, no_best
from flagcore.report.text import candidate_columns, candidate_line, funnel, highest_text, values_text
from flagcore.tuner.search_state import speedup
from flagcore.tuner.stages.learn import learn
from tests import tasks
from tests.serving_trials import LIMITS, OBJECTIVE, trial


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


SERVED: dict[str, Any] = {
    "output_tokens_per_s": 1500.0,
    "ttft_s": {"mean": 0.1, "p50": 0.09, "p90": 0.2, "p99": 0.3},
    "objective": {"value": 1500.0, "low": 1000.0, "high": 1800.0},
    "time": {"queue_s": 0.5, "prefill_s": 0.25, "decode_s": 0.25, "collectives_s": 0.0, "host_s": 0.0},
    "memory": {
        "fits": True,
        "capacity_gib": 80.0,
        "static_gib": 60.0,
        "activation_gib": 2.0,
        "device_used_gib": 70.0,
        "kv_cache_gib": 40.0,
        "kv_cache_tokens": 320000.0,
    },
}


def test_a_server_is_described_with_units() -> None:
    text = prediction_text(SERVED, Labels())
    assert "~1,500 output tokens/s" in text
    assert "Mean time of a request: ~1 s" in text
    assert ["queue", "0.5", "50.0%", "waiting"] in [line.split()[:4] for line in text.splitlines()]
    assert "weights ~20.00, activations and graphs ~2.00, KV cache (320,000 tokens" in text
    assert "~70.00 / 80.00 GiB (fits)" in text
    assert "{" not in text
    assert "_s" not in text


def test_parts_of_memory_add_up_for_training_and_for_servers() -> None:
    training = {
        "static_gib": 6.0,
        "activation_gib": 2.0,
        "peak_allocated_gib": 8.5,
        "reserved_gib": 9.0,
        "device_used_gib": 10.0,
        "capacity_gib": 8.0,
        "worst_stage": 3,
        "components": {"ffn": {"params": 1.0, "weights_gib": 2.0, "optimizer_gib": 3.5, "activation_gib": 2.0}},
    }
    found = read_prediction({"memory": training})
    parts = memory_parts(found)
    assert sum(parts.values()) == 10.0 * GIB
    assert parts["other states"] == 0.5 * GIB
    text = needs_text(found)
    assert all(each in text for each in ("10.00 / 8.00 GiB", "stage 3: weights 2.00, "))
    server = replace(found, components={}, figures={"kv_cache_bytes": 4.0 * GIB})
    assert sum(memory_parts(server).values()) == 10.0 * GIB
    assert memory_parts(server)["weights"] == 2.0 * GIB
    assert "stage" not in needs_text(server)


STEP = "tokens_per_second_per_device"
TIME = {"compute_s": (1.0, 0.7), "tp_comm_s": (0.5, 0.1), "pp_bubble_s": (0.0, 0.2)}


def text(
    seconds: tuple[float, float], predicted: tuple[float | None, float], objective: str = STEP, **more: bool
) -> str:
    """Return the causes of a time, with TIME as the parts of the predictions."""
    times = [{part: pair[place] for part, pair in TIME.items()} for place in (0, 1)]
    before, after = (replace(tasks.prediction(**t), step_time_s=s) for t, s in zip(times, predicted, strict=True))
    return causes_text(objective, "the baseline", seconds, (before, after), "measured", **more)


def test_parts_with_the_sign_of_the_change_come_first_and_those_against_it_are_named_as_such() -> None:
    assert differences_text(TIME, -1.0) == "tp_comm_s -0.4 s, compute_s -0.3 s; the other way: pp_bubble_s +0.2 s"
    assert differences_text({**TIME, "pp_bubble_s": (0.0, 0.03)}, -1.0) == "tp_comm_s -0.4 s, compute_s -0.3 s"
    assert differences_text({"compute_s": (1.0, 1.0)}, -1.0) == differences_text({"compute_s": (1.0, 0.5)}, 1.0) == ""


def test_the_parts_are_listed_only_if_the_prediction_explains_half_of_the_measured_difference() -> None:
    assert "-0.4 s" not in text((2.1, 1.0), (1.5, 1.0))
    assert text((2.1, 1.0), (1.5, 1.0)).endswith("of the baseline (measured).")
    faster = text((1.6, 1.2), (1.5, 1.0))
    assert "-25.0%" in faster
    assert "-0.4 s" in faster
    assert faster.index("-0.4 s") < faster.index("-0.3 s")
    assert "-0.4 s" not in text((1.2, 1.6), (1.5, 1.0))
    assert "-0.4 s" not in text((1.6, 1.2), (None, 1.0))


@pytest.mark.parametrize("objective", [STEP, "output_tokens_per_s"])
def test_the_speedup_of_rounds_is_the_only_one(objective: str) -> None:
    causes = text((1.6, 1.2), (1.5, 1.0), objective, has_rounds=True)
    assert causes.count("%") == 1
    assert "125%" in causes  # of the measured difference is predicted
    assert "-0.4 s" in causes


def test_a_rate_is_compared_as_a_rate() -> None:
    assert "+100.0%" in text((0.5, 0.25), (0.5, 0.25), "output_tokens_per_s")
    assert "-50.0%" in text((0.5, 0.25), (0.5, 0.25), "ttft_s.p99")


COUNTS = Counts(
    combinations=3,
    illegal={},
    merged=0,
    candidates=3,
    does_not_fit=0,
    pruned={},
    measured=3,
    stopped=0,
    failed=0,
    untried=0,
)


def run_data(plan: Plan) -> RunData:
    return RunData.from_json(Result.write(plan, "run"), Path("run"), folder_name="run", knobs=plan.knobs)


def plan_text(plan: Plan) -> str:
    return result_text(run_data(plan))


def reason(plan: Plan) -> str:
    return no_best(run_data(plan))


def plan(*trials: Trial, objective: str = OBJECTIVE, limits: dict[str, float] = LIMITS) -> Plan:
    search_state = learn(trials)
    return Plan(
        chip="x",
        devices=8,
        objective=objective,
        counts=COUNTS,
        trials=search_state.trials,
        repeats=search_state.repeats,
        baseline=search_state.baseline,
        best=search_state.best,
        speedup=speedup(search_state, objective),
        stopped_because="all is tried",
        fastest=search_state.fastest,
        limits=limits,
    )


def test_percentiles_of_few_requests_are_reported_as_such() -> None:
    def found(answered: int) -> Plan:
        one = trial(0, 100.0, role=Role.BASELINE)
        assert one.measurement is not None
        points = tuple({**point, "answered": answered} for point in one.measurement.points or ({},))
        return plan(dataclasses.replace(one, measurement=dataclasses.replace(one.measurement, points=points)))

    (note,) = Result.write(found(64), "r")["notes"]
    assert note.startswith("p99, p95 of 64 requests")
    assert f"Note: {note}." in plan_text(found(64))
    assert "p90 of 8 requests" in plan_text(found(8))
    assert Result.write(found(400), "r")["notes"] == []


BASELINE = trial(0, 100.0, role=Role.BASELINE)


@pytest.mark.parametrize(
    ("highest", "numbers"),
    [
        (HighestLoad(met=2.4, untested=3.6), {"2.4"}),
        (HighestLoad(met=2.4, exceeded=9.7, untested=3.6), {"2.4", "9.7"}),
        (HighestLoad(met=2.4, exceeded=2.5), {"2.4"}),
    ],
)
def test_the_highest_load_is_reported_with_what_was_not_tested(highest: HighestLoad, numbers: set[str]) -> None:
    assert BASELINE.measurement is not None
    figures = {**BASELINE.measurement.figures, "highest_load": 2.4}
    measured = dataclasses.replace(BASELINE.measurement, figures=figures, highest=highest)
    found = Result.write(plan(dataclasses.replace(BASELINE, measurement=measured)), "r")
    read = TrialResult.read(json.loads(json.dumps(found["baseline"]))).measurement
    assert read is not None
    assert read.highest == highest
    assert set(re.findall(r"[0-9.]+[0-9]", highest_text(2.4, read.highest))) == numbers


def test_the_best_is_reported_with_the_cost_of_the_limits() -> None:
    text = plan_text(plan(BASELINE, trial(1, 200.0, ttft=1.5), trial(2, 160.0, ttft=0.9)))
    assert "160 output tok/s" in text
    assert "+60.0% output tok/s" in text
    assert "Within latency limits: p99 TTFT <= 1 s" in text
    assert re.search(r"p99 TTFT 0.9 s, 90% of 1 s", text)
    assert "trial 1 reached 200 output tok/s (ttft_s.p99 = 1.5 s)" in text


def test_the_cost_of_limits_counts_load_points_that_break_them() -> None:
    best = trial(1, 200.0)
    assert best.measurement is not None
    few, many = {"concurrency": 4, **best.measurement.figures}, {"concurrency": 16, "output_tokens_per_s": 350.0}
    points = (few, {**many, "ttft_s.p99": 1.7, "tpot_s.p50": 0.02})
    served_plan = plan(
        BASELINE, dataclasses.replace(best, measurement=dataclasses.replace(best.measurement, points=points))
    )
    text = plan_text(served_plan)
    assert "200 output tok/s at 4 clients" in text
    assert "trial 1 reached 350 output tok/s at 16 clients (ttft_s.p99 = 1.7 s)" in text
    assert "Pareto front" in text


def test_unreachable_limits_name_the_nearest_candidate() -> None:
    served_plan = plan(trial(0, 100.0, ttft=3.0, role=Role.BASELINE), trial(1, 200.0, ttft=1.5))
    assert "p99 TTFT <= 1 s; nearest: trial 1 (parallel 1)" in reason(served_plan)
    assert "ttft_s.p99 is 1.5 s, over 1 s" in reason(served_plan)
    assert "none within the limits p99 TTFT <= 1 s" in plan_text(served_plan)


def test_a_trial_that_broke_limits_only_in_a_repeat_is_reported() -> None:
    first_trial, repeat_trial = trial(1, 200.0), dataclasses.replace(trial(2, 190.0, ttft=1.5), role=Role.REPEAT)
    repeat_trial = dataclasses.replace(repeat_trial, candidate=first_trial.candidate)
    served_plan = plan(trial(0, 100.0, ttft=3.0, role=Role.BASELINE), first_trial, repeat_trial)
    assert served_plan.best is None
    assert "exceeded when repeated (trial 2: ttft_s.p99 is 1.5 s, over 1 s)" in reason(served_plan)


def test_a_latency_objective_is_reported_in_seconds_and_less_is_better() -> None:
    objective = "ttft_s.p99"
    base, best = (trial(n, 10.0, ttft=t, objective=objective, limits={}) for n, t in ((0, 0.8), (1, 0.4)))
    served_plan = plan(dataclasses.replace(base, role=Role.BASELINE), best, objective=objective, limits={})
    text = plan_text(served_plan)
    assert "0.4 TTFT p99 s" in text
    assert "-50.0% TTFT p99" in text
    assert Result.write(served_plan, "x")["objective"] == {"name": objective, "direction": "min"}


def test_a_rate_above_ten_thousand_is_a_plain_number() -> None:
    found = dataclasses.replace(tasks.prediction(), figures={"output_tokens_per_s": 10_891.4})
    assert "10,891" in candidate_line("baseline", {}, found, {})


@pytest.mark.parametrize(
    ("rivals", "reported"),
    [
        (0, None),
        (1, "trial 1 (parallel 1)"),
        (MAX_RIVALS + 2, "; ".join([*(f"trial {n} (parallel {n})" for n in range(1, 1 + MAX_RIVALS)), "and 2 more"])),
    ],
)
def test_every_rival_is_counted_whether_or_not_it_ran_again(rivals: int, reported: str | None) -> None:
    found = plan(BASELINE, *(trial(number, 99.0 - number) for number in range(1, 9)), trial(9, 200.0))
    text = plan_text(dataclasses.replace(found, rivals=found.trials[1 : 1 + rivals]))
    assert (f"not significantly faster than {reported}." in text) if reported else ("significantly" not in text)


def test_repeats_without_a_measurement_are_reported_outside_the_funnel() -> None:
    repeat = dataclasses.replace(trial(1, 100.0, role=Role.REPEAT), candidate=BASELINE.candidate)
    late = dataclasses.replace(repeat, number=2, state=TrialState.TIMED_OUT, measurement=None, reason="still running")
    assert failed_repeats([repeat, late]) == {2: "timed_out"}
    assert "1 failed repeat (trial 2 timed out)" in plan_text(plan(BASELINE, repeat, late))
    assert "failed repeat" not in plan_text(plan(BASELINE, repeat))


def test_legal_candidates_that_are_not_tried_are_not_called_illegal() -> None:
    counts = dataclasses.replace(plan(BASELINE).counts, illegal={"cards": 2, "far_too_slow": 1})
    assert [each.split()[0] for each in funnel(counts).splitlines()[1:3]] == ["illegal:", "too"]
