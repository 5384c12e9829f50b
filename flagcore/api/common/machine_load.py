"""CPU load of other processes during a measurement."""

from __future__ import annotations

import resource

import psutil

BUSY = 0.1
"""Minimum share of the processors used by other processes that causes a warning."""


def busy(others: float) -> list[str]:
    """Return a warning if other processes used the share `others` of the processors, empty if it is small."""
    if others < BUSY:
        return []
    return [f"other programs used {others:.0%} of the processors: measure again on an idle machine"]


class Load:
    """CPU use of other processes since the start: the total without this process and its children.

    Children count once they have ended and were waited for.
    """

    def __init__(self) -> None:
        self._all, self._idle, self._own = _read_times()

    def used_by_others(self) -> float:
        """Return the share of the processors' time, 0 to 1, that other processes have used since the start."""
        total, idle, own = (
            now - then for now, then in zip(_read_times(), (self._all, self._idle, self._own), strict=True)
        )
        return min(1.0, max(0.0, (total - idle - own) / total)) if total > 0 else 0.0


def _read_times() -> tuple[float, float, float]:
    """Return the seconds of all processors, those without work, and those of this process and its children."""
    times = psutil.cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0)
    total = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return total, idle, sum(each.ru_utime + each.ru_stime for each in used)
