"""The prior of the error of predictions: scales, length scales, and a covariance.

The error is the sum of one factor per chip, per task, per part of the step (so that slow links affect all candidates
that use them) and per part and task, of smooth functions of kernel sizes and of each knob, of one of all knobs for each
task, and of an independent error per candidate.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flagcore.domain.experience import Features
from flagcore.domain.space import FloatArray, IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Scales:
    """Standard deviations of the logarithm of measured over predicted, and lengths in factors of two.

    `part_of_task` is the additional deviation of a part in one task, `row` the prior error of a single candidate.
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
"""Of step times, from published runs that were not fitted (bias of a source 5 to 20%, within a source 7 to 10%)."""

MEMORY = Scales(chip=0.10, task=0.03, part=0.0, part_of_task=0.0, size=0.02, knob=0.01, own=0.015, row=0.005)
"""Of memory in use: 2 to 4% if the size of a chip's context is known, more if it is estimated."""


@dataclass(frozen=True, slots=True)
class Points:
    """Candidates as matrices with one row each: `task` is one column, the others have one column per feature."""

    task: FloatArray
    parts: FloatArray
    sizes: FloatArray
    knobs: FloatArray

    @classmethod
    def of(cls, features: Features, task: IntArray | FloatArray) -> Points:
        """Return candidates of one or several tasks."""
        count = len(features)
        groups = (list(group.values()) for group in (features.parts, features.sizes, features.knobs))
        matrices = (np.stack(columns, axis=1) if columns else np.zeros((count, 0)) for columns in groups)
        return cls(np.asarray(task, dtype=np.float64)[:, None], *matrices)

    def __len__(self) -> int:
        return int(self.task.shape[0])

    def take(self, rows: IntArray) -> Points:
        """Return some of the candidates."""
        return Points(self.task[rows], self.parts[rows], self.sizes[rows], self.knobs[rows])


def covariance(scales: Scales, here: Points, there: Points) -> FloatArray:
    """Return the covariance of each of `here` with each of `there`, without their independent errors."""
    same = here.task == there.task.T
    found: FloatArray = scales.chip**2 + scales.task**2 * same
    if here.parts.shape[1] and scales.part:
        found = found + (scales.part**2 + scales.part_of_task**2 * same) * (here.parts @ there.parts.T)
    if here.sizes.shape[1]:
        found += scales.size**2 * _near(here.sizes, there.sizes, scales.size_length)
    if here.knobs.shape[1]:
        found += scales.own**2 * same * _near(here.knobs, there.knobs, scales.knob_length)
        found += scales.knob**2 * _near_along_each(here.knobs, there.knobs, scales.knob_length)
    return found


def variance(scales: Scales, here: Points) -> FloatArray:
    """Return the diagonal of the covariance of `here` with itself."""
    alike = scales.chip**2 + scales.task**2 + scales.size**2 * bool(here.sizes.shape[1])
    alike += scales.knob**2 * here.knobs.shape[1] + scales.own**2 * bool(here.knobs.shape[1])
    found: FloatArray = alike + (scales.part**2 + scales.part_of_task**2) * (here.parts**2).sum(axis=1)
    return found


def _near(here: FloatArray, there: FloatArray, length: float) -> FloatArray:
    squares = (here**2).sum(axis=1)[:, None] + (there**2).sum(axis=1) - 2.0 * (here @ there.T)
    near: FloatArray = np.exp(np.maximum(squares, 0.0) * (-0.5 / length**2))
    return near


def _near_along_each(here: FloatArray, there: FloatArray, length: float) -> FloatArray:
    """Return the sum over columns of exp(-d^2 / 2 length^2). A knob has few values, so matrix products suffice."""
    left, right = [], []
    for column in np.concatenate((here, there)).T:
        values, place = np.unique(column, return_inverse=True)
        which = np.eye(values.size)[place]
        left.append(which[: len(here)] @ np.exp(-0.5 * ((values[:, None] - values) / length) ** 2))
        right.append(which[len(here) :])
    total: FloatArray = np.concatenate(left, axis=1) @ np.concatenate(right, axis=1).T
    return total
