"""The Gaussian prior of the errors of predictions: standard deviations, length scales, and a covariance.

The error of a candidate is a sum of independent terms: for the chip; for the task; for each part of the step, so that a
slow link affects all candidates that use it; for each part in a task; smooth functions of kernel sizes, of each knob,
and of all knobs in a task; and an error of the candidate alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from flagcore.domain.experience import Features
from flagcore.domain.prediction import Predictions
from flagcore.domain.space import FloatArray, IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Scales:
    """Standard deviations of the logarithm of measured over predicted, and length scales in octaves.

    `part_of_task` is the deviation of a part of the step in one task, `own` that of the function of all knobs in a
    task, and `row` that of a single candidate.
    """

    chip: float
    task: float
    part: float
    part_of_task: float
    size: float
    knob: float
    own: float
    row: float
    size_length: float = 0.7
    knob_length: float = 1.5


TIME = Scales(chip=0.25, task=0.10, part=0.15, part_of_task=0.05, size=0.15, knob=0.03, own=0.05, row=0.03)
"""The scales for step times, from published runs that were not fitted: 5 to 20% between sources, 7 to 10% within
(docs/accuracy.md). The length scales are chosen."""

MEMORY = Scales(chip=0.10, task=0.03, part=0.0, part_of_task=0.0, size=0.02, knob=0.01, own=0.015, row=0.005)
"""The scales for memory in use, from measured runs (docs/accuracy.md): 2 to 4% if the context size of the chip is
known, more if it is estimated. The length scales are chosen."""

QUANTILE_90 = 1.2815515655446004
"""The 90% quantile of the standard normal distribution, which bounds an 80% interval."""
MAX_INTERVALS = 1000
"""The maximum number of intervals whose median is taken. Chosen: they differ little."""


def time_scales(predictions: Predictions) -> Scales:
    """Return `TIME`, with the deviation of the 80% intervals of `predictions` for the chip if it is larger.

    Such intervals belong to chips without measured costs: most of the error is then common to all candidates.
    """
    low, high = predictions.low_s[:MAX_INTERVALS], predictions.high_s[:MAX_INTERVALS]
    is_known = np.isfinite(high) & (low > 0)
    if not is_known.any():
        return TIME
    deviation = float(np.median(np.log(high[is_known] / low[is_known]))) / (2.0 * QUANTILE_90)
    return replace(TIME, chip=max(TIME.chip, deviation))


@dataclass(frozen=True, slots=True)
class Points:
    """The features of candidates as matrices: one row per candidate, and one column per feature or for the task."""

    task: FloatArray
    parts: FloatArray
    sizes: FloatArray
    knobs: FloatArray

    @classmethod
    def of(cls, features: Features, task: IntArray | FloatArray) -> Points:
        """Return the points of candidates with some features and task numbers."""
        count = len(features)
        groups = (list(group.values()) for group in (features.parts, features.sizes, features.knobs))
        matrices = (np.stack(columns, axis=1) if columns else np.zeros((count, 0)) for columns in groups)
        return cls(np.asarray(task, dtype=np.float64)[:, None], *matrices)

    def __len__(self) -> int:
        return int(self.task.shape[0])

    def take(self, rows: IntArray) -> Points:
        """Return the points of some rows."""
        return Points(self.task[rows], self.parts[rows], self.sizes[rows], self.knobs[rows])


def covariance(scales: Scales, left: Points, right: Points) -> FloatArray:
    """Return the covariance of each of `left` with each of `right`, without the errors of single candidates."""
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
    """Return the diagonal of the covariance of `points` with themselves."""
    constant = scales.chip**2 + scales.task**2 + scales.size**2 * bool(points.sizes.shape[1])
    constant += scales.knob**2 * points.knobs.shape[1] + scales.own**2 * bool(points.knobs.shape[1])
    total: FloatArray = constant + (scales.part**2 + scales.part_of_task**2) * (points.parts**2).sum(axis=1)
    return total


def _rbf_kernel(left: FloatArray, right: FloatArray, length: float) -> FloatArray:
    squares = (left**2).sum(axis=1)[:, None] + (right**2).sum(axis=1) - 2.0 * (left @ right.T)
    kernel: FloatArray = np.exp(np.maximum(squares, 0.0) * (-0.5 / length**2))
    return kernel


def _additive_rbf_kernel(left: FloatArray, right: FloatArray, length: float) -> FloatArray:
    """Return the sum of the RBF kernels of single columns. Columns have few distinct values, so products are fast."""
    left_factors, right_factors = [], []
    for column in np.concatenate((left, right)).T:
        values, index = np.unique(column, return_inverse=True)
        one_hot = np.eye(values.size)[index]
        left_factors.append(one_hot[: len(left)] @ np.exp(-0.5 * ((values[:, None] - values) / length) ** 2))
        right_factors.append(one_hot[len(left) :])
    total: FloatArray = np.concatenate(left_factors, axis=1) @ np.concatenate(right_factors, axis=1).T
    return total
