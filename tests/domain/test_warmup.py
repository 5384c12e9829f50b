"""The warm-up ends early only if steps are steady, and without an effect on the measured time."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from flagcore.domain.warmup import warmup_steps


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
