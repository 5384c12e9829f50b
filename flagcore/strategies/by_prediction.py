"""The fastest predicted candidate first, once each knob has been turned."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flagcore.domain.prediction import Predictions
from flagcore.domain.space import BoolArray, IntArray, Space
from flagcore.domain.trial import Trial


class ByPrediction:
    """Tries candidates in the order of their predicted step time, unknown ones last and by memory.

    A prediction is an interval. So before the order is trusted, each knob gets one trial in which it is
    turned (not at its neutral value), if some such candidate could still be the fastest within the intervals.
    """

    name = "by_prediction"

    def next(self, open_rows: IntArray, predictions: Predictions, space: Space, trials: Sequence[Trial]) -> int:
        """Return the open row to try; of equal predictions, the one that needs least memory."""
        rows = open_rows
        unturned = _unturned(space, trials)
        if unturned:
            turns = rows[_turns(space, rows, unturned) & _could_win(predictions, rows)]
            rows = turns if turns.size else rows
        time = np.nan_to_num(predictions.step_time_s[rows], nan=np.inf)
        return int(rows[np.lexsort((predictions.device_used_bytes[rows], time))[0]])


def _unturned(space: Space, trials: Sequence[Trial]) -> list[int]:
    """Return the places of the axes that were neutral in every trial."""
    tried = [trial.candidate.as_dict() for trial in trials]
    axes = enumerate(space.axes)
    return [place for place, axis in axes if all(values.get(axis.knob) == axis.neutral for values in tried)]


def _turns(space: Space, rows: IntArray, unturned: Sequence[int]) -> BoolArray:
    """Return which rows turn at least one of the axes at `unturned`."""
    columns = space.columns(rows)
    axes = [space.axes[place] for place in unturned]
    turned: BoolArray = np.logical_or.reduce([columns[axis.knob] != axis.encode(axis.neutral) for axis in axes])
    return turned


def _could_win(predictions: Predictions, rows: IntArray) -> BoolArray:
    """Return which rows may be faster than the fastest predicted one, both at the favourable ends."""
    low, high = predictions.low_s[rows], predictions.high_s[rows]
    possible: BoolArray = ~(low > np.nanmin(high)) if np.isfinite(high).any() else np.ones(rows.shape, dtype=np.bool_)
    return possible


STRATEGY = ByPrediction()
