"""Gaussian processes for log(measured / predicted), for step times, memory use and latencies.

In the prior, the error of a prediction is a sum of independent terms. There is one term for the chip, one for the task,
one for each part of the step (a slow link affects all candidates that use it), and one for each part in each task.
There are smooth functions of the kernel sizes, of each knob, and of all knobs in a task. The last term is an error of
the single candidate.

The size of the single candidate's error is unknown, and earlier runs may not apply to the current task. Therefore there
are several processes: for different sizes of this error, with and without earlier runs. Their average is weighted by
the likelihood of the task's trials under each process (Bayesian model averaging; Hoeting et al. 1999).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import scipy

from flagcore.domain.features import Features, Observations
from flagcore.domain.prediction import Predictions
from flagcore.domain.space import FloatArray, IntArray


class Scales(NamedTuple):
    """Standard deviations of the terms of the prior of log(measured / predicted). Length scales are in octaves.

    - `chip`, `task`: errors that all candidates on a chip, or of a task, share.
    - `part`, `part_of_task`: the error of a part of the step, on a chip and in one task.
    - `size`: the smooth function of kernel sizes.
    - `knob`: the smooth function of one knob.
    - `own`: the smooth function of all knobs together, which is different in each task.
    - `row`: the error of a single candidate.
    - `slowdown`: replaces `task` in rare runs that are slower as a whole, as on a busy machine; 0 for none.
    - `size_length`, `knob_length`: the length scales of the smooth functions.
    """

    chip: float
    task: float
    part: float
    part_of_task: float
    size: float
    knob: float
    own: float
    row: float
    slowdown: float = 0.0
    size_length: float = 0.7
    knob_length: float = 1.5


TIME = Scales(
    chip=0.25, task=0.10, part=0.15, part_of_task=0.05, size=0.15, knob=0.03, own=0.05, row=0.03, slowdown=2.0
)
"""Scales for step times, from published runs to which nothing was fitted: errors of 5 to 20% between sources, 7 to 10%
within one (docs/accuracy.md). The length scales and `slowdown` are chosen: 16 busy processes on two cores slow a run
down by a factor of 9."""

MEMORY = Scales(chip=0.10, task=0.03, part=0.0, part_of_task=0.0, size=0.02, knob=0.01, own=0.015, row=0.005)
"""Scales for memory in use, from measured runs (docs/accuracy.md): errors of 2 to 4% if the size of the chip's device
context is known, more if it is estimated. The length scales are chosen."""

QUANTILE_90 = 1.2815515655446004
"""The 90% quantile of the standard normal distribution, which is the upper bound of an 80% interval."""
MAX_INTERVALS = 1000
"""The maximum number of intervals over which a median is taken. Chosen by hand: the intervals differ little."""


def time_scales(predictions: Predictions) -> Scales:
    """Return `TIME`, with larger deviations for the chip and for knobs if the 80% intervals of `predictions` are wider.

    Such intervals belong to chips without measured costs. Most of the error is then common to all candidates. Knobs may
    change it more, in the same ratio: on 36 made-up servers, the best of 8 trials is then 0.8 times as far away.
    """
    low, high = predictions.low_s[:MAX_INTERVALS], predictions.high_s[:MAX_INTERVALS]
    is_known = np.isfinite(high) & (low > 0)
    if not is_known.any():
        return TIME
    deviation = float(np.median(np.log(high[is_known] / low[is_known]))) / (2.0 * QUANTILE_90)
    return TIME._replace(chip=max(TIME.chip, deviation), knob=TIME.knob * max(1.0, deviation / TIME.chip))


@dataclass(frozen=True, slots=True)
class Points:
    """Features of candidates, one row each. `task`: the task number, in one column. Others: one column per feature."""

    task: FloatArray
    parts: FloatArray
    sizes: FloatArray
    knobs: FloatArray

    @classmethod
    def from_features(cls, features: Features, task: IntArray | FloatArray) -> Points:
        """Build the matrices from the features of candidates and the number of each candidate's task."""
        count = len(features)
        groups = (list(group.values()) for group in (features.parts, features.sizes, features.knobs))
        matrices = (np.stack(columns, axis=1) if columns else np.zeros((count, 0)) for columns in groups)
        return cls(np.asarray(task, dtype=np.float64)[:, None], *matrices)

    def __len__(self) -> int:
        return int(self.task.shape[0])

    def take(self, rows: IntArray) -> Points:
        """Return the points with the indices `rows`."""
        return Points(self.task[rows], self.parts[rows], self.sizes[rows], self.knobs[rows])


def covariance(scales: Scales, left: Points, right: Points) -> FloatArray:
    """Return the prior covariance of each of `left` with each of `right`, without the errors of single candidates."""
    same_task = left.task == right.task.T
    total: FloatArray = scales.chip**2 + scales.task**2 * same_task
    if left.parts.shape[1] and scales.part:
        total = total + (scales.part**2 + scales.part_of_task**2 * same_task) * (left.parts @ right.parts.T)
    if left.sizes.shape[1]:
        total += scales.size**2 * _rbf_kernel(left.sizes, right.sizes, scales.size_length)
    if left.knobs.shape[1]:
        total += scales.own**2 * same_task * _rbf_kernel(left.knobs, right.knobs, scales.knob_length)
        total += scales.knob**2 * _additive_rbf_kernel(left.knobs, right.knobs, scales.knob_length)
    return total


def variance(scales: Scales, points: Points) -> FloatArray:
    """Return the prior variance at each point, without the errors of single candidates."""
    constant = scales.chip**2 + scales.task**2 + scales.size**2 * bool(points.sizes.shape[1])
    constant += scales.knob**2 * points.knobs.shape[1] + scales.own**2 * bool(points.knobs.shape[1])
    return np.asarray(constant + (scales.part**2 + scales.part_of_task**2) * (points.parts**2).sum(axis=1))


def _rbf_kernel(left: FloatArray, right: FloatArray, length: float) -> FloatArray:
    squares = (left**2).sum(axis=1)[:, None] + (right**2).sum(axis=1) - 2.0 * (left @ right.T)
    return np.asarray(np.exp(np.maximum(squares, 0.0) * (-0.5 / length**2)))


def _additive_rbf_kernel(left: FloatArray, right: FloatArray, length: float) -> FloatArray:
    """Return the sum over the columns of the RBF kernel of each column, with the shape (left rows, right rows).

    Columns contain few distinct values, so products of one-hot matrices are fast.
    """
    left_factors, right_factors = [], []
    for column in np.concatenate((left, right)).T:
        values, index = np.unique(column, return_inverse=True)
        one_hot = np.eye(values.size)[index]
        left_factors.append(one_hot[: len(left)] @ np.exp(-0.5 * ((values[:, None] - values) / length) ** 2))
        right_factors.append(one_hot[len(left) :])
    return np.asarray(np.concatenate(left_factors, axis=1) @ np.concatenate(right_factors, axis=1).T)


PRIOR_WEIGHT = 4.0
"""The weight of a process's prior scale, as a number of measurements. Chosen by hand."""

ERROR_FACTORS, FACTOR_PROBABILITIES = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0), (0.2, 0.45, 0.2, 0.08, 0.04, 0.03)
"""Factors of `Scales.row`, and their prior probabilities. Chosen by hand: for step times, they give errors of 1.5% to
50% per candidate; large errors are rare."""

PRIOR_VALIDITY = 0.97
"""The prior probability that earlier runs apply to the current task. Chosen by hand."""

SLOWDOWN, SLOWDOWN_RATIO = 0.1, 2.0
"""The prior probability that `Scales.slowdown` applies. It is considered only if all trials of the task take at least
SLOWDOWN_RATIO times as long as predicted, or all are faster by this ratio. Chosen by hand."""

MIN_PROBABILITY = 1e-3
"""Processes with a smaller posterior probability are dropped. Chosen to limit the run time."""


class Posterior(NamedTuple):
    """The posterior of log(measured / predicted), as a mixture of processes with `probabilities`.

    `means` and `deviations` have the shape (processes, candidates).
    """

    probabilities: FloatArray
    means: FloatArray
    deviations: FloatArray

    @property
    def mean(self) -> FloatArray:
        """The mean of the mixture, for each candidate."""
        return np.asarray(self.probabilities @ self.means)

    @property
    def deviation(self) -> FloatArray:
        """The standard deviation of the mixture, for each candidate."""
        square = self.probabilities @ (self.deviations**2 + self.means**2)
        return np.asarray(np.sqrt(np.maximum(square - self.mean**2, 0.0)))


class _Fit(NamedTuple):
    """A Gaussian process fitted to measurements.

    - `root`: the Cholesky root of the measurements' covariance.
    - `weights`: the inverse covariance times the measured values.
    - `scale`: the posterior scale of all variances.
    - `log_likelihood`: the log-likelihood, up to a constant.
    """

    root: FloatArray
    weights: FloatArray
    scale: float
    log_likelihood: float

    @classmethod
    def from_covariance(
        cls,
        covariance: FloatArray,
        noise: FloatArray,
        measured: FloatArray,
        prior_scale: float = 1.0,
        min_scale: float = 0.0,
    ) -> _Fit:
        """Fit `measured` values with the prior mean 0 and the prior `covariance`.

        `noise` contains the variances of the measurements. The scale of all variances is unknown, so the marginal
        distribution is a Student t-distribution. The prior scale is `prior_scale` with the weight PRIOR_WEIGHT. The
        posterior scale is at least `min_scale`.
        """
        root: FloatArray = np.linalg.cholesky(covariance + np.diag(noise)).astype(np.float64)
        weights = scipy.linalg.cho_solve((root, True), measured)
        distance, count = float(measured @ weights), len(measured)
        scale = max(min_scale, (PRIOR_WEIGHT * prior_scale + distance) / (PRIOR_WEIGHT + count))
        student = (PRIOR_WEIGHT + count) * np.log1p(distance / (PRIOR_WEIGHT * prior_scale))
        log_likelihood = -np.log(np.diag(root)).sum() - 0.5 * (count * np.log(prior_scale) + student)
        return cls(root, weights, scale, float(log_likelihood))


class _TaskPrior(NamedTuple):
    """The prior of a task before its trials, with or without earlier runs.

    - `probability`: the prior probability that this is the right prior.
    - `factor_log_probabilities`: the log-probability of each of ERROR_FACTORS.
    - `past`, `fit`: the points of earlier runs and the fit to them, or None without earlier runs.
    """

    scales: Scales
    probability: float
    factor_log_probabilities: FloatArray
    past: Points | None = None
    fit: _Fit | None = None

    def mean_and_root(self, points: Points) -> tuple[FloatArray, FloatArray]:
        """Return the prior mean at `points`, and a square root of the covariance that earlier runs explain."""
        if self.past is None or self.fit is None:
            return np.zeros(len(points)), np.zeros((0, len(points)))
        cross = covariance(self.scales, self.past, points)
        return self.fit.weights @ cross, scipy.linalg.solve_triangular(
            self.fit.root, cross, lower=True, check_finite=False
        )


class _Process(NamedTuple):
    """A task prior fitted to the task's trials, the deviation of a single candidate's error, and its probability."""

    task_prior: _TaskPrior
    fit: _Fit
    row: float
    probability: float


class Ratios:
    """The posterior of log(measured / predicted) in the current task, which is task 0 of `observed`.

    As in a Student-t process (Shah et al. 2014), the variances of each process are scaled by its prediction errors.
    Intervals become wide if the model does not match the measurements.
    """

    def __init__(self, observed: Observations, rows: Features, scales: Scales) -> None:
        """Learn from `observed`. Candidates that are queried later must have the same features as `rows`."""
        no_rows = rows.take(np.zeros(0, dtype=np.int64))
        self._features = Features.join((observed.features, no_rows)) if len(observed) else no_rows
        points = Points.from_features(self._features, observed.task)
        task_rows, past_rows = np.flatnonzero(observed.task == 0), np.flatnonzero(observed.task != 0)
        self._own = points.take(task_rows)
        task_ratio, past_ratio = observed.log_ratio[task_rows], observed.log_ratio[past_rows]
        task_priors = _new_priors(scales, task_ratio, 1.0 - PRIOR_VALIDITY if past_rows.size else 1.0)
        if past_rows.size:
            task_priors.append(_past_prior(scales, points.take(past_rows), past_ratio, observed.noise[past_rows]))
        self._processes = _processes(task_priors, self._own, task_ratio, observed.noise[task_rows])

    def posterior(self, rows: Features) -> Posterior:
        """Return the posterior of the log ratio of each candidate in `rows`."""
        aligned = Features.join((self._features.take(np.zeros(0, dtype=np.int64)), rows))
        points = Points.from_features(aligned, np.zeros(len(rows)))
        means, deviations = [], []
        for process, mean, roots in self._posteriors(points):
            prior_variance = variance(process.task_prior.scales, points)
            unexplained = np.maximum(prior_variance - sum((root**2).sum(axis=0) for root in roots), 0.0)
            means.append(mean)
            deviations.append(np.sqrt((unexplained + process.row**2) * process.fit.scale))
        probabilities = np.array([process.probability for process in self._processes])
        return Posterior(probabilities, np.stack(means), np.stack(deviations))

    def _posteriors(self, points: Points) -> Iterator[tuple[_Process, FloatArray, tuple[FloatArray, FloatArray]]]:
        """Yield each process, its posterior mean at `points`, and two roots of the explained covariance.

        The first root is the part that earlier runs explain, the second the part that the task's trials explain.
        """
        by_prior = {}
        for process in self._processes:
            task_prior = process.task_prior
            if id(task_prior) not in by_prior:
                prior = covariance(task_prior.scales, self._own, points)
                mean, root = task_prior.mean_and_root(points)
                own_root = task_prior.mean_and_root(self._own)[1]
                by_prior[id(task_prior)] = mean, root, prior - own_root.T @ root
            mean, root, cross = by_prior[id(task_prior)]
            explained = scipy.linalg.solve_triangular(process.fit.root, cross, lower=True, check_finite=False)
            yield process, mean + process.fit.weights @ cross, (root, explained)


def _past_prior(scales: Scales, past: Points, measured: FloatArray, noise: FloatArray) -> _TaskPrior:
    """Return the prior of the task that is fitted to the earlier runs `past`."""
    covariance_of_past = covariance(scales, past, past)
    fits = [
        _Fit.from_covariance(covariance_of_past, noise**2 + (factor * scales.row) ** 2, measured)
        for factor in ERROR_FACTORS
    ]
    log_posterior = np.log(FACTOR_PROBABILITIES) + [fit.log_likelihood for fit in fits]
    log_posterior -= scipy.special.logsumexp(log_posterior)
    best = fits[int(np.argmax(log_posterior))]
    mixed = np.logaddexp(np.log(FACTOR_PROBABILITIES), log_posterior) - np.log(2.0)
    return _TaskPrior(scales, PRIOR_VALIDITY, mixed, past, best)


def _new_priors(scales: Scales, task_ratio: FloatArray, probability: float) -> list[_TaskPrior]:
    """Return the priors without earlier runs: two if all trials of the task share a large factor, else one."""
    factors = np.log(FACTOR_PROBABILITIES)
    common = max(np.min(task_ratio), np.min(-task_ratio)) if task_ratio.size else 0.0
    if not scales.slowdown or common < np.log(SLOWDOWN_RATIO):
        return [_TaskPrior(scales, probability, factors)]
    slow = scales._replace(task=scales.slowdown)
    return [
        _TaskPrior(scales, (1.0 - SLOWDOWN) * probability, factors),
        _TaskPrior(slow, SLOWDOWN * probability, factors),
    ]


def _processes(
    task_priors: list[_TaskPrior], task_points: Points, measured: FloatArray, noise: FloatArray
) -> tuple[_Process, ...]:
    """Return one process per task prior and error factor, each with its posterior probability.

    Improbable ones are dropped. The scale of a process is at least the scale of its prior, because a task has few
    trials.
    """
    components, log_posterior = [], []
    for task_prior in task_priors:
        scales = task_prior.scales
        prior = covariance(scales, task_points, task_points)
        mean, root = task_prior.mean_and_root(task_points)
        unexplained = prior - root.T @ root
        prior_scale = task_prior.fit.scale if task_prior.fit else 1.0
        for factor, log_probability in zip(ERROR_FACTORS, task_prior.factor_log_probabilities, strict=True):
            row = factor * scales.row
            fit = _Fit.from_covariance(
                unexplained, noise**2 + row**2, measured - mean, prior_scale, min_scale=prior_scale
            )
            components.append((task_prior, fit, row))
            log_posterior.append(np.log(task_prior.probability) + log_probability + fit.log_likelihood)
    probabilities = np.exp(np.array(log_posterior) - scipy.special.logsumexp(log_posterior))
    used = np.flatnonzero(probabilities > MIN_PROBABILITY)
    probabilities /= probabilities[used].sum()
    return tuple(_Process(*components[index], float(probabilities[index])) for index in used)
