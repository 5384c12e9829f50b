"""The highest load that keeps latency limits, and when a load is certain to break them."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping

from flagcore.engines.serving.load.result import Answer

RESOLUTION = 1.05
"""The search ends once a load that breaks the limits is at most this factor above one that keeps them."""
GROWTH = 1.25
"""The first factor between two loads; the exponent doubles until one load keeps the limits and one does not."""
MAX_GROWTH = 4.0
LEAST_RATE = 0.01
"""The lowest request rate of a search, in requests per second."""


def highest_load(
    keeps: Callable[[float], bool], start: float, *, least: float, most: float, whole: bool = False
) -> float | None:
    """Return the highest load between `least` and `most` that keeps the limits, within RESOLUTION; None if none does.

    `keeps` is called for one load after the other, first for `start`. `whole`: loads are whole numbers.
    """
    kept, broken, factor, load = 0.0, math.inf, GROWTH, min(max(start, least), most)
    while True:
        load = min(max(float(round(load)), kept + 1), broken - 1) if whole else load
        if keeps(load):
            kept = load
        else:
            broken = load
        if kept and broken < math.inf:
            load = math.sqrt(kept * broken)
            ended = broken <= max(kept * RESOLUTION, kept + whole)
        else:
            load = min(kept * factor, most) if kept else max(broken / factor, least)
            factor, ended = min(factor * factor, MAX_GROWTH), kept == most or broken == least
        if ended:
            return kept or None


class LimitCheck:
    """Counts the answers of a load until a limit is certain to be exceeded, however fast the remaining ones are.

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

        A percentile lies between the two values around its place; the lower one must exceed the limit.
        """
        if statistic == "mean":
            return self._sums[name] > limit * self._count
        place = math.floor((self._count - 1) * float(statistic.removeprefix("p")) / 100)
        return self._slower[name, statistic] >= self._count - place
