"""Finds the highest load within latency limits, and detects loads that are certain to exceed them."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence

from flagcore.engines.serving.load.result import Answer

RESOLUTION = 1.05
"""The search ends once a load above the limits is at most this factor higher than a load within them."""
GROWTH = RESOLUTION**4
"""The first factor between two loads, which two bisections reduce to RESOLUTION. Its exponent doubles until one load is
within the limits and one is not."""
MAX_GROWTH = RESOLUTION**32
MAX_HEADROOM = 3.0
"""The highest factor between two loads because of the headroom of the first."""
MIN_RATE = 0.01
"""The lowest request rate of a search, in requests per second."""


def highest_load(
    meets_limits: Callable[[float], bool],
    start: float,
    *,
    minimum: float,
    maximum: float,
    is_integer: bool = False,
    capacity: Callable[[], float] = lambda: math.inf,
    headroom: Callable[[], float] = lambda: 1.0,
) -> float | None:
    """Return the highest load from `minimum` to `maximum` within the limits, up to RESOLUTION; None if there is none.

    `meets_limits` is called for one load after the other, first for `start`. With `is_integer`, loads are integers.
    `capacity` returns an upper bound of the highest load after a load above the limits. `headroom` returns the smallest
    ratio of a limit to its figure after a load within the limits: the next load is higher by at least its square root,
    since latencies grow faster than loads near the limit, and slower below.
    """
    passed, failed, factor, load = 0.0, math.inf, GROWTH, min(max(start, minimum), maximum)
    while True:
        load = min(max(float(round(load)), passed + 1), failed - 1) if is_integer else load
        if meets_limits(load):
            passed = load
        else:
            failed = load
        if passed == maximum or failed == minimum or is_bracketed(passed, failed, is_integer):
            return passed or None
        if passed and failed < math.inf:
            load = math.sqrt(passed * failed)
        elif passed:
            load = min(passed * max(factor, min(math.sqrt(headroom()), MAX_HEADROOM)), maximum)
        else:
            load = max(min(failed / factor, capacity()), minimum)
        factor = min(factor * factor, MAX_GROWTH)


def is_bracketed(passed: float, failed: float, is_integer: bool) -> bool:
    """Return whether no load between both needs to be tried."""
    return passed > 0.0 and failed <= max(passed * RESOLUTION * (1 + 1e-9), passed + is_integer)


def completions_per_s(answers: Sequence[Answer]) -> float:
    """Return the rate between the first and the last of the answers' ends, infinity if they do not determine it.

    Of an overloaded server it is the highest rate that the server sustains.
    """
    ends = sorted(answer.end_s for answer in answers)
    return (len(ends) - 1) / (ends[-1] - ends[0]) if ends and ends[-1] > ends[0] else math.inf


class LimitCheck:
    """Counts the answers of a load until a limit is certain to be exceeded, even if all remaining answers are fast.

    `limits` are seconds by figure, `count` is the number of requests. Limits of ITL are not checked.
    """

    def __init__(self, limits: Mapping[str, float], count: int) -> None:
        checked = {name: limit for name, limit in limits.items() if not name.startswith("itl_s")}
        self._limits = {(name.partition(".")[0], name.partition(".")[2]): limit for name, limit in checked.items()}
        self._count = count
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._slower: Counter[tuple[str, str]] = Counter()

    def exceeded(self, answer: Answer) -> bool:
        """Add an answer, and return whether a limit is certain to be exceeded."""
        for name in {name for name, _ in self._limits}:
            self._sums[name] += getattr(answer, name) or 0.0
        for figure, limit in self._limits.items():
            self._slower[figure] += (getattr(answer, figure[0]) or 0.0) > limit
        return any(self._is_exceeded(*figure, limit) for figure, limit in self._limits.items())

    def _is_exceeded(self, name: str, statistic: str, limit: float) -> bool:
        """Return whether a statistic is too high if all remaining values are 0.

        A percentile lies between two values; the lower one must exceed the limit.
        """
        if statistic == "mean":
            return self._sums[name] > limit * self._count
        place = math.floor((self._count - 1) * float(statistic.removeprefix("p")) / 100)
        return self._slower[name, statistic] >= self._count - place
