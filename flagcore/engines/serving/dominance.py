"""Which candidates need at least as much memory as a given one, and which cannot keep the SLO."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from flagcore.domain.candidate import Candidate
from flagcore.domain.prediction import Predictions
from flagcore.domain.space import BoolArray, Columns

MORE_NEEDS_MORE = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_running_requests",
    "chunked_prefill_size",
    "max_prefill_tokens",
    "parallel",
    "batch_size",
    "ubatch_size",
)
"""Knobs of which a larger value needs at least as much memory, all else being equal."""
LESS_NEEDS_MORE = ("enforce_eager",)
"""Knobs of which a smaller value does: captured graphs take memory."""


def needs_at_least(columns: Columns, candidate: Candidate) -> BoolArray:
    """Return which rows need at least as much memory as `candidate`; a knob that is left to the engine has no order."""
    values = candidate.as_dict()
    result = np.ones(_rows(columns), dtype=np.bool_)
    for knob, column in columns.items():
        value = values.get(knob)
        if isinstance(value, str):  # a word's code is known to its axis alone
            return np.zeros(_rows(columns), dtype=np.bool_)
        code = 0 if value is None else int(value)
        if knob in MORE_NEEDS_MORE and code > 0:
            result &= column >= code
        elif knob in LESS_NEEDS_MORE:
            result &= column <= code
        else:
            result &= column == code
    return result


def takes_at_least(columns: Columns, candidate: Candidate) -> BoolArray:
    """Return no row: a scheduler's knobs have no order in time that holds for every model and load."""
    return np.zeros(_rows(columns), dtype=np.bool_)


SURELY = 0.4
"""Of 152 published first tokens 1.3% took less than 0.49 of what is predicted: even so it is over its limit."""


class SloImpossible:
    """A predicted figure is over its limit even where twice its uncertainty is taken off, and `SURELY` at the least."""

    name = "slo_impossible"

    def __init__(self, limits: Mapping[str, float]) -> None:
        self._limits = limits
        bounds = ", ".join(f"{name} <= {limit:g} s" for name, limit in limits.items())
        self.message = f"it is predicted to be surely over a limit of the SLO ({bounds})"

    def prunes(self, columns: Columns, predictions: Predictions) -> BoolArray:
        """Return True where a limit cannot be kept; a figure or an interval that is not known rules nothing out."""
        least = np.minimum((predictions.low_s / predictions.step_time_s) ** 2, SURELY)
        pruned = np.zeros(predictions.step_time_s.shape, dtype=np.bool_)
        for name, limit in self._limits.items():
            if name in predictions.figures:
                pruned |= predictions.figures[name] * least > limit
        return pruned


def _rows(columns: Columns) -> int:
    return int(next(iter(columns.values())).size)
