"""Learns the acceptance of drafted tokens from trials, for the predictions of other candidates with speculation."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

from flagcore.domain.spec import Task
from flagcore.domain.trial import Trial, TrialState
from flagcore.engines.serving.common.knobs import DRAFTED

ROUNDING = 0.01
"""Differences in the acceptance that change no prediction."""


def with_measured_acceptance(task: Task, trials: Sequence[Trial]) -> Task:
    """Return the task with the median acceptance of its trials, unchanged if none reports one."""
    found = [
        acceptance(trial.measurement.figures["acceptance_rate"], drafted)
        for trial in trials
        if trial.state is TrialState.MEASURED and trial.measurement and "acceptance_rate" in trial.measurement.figures
        if isinstance(drafted := trial.candidate.as_dict().get(DRAFTED), int) and drafted > 0
    ]
    if not found:
        return task
    value, serve = round(statistics.median(found) / ROUNDING) * ROUNDING, task.spec.serve
    loads = tuple(replace(load, acceptance=value) for load in serve.loads)
    return replace(task, spec=replace(task.spec, work=replace(serve, loads=loads)))


def acceptance(share: float, drafted: int) -> float:
    """Return the probability `a` that a drafted token is accepted once those before it are, from the accepted share of
    all drafted tokens: share = (a + a^2 + ... + a^drafted) / drafted.
    """
    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        is_low = sum(middle**each for each in range(1, drafted + 1)) / drafted < share
        low, high = (middle, high) if is_low else (low, middle)
    return high
