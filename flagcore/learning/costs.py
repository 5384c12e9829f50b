"""What a trial is expected to cost: the seconds of one that runs to its end, and of one that does not."""

from __future__ import annotations

from collections.abc import Collection
from statistics import median

import numpy as np

from flagcore.contracts import SearchContext
from flagcore.domain.budget import FAILED_STATES
from flagcore.domain.space import FloatArray
from flagcore.domain.trial import PROBE, TrialState
from flagcore.learning.trials import overhead_seconds


def whole_seconds(context: SearchContext, log_time: FloatArray) -> FloatArray:
    """Return the seconds of a trial that runs to its end: what trials took beside their steps, and the steps.

    A probe runs few micro-batches, whatever the step: all cost the same, 1 while none was measured.
    """
    if context.task.spec.control.fidelity == PROBE:
        return np.full_like(log_time, _median(context, (TrialState.MEASURED,)) or 1.0)
    seconds: FloatArray = overhead_seconds(context) + context.task.spec.control.train_iters * np.exp(log_time)
    return seconds


def expected_seconds(
    context: SearchContext, log_time: FloatArray, whole: FloatArray, fits: FloatArray, ends: FloatArray
) -> FloatArray:
    """Return the seconds of a trial, weighed by the chances that it fits and that it ends.

    One that fails takes as long as those that failed in the same way, the median of them; before any, what trials take
    beside their steps, and a step.
    """
    short = overhead_seconds(context) + np.exp(log_time) if context.task.spec.control.fidelity != PROBE else whole
    out = _median(context, (TrialState.OUT_OF_MEMORY,)) or short
    broken = _median(context, FAILED_STATES) or short
    seconds: FloatArray = fits * (ends * whole + (1.0 - ends) * broken) + (1.0 - fits) * out
    return seconds


def _median(context: SearchContext, states: Collection[TrialState]) -> float | None:
    """Return the median duration of the trials that ended in one of some ways."""
    return median([trial.duration_s for trial in context.trials if trial.state in states] or [0.0]) or None
