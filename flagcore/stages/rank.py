"""rank: which candidate is tried next."""

from __future__ import annotations

import numpy as np

from flagcore.contracts import Strategy
from flagcore.domain.knowledge import Lessons, Pruned
from flagcore.domain.prediction import Predictions
from flagcore.domain.space import IntArray, Space


def rank(strategy: Strategy, space: Space, predictions: Predictions, pruned: Pruned, lessons: Lessons) -> int | None:
    """Return the row that `strategy` wants to try next, or None when nothing is left."""
    rows = untried(space, pruned, lessons)
    return strategy.next(rows, predictions, space, lessons.trials) if rows.size else None


def untried(space: Space, pruned: Pruned, lessons: Lessons) -> IntArray:
    """Return the rows that no rule removed and no trial settled."""
    settled = [row for candidate in lessons.settled if (row := space.find(candidate)) is not None]
    open_rows: IntArray = np.setdiff1d(pruned.open_rows, np.array(settled, dtype=np.int64), assume_unique=True)
    return open_rows
