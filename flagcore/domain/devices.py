"""Which device of a job holds the others up.

All ranks of a synchronous job have the same step time, for they wait for each other: what tells them apart is what a
device does alone. That is the speed test that each rank makes at the end of a trial, a fixed product, all at once and
each by itself; and the clock that the management tool shows meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from statistics import median

SLOWER = 1.25
"""A device stands out whose speed test takes as many times the median of the others: chips of one kind differ by a few
percent."""

SLOWER_CORES = 2.0
"""The same for cores of a plain processor, which other work disturbs."""

LOWER = 0.85
"""Or whose clock is at most this share of the median of the others: one that is throttled."""

SPEED_TEST, CLOCK = "speed_test_s", "clock_hertz"


def slow_devices(
    devices: Sequence[Mapping[str, float]], devices_per_node: int, slower: float = SLOWER
) -> tuple[str, ...]:
    """Return a line for each device that stands out. `devices` have figures by name, and `device`, their number over
    all nodes. One alone stands out from nobody."""
    lines = []
    for name, worse in ((SPEED_TEST, partial(_slower, slower)), (CLOCK, _lower)):
        known = [(int(each["device"]), float(each[name])) for each in devices if each.get(name, 0.0) > 0.0]
        for place, (number, figure) in enumerate(known):
            others = [other for at, (_, other) in enumerate(known) if at != place]
            if others and (told := worse(figure, median(others))):
                lines.append(f"device {number % devices_per_node} of node {number // devices_per_node} {told}")
    return tuple(lines)


def _slower(slower: float, figure: float, others: float) -> str:
    ratio = figure / others
    return f"takes {ratio:.3g}x the median of the others for the same product" if ratio >= slower else ""


def _lower(figure: float, others: float) -> str:
    ratio = figure / others
    return f"runs at {ratio:.2g}x the median clock of the others ({figure / 1e9:.3g} GHz)" if ratio <= LOWER else ""
