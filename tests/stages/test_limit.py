"""How long a trial may take: set, by its prediction, or by the trials before it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from flagcore.domain.search_state import EXTRA_ROUNDS
from flagcore.domain.serving import Load, ServeSpec
from flagcore.domain.spec import Control, Task
from flagcore.domain.trial import Measurement, Role, Shortened, TimeLimit, Trial, TrialState
from flagcore.engines.megatron.adapter import WORKLOAD
from flagcore.stages.limit import SLACK, START_SLACK, UNKNOWN_SECONDS, cap_limit, search_time, time_limit
from tests import small

TASK = small.task(control=Control(train_iters=5))
START = 300.0


def planned(value: float = 10.0, high: float = 12.0, **extra: Any) -> Trial:
    step = {"value": value, "low": value / 2, "high": high}
    return Trial(
        number=9,
        candidate=small.candidate(),
        role=Role.SEARCH,
        state=TrialState.RUNNING,
        predicted={"step_time_s": step},
        **extra,
    )


def measured_trial(step: float, seconds: float, scaled_from: float | None = None) -> Trial:
    measured = Measurement(
        step_times_s=(step,),
        step_time_s=step,
        spread_s=0.0,
        tokens_per_second_per_device=1.0,
        scaled_from=scaled_from,
    )
    return replace(planned(), state=TrialState.MEASURED, measurement=measured, duration_s=seconds)


def seconds(trial: Trial, *earlier: Trial, task: Task = TASK, launches: int = 1) -> float:
    return time_limit(task, WORKLOAD, trial, earlier, launches).seconds


def test_without_a_setting_it_is_the_start_and_the_steps_with_slack() -> None:
    limit = time_limit(TASK, WORKLOAD, planned(), ())
    assert limit.seconds == START + SLACK * 5 * 12.0
    assert "300 s to start" in limit.because
    assert "5 steps" in limit.because


def test_a_setting_counts_alone() -> None:
    task = small.task(control=Control(max_time_per_task=70.0))
    limit = time_limit(task, WORKLOAD, planned(value=1e3, high=1e4), ())
    assert limit.seconds == 70.0
    assert "max_time_per_task" in limit.because


def test_steps_slower_than_predicted_and_longer_starts_make_later_limits_longer() -> None:
    assert seconds(planned(), measured_trial(36.0, 200.0)) == START + SLACK * 5 * 36.0  # three times the high end
    assert seconds(planned(), measured_trial(6.0, 100.0)) == START + SLACK * 5 * 12.0
    assert seconds(planned(), measured_trial(10.0, 450.0)) == START_SLACK * 400.0 + SLACK * 5 * 12.0


def test_shortened_steps_get_less_time_and_have_their_own_start() -> None:
    short = Shortened(global_batch_size=2, whole=8, scale=4.0, low=3.5, high=4.1)
    assert seconds(planned(shortened=short)) == START + SLACK * 5 * 3.0
    assert seconds(planned(), measured_trial(10.0, 412.5, scaled_from=2.5)) == START_SLACK * 400.0 + SLACK * 5 * 12.0


def test_without_a_prediction_it_is_a_constant_that_is_named() -> None:
    limit = time_limit(TASK, WORKLOAD, replace(planned(), predicted={}), ())
    assert limit.seconds == UNKNOWN_SECONDS
    assert "predicted" in limit.because


def test_ranks_of_a_probe_add_up() -> None:
    assert seconds(planned(), launches=3) == 3 * (START + SLACK * 5 * 12.0)


def test_the_start_limit_of_a_server_comes_from_its_engine() -> None:
    task = replace(TASK, spec=replace(TASK.spec, work=ServeSpec(engine="vllm", loads=(Load(),))))
    assert time_limit(task, small.ENGINES["vllm"], planned(), ()).seconds == 1200.0


def test_the_rest_of_the_run_is_the_limit_if_that_is_less() -> None:
    limit = TimeLimit(seconds=50.0, because="x")
    assert cap_limit(limit, 60.0, "max_time") is limit
    assert cap_limit(limit, 20.0, "max_time").seconds == 20.0
    assert cap_limit(limit, -5.0, "max_time").seconds == 1.0
    assert "max_time" in cap_limit(limit, 20.0, "max_time").because


@pytest.mark.parametrize("max_time", [None, 100.0])
def test_a_search_takes_at_most_its_limits(max_time: float | None) -> None:
    task = small.task(control=Control(train_iters=5, max_trials=2, max_time=max_time, max_step_time=3.0))
    rows = np.arange(2)
    predictions = WORKLOAD.predict(task, WORKLOAD.columns(task, {}), small.costs(task))
    several = replace(predictions.take(np.zeros(3, dtype=np.int64)), step_time_s=np.array([1.0, 4.0, 9.0]))
    several = replace(several, high_s=several.step_time_s * 2)
    found = search_time(task, WORKLOAD, several, rows)
    repeats = (1 + EXTRA_ROUNDS) * 2
    assert (found.trials, found.repeats) == (2, repeats)
    assert found.steps_s == 5 * (1.0 + 3.0 + repeats * 4.0)
    highest = (2 + repeats) * START + SLACK * 5 * (2.0 + 3.0 + repeats * 8.0)
    assert found.at_most_s == (max_time or highest)
