"""The CPU time of the load client, and of other processes meanwhile."""

from __future__ import annotations

import time
from collections.abc import Mapping

import psutil

NEAR_LIMIT = 0.8
"""Share of one core above which the client, which runs on one, may be the bottleneck."""


class Meter:
    """Counts from its creation on: this process, its descendants, the whole machine."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._own = time.process_time()
        self._tree, self._busy = _tree_s(), _busy_s()

    def figures(self) -> Mapping[str, float]:
        """Return `client_cpu_s`, `client_cpu_share` of one core, and `others_cores`.

        `others_cores` are the busy cores of processes that this one did not start, on average.
        """
        wall = max(time.perf_counter() - self._began, 1e-9)
        own = time.process_time() - self._own
        others = (_busy_s() - self._busy) - (_tree_s() - self._tree)
        return {"client_cpu_s": own, "client_cpu_share": own / wall, "others_cores": max(0.0, others / wall)}


def _busy_s() -> float:
    """Return the core seconds that the machine was not idle; waiting for a disk is idle, stolen time is not."""
    times = psutil.cpu_times()
    busy = times.user + times.system
    return float(busy + sum(getattr(times, name, 0.0) for name in ("nice", "irq", "softirq", "steal")))


def _tree_s() -> float:
    """Return the core seconds of this process and its descendants, ended and waited for ones included."""
    own = psutil.Process()
    total = 0.0
    for process in (own, *own.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total
