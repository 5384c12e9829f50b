"""A Gaussian process over the logarithm of measured over predicted: what is believed of candidates that did not run.

The prior is of physics: a factor common to a chip, one of a task, one of each part of the step (so that slow links
show wherever they weigh), a smooth function of the sizes that kernels see and one of each knob, for each task one of
all its knobs together, and an error of each candidate's own. What it says of the error of a prediction before anything
was measured is what `docs/accuracy.md` shows of runs that were not fitted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import Kernel
from sklearn.metrics.pairwise import euclidean_distances

from flagcore.domain.experience import Features, Observed
from flagcore.domain.space import FloatArray, IntArray

TRUST = 4.0
"""How many measurements the prior's own widths weigh against: after as many, widths follow the measurements half."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scales:
    """Standard deviations of the logarithm of measured over predicted, and lengths in factors of two."""

    chip: float
    task: float
    part: float
    size: float
    knob: float
    own: float
    row: float
    size_length: float = 0.7
    knob_length: float = 1.5


TIME = Scales(chip=0.25, task=0.10, part=0.15, size=0.15, knob=0.03, own=0.05, row=0.03)
"""Of step times: those of published runs that were not fitted (bias 5 to 20% a source, 7 to 10% within one)."""

MEMORY = Scales(chip=0.10, task=0.03, part=0.0, size=0.02, knob=0.01, own=0.015, row=0.005)
"""Of memory in use: within 2 to 4% where a chip's context is known, more where it is guessed."""


@dataclass(frozen=True, slots=True)
class Belief:
    """Mean and standard deviation of the logarithm of the ratio, one element a candidate; their covariance if asked."""

    mean: FloatArray
    deviation: FloatArray
    covariance: FloatArray | None = None


class Ratios:
    """What measurements let us believe of candidates of the task at hand.

    Widths are scaled by how far the measurements are from what the prior expected, as a Student process does
    (Shah et al. 2014), so that a model that is badly off is not trusted.
    """

    def __init__(self, observed: Observed, rows: Features, scales: Scales) -> None:
        """Learn from `observed`. What is asked later has the same features as `rows`."""
        count = len(observed)
        self._like = rows.take(np.zeros(0, dtype=np.int64))
        self._names = Features.join((observed.features, self._like)) if count else self._like
        known = self._matrix(self._names, observed.task)
        prior = Prior(scales, len(self._names.parts), len(self._names.sizes))
        self._row = scales.row
        noise = observed.noise**2 + scales.row**2 if count else 0.0
        self._process = GaussianProcessRegressor(prior, alpha=noise, optimizer=None)
        self._wider = 1.0
        if count:
            self._process.fit(known, observed.log_ratio)
            surprise = float(observed.log_ratio @ self._process.alpha_)
            self._wider = max(1.0, np.sqrt((TRUST + surprise) / (TRUST + count)))

    def of(self, rows: Features) -> Belief:
        """Return what is believed of each of `rows`."""
        mean, deviation = self._process.predict(self._asked(rows), return_std=True)
        return Belief(mean, np.hypot(deviation, self._row) * self._wider)

    def joint(self, rows: Features) -> Belief:
        """Return what is believed of `rows` together, with covariance."""
        mean, covariance = self._process.predict(self._asked(rows), return_cov=True)
        covariance = (covariance + self._row**2 * np.eye(len(mean))) * self._wider**2
        return Belief(mean, np.sqrt(np.maximum(np.diag(covariance), 0.0)), covariance)

    def _asked(self, rows: Features) -> FloatArray:
        aligned = Features.join((self._names.take(np.zeros(0, dtype=np.int64)), rows))
        return self._matrix(aligned, np.zeros(len(rows)))

    @staticmethod
    def _matrix(features: Features, task: FloatArray | IntArray) -> FloatArray:
        """Return a row a candidate: its task, and its features group by group."""
        columns = [*features.parts.values(), *features.sizes.values(), *features.knobs.values()]
        return np.stack([np.asarray(task, dtype=np.float64), *columns], axis=1)


class Prior(Kernel):  # type: ignore[misc]
    """Covariance of two candidates: columns are the task, then `parts` shares, `sizes` sizes, and the knobs."""

    def __init__(self, scales: Scales, parts: int, sizes: int) -> None:
        self.scales, self.parts, self.sizes = scales, parts, sizes

    def __call__(self, X: FloatArray, Y: FloatArray | None = None, eval_gradient: bool = False) -> FloatArray:
        """Return the covariance of each row of `X` with each of `Y`."""
        other, scales = X if Y is None else Y, self.scales
        parts, sizes, knobs = self._split()
        same = X[:, :1] == other[:, :1].T
        found: FloatArray = scales.chip**2 + scales.task**2 * same
        found = found + scales.part**2 * (X[:, parts] @ other[:, parts].T)
        if X[:, sizes].shape[1]:
            apart = euclidean_distances(X[:, sizes], other[:, sizes], squared=True)
            found = found + scales.size**2 * np.exp(-0.5 * apart / scales.size_length**2)
        if X[:, knobs].shape[1]:
            apart = euclidean_distances(X[:, knobs], other[:, knobs], squared=True)
            found = found + scales.own**2 * same * np.exp(-0.5 * apart / scales.knob_length**2)
            for here, there in zip(X[:, knobs].T, other[:, knobs].T, strict=True):
                along = np.exp(-0.5 * ((here[:, None] - there) / scales.knob_length) ** 2)
                found = found + scales.knob**2 * along
        return found

    def diag(self, X: FloatArray) -> FloatArray:
        """Return the variance of each row."""
        scales, (parts, sizes, knobs) = self.scales, self._split()
        smooth = scales.size**2 * bool(X[:, sizes].shape[1]) + scales.knob**2 * X[:, knobs].shape[1]
        smooth = smooth + scales.own**2 * bool(X[:, knobs].shape[1])
        found: FloatArray = scales.chip**2 + scales.task**2 + smooth + scales.part**2 * (X[:, parts] ** 2).sum(axis=1)
        return found

    def is_stationary(self) -> bool:
        """Return that it is not: parts of a step weigh by their shares."""
        return False

    def _split(self) -> tuple[slice, slice, slice]:
        ends = 1 + self.parts, 1 + self.parts + self.sizes
        return slice(1, ends[0]), slice(ends[0], ends[1]), slice(ends[1], None)
