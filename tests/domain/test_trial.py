"""Trials: their steps, and the devices that hold others up."""

import math
import random
import statistics

import pytest

from flagcore.domain.chip import slow_devices
from flagcore.domain.trial import steps_in_time, warmup_of_fewer, warmup_steps


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([9.0, 1.0, 1.01, 1.0, 1.0], 4),
        ([1.0, 1.0, 1.0], 10),  # the first step does not count
        ([9.0, 1.02, 1.01, 1.0, 0.99, 0.98], 10),  # becomes faster throughout
        ([9.0, 1.0, 1.05, 1.0, 1.05], 10),
        ([9.0, 3.0, 1.5, 1.0, 1.01, 1.0], 6),
        ([], 10),
    ],
)
def test_warm_up_ends_after_three_steady_steps(steps: list[float], expected: int) -> None:
    assert warmup_steps(steps, 10) == expected
    assert warmup_steps(steps, 3) == 3


@pytest.mark.parametrize("noise", [0.005, 0.016, 0.04])
@pytest.mark.parametrize("decay", [0.5, 2.0, 5.0])
def test_the_measured_time_is_that_after_the_whole_warm_up(noise: float, decay: float) -> None:
    draw, early, late = random.Random(0), [], []
    for _ in range(1000):
        steps = [1.0 + 0.5 * math.exp(-number / decay) + draw.gauss(0.0, noise) for number in range(30)]
        warmup = warmup_steps(steps, 10)
        early.append(statistics.median(steps[warmup : warmup + 20]))
        late.append(statistics.median(steps[10:]))
    assert abs(statistics.fmean(early) - statistics.fmean(late)) < 0.2 * statistics.pstdev(late)


@pytest.mark.parametrize(("steps", "at_most", "expected"), [(8, 2, 2), (3, 2, 2), (2, 2, 1), (1, 2, 1), (2, 0, 0)])
def test_fewer_steps_have_fewer_warm_up_steps(steps: int, at_most: int, expected: int) -> None:
    assert warmup_of_fewer(steps, at_most) == expected


@pytest.mark.parametrize(
    ("steps", "seconds", "expected"),
    [
        ([], 0.0, 8),
        ([9.0], 62.0, 7),
        ([9.0], 63.0, 8),
        ([9.0, 2.0, 4.0], 10.0, 6),  # the first one does not count
        ([9.0, 2.0], -5.0, 2),
        ([2.0] * 8, 0.0, 8),
    ],
)
def test_the_steps_that_fit_in_the_remaining_time(steps: list[float], seconds: float, expected: int) -> None:
    assert steps_in_time(steps, 8, seconds) == expected


@pytest.mark.parametrize(
    ("name", "figures", "line"),
    [
        ("speed_test_s", (1.0, 1.02, 0.98, 1.0, 1.0, 1.0, 1.4, 1.01), "device 2 of node 1 takes 1.4x the median time"),
        ("clock_hertz", (1.98e9, 1.98e9, 1.2e9, 1.95e9), "device 2 of node 0 runs at 0.61x the median clock"),
        ("speed_test_s", (3.0, 1.0), "device 0 of node 0 takes 3x"),
        *(("speed_test_s", figures, "") for figures in ((1.0,), (1.0, 1.1, 0.95), (), (0.0, 5.0))),
    ],
)
def test_a_slow_device_is_named_with_its_node_and_by_how_much(name: str, figures: tuple[float, ...], line: str) -> None:
    found = slow_devices([{"device": number, name: figure} for number, figure in enumerate(figures)], 4)
    assert [each.startswith(line) for each in found] == [True] * bool(line)
