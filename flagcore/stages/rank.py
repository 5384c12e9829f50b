"""rank: which candidate is tried next."""

from __future__ import annotations

import numpy as np

from flagcore.contracts import Strategy
from flagcore.domain.knowledge import Lessons, Pruned
from flagcore.domain.prediction import Predictions
from flagcore.domain.space import IntArray, Space
from flagcore.domain.trial import TrialState


def rank(strategy: Strategy, space: Space, predictions: Predictions, pruned: Pruned, lessons: Lessons) -> int | None:
    """Return the row to try next, or None when nothing is left: what was interrupted, else what `strategy` wants."""
    rows = untried(space, pruned, lessons)
    for trial in lessons.trials:
        if trial.state is TrialState.INTERRUPTED and (row := space.find(trial.candidate)) in rows:
            return row
    return strategy.next(rows, predictions, space, lessons.trials) if rows.size else None


def untried(space: Space, pruned: Pruned, lessons: Lessons) -> IntArray:
    """Return the rows that no rule removed and no trial settled."""
    settled = [row for candidate in lessons.settled if (row := space.find(candidate)) is not None]
    open_rows: IntArray = np.setdiff1d(pruned.open_rows, np.array(settled, dtype=np.int64), assume_unique=True)
    return open_rows
