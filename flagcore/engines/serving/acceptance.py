"""Learns the acceptance of drafted tokens from trials, for the predictions of other candidates with speculation."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from flagcore.domain.spec import Task
from flagcore.domain.trial import Trial, TrialState
from flagcore.engines.serving.common.knobs import DRAFTED
from flagcore.engines.serving.model.price import tokens_per_iteration

ROUNDING = 0.01
"""Differences in the acceptance that change no prediction."""


def with_measured_acceptance(task: Task, trials: Sequence[Trial]) -> Task:
    """Return the task with the median acceptance of its trials, unchanged if none reports one."""
    found = [
        acceptance(tokens, drafted)
        for trial in trials
        if trial.state is TrialState.MEASURED and trial.measurement
        if (tokens := _tokens_per_iteration(trial.measurement.figures)) is not None
        if isinstance(drafted := trial.candidate.as_dict().get(DRAFTED), int) and drafted > 0
    ]
    if not found:
        return task
    value, serve = round(statistics.median(found) / ROUNDING) * ROUNDING, task.spec.serve
    loads = tuple(replace(load, acceptance=value) for load in serve.loads)
    return replace(task, spec=replace(task.spec, work=replace(serve, loads=loads)))


def _tokens_per_iteration(figures: Mapping[str, float]) -> float | None:
    """Return the mean tokens of a sequence in one iteration; None if unknown.

    Each iteration yields a token of the model, and the accepted ones. It counts iterations without drafts, which
    n-grams often have, and which the acceptance does not show.
    """
    if (share := figures.get("drafted_share")) is not None and share < 1.0:
        return 1.0 / (1.0 - share)
    return figures.get("tokens_per_iteration")


def acceptance(tokens: float, drafted: int) -> float:
    """Return the probability that a drafted token is accepted once those before it are, from the mean tokens of an
    iteration with `drafted` drafted tokens (the inverse of `tokens_per_iteration`).
    """
    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if tokens_per_iteration(middle, drafted) < tokens else (low, middle)
    return high
