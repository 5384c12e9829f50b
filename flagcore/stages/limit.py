"""limit: derive the time limits of trials and of the search from predictions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from flagcore.contracts import Workload, start_seconds
from flagcore.domain.plan import measured_to_predicted
from flagcore.domain.prediction import Predictions
from flagcore.domain.search_state import EXTRA_ROUNDS, MAX_RIVALS, SearchTime
from flagcore.domain.space import FloatArray, IntArray
from flagcore.domain.spec import Task, TrainSpec
from flagcore.domain.trial import TimeLimit, Trial, TrialState

SLACK = 3.0
"""The time limit of steps relative to the upper bound of their prediction, because of other jobs, slow file systems and
compilation. Chosen: the limit ends trials that hang, not slow ones."""

START_SLACK = 2.0
"""The time limit of a start relative to the longest start of the run so far. Chosen."""

UNKNOWN_SECONDS = 3600.0
"""The limit of a trial whose step time is not predicted. Chosen."""


def time_limit(task: Task, workload: Workload, trial: Trial, earlier: Sequence[Trial], launches: int = 1) -> TimeLimit:
    """Return the time limit of a trial with `launches` consecutive launches.

    It is `control.max_time_per_task` or, for each launch, the time to start plus SLACK times the upper bound of the
    steps. Both are increased if `earlier` trials took longer.
    """
    control = task.spec.control
    if (given := control.max_time_per_task) is not None:
        return TimeLimit(seconds=given, because=f"auto_tuner.control.max_time_per_task = {given:g} s")
    overheads = (each.overhead_s(control.train_iters, control.warmup_iters) for each in earlier)
    starts = [seconds for seconds in overheads if seconds is not None]
    start, longest = start_seconds(workload), START_SLACK * max(starts, default=0.0)
    because = f"{start:g} s to start" if start >= longest else f"{longest:.0f} s to start, twice the longest so far"
    steps = 0.0
    if isinstance(task.spec.work, TrainSpec):
        step = _slowest_step(trial, earlier)
        if step is None:
            return TimeLimit(seconds=UNKNOWN_SECONDS, because=f"{UNKNOWN_SECONDS:g} s without a predicted step time")
        steps = SLACK * control.train_iters * step
        because += f" + {SLACK:g} x {control.train_iters} steps of at most ~{step:.3g} s"
    because = because if launches == 1 else f"{launches} x ({because})"
    return TimeLimit(seconds=launches * (max(start, longest) + steps), because=because)


def cap_limit(limit: TimeLimit, seconds_left: float, key: str) -> TimeLimit:
    """Return `limit`, or a limit of `seconds_left` if that is less, but at least a second.

    `key` describes the option that limits the remaining time.
    """
    if seconds_left >= limit.seconds:
        return limit
    return TimeLimit(seconds=max(1.0, seconds_left), because=f"the rest of {key}")


def _slowest_step(trial: Trial, earlier: Sequence[Trial]) -> float | None:
    step: Any = trial.predicted.get("step_time_s")
    if not isinstance(step, Mapping) or not math.isfinite(step["high"]):
        return None
    measured = (each for each in earlier if each.state in (TrialState.MEASURED, TrialState.STOPPED))
    ratios = [
        ratio * step["value"] / step["high"] for each in measured if (ratio := measured_to_predicted(each, "predicted"))
    ]
    high: float = step["high"] * max([1.0, *ratios])
    return high / trial.shortened.scale if trial.shortened else high


def search_time(task: Task, workload: Workload, predictions: Predictions, rows: IntArray) -> SearchTime:
    """Return the time of a search that tries `rows`."""
    control = task.spec.control
    max_step = control.max_step_time or math.inf
    # if steps are shortened, the finalists run again with whole steps
    is_shortened = bool((predictions.step_time_s[rows] > max_step).any())
    rounds = control.repeats + EXTRA_ROUNDS if control.repeats and rows.size > 1 else int(is_shortened)
    repeats = rounds * min(2 + MAX_RIVALS, int(rows.size))

    def seconds_of_steps(seconds: FloatArray) -> float:
        trial_seconds = float(np.minimum(seconds, max_step).sum())  # longer steps are shortened
        return control.train_iters * (trial_seconds + repeats * float(np.max(seconds, initial=0.0)))

    is_training = isinstance(task.spec.work, TrainSpec)
    predicted, high = (seconds_of_steps(column[rows]) for column in (predictions.step_time_s, predictions.high_s))
    limit = control.max_time_per_task
    if limit is not None:
        at_most = (rows.size + repeats) * limit
    elif not is_training:
        at_most = (rows.size + repeats) * start_seconds(workload)
    elif math.isfinite(high):
        at_most = (rows.size + repeats) * start_seconds(workload) + SLACK * high
    else:
        at_most = (rows.size + repeats) * UNKNOWN_SECONDS
    return SearchTime(
        trials=int(rows.size),
        repeats=repeats,
        steps_s=predicted if is_training and math.isfinite(predicted) else None,
        at_most_s=min(at_most, control.max_time or math.inf),
    )


def seconds_used(trials: Sequence[Trial]) -> float:
    """Return the seconds that earlier calls of a run took, including the time between trials."""
    ends = [trial.began_s + trial.duration_s for trial in trials if trial.began_s is not None]
    return max([*ends, math.fsum(trial.duration_s for trial in trials if trial.group is None)])
