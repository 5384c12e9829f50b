"""What the error of a prediction may depend on, as numbers that mean the same from one task to the next."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from flagcore.domain.experience import Features
from flagcore.domain.prediction import Predictions
from flagcore.domain.space import Axis, Columns, FloatArray

WORD_APART = np.sqrt(0.5)
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
                knobs[f"{axis.knob}={word}"] = WORD_APART * (codes == code)
        else:
            knobs[axis.knob] = np.sign(codes) * np.log2(1.0 + np.abs(codes))
    return Features(parts, {name: np.asarray(values, dtype=np.float64) for name, values in sizes.items()}, knobs)
