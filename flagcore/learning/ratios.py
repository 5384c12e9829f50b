"""A Gaussian process over the logarithm of measured over predicted figures.

The independent error of candidates is unknown in advance, and earlier runs may not apply to the current task. So there
are several processes, one per size of that error, with and without earlier runs. They are weighted by how well they
predicted the trials of the task (Bayesian model averaging; Hoeting et al. 1999).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import scipy

from flagcore.domain.experience import Features, Observations
from flagcore.domain.space import FloatArray
from flagcore.learning.prior import Points, Scales, covariance, variance

TRUST = 4.0
"""Weight of the prior's scale, in measurements: after as many, prior and measurements count equally."""

ROUGHER, CHANCES = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0), (0.2, 0.45, 0.2, 0.08, 0.04, 0.03)
"""Factors on the prior's independent error of a candidate, and their prior probabilities."""

PRIOR_VALIDITY = 0.97
"""Prior probability that earlier runs apply to the current task."""

NEGLIGIBLE = 1e-3
"""Processes with a smaller probability are dropped."""


@dataclass(frozen=True, slots=True)
class Belief:
    """Posterior of the logarithm of the ratio: means and standard deviations (processes, candidates), and the
    probabilities of the processes."""

    chances: FloatArray
    means: FloatArray
    deviations: FloatArray

    @property
    def mean(self) -> FloatArray:
        """Of the mixture of all processes."""
        mean: FloatArray = self.chances @ self.means
        return mean

    @property
    def deviation(self) -> FloatArray:
        """Of the mixture of all processes."""
        square = self.chances @ (self.deviations**2 + self.means**2)
        deviation: FloatArray = np.sqrt(np.maximum(square - self.mean**2, 0.0))
        return deviation


@dataclass(frozen=True, slots=True)
class _Fit:
    """Measurements with the Cholesky root of their covariance, and its inverse times the measured values.

    `wider` is the posterior scale of all variances, `likely` the log-likelihood up to a constant.
    """

    root: FloatArray
    weights: FloatArray
    wider: float
    likely: float

    @classmethod
    def of(
        cls, covariance: FloatArray, noise: FloatArray, measured: FloatArray, wide: float = 1.0, least: float = 0.0
    ) -> _Fit:
        """Fit `measured` about 0, with variances `noise`. `wide` is the prior scale, `least` the least posterior one.

        The scale is unknown, with a prior worth TRUST measurements (a Student distribution).
        """
        root: FloatArray = np.linalg.cholesky(covariance + np.diag(noise)).astype(np.float64)
        weights = scipy.linalg.cho_solve((root, True), measured)
        surprise, count = float(measured @ weights), len(measured)
        wider = max(least, (TRUST * wide + surprise) / (TRUST + count))
        scaled = count * np.log(wide) + (TRUST + count) * np.log1p(surprise / (TRUST * wide))
        likely = -np.log(np.diag(root)).sum() - 0.5 * scaled
        return cls(root, weights, wider, float(likely))


@dataclass(frozen=True, slots=True)
class _TaskPrior:
    """The prior of a task before its trials, with or without earlier runs.

    `rough` are the log-probabilities of ROUGHER.
    """

    scales: Scales
    chance: float
    rough: FloatArray
    past: Points | None = None
    fit: _Fit | None = None

    def about(self, points: Points) -> tuple[FloatArray, FloatArray]:
        """Return the mean of `points`, and a root of the part of their covariance that earlier runs explain."""
        if self.past is None or self.fit is None:
            return np.zeros(len(points)), np.zeros((0, len(points)))
        cross = covariance(self.scales, self.past, points)
        return self.fit.weights @ cross, scipy.linalg.solve_triangular(
            self.fit.root, cross, lower=True, check_finite=False
        )


@dataclass(frozen=True, slots=True)
class _Process:
    """A `_TaskPrior` with the trials of the task, for an independent error `row` of candidates."""

    task_prior: _TaskPrior
    fit: _Fit
    row: float
    chance: float


class Ratios:
    """Posterior of the ratios of candidates of the current task, task 0 of `observed`.

    The variances of each process are scaled by the errors of its predictions, as in a Student process (Shah et al.
    2014), so that a wrong model gets wide intervals.
    """

    def __init__(self, observed: Observations, rows: Features, scales: Scales) -> None:
        """Learn from `observed`. Later queries have the same features as `rows`."""
        like = rows.take(np.zeros(0, dtype=np.int64))
        self._names = Features.join((observed.features, like)) if len(observed) else like
        points = Points.of(self._names, observed.task)
        own, past = np.flatnonzero(observed.task == 0), np.flatnonzero(observed.task != 0)
        self._scales, self._own = scales, points.take(own)
        task_priors = [_TaskPrior(scales, 1.0, np.log(CHANCES))]
        if past.size:
            task_priors = _task_priors(scales, points.take(past), observed.log_ratio[past], observed.noise[past])
        self._processes = _processes(scales, task_priors, self._own, observed.log_ratio[own], observed.noise[own])

    def of(self, rows: Features) -> Belief:
        """Return the posterior of each of `rows`."""
        asked = self._asked(rows)
        alone = variance(self._scales, asked)
        means, deviations = [], []
        for process, middle, roots in self._posteriors(asked):
            spread = np.maximum(alone - sum((root**2).sum(axis=0) for root in roots), 0.0)
            means.append(middle)
            deviations.append(np.sqrt((spread + process.row**2) * process.fit.wider))
        chances = np.array([process.chance for process in self._processes])
        return Belief(chances, np.stack(means), np.stack(deviations))

    def drawn(self, rows: Features, count: int) -> FloatArray:
        """Return about `count` joint draws of the logarithms of the ratios of `rows`. Deterministic."""
        asked, rng = self._asked(rows), np.random.default_rng(0)
        alone = covariance(self._scales, asked, asked)
        draws = []
        for process, middle, roots in self._posteriors(asked):
            together = alone - sum(root.T @ root for root in roots)
            values, vectors = np.linalg.eigh(together)
            root = vectors * np.sqrt(np.maximum(values, 0.0))
            several = max(1, round(process.chance * count))
            deviates = rng.standard_normal((several, len(asked))) @ root.T
            deviates += process.row * rng.standard_normal((several, len(asked)))
            draws.append(middle + np.sqrt(process.fit.wider) * deviates)
        return np.concatenate(draws)

    def _posteriors(self, asked: Points) -> Iterator[tuple[_Process, FloatArray, tuple[FloatArray, FloatArray]]]:
        """Yield the mean of `asked` for each process, and roots of the explained part of the covariance."""
        prior = covariance(self._scales, self._own, asked)
        about = {}
        for process in self._processes:
            if id(process.task_prior) not in about:
                middle, root = process.task_prior.about(asked)
                about[id(process.task_prior)] = middle, root, prior - process.task_prior.about(self._own)[1].T @ root
            middle, root, cross = about[id(process.task_prior)]
            own = scipy.linalg.solve_triangular(process.fit.root, cross, lower=True, check_finite=False)
            yield process, middle + process.fit.weights @ cross, (root, own)

    def _asked(self, rows: Features) -> Points:
        aligned = Features.join((self._names.take(np.zeros(0, dtype=np.int64)), rows))
        return Points.of(aligned, np.zeros(len(rows)))


def _task_priors(scales: Scales, past: Points, measured: FloatArray, noise: FloatArray) -> list[_TaskPrior]:
    """Return the prior without and with earlier runs."""
    shared = covariance(scales, past, past)
    fits = [_Fit.of(shared, noise**2 + (times * scales.row) ** 2, measured) for times in ROUGHER]
    likely = np.log(CHANCES) + [fit.likely for fit in fits]
    likely -= scipy.special.logsumexp(likely)
    best = fits[int(np.argmax(likely))]
    widened = np.logaddexp(np.log(CHANCES), likely) - np.log(2.0)
    return [
        _TaskPrior(scales, 1.0 - PRIOR_VALIDITY, np.log(CHANCES)),
        _TaskPrior(scales, PRIOR_VALIDITY, widened, past, best),
    ]


def _processes(
    scales: Scales, task_priors: list[_TaskPrior], own: Points, measured: FloatArray, noise: FloatArray
) -> tuple[_Process, ...]:
    """Return the processes of all task priors and errors, weighted by their likelihood.

    Earlier runs may have narrowed the scale; the few trials of a task only widen it.
    """
    prior, found, likely = covariance(scales, own, own), [], []
    for task_prior in task_priors:
        middle, root = task_prior.about(own)
        left = prior - root.T @ root
        for times, rough in zip(ROUGHER, task_prior.rough, strict=True):
            row, wide = times * scales.row, task_prior.fit.wider if task_prior.fit else 1.0
            fit = _Fit.of(left, noise**2 + row**2, measured - middle, wide, least=wide)
            found.append((task_prior, fit, row))
            likely.append(np.log(task_prior.chance) + rough + fit.likely)
    chances = np.exp(np.array(likely) - scipy.special.logsumexp(likely))
    kept = np.flatnonzero(chances > NEGLIGIBLE)
    chances /= chances[kept].sum()
    return tuple(_Process(*found[at], float(chances[at])) for at in kept)
