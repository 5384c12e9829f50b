"""Figures of servers and objectives: names, groups and directions."""

from dataclasses import replace

import numpy as np
import pytest

from flagcore.domain.serving import nest_statistics
from flagcore.domain.spec import figure_name, is_rate, objective_value, pareto, seconds
from flagcore.domain.trial import Measurement


def test_statistics_of_a_latency_are_grouped() -> None:
    figures = {"ttft_s.mean": 1.0, "requests_per_s": 2.0, "ttft_s.p99": 3.0}
    assert nest_statistics(figures) == {"ttft_s": {"mean": 1.0, "p99": 3.0}, "requests_per_s": 2.0}


@pytest.mark.parametrize(
    ("objective", "name", "rate"),
    [
        ("output_tokens_per_s", "output_tokens_per_s", True),
        ("ttft_s", "ttft_s.mean", False),
        ("tpot_s.p99",) * 2 + (False,),
    ],
)
def test_an_objective_converts_to_seconds_and_back(objective: str, name: str, rate: bool) -> None:
    assert figure_name(objective) == name
    assert is_rate(objective) is rate
    assert seconds(objective, 4.0) == (0.25 if rate else 4.0)
    assert objective_value(objective, seconds(objective, 4.0)) == 4.0


def test_the_rate_of_training_is_scaled_from_a_measurement() -> None:
    measured = Measurement(step_times_s=(2.0,), step_time_s=2.0, spread_s=0.0, tokens_per_second_per_device=100.0)
    assert objective_value("tokens_per_second_per_device", 1.0, measured) == 200.0
    assert objective_value("tokens_per_second_per_device", 1.0, replace(measured, step_time_s=4.0)) == 400.0
    assert is_rate("tokens_per_second_per_device")


def test_the_front_has_the_points_that_no_other_point_exceeds_in_both() -> None:
    first = np.array([1.0, 5.0, 3.0, 5.0, 2.0, np.nan])
    second = np.array([9.0, 1.0, 4.0, 2.0, 3.0, 99.0])
    assert pareto(first, second).tolist() == [3, 2, 0]
    assert pareto(np.zeros(0), np.zeros(0)).tolist() == []
