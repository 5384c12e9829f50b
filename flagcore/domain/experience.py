"""Measurements with the predictions of the same candidates, by which predictions are corrected, and their features."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np

from flagcore.domain.prediction import Predictions
from flagcore.domain.space import Axis, Columns, FloatArray, IntArray


@dataclass(frozen=True, slots=True)
class Features:
    """One element a candidate in each array; arrays that a candidate of another task lacks are 0 there.

    `parts` are the shares of the predicted step time, `sizes` and `knobs` logarithms to base 2. `sizes` are what
    kernels' speed depends on, whatever the model; `knobs` are the candidate.
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
        """Put rows of several tasks together."""
        joined = []
        for each in fields(cls):
            groups = [getattr(some, each.name) for some in several]
            names = dict.fromkeys(name for group in groups for name in group)
            counts = [np.zeros(len(some)) for some in several]
            pairs = [list(zip(groups, counts, strict=True))] * len(names)
            joined.append(
                {
                    name: np.concatenate([group.get(name, zeros) for group, zeros in pair])
                    for name, pair in zip(names, pairs, strict=True)
                }
            )
        return cls(*joined)


@dataclass(frozen=True, slots=True)
class Observed:
    """Measurements: logarithms of measured over predicted, the standard deviation of their noise, and their task.

    `task` is any number that is the same for all candidates of one task; 0 is the task at hand.
    """

    features: Features
    log_ratio: FloatArray
    noise: FloatArray
    task: IntArray

    def __len__(self) -> int:
        return int(self.log_ratio.size)

    @classmethod
    def empty(cls) -> Observed:
        """Return no measurement."""
        return cls(Features({}, {}, {}), np.zeros(0), np.zeros(0), np.zeros(0, dtype=np.int64))

    @classmethod
    def join(cls, several: Sequence[Observed]) -> Observed:
        """Put measurements together."""
        some = [each for each in several if len(each)]
        if not some:
            return cls.empty()
        arrays = [np.concatenate([getattr(each, name) for each in some]) for name in ("log_ratio", "noise", "task")]
        return cls(Features.join([each.features for each in some]), *arrays)


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """Measurements of other tasks on the same chip and engine: step time, and memory in use."""

    time: Observed
    memory: Observed

    @classmethod
    def empty(cls) -> Past:
        """Return no measurements."""
        return cls(time=Observed.empty(), memory=Observed.empty())


WORD_DISTANCE = np.sqrt(0.5)
"""So that two words of a knob are 1 apart, as far as two values of which one is twice the other."""


def features(
    axes: Iterable[Axis], columns: Columns, predictions: Predictions, sizes: Mapping[str, FloatArray]
) -> Features:
    """Return the features of the rows of `columns`, which `predictions` are of.

    `sizes` are the engine's own, `flagcore.contracts.Workload.sizes`. Shares are 0 where the time is not known.
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
