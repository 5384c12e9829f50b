"""Probabilities of a trial: not to fail, to meet the limits, to fit, and to be faster than the best."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import scipy

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
"""Beta prior of a knob's value, as counts of trials that failed and that did not."""

ROUNDS = 50
"""Iterations of expectation-maximization."""


def success_probability(context: SearchContext, rows: IntArray) -> FloatArray:
    """Return the probability that a trial of each row ends, if it fits. 1 until a trial has failed.

    Each value of a knob, and a cause common to all trials, fails a trial independently (noisy-OR; Pearl 1988). The
    probabilities are estimated by expectation-maximization with a beta prior: a failure is attributed to those values
    with which no trial has ended.
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
    """Return an index for each value of a row, one column per knob and one for the common cause, and their number."""
    numbers, count = [np.zeros(rows.size, dtype=np.int64)], 1
    for column in context.space.columns(rows).values():
        codes, place = np.unique(column, return_inverse=True)
        if codes.size > 1:
            numbers.append(place + count)
            count += codes.size
    return np.stack(numbers, axis=1), count


LEAST = 1e-9
"""Lower bound of predicted figures, in seconds."""


def feasibility_probability(context: SearchContext, rows: IntArray, found: Features) -> FloatArray:
    """Return the probability that each row meets all limits, assumed independent; 1 without a prediction.

    `found` are the features of `rows`. The error of a figure is learned like that of the time.
    """
    chance = np.ones(rows.size)
    for name, limit in context.task.spec.limits.items():
        predicted = context.predictions.figures.get(name)
        if predicted is None:
            continue
        ratio = Ratios(observed_figure(context, name), found, TIME).of(found)
        room = math.log(limit) - np.log(np.maximum(predicted[rows], LEAST)) - ratio.mean
        chance *= np.nan_to_num(scipy.special.ndtr(room / np.maximum(ratio.deviation, 1e-6)), nan=1.0)
    return chance


def expected_gain(log_predicted: FloatArray, ratio: Belief, best: float) -> FloatArray:
    """Return the expected improvement of each candidate over `best`, as a share (Jones et al. 1998).

    All are logarithms of seconds; `ratio` is the posterior of the prediction's error.
    """
    spread = np.maximum(ratio.deviations, 1e-9)
    z = (best - log_predicted - ratio.means) / spread
    density = np.exp(-0.5 * z**2) / np.sqrt(2.0 * np.pi)
    gain: FloatArray = ratio.chances @ (spread * (z * scipy.special.ndtr(z) + density))
    return gain


def improvement_probability(
    log_times: FloatArray, fits: FloatArray, ends: FloatArray, best: float, least: float
) -> tuple[float, float]:
    """Return the probability that any candidate works and is faster than `best` by more than `least`, and the gain.

    `log_times` are joint draws of all candidates, one per row. `fits` are the independent probabilities of each to
    fit; `ends` those not to fail otherwise, fully correlated: with a candidate, all less reliable ones fail.
    The gain is the share that is exceeded with a probability of 5%; 0 if there is none. Deterministic.
    """
    rng = np.random.default_rng(1)
    works = (rng.random(log_times.shape) < fits) & (rng.random((len(log_times), 1)) < ends)
    fastest = np.where(works, log_times, np.inf).min(axis=1)
    gains = np.where(np.isfinite(fastest), best - fastest, 0.0)
    return float((gains > np.log1p(least)).mean()), float(max(np.expm1(np.quantile(gains, 0.95)), 0.0))


SURE = 1.6448536269514722
"""The 95% quantile of the standard normal distribution."""


def min_memory_share(ratios: Sequence[float]) -> float:
    """Return the lower bound (95%) of a candidate's needed memory, as a share of the predicted one.

    `ratios` are logarithms of used over predicted memory of trials that ran. 1 before the first one. The common
    ratio is normal, with the variances of `MEMORY`.
    """
    if not ratios:
        return 1.0
    common, own = MEMORY.chip**2 + MEMORY.task**2, MEMORY.size**2 + MEMORY.own**2
    weight = common / (len(ratios) * common + own)
    return math.exp(weight * sum(ratios) - SURE * math.sqrt(weight * own + own))
