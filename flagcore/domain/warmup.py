"""The end of a trial's warm-up."""

from __future__ import annotations

from collections.abc import Sequence

STEADY_STEPS, AGREEMENT = 3, 0.02


def warmup_steps(step_times_s: Sequence[float], at_most: int) -> int:
    """Return the number of warm-up steps of a trial: `at_most`, or fewer if its steps are steady before.

    Steps are steady if three in a row, not the first one among them, differ by at most 2%, and do not become faster or
    slower throughout. These steps are part of the warm-up, so the test does not select the measured steps.
    """
    for end in range(1 + STEADY_STEPS, min(at_most, len(step_times_s) + 1)):
        before, middle, last = step_times_s[end - STEADY_STEPS : end]
        is_trend = before < middle < last or before > middle > last
        if not is_trend and max(before, middle, last) <= (1.0 + AGREEMENT) * min(before, middle, last):
            return end
    return at_most
