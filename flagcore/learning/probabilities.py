"""Probabilities that a trial succeeds, fits, meets the limits, and is faster than the best."""

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
from flagcore.learning.prior import MEMORY, time_scales
from flagcore.learning.ratios import Posterior, Ratios
from flagcore.learning.trials import observed_figure, trial_rows

SUCCESS_STATES = (TrialState.MEASURED, TrialState.STOPPED)

PRIOR_FAILURES, PRIOR_SUCCESSES = 0.001, 0.2
"""The beta prior of a knob's value, as numbers of failed and successful trials. Chosen: half a percent of trials
fail per value, and one failure outweighs the prior."""

ITERATIONS = 50
"""The number of iterations of expectation-maximization. Chosen: they converge."""


def success_probability(context: SearchContext, rows: IntArray) -> FloatArray:
    """Return the probability that a trial of each row does not fail for other reasons than memory.

    Each value of a knob, and a common cause, fail a trial independently (noisy-OR; Pearl 1988). Their probabilities are
    estimated by expectation-maximization with a beta prior: failures are attributed to values without successful
    trials. Before the first failure, all probabilities are 1.
    """
    failed_rows = np.array([row for trial, row in trial_rows(context) if trial.state in FAILED_STATES], dtype=np.int64)
    if not failed_rows.size:
        return np.ones(rows.size)
    success_rows = np.array(
        [row for trial, row in trial_rows(context) if trial.state in SUCCESS_STATES], dtype=np.int64
    )
    values, count = _value_indices(context, np.concatenate((failed_rows, success_rows, rows)))
    failed, successful, queried = np.split(values, (failed_rows.size, failed_rows.size + success_rows.size))
    trials = np.bincount(np.concatenate((failed, successful)).ravel(), minlength=count)
    failure = np.full(count, PRIOR_FAILURES / (PRIOR_FAILURES + PRIOR_SUCCESSES))
    for _ in range(ITERATIONS):
        share = failure[failed] / (1.0 - np.prod(1.0 - failure[failed], axis=1, keepdims=True))
        failures = PRIOR_FAILURES + np.bincount(failed.ravel(), share.ravel(), count)
        failure = failures / (PRIOR_FAILURES + PRIOR_SUCCESSES + trials)
    success: FloatArray = np.prod(1.0 - failure[queried], axis=1)
    return success


def _value_indices(context: SearchContext, rows: IntArray) -> tuple[IntArray, int]:
    """Return an index for each value of each row, and the number of values.

    The first column is the common cause, which all rows have. The others are the knobs that vary.
    """
    indices, count = [np.zeros(rows.size, dtype=np.int64)], 1
    for column in context.space.columns(rows).values():
        codes, index = np.unique(column, return_inverse=True)
        if codes.size > 1:
            indices.append(index + count)
            count += codes.size
    return np.stack(indices, axis=1), count


MIN_FIGURE = 1e-9
"""The lower bound of predicted figures, in seconds. Chosen: it keeps logarithms finite."""


def feasibility_probability(context: SearchContext, rows: IntArray, features: Features) -> FloatArray:
    """Return the probability that each row meets all limits, which are assumed to be independent.

    `found` are the features of `rows`. The error of a figure is learned like that of the step time. Figures without a
    prediction are ignored.
    """
    probability = np.ones(rows.size)
    for name, limit in context.task.spec.limits.items():
        predicted = context.predictions.figures.get(name)
        if predicted is None:
            continue
        ratio = Ratios(observed_figure(context, name), features, time_scales(context.predictions)).of(features)
        margin = math.log(limit) - np.log(np.maximum(predicted[rows], MIN_FIGURE)) - ratio.mean
        probability *= np.nan_to_num(scipy.special.ndtr(margin / np.maximum(ratio.deviation, 1e-6)), nan=1.0)
    return probability


def expected_gain(log_predicted: FloatArray, ratio: Posterior, best: float) -> FloatArray:
    """Return the expected improvement of each candidate over `best` (Jones et al. 1998).

    `log_predicted` and `best` are logarithms of seconds, `ratio` is the posterior of the prediction's error.
    """
    spread = np.maximum(ratio.deviations, 1e-9)
    z = (best - log_predicted - ratio.means) / spread
    density = np.exp(-0.5 * z**2) / np.sqrt(2.0 * np.pi)
    gain: FloatArray = ratio.probabilities @ (spread * (z * scipy.special.ndtr(z) + density))
    return gain


def improvement_probability(
    log_times: FloatArray, fits: FloatArray, success: FloatArray, best: float, min_gain: float
) -> tuple[float, float]:
    """Return the probability that a candidate succeeds and is faster than `best` by more than `min_gain`, and the gain
    that is exceeded with a probability of 5%.

    `log_times` are joint samples of all candidates, one per row. `fits` are the probabilities that candidates fit,
    which are independent. `success` are the probabilities that they do not fail otherwise, which are fully correlated:
    if a candidate fails, all less reliable ones fail, too. The result is deterministic.
    """
    rng = np.random.default_rng(1)
    succeeds = (rng.random(log_times.shape) < fits) & (rng.random((len(log_times), 1)) < success)
    fastest = np.where(succeeds, log_times, np.inf).min(axis=1)
    gains = np.where(np.isfinite(fastest), best - fastest, 0.0)
    return float((gains > np.log1p(min_gain)).mean()), float(max(np.expm1(np.quantile(gains, 0.95)), 0.0))


QUANTILE_95 = 1.6448536269514722
"""The 95% quantile of the standard normal distribution."""


def min_memory_share(ratios: Sequence[float]) -> float:
    """Return the 95% lower bound of a candidate's memory, as a share of its predicted memory.

    `ratios` are the logarithms of used over predicted memory of measured trials. They are assumed to be normal with the
    variances of `MEMORY`. Without trials, the result is 1.
    """
    if not ratios:
        return 1.0
    common, own = MEMORY.chip**2 + MEMORY.task**2, MEMORY.size**2 + MEMORY.own**2
    weight = common / (len(ratios) * common + own)
    return math.exp(weight * sum(ratios) - QUANTILE_95 * math.sqrt(weight * own + own))
