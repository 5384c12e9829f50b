"""Which candidates need at least as much memory as another one, and which cannot keep the SLO."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from flagcore.domain.candidate import Candidate
from flagcore.domain.knob import Knob
from flagcore.domain.prediction import Predictions
from flagcore.domain.space import BoolArray, Columns

CERTAIN = 0.4
"""1.3% of 152 published first tokens took less than 0.49 of the prediction. A limit that even this share of the
prediction exceeds is certain to be missed."""


def needs_at_least(knobs: Sequence[Knob], columns: Columns, candidate: Candidate) -> BoolArray:
    """Return which rows need at least as much memory as `candidate`. A knob that is not set has no order."""
    values, orders = candidate.as_dict(), {knob.name: knob.memory_order for knob in knobs}
    result = np.ones(next(iter(columns.values())).size, dtype=np.bool_)
    for name, column in columns.items():
        value, order = values.get(name), orders.get(name, 0)
        if isinstance(value, str):  # only its axis knows the code of a word
            return np.zeros_like(result)
        code = 0 if value is None else int(value)
        if order > 0 and code > 0:
            result &= column >= code
        elif order < 0:
            result &= column <= code
        else:
            result &= column == code
    return result


class SloImpossible:
    """A predicted figure exceeds its limit even after twice its uncertainty, and at least `CERTAIN`, is taken off."""

    name = "slo_impossible"

    def __init__(self, limits: Mapping[str, float]) -> None:
        self._limits = limits
        bounds = ", ".join(f"{name} <= {limit:g} s" for name, limit in limits.items())
        self.message = f"it is predicted to miss the SLO by far ({bounds})"

    def prunes(self, columns: Columns, predictions: Predictions) -> BoolArray:
        """Return True where a limit cannot be kept; an unknown figure or interval excludes nothing."""
        least = np.minimum((predictions.low_s / predictions.step_time_s) ** 2, CERTAIN)
        pruned = np.zeros(predictions.step_time_s.shape, dtype=np.bool_)
        for name, limit in self._limits.items():
            if name in predictions.figures:
                pruned |= predictions.figures[name] * least > limit
        return pruned
