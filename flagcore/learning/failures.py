"""The chance that a trial comes to its end, memory aside: from trials that failed and trials that ended."""

from __future__ import annotations

import numpy as np

from flagcore.contracts import SearchContext
from flagcore.domain.budget import FAILED_STATES
from flagcore.domain.space import FloatArray, IntArray
from flagcore.domain.trial import TrialState
from flagcore.learning.trials import seen

ENDED = (TrialState.MEASURED, TrialState.STOPPED)

AT_FAULT, AT_REST = 0.001, 0.2
"""What is known of a value of a knob before any trial, as trials that it failed and trials that it did not."""

ROUNDS = 50
"""Of expectation and maximisation."""


def chance_to_end(context: SearchContext, rows: IntArray) -> FloatArray:
    """Return the chance that a trial of each row comes to its end, if it fits. 1 while none has failed.

    Each value of a knob, and something that all trials share, fails a trial with a chance of its own, whatever the
    others do (a noisy or; Pearl 1988). The chances are those of expectation-maximisation with a beta prior: of a trial
    that failed those values are suspected that no trial ended with.
    """
    broken = np.array([row for trial, row in seen(context) if trial.state in FAILED_STATES], dtype=np.int64)
    if not broken.size:
        return np.ones(rows.size)
    ended = np.array([row for trial, row in seen(context) if trial.state in ENDED], dtype=np.int64)
    values, count = _values(context, np.concatenate((broken, ended, rows)))
    failed, tried, asked = np.split(values, (broken.size, broken.size + ended.size))
    times = np.bincount(np.concatenate((failed, tried)).ravel(), minlength=count)
    fault = np.full(count, AT_FAULT / (AT_FAULT + AT_REST))
    for _ in range(ROUNDS):
        share = fault[failed] / (1.0 - np.prod(1.0 - fault[failed], axis=1, keepdims=True))
        fault = (AT_FAULT + np.bincount(failed.ravel(), share.ravel(), count)) / (AT_FAULT + AT_REST + times)
    ends: FloatArray = np.prod(1.0 - fault[asked], axis=1)
    return ends


def _values(context: SearchContext, rows: IntArray) -> tuple[IntArray, int]:
    """Return a number for each value that a row has, a column a knob and one for what all share; and how many."""
    numbers, count = [np.zeros(rows.size, dtype=np.int64)], 1
    for column in context.space.columns(rows).values():
        codes, place = np.unique(column, return_inverse=True)
        if codes.size > 1:
            numbers.append(place + count)
            count += codes.size
    return np.stack(numbers, axis=1), count
