"""Measurements that correct predictions, and the features of candidates on which the corrections depend."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np

from flagcore.domain.prediction import Predictions
from flagcore.domain.space import Axis, Columns, FloatArray, IntArray


@dataclass(frozen=True, slots=True)
class Features:
    """The features of candidates by name, each an array with one element per candidate.

    `parts` are the shares of the predicted step time. `sizes` determine the speed of kernels; `knobs` are the values of
    the candidate. Both are logarithms to base 2. Features that a task does not have are 0.
    """

    parts: Mapping[str, FloatArray]
    sizes: Mapping[str, FloatArray]
    knobs: Mapping[str, FloatArray]

    def __len__(self) -> int:
        return next((values.size for each in fields(self) for values in getattr(self, each.name).values()), 0)

    def take(self, rows: IntArray) -> Features:
        """Return the features of some rows."""
        return Features(
            *({name: values[rows] for name, values in getattr(self, each.name).items()} for each in fields(self))
        )

    @classmethod
    def join(cls, several: Sequence[Features]) -> Features:
        """Concatenate the rows of several tasks."""
        joined = []
        for each in fields(cls):
            groups = [(getattr(features, each.name), np.zeros(len(features))) for features in several]
            names = dict.fromkeys(name for group, _ in groups for name in group)
            joined.append({name: np.concatenate([group.get(name, zeros) for group, zeros in groups]) for name in names})
        return cls(*joined)


@dataclass(frozen=True, slots=True)
class Observations:
    """Measured candidates: the logarithm of measured over predicted, and the standard deviation of its noise.

    `task` numbers the tasks of the candidates; 0 is the current task.
    """

    features: Features
    log_ratio: FloatArray
    noise: FloatArray
    task: IntArray

    def __len__(self) -> int:
        return int(self.log_ratio.size)

    @classmethod
    def empty(cls) -> Observations:
        """Return an object without measurements."""
        return cls(Features({}, {}, {}), np.zeros(0), np.zeros(0), np.zeros(0, dtype=np.int64))

    @classmethod
    def join(cls, several: Sequence[Observations]) -> Observations:
        """Concatenate measurements."""
        nonempty = [each for each in several if len(each)]
        if not nonempty:
            return cls.empty()
        arrays = [np.concatenate([getattr(each, name) for each in nonempty]) for name in ("log_ratio", "noise", "task")]
        return cls(Features.join([each.features for each in nonempty]), *arrays)


@dataclass(frozen=True, slots=True, kw_only=True)
class PastMeasurements:
    """Measurements of other tasks on the same chip and engine: step time, and memory in use."""

    time: Observations
    memory: Observations

    @classmethod
    def empty(cls) -> PastMeasurements:
        """Return an object without measurements."""
        return cls(time=Observations.empty(), memory=Observations.empty())


WORD_DISTANCE = np.sqrt(0.5)
"""The feature of a knob's word. Two words then have distance 1, the distance of a number and its double."""


def features(
    axes: Iterable[Axis], columns: Columns, predictions: Predictions, sizes: Mapping[str, FloatArray]
) -> Features:
    """Return the features of the rows of `columns`, given the `predictions` of the same rows.

    `sizes` is the result of `Workload.sizes`. Shares are 0 if the time is unknown.
    """
    step = predictions.step_time_s
    with np.errstate(invalid="ignore", divide="ignore"):
        parts = {name: np.nan_to_num(seconds / step) for name, seconds in predictions.time_s.items()}
    knobs: dict[str, FloatArray] = {}
    for axis in axes:
        codes = columns[axis.knob]
        if axis.words:
            for code, word in enumerate(axis.words):
                knobs[f"{axis.knob}={word}"] = WORD_DISTANCE * (codes == code)
        else:
            knobs[axis.knob] = np.sign(codes) * np.log2(1.0 + np.abs(codes))
    return Features(parts, {name: np.asarray(values, dtype=np.float64) for name, values in sizes.items()}, knobs)
