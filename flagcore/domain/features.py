"""What the errors of predictions are learned from: the features of candidates, and what was measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np

from flagcore.domain.prediction import Predictions
from flagcore.domain.space import Axis, Columns, FloatArray, IntArray


@dataclass(frozen=True, slots=True)
class Features:
    """Features of candidates, from which the errors of predictions are learned.

    Each feature is an array with one element per candidate. Features that a task does not have are 0.

    `parts`: the shares of the step's parts in the predicted step time.
    `sizes`: the sizes that determine the speed of kernels, as logarithms to base 2.
    `knobs`: the knob values, as logarithms to base 2.
    """

    parts: Mapping[str, FloatArray]
    sizes: Mapping[str, FloatArray]
    knobs: Mapping[str, FloatArray]

    def __len__(self) -> int:
        return next((values.size for each in fields(self) for values in getattr(self, each.name).values()), 0)

    def take(self, rows: IntArray) -> Features:
        """Return the features of the candidates in `rows`."""
        return Features(
            *({name: values[rows] for name, values in getattr(self, each.name).items()} for each in fields(self))
        )

    @classmethod
    def join(cls, parts: Sequence[Features]) -> Features:
        """Concatenate the candidates of several tasks. Features that a task lacks are filled with 0."""
        arrays = []
        for each in fields(cls):
            groups = [(getattr(features, each.name), np.zeros(len(features))) for features in parts]
            names = dict.fromkeys(name for group, _ in groups for name in group)
            arrays.append({name: np.concatenate([group.get(name, zeros) for group, zeros in groups]) for name in names})
        return cls(*arrays)


@dataclass(frozen=True, slots=True)
class Observations:
    """Measured candidates, from which the errors of predictions are learned.

    `log_ratio`: the logarithm of the measured over the predicted value.
    `noise`: the standard deviation of the noise of `log_ratio`.
    `task`: the number of each candidate's task. 0 is the current task.
    """

    features: Features
    log_ratio: FloatArray
    noise: FloatArray
    task: IntArray

    def __len__(self) -> int:
        return int(self.log_ratio.size)

    @classmethod
    def empty(cls) -> Observations:
        """Return observations of no candidates."""
        return cls(Features({}, {}, {}), np.zeros(0), np.zeros(0), np.zeros(0, dtype=np.int64))

    @classmethod
    def join(cls, parts: Sequence[Observations]) -> Observations:
        """Concatenate the observations of several sets of trials."""
        nonempty = [each for each in parts if len(each)]
        if not nonempty:
            return cls.empty()
        arrays = [np.concatenate([getattr(each, name) for each in nonempty]) for name in ("log_ratio", "noise", "task")]
        return cls(Features.join([each.features for each in nonempty]), *arrays)


@dataclass(frozen=True, slots=True, kw_only=True)
class PastMeasurements:
    """Step times and memory in use that were measured in other tasks on the same chip and engine."""

    time: Observations
    memory: Observations

    @classmethod
    def empty(cls) -> PastMeasurements:
        """Return empty measurements, for a chip and engine that no other task has used."""
        return cls(time=Observations.empty(), memory=Observations.empty())


WORD_DISTANCE = np.sqrt(0.5)
"""The feature value of a knob's word. With it, two different words have distance 1, like a number and its double."""


def features(
    axes: Iterable[Axis], columns: Columns, predictions: Predictions, sizes: Mapping[str, FloatArray]
) -> Features:
    """Return the features of the candidates in `columns`, given the `predictions` of the same candidates.

    `sizes`: the result of `Engine.sizes`. Shares of an unknown step time are 0.
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
            knobs[axis.knob] = _octaves(codes)
            known = [axis.encode(value) for value in axis.values if value]
            if axis.neutral is None and known:  # code 0 is not the number 0, but the engine's own choice
                knobs[axis.knob] = np.where(codes == 0, _octaves(np.array(known)).mean(), knobs[axis.knob])
                knobs[f"{axis.knob}=None"] = WORD_DISTANCE * (codes == 0)
    return Features(parts, {name: np.asarray(values, dtype=np.float64) for name, values in sizes.items()}, knobs)


def _octaves(codes: IntArray) -> FloatArray:
    return np.asarray(np.sign(codes) * np.log2(1.0 + np.abs(codes)))
