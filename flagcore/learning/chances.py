"""The chances of a trial: that it does not fail, keeps the limits of its task, fits, and is faster than the best."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy.special import ndtr

from flagcore.contracts import SearchContext
from flagcore.domain.experience import Features
from flagcore.domain.search_state import FAILED_STATES
from flagcore.domain.space import FloatArray, IntArray
from flagcore.domain.trial import TrialState
from flagcore.learning.prior import MEMORY, TIME
from flagcore.learning.ratios import Belief, Ratios
from flagcore.learning.trials import observed_figure, seen

ENDED = (TrialState.MEASURED, TrialState.STOPPED)

AT_FAULT, AT_REST = 0.001, 0.2
"""What is known of a value of a knob before any trial, as trials that it failed and trials that it did not."""

ROUNDS = 50
"""Of expectation and maximisation."""


def chance_to_end(context: SearchContext, rows: IntArray) -> FloatArray:
    """Return the chance that a trial of each row comes to its end, if it fits. 1 while none has failed.

    Each value of a knob, and something that all trials share, fails a trial with its own chance, whatever the
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


LEAST = 1e-9
"""Seconds: predicted figures below it count as it."""


def chance_to_keep(context: SearchContext, rows: IntArray, found: Features) -> FloatArray:
    """Return the chance that each row keeps all limits, as if they were independent; 1 where nothing is predicted.

    `found` are the features of `rows`. A figure's error is learned as that of the time is.
    """
    chance = np.ones(rows.size)
    for name, limit in context.task.spec.limits.items():
        predicted = context.predictions.figures.get(name)
        if predicted is None:
            continue
        ratio = Ratios(observed_figure(context, name), found, TIME).of(found)
        room = math.log(limit) - np.log(np.maximum(predicted[rows], LEAST)) - ratio.mean
        chance *= np.nan_to_num(ndtr(room / np.maximum(ratio.deviation, 1e-6)), nan=1.0)
    return chance


def expected_gain(log_predicted: FloatArray, ratio: Belief, best: float) -> FloatArray:
    """Return by how much each candidate is expected to be faster than `best`, as a share (expected improvement).

    All are logarithms of seconds; `ratio` is what is believed of the prediction's error (Jones et al. 1998).
    """
    spread = np.maximum(ratio.deviations, 1e-9)
    z = (best - log_predicted - ratio.means) / spread
    density = np.exp(-0.5 * z**2) / np.sqrt(2.0 * np.pi)
    gain: FloatArray = ratio.chances @ (spread * (z * ndtr(z) + density))
    return gain


def chance_to_gain(
    log_times: FloatArray, fits: FloatArray, ends: FloatArray, best: float, least: float
) -> tuple[float, float]:
    """Return the chance that any candidate works and is faster than `best` by more than `least`, and how far it may be.

    `log_times` are draws, a row each, of all candidates together. `fits` are the chances that each fits, whatever the
    others do; `ends` those that it does not fail otherwise: what fails the likeliest, fails with the less likely.
    The second figure is the gain, as a share, that is reached with a chance of 5%; 0 if there is none. Always the same
    answer.
    """
    rng = np.random.default_rng(1)
    works = (rng.random(log_times.shape) < fits) & (rng.random((len(log_times), 1)) < ends)
    fastest = np.where(works, log_times, np.inf).min(axis=1)
    gains = np.where(np.isfinite(fastest), best - fastest, 0.0)
    return float((gains > np.log1p(least)).mean()), float(max(np.expm1(np.quantile(gains, 0.95)), 0.0))


SURE = 1.6448536269514722
"""Standard deviations below the mean: with a chance of 95% a candidate needs more."""


def least_share(ratios: Sequence[float]) -> float:
    """Return the share of its predicted memory that any candidate is believed to need at least.

    `ratios` are logarithms of used over predicted memory of trials that ran. 1 before any: a prediction stands until
    something was measured. The ratio common to all is normal, with the variances of `MEMORY`.
    """
    if not ratios:
        return 1.0
    common, own = MEMORY.chip**2 + MEMORY.task**2, MEMORY.size**2 + MEMORY.own**2
    weight = common / (len(ratios) * common + own)
    return math.exp(weight * sum(ratios) - SURE * math.sqrt(weight * own + own))
