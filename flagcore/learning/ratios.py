"""Gaussian processes for the logarithm of measured over predicted figures.

The independent error of single candidates is unknown, and earlier runs may not apply to the current task. Therefore
there are several processes, for different sizes of this error, with and without earlier runs. They are averaged with
their likelihood of the task's trials as weights (Bayesian model averaging; Hoeting et al. 1999).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import scipy

from flagcore.domain.experience import Features, Observations
from flagcore.domain.space import FloatArray
from flagcore.learning.prior import Points, Scales, covariance, variance

PRIOR_WEIGHT = 4.0
"""The weight of the prior's scale, as a number of measurements. Chosen."""

ERROR_FACTORS, FACTOR_PROBABILITIES = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0), (0.2, 0.45, 0.2, 0.08, 0.04, 0.03)
"""Factors of the prior's independent error of a candidate, and their prior probabilities. Chosen: errors
of 1.5% to 50% per candidate, of which rough ones are rare."""

PRIOR_VALIDITY = 0.97
"""The prior probability that earlier runs apply to the current task. Chosen."""

MIN_PROBABILITY = 1e-3
"""Processes with a smaller probability are dropped. Chosen to limit the run time."""


@dataclass(frozen=True, slots=True)
class Posterior:
    """The posterior of the logarithm of the ratio.

    `means` and `deviations` have the shape (processes, candidates); `probabilities` are those of the processes.
    """

    probabilities: FloatArray
    means: FloatArray
    deviations: FloatArray

    @property
    def mean(self) -> FloatArray:
        """The means of the mixture of all processes."""
        mean: FloatArray = self.probabilities @ self.means
        return mean

    @property
    def deviation(self) -> FloatArray:
        """The standard deviations of the mixture of all processes."""
        square = self.probabilities @ (self.deviations**2 + self.means**2)
        deviation: FloatArray = np.sqrt(np.maximum(square - self.mean**2, 0.0))
        return deviation


@dataclass(frozen=True, slots=True)
class _Fit:
    """A fit of measurements: the Cholesky root of their covariance, and the inverse covariance times their values.

    `scale` is the posterior scale of all variances, `log_likelihood` the log-likelihood up to a constant.
    """

    root: FloatArray
    weights: FloatArray
    scale: float
    log_likelihood: float

    @classmethod
    def of(
        cls,
        covariance: FloatArray,
        noise: FloatArray,
        measured: FloatArray,
        prior_scale: float = 1.0,
        min_scale: float = 0.0,
    ) -> _Fit:
        """Fit `measured` with mean 0 and the variances `noise`.

        The scale of all variances is unknown, so the marginal distribution is a Student distribution. Its prior is
        `prior_scale` with the weight PRIOR_WEIGHT, and the posterior scale is at least `min_scale`.
        """
        root: FloatArray = np.linalg.cholesky(covariance + np.diag(noise)).astype(np.float64)
        weights = scipy.linalg.cho_solve((root, True), measured)
        distance, count = float(measured @ weights), len(measured)
        scale = max(min_scale, (PRIOR_WEIGHT * prior_scale + distance) / (PRIOR_WEIGHT + count))
        student = (PRIOR_WEIGHT + count) * np.log1p(distance / (PRIOR_WEIGHT * prior_scale))
        log_likelihood = -np.log(np.diag(root)).sum() - 0.5 * (count * np.log(prior_scale) + student)
        return cls(root, weights, scale, float(log_likelihood))


@dataclass(frozen=True, slots=True)
class _TaskPrior:
    """The prior of a task before its trials, with or without earlier runs.

    `factor_log_probabilities` are the log-probabilities of ERROR_FACTORS.
    """

    scales: Scales
    probability: float
    factor_log_probabilities: FloatArray
    past: Points | None = None
    fit: _Fit | None = None

    def mean_and_root(self, points: Points) -> tuple[FloatArray, FloatArray]:
        """Return the mean of `points`, and a root of the part of their covariance that earlier runs explain."""
        if self.past is None or self.fit is None:
            return np.zeros(len(points)), np.zeros((0, len(points)))
        cross = covariance(self.scales, self.past, points)
        return self.fit.weights @ cross, scipy.linalg.solve_triangular(
            self.fit.root, cross, lower=True, check_finite=False
        )


@dataclass(frozen=True, slots=True)
class _Process:
    """A process: a prior that is fitted to the trials of the task, with the independent error `row` of candidates."""

    task_prior: _TaskPrior
    fit: _Fit
    row: float
    probability: float


class Ratios:
    """Posterior of the ratios of candidates of the current task, task 0 of `observed`.

    As in a Student process (Shah et al. 2014), the variances of each process are scaled by the errors of its
    predictions, so that intervals are wide if the model does not match the measurements.
    """

    def __init__(self, observed: Observations, rows: Features, scales: Scales) -> None:
        """Learn from `observed`. Rows for which the posterior is computed later have the same features as `rows`."""
        no_rows = rows.take(np.zeros(0, dtype=np.int64))
        self._features = Features.join((observed.features, no_rows)) if len(observed) else no_rows
        points = Points.of(self._features, observed.task)
        task_rows, past_rows = np.flatnonzero(observed.task == 0), np.flatnonzero(observed.task != 0)
        self._scales, self._own = scales, points.take(task_rows)
        task_priors = [_TaskPrior(scales, 1.0, np.log(FACTOR_PROBABILITIES))]
        if past_rows.size:
            task_priors = _task_priors(
                scales, points.take(past_rows), observed.log_ratio[past_rows], observed.noise[past_rows]
            )
        self._processes = _processes(
            scales, task_priors, self._own, observed.log_ratio[task_rows], observed.noise[task_rows]
        )

    def of(self, rows: Features) -> Posterior:
        """Return the posterior of each of `rows`."""
        points = self._points(rows)
        prior_variance = variance(self._scales, points)
        means, deviations = [], []
        for process, mean, roots in self._posteriors(points):
            unexplained = np.maximum(prior_variance - sum((root**2).sum(axis=0) for root in roots), 0.0)
            means.append(mean)
            deviations.append(np.sqrt((unexplained + process.row**2) * process.fit.scale))
        probabilities = np.array([process.probability for process in self._processes])
        return Posterior(probabilities, np.stack(means), np.stack(deviations))

    def sample(self, rows: Features, count: int) -> FloatArray:
        """Return about `count` joint samples of the logarithms of the ratios of `rows`. Deterministic."""
        points, rng = self._points(rows), np.random.default_rng(0)
        prior_covariance = covariance(self._scales, points, points)
        samples = []
        for process, mean, roots in self._posteriors(points):
            posterior_covariance = prior_covariance - sum(root.T @ root for root in roots)
            values, vectors = np.linalg.eigh(posterior_covariance)
            root = vectors * np.sqrt(np.maximum(values, 0.0))
            process_count = max(1, round(process.probability * count))
            deviates = rng.standard_normal((process_count, len(points))) @ root.T
            deviates += process.row * rng.standard_normal((process_count, len(points)))
            samples.append(mean + np.sqrt(process.fit.scale) * deviates)
        return np.concatenate(samples)

    def _posteriors(self, points: Points) -> Iterator[tuple[_Process, FloatArray, tuple[FloatArray, FloatArray]]]:
        """Yield the mean of `points` for each process, and roots of the explained part of the covariance."""
        prior = covariance(self._scales, self._own, points)
        by_prior = {}
        for process in self._processes:
            task_prior = process.task_prior
            if id(task_prior) not in by_prior:
                mean, root = task_prior.mean_and_root(points)
                own_root = task_prior.mean_and_root(self._own)[1]
                by_prior[id(task_prior)] = mean, root, prior - own_root.T @ root
            mean, root, cross = by_prior[id(task_prior)]
            explained = scipy.linalg.solve_triangular(process.fit.root, cross, lower=True, check_finite=False)
            yield process, mean + process.fit.weights @ cross, (root, explained)

    def _points(self, rows: Features) -> Points:
        aligned = Features.join((self._features.take(np.zeros(0, dtype=np.int64)), rows))
        return Points.of(aligned, np.zeros(len(rows)))


def _task_priors(scales: Scales, past: Points, measured: FloatArray, noise: FloatArray) -> list[_TaskPrior]:
    """Return the priors of the task without and with earlier runs."""
    shared = covariance(scales, past, past)
    fits = [_Fit.of(shared, noise**2 + (factor * scales.row) ** 2, measured) for factor in ERROR_FACTORS]
    log_posterior = np.log(FACTOR_PROBABILITIES) + [fit.log_likelihood for fit in fits]
    log_posterior -= scipy.special.logsumexp(log_posterior)
    best = fits[int(np.argmax(log_posterior))]
    mixed = np.logaddexp(np.log(FACTOR_PROBABILITIES), log_posterior) - np.log(2.0)
    return [
        _TaskPrior(scales, 1.0 - PRIOR_VALIDITY, np.log(FACTOR_PROBABILITIES)),
        _TaskPrior(scales, PRIOR_VALIDITY, mixed, past, best),
    ]


def _processes(
    scales: Scales, task_priors: list[_TaskPrior], own: Points, measured: FloatArray, noise: FloatArray
) -> tuple[_Process, ...]:
    """Return the processes of all task priors and error factors with their posterior probabilities.

    The scale of a process is at least that of its prior, because a task has few trials.
    """
    prior, components, log_posterior = covariance(scales, own, own), [], []
    for task_prior in task_priors:
        mean, root = task_prior.mean_and_root(own)
        unexplained = prior - root.T @ root
        prior_scale = task_prior.fit.scale if task_prior.fit else 1.0
        for factor, log_probability in zip(ERROR_FACTORS, task_prior.factor_log_probabilities, strict=True):
            row = factor * scales.row
            fit = _Fit.of(unexplained, noise**2 + row**2, measured - mean, prior_scale, min_scale=prior_scale)
            components.append((task_prior, fit, row))
            log_posterior.append(np.log(task_prior.probability) + log_probability + fit.log_likelihood)
    probabilities = np.exp(np.array(log_posterior) - scipy.special.logsumexp(log_posterior))
    used = np.flatnonzero(probabilities > MIN_PROBABILITY)
    probabilities /= probabilities[used].sum()
    return tuple(_Process(*components[index], float(probabilities[index])) for index in used)
