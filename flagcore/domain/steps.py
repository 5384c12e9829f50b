"""The steps of a trial: which times can be, which are warm-up, and how many fit into a limit."""

from collections.abc import Sequence
from statistics import median

MIN_STEP_S, MAX_STEP_S = 1e-9, 1e6
"""The step times that are believed, in seconds, and also the seconds per token or request of servers. Chosen: no device
finishes anything in a nanosecond, and no trial lasts as long as 11 days."""


def is_step_time(seconds: float) -> bool:
    """Return whether a step can take so many seconds."""
    return MIN_STEP_S <= seconds <= MAX_STEP_S


STEADY_STEPS, AGREEMENT = 3, 0.02
SLACK = 3.0
"""The time limit of a trial's steps, relative to the upper bound of their predicted time. It allows for other jobs,
slow file systems and compilation. Chosen by hand: the limit ends trials that hang, not slow ones."""

UNKNOWN_SECONDS = 3600.0
"""The time limit of a trial whose step time is not predicted. Chosen by hand."""

MIN_STEPS = 2
"""The minimum number of steps of a measured trial: one warm-up step, and one measured step."""


def warmup_steps(step_times_s: Sequence[float], at_most: int) -> int:
    """Return the number of warm-up steps of a trial: `at_most`, or fewer if its step times are steady earlier.

    Step times are steady if three consecutive ones, after the first step, differ by at most 2% and do not all rise or
    all fall. These three steps belong to the warm-up, so that the test does not bias the measured steps.
    """
    for end in range(1 + STEADY_STEPS, min(at_most, len(step_times_s) + 1)):
        before, middle, last = step_times_s[end - STEADY_STEPS : end]
        is_trend = before < middle < last or before > middle > last
        if not is_trend and max(before, middle, last) <= (1.0 + AGREEMENT) * min(before, middle, last):
            return end
    return at_most


def steps_in_time(step_times_s: Sequence[float], planned: int, seconds: float) -> int:
    """Return how many of the `planned` steps will be finished in `seconds` from now, including `step_times_s`.

    `step_times_s`: the times of the steps that are finished now. Each further step is expected to take their median,
    without the first.
    """
    if not step_times_s:
        return planned
    expected = median(step_times_s[1:] or step_times_s)
    steps_left = planned - len(step_times_s)
    return planned if steps_left * expected <= seconds else len(step_times_s) + max(0, int(seconds / expected))
