"""Who uses a device, and devices that slow down a job.

All ranks of a synchronous job have the same step time, since they wait for each other. Devices are compared by the
speed test at the end of a trial, a fixed matrix product on each rank, and by the clock that the vendor's tool reports.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUse:
    """Who uses a device. `processes` hold memory on it, such as `4711 python (20.5 GiB)`.

    `blocked` is the reason why no process can start on it, such as its compute mode; empty: none, or unknown.
    `free_bytes` is what new processes can have if devices share the machine's memory; None: unknown. `pending` is what
    changes with the next reset of the device.
    """

    processes: tuple[str, ...] = ()
    blocked: str = ""
    free_bytes: int | None = None
    pending: str = ""


SLOW_RATIO = 1.25
"""A device is slow if its speed test takes this many times the median of the others; equal chips differ by a few
percent."""

SLOW_CORE_RATIO = 2.0
"""The same for CPU cores, which other processes disturb."""

LOW_CLOCK_RATIO = 0.85
"""A device is throttled if its clock is at most this share of the median of the others."""

SPEED_TEST, CLOCK, MEMORY_IN_USE = "speed_test_s", "clock_hertz", "memory_used_bytes"
"""Names of figures of a device."""


def slow_devices(
    devices: Sequence[Mapping[str, float]],
    devices_per_node: int,
    slower: float = SLOW_RATIO,
    hosts: Sequence[str] = (),
) -> tuple[str, ...]:
    """Return a line for each slow or throttled device. `devices` have figures by name, and `device`, their number over
    all nodes; `hosts` are the names of the nodes, if known."""
    lines = []
    for name, worse in ((SPEED_TEST, partial(_slower, slower)), (CLOCK, _lower)):
        known = [(int(each["device"]), float(each[name])) for each in devices if each.get(name, 0.0) > 0.0]
        for place, (number, figure) in enumerate(known):
            others = [other for at, (_, other) in enumerate(known) if at != place]
            if others and (text := worse(figure, median(others))):
                node = number // devices_per_node
                where = hosts[node] if node < len(hosts) else f"node {node}"
                lines.append(f"device {number % devices_per_node} of {where} {text}")
    return tuple(lines)


def _slower(slower: float, figure: float, others: float) -> str:
    ratio = figure / others
    return f"takes {ratio:.3g}x the median of the others for the same product" if ratio >= slower else ""


def _lower(figure: float, others: float) -> str:
    ratio = figure / others
    return (
        f"runs at {ratio:.2g}x the median clock of the others ({figure / 1e9:.3g} GHz)"
        if ratio <= LOW_CLOCK_RATIO
        else ""
    )
