"""The Pareto front of two rates."""

from __future__ import annotations

import numpy as np

from flagcore.domain.space import FloatArray, IntArray


def pareto(first: FloatArray, second: FloatArray) -> IntArray:
    """Return the indices of the points for which no other has a higher `first` and a higher `second`, by descending
    `first`. Points with NaN are not among them.
    """
    order = np.lexsort((-second, -first))
    order = order[~np.isnan(first[order]) & ~np.isnan(second[order])]
    best_before = np.maximum.accumulate(np.concatenate(([-np.inf], second[order])))[:-1]
    return order[second[order] > best_before].astype(np.int64)
