"""The Pareto front of two rates."""

from __future__ import annotations

import numpy as np

from flagcore.domain.spec import pareto


def test_the_front_has_the_points_that_no_other_point_exceeds_in_both() -> None:
    first = np.array([1.0, 5.0, 3.0, 5.0, 2.0, np.nan])
    second = np.array([9.0, 1.0, 4.0, 2.0, 3.0, 99.0])
    assert pareto(first, second).tolist() == [3, 2, 0]
    assert pareto(np.zeros(0), np.zeros(0)).tolist() == []
