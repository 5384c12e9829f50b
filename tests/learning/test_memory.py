"""How much of the predicted memory is needed at the least."""

from __future__ import annotations

import math

import pytest

from flagcore.learning.probabilities import min_memory_share


def test_a_prediction_is_used_until_something_was_measured() -> None:
    assert min_memory_share([]) == 1.0


def test_trials_that_need_less_than_predicted_readmit_candidates() -> None:
    few, many = (min_memory_share([math.log(0.7)] * count) for count in (1, 8))
    assert 0.6 < many < few * 1.05
    assert many < 0.7


def test_more_trials_reduce_the_uncertainty() -> None:
    assert min_memory_share([0.0]) < min_memory_share([0.0] * 4) < min_memory_share([0.0] * 64) < 1.0


@pytest.mark.parametrize("ratio", [0.5, 1.0, 1.3])
def test_the_probe_peak_is_at_most_that_of_trials(ratio: float) -> None:
    assert min_memory_share([math.log(ratio)] * 20) < ratio
