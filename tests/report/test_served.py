"""What a person reads of a run: servers and their limits, rivals of the best, and repeats without a measurement."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from flagcore.domain.metrics import HighestLoad
from flagcore.domain.plan import Counts, Plan, failed_repeats
from flagcore.domain.trial import Role, Trial, TrialState
from flagcore.report.result import read_trial, result
from flagcore.report.run import RunData
from flagcore.report.run_text import result_text
from flagcore.report.summary import MAX_RIVALS, no_best
from flagcore.report.text import candidate_line, highest_text
from flagcore.tuner.search_state import speedup
from flagcore.tuner.stages.learn import learn
from tests import tasks
from tests.serving_trials import LIMITS, OBJECTIVE, trial

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
    return RunData.from_json(result(plan, "run"), Path("run"), folder_name="run", knobs=plan.knobs)


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
        speedup=speedup(search_state),
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

    (note,) = result(found(64), "r")["notes"]
    assert note.startswith("p99, p95 of 64 requests")
    assert f"Note: {note}." in plan_text(found(64))
    assert "p90 of 8 requests" in plan_text(found(8))
    assert result(found(400), "r")["notes"] == []


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
    found = result(plan(dataclasses.replace(BASELINE, measurement=measured)), "r")
    read = read_trial(json.loads(json.dumps(found["baseline"]))).measurement
    assert read is not None
    assert read.highest == highest
    assert set(re.findall(r"[0-9.]+[0-9]", highest_text(2.4, read.highest))) == numbers


def test_the_best_is_reported_with_the_cost_of_the_limits() -> None:
    text = plan_text(plan(BASELINE, trial(1, 200.0, ttft=1.5), trial(2, 160.0, ttft=0.9)))
    assert "160 output tok/s" in text
    assert "+60.0% output tok/s over " in text
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
    assert "-50.0% TTFT p99 over " in text
    assert result(served_plan, "x")["objective"] == {"name": objective, "direction": "min"}


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
