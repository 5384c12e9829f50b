"""How long a run may go on, the time limits of trials, and the reasons to start no trial."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flagcore_testing.toy import ENGINE, Toy

from flagcore.contracts import SearchContext
from flagcore.domain.chip import Fact
from flagcore.domain.space import Candidate
from flagcore.domain.spec import Control, Task
from flagcore.domain.steps import SLACK, UNKNOWN_SECONDS
from flagcore.domain.trial import PROBE, RUN, Role, Shortened, TimeLimit, Trial, TrialState
from flagcore.i18n import choose, from_record
from flagcore.tuner.budget import (
    REPEAT_SLACK,
    START_SLACK,
    cap_limit,
    has_time_to_repeat,
    repeats_seconds,
    seconds_left,
    share_of_time,
    stop_reason,
    time_limit,
    why_no_trial,
    with_target,
)
from flagcore.tuner.feasibility import USUAL_START, search_time
from flagcore.tuner.search_state import SearchState
from flagcore.tuner.stages.build import build
from flagcore.tuner.stages.learn import learn
from tests import tasks
from tests.tuner.strategies.contexts import predictions, search_context, trial_of

TASK = tasks.task(control=Control(train_iters=5))
START = 300.0


def planned(value: float = 10.0, high: float = 12.0, **extra: Any) -> Trial:
    predicted = replace(tasks.prediction(compute_s=value), high_s=high)
    return tasks.trial(9, tasks.candidate(), None, state=TrialState.RUNNING, predicted=predicted, **extra)


def measured_trial(step: float, seconds: float, scaled_from: float | None = None) -> Trial:
    done = tasks.trial(9, tasks.candidate(), step, predicted=planned().predicted, duration_s=seconds)
    return replace(done, measurement=replace(done.measurement, scaled_from=scaled_from))


def seconds(trial: Trial, *earlier: Trial, task: Task = TASK, launches: int = 1) -> float:
    trial = replace(trial, fidelity=RUN if launches == 1 else PROBE)
    return time_limit(tasks.platform(task), trial, earlier, launches).seconds


@pytest.mark.parametrize(
    ("control", "step", "seconds", "words"),
    [
        ({}, {"value": 10.0, "high": 12.0}, START + SLACK * 5 * 12.0, ["300 s to start", "5 steps"]),
        ({"max_time_per_task": 70.0}, {"value": 1e3, "high": 1e4}, 70.0, ["max_time_per_task"]),
        ({}, None, UNKNOWN_SECONDS, ["predicted"]),
    ],
)
def test_a_limit_is_the_setting_or_the_start_and_the_steps_and_names_its_origin(
    control: dict[str, float], step: dict[str, float] | None, seconds: float, words: list[str]
) -> None:
    task = tasks.task(control=Control(train_iters=5, **control))
    trial = planned(**step) if step else replace(planned(), predicted=None)
    limit = time_limit(tasks.platform(task), trial, ())
    assert limit.seconds == seconds
    assert all(each in limit.because for each in words)


def test_steps_slower_than_predicted_and_longer_starts_make_later_limits_longer() -> None:
    assert seconds(planned(), measured_trial(36.0, 200.0)) == START + SLACK * 5 * 36.0  # three times the high end
    assert seconds(planned(), measured_trial(6.0, 100.0)) == START + SLACK * 5 * 12.0
    assert seconds(planned(), measured_trial(10.0, 450.0)) == START_SLACK * 400.0 + SLACK * 5 * 12.0
    unmeasured = replace(planned(), state=TrialState.TIMED_OUT, finished_steps_s=(100.0,), duration_s=120.0)
    assert seconds(planned(), unmeasured) == START + SLACK * 5 * 100.0


def test_the_ranks_of_a_probe_add_up_and_the_start_of_a_server_is_longer() -> None:
    assert seconds(planned(), launches=3) == 3 * (START + SLACK * 5 * 12.0)
    serving = replace(TASK, spec=replace(TASK.spec, work=tasks.Service(engine="server")))
    assert time_limit(tasks.platform(serving, engine=Toy()), planned(), ()).seconds == 1200.0


def test_shortened_steps_get_less_time_and_have_their_own_start() -> None:
    short = Shortened(global_batch_size=2, whole=8, scale=4.0, low=3.5, high=4.1)
    assert seconds(planned(shortened=short)) == START + SLACK * 5 * 3.0
    assert seconds(planned(), measured_trial(10.0, 412.5, scaled_from=2.5)) == START_SLACK * 400.0 + SLACK * 5 * 12.0


def test_the_rest_of_the_run_is_the_limit_if_that_is_less() -> None:
    limit = TimeLimit(seconds=50.0, because="x")
    assert cap_limit(limit, 60.0, "max_time") is limit
    assert cap_limit(limit, 20.0, "max_time").seconds == 20.0
    assert cap_limit(limit, -5.0, "max_time").seconds == 1.0
    assert "max_time" in cap_limit(limit, 20.0, "max_time").because


@pytest.mark.parametrize("max_time", [None, 100.0])
def test_a_search_takes_at_most_its_limits(max_time: float | None) -> None:
    task = tasks.task(control=Control(train_iters=5, max_trials=2, max_time=max_time, max_step_time=3.0))
    predictions = ENGINE.predict(task, ENGINE.columns(task, {}), tasks.costs(task))
    several = replace(predictions.take(np.zeros(3, dtype=np.int64)), step_time_s=np.array([1.0, 4.0, 9.0]))
    several = replace(several, high_s=several.step_time_s * 2)
    space = replace(build(ENGINE.axes(task), (), ()), rows=np.arange(3))
    found = search_time(tasks.problem(tasks.platform(task), space, several))
    repeats = 2
    assert (found.trials, found.repeats) == (2, repeats)
    assert found.measuring_s == 5 * (1.0 + 3.0 + repeats * 4.0)
    assert found.starting_s == pytest.approx((2 + repeats) * USUAL_START * START)
    highest = (2 + repeats) * START + SLACK * 5 * (2.0 + 3.0 + repeats * 8.0)
    assert found.at_most_s == (max_time or highest)


@pytest.mark.parametrize(
    ("share", "expected"),
    [
        (90.0, 90.0),  # its share of the search's time
        (10.0, 60.0),  # as long as predicted
        (float("inf"), 190.0),  # the limit without the reserve
    ],
)
def test_a_trial_has_a_target_within_its_limit(share: float, expected: float) -> None:
    limit = with_target(TimeLimit(seconds=200.0, because=""), TASK, planned(), share, ())
    assert limit.target_s == pytest.approx(expected)


KNOWN = predictions()
FASTEST = float(KNOWN.step_time_s.min())


def after(*trials: Trial, rates: dict[str, float] | None = None, **control: Any) -> SearchContext:
    """A context whose trials have a limit of 100 fast steps each, on a chip with some rates."""
    context = search_context(KNOWN, trials)
    spec = replace(context.task.spec, control=Control(**{"max_time_per_task": 100 * FASTEST, **control}))
    facts = {name: Fact(value=rate, source=tasks.SOURCE) for name, rate in (rates or {"bf16": 1e9}).items()}
    group = context.task.cluster.groups[0]
    group = replace(group, chip=replace(group.chip, dense_flops_per_second=facts))
    task = replace(context.task, spec=spec, cluster=replace(context.task.cluster, groups=(group,)))
    return replace(tasks.with_task(context, task), seconds_left=control.get("max_time"))


def cut_short(row: int, times: float, **changes: Any) -> Trial:
    """A trial whose only step took `times` as long as predicted."""
    step = float(KNOWN.step_time_s[row])
    trial = replace(trial_of(row, None, row), predicted=tasks.prediction(compute_s=step))
    changes = {"duration_s": times * step, "finished_steps_s": (times * step,), **changes}
    return replace(trial, state=TrialState.TIMED_OUT, **changes)


def test_a_search_ends_if_no_candidate_has_time_for_two_steps() -> None:
    assert why_no_trial(after()) is None
    assert why_no_trial(after(trial_of(0, 1.0, 0))) is None
    assert why_no_trial(after(cut_short(0, 20.0))) is None
    assert why_no_trial(after(cut_short(0, 2000.0)))
    assert why_no_trial(after(cut_short(0, 2000.0), max_time_per_task=None)) is None
    assert why_no_trial(after(cut_short(0, 2000.0), max_time_per_task=None, max_time=9 * FASTEST))
    hung = [cut_short(row, 1.0, silent_s=9.0, duration_s=10.0) for row in (0, 1)]
    assert why_no_trial(after(hung[0])) is None
    assert why_no_trial(after(*hung))
    assert why_no_trial(after(trial_of(2, 1.0, 2), *hung)) is None
    hung = [replace(each, silent_s=0.0, duration_s=100 * FASTEST, finished_steps_s=()) for each in hung]  # no step
    assert why_no_trial(after(hung[0])) is None
    assert "auto_tuner.control.max_time_per_task: " in why_no_trial(after(*hung))
    assert why_no_trial(replace(after(*hung, max_time_per_task=None, max_time=1e9), seconds_left=0.0)) is None


def test_a_search_of_servers_ends_if_two_loads_had_too_little_time() -> None:
    def why(*trials: Trial) -> str | None:
        context = after(*trials)
        spec = replace(context.task.spec, work=tasks.Service(engine="server"))
        return why_no_trial(tasks.with_task(context, replace(context.task, spec=spec)))

    longest, other = (cut_short(row, 20.0, reason=f"row {row}", duration_s=9.0 - row) for row in (0, 1))
    assert why(longest) is None
    assert why(trial_of(2, 1.0, 2), longest, other) is None
    assert "row 0" in str(why(longest, other))


def test_the_advice_is_computed() -> None:
    slow = cut_short(0, 2000.0, telemetry={"cores": 2.0, "cores_used_by_others": 1.8})
    reason = why_no_trial(after(slow, max_time=100 * FASTEST))
    steps = slow.finished_steps_s[0] * Control().train_iters
    advised = {
        key: float(reason.split(f"auto_tuner.control.{key}: ")[1].split()[0])
        for key in ("max_time_per_task", "max_time")
    }
    assert steps < advised["max_time_per_task"] < 1.3 * steps + 20
    assert advised["max_time"] > 3 * advised["max_time_per_task"]
    assert "1.8 of 2 cores" in reason
    with_language = from_record(reason, reason.record)
    choose("zh")
    try:
        assert from_record(reason, reason.record) != with_language
    finally:
        choose("en")


def test_a_much_faster_precision_ends_a_search_without_time_for_its_steps() -> None:
    rates = {"bf16": 1e9, "fp32": 48e9}
    assert "train.precision: fp32 (48 times" in why_no_trial(after(cut_short(0, 20.0), rates=rates))
    assert why_no_trial(after(trial_of(0, 1.0, 0), rates=rates)) is None
    assert why_no_trial(after(cut_short(0, 20.0), rates={"bf16": 9e9, "fp32": 1e9})) is None


def test_the_remaining_time_is_shared_by_trials_and_repeats() -> None:
    control = Control(repeats=1, max_time=600.0)
    before, baseline = learn(()), replace(trial_of(0, 1.0, 0), role=Role.BASELINE)
    assert share_of_time(control, before, Role.BASELINE, 100, None) == np.inf
    assert share_of_time(control, before, Role.BASELINE, 100, 600.0) == 100.0
    assert share_of_time(control, before, Role.BASELINE, 1, 600.0) == 200.0
    later = learn([baseline, *(trial_of(row, 1.0 - row / 10, row) for row in range(1, 6))])
    assert share_of_time(control, later, Role.SEARCH, 100, 300.0) == 100.0
    assert share_of_time(control, later, Role.REPEAT, 100, 300.0) == pytest.approx(150.0)


CONTROL = Control(max_trials=4, max_time=100.0, max_time_per_task=30.0, repeats=1)


def trial(number: int, speed: float | None = 1.0, *, role: Role = Role.SEARCH, seconds: float = 10.0) -> Trial:
    step, candidate = 1.0 / speed if speed else None, Candidate.of({"micro_batch_size": number})
    return tasks.trial(number, candidate, step, rate=speed, role=role, duration_s=seconds)


def search_state(*trials: Trial) -> SearchState:
    return learn(trials)


def test_the_number_of_trials_ends_a_run() -> None:
    known = [trial(0, role=Role.BASELINE), *(trial(n) for n in (1, 2, 3))]
    assert stop_reason(CONTROL, search_state(*known[:3]), 0.0) is None
    assert stop_reason(CONTROL, search_state(*known), 0.0) == "max_trials = 4 reached"


def test_an_interrupted_trial_uses_no_budget() -> None:
    known = [trial(n) for n in range(4)]
    known[3] = replace(known[3], state=TrialState.INTERRUPTED, measurement=None)
    assert stop_reason(CONTROL, search_state(*known), 0.0) is None


def test_time_is_reserved_for_the_repeats_and_one_more_trial() -> None:
    known = search_state(trial(0, 1.0, role=Role.BASELINE, seconds=20.0), trial(1, 2.0, seconds=10.0))
    assert repeats_seconds(CONTROL, known) == 30.0 * REPEAT_SLACK
    assert stop_reason(CONTROL, known, 79.0 - 30.0 * REPEAT_SLACK) is None
    assert stop_reason(CONTROL, known, 80.0 - 30.0 * REPEAT_SLACK) is not None


def test_time_is_also_reserved_for_the_repeats_of_rivals() -> None:
    known = search_state(trial(0, 1.0, role=Role.BASELINE), trial(1, 2.0), trial(2, 1.99))
    assert repeats_seconds(CONTROL, known) == 30.0 * REPEAT_SLACK
    assert seconds_left(CONTROL, known, 3, 0.0) == 30.0 * REPEAT_SLACK
    one_done = search_state(
        *known.trials, replace(trial(3, 1.0, role=Role.REPEAT), candidate=known.trials[0].candidate)
    )
    assert repeats_seconds(CONTROL, one_done) == 20.0 * REPEAT_SLACK
    assert repeats_seconds(replace(CONTROL, repeats=0), known) == 0.0


def test_repeats_that_would_not_end_in_time_do_not_start() -> None:
    most = 10.0 * REPEAT_SLACK
    assert has_time_to_repeat(CONTROL, trial(0, seconds=10.0), 100.0 - most)
    assert not has_time_to_repeat(CONTROL, trial(0, seconds=10.0), 101.0 - most)
    assert has_time_to_repeat(replace(CONTROL, max_time=None), trial(0, seconds=10.0), 1e9)


def test_a_hang_leaves_time_for_the_others() -> None:
    known = search_state(
        trial(0, 1.0, role=Role.BASELINE), replace(trial(1, None, seconds=30.0), state=TrialState.TIMED_OUT)
    )
    assert stop_reason(CONTROL, known, 80.0) is None


def test_no_trial_starts_in_the_last_seconds_after_a_timeout() -> None:
    known = search_state(replace(trial(0, None, role=Role.BASELINE, seconds=80.0), state=TrialState.TIMED_OUT))
    assert stop_reason(CONTROL, known, 80.0) is None
    assert vars(stop_reason(CONTROL, known, 99.0))["values"] == {"elapsed": 99.0, "seconds": 100.0}


def test_it_ends_early_if_all_trials_fail() -> None:
    assert stop_reason(replace(CONTROL, max_trials=99), search_state(*(trial(n, None) for n in range(5))), 0.0) == (
        "the first 5 trials all failed"
    )
    memory = [replace(trial(n, None), state=TrialState.OUT_OF_MEMORY) for n in range(5)]
    assert stop_reason(replace(CONTROL, max_trials=99), search_state(*memory), 0.0) is None
    one_worked = (trial(0), *(trial(n, None) for n in range(1, 6)))
    assert stop_reason(replace(CONTROL, max_trials=99), search_state(*one_worked), 0.0) is None


def test_imported_trials_use_no_budget() -> None:
    imported = [replace(trial(n), source="history.csv") for n in range(4)]
    assert stop_reason(CONTROL, search_state(*imported), 0.0) is None
    assert seconds_left(CONTROL, search_state(*imported), 50, 0.0) is None


def test_time_is_kept_for_the_whole_runs_of_shortened_finalists() -> None:
    both = [trial(0, 1.0, role=Role.BASELINE), trial(1, 2.0)]
    known = search_state(*(scaled(each, 0.25) for each in both))
    durations = [REPEAT_SLACK * (10.0 + CONTROL.train_iters * share) for share in (0.75, 0.25)]
    assert repeats_seconds(CONTROL, known) == sum(durations)
    assert repeats_seconds(replace(CONTROL, repeats=0), known) == sum(durations)
    assert has_time_to_repeat(CONTROL, known.trials[0], 100.0 - durations[0])
    assert not has_time_to_repeat(CONTROL, known.trials[0], 100.1 - durations[0])


def scaled(trial: Trial, seconds: float) -> Trial:
    """The trial as if its step had been scaled from one of `seconds`."""
    measured = trial.measurement
    step = measured.step_time_s
    return replace(trial, measurement=replace(measured, scaled_from=seconds, low_s=0.99 * step, high_s=1.01 * step))


def test_the_remaining_time_includes_trials_and_repeats() -> None:
    known = search_state(trial(0, 1.0, role=Role.BASELINE), trial(1, 2.0))
    assert seconds_left(CONTROL, search_state(), 50, 0.0) is None
    only_baseline = search_state(trial(0, 1.0, role=Role.BASELINE))
    assert seconds_left(CONTROL, only_baseline, 3, 0.0) == 2 * 10.0 + 20.0
    assert seconds_left(replace(CONTROL, repeats=0), only_baseline, 3, 0.0) == 2 * 10.0
    assert seconds_left(CONTROL, known, 50, 0.0) == 2 * 10.0 + 20.0 * REPEAT_SLACK
    assert seconds_left(CONTROL, known, 3, 0.0) == 1 * 10.0 + 20.0 * REPEAT_SLACK
    assert seconds_left(CONTROL, known, 50, 95.0) == 5.0
