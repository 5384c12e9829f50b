"""The use of devices by processes, and the detection of slow devices.

All ranks of a synchronous job have the same step time, since they wait for each other. To find slow devices, a trial
ends with a speed test, a fixed matrix product on each rank, and the clocks that the vendor's tool reports are compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

from flagcore.i18n import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUse:
    """The processes that use a device, and whether new ones can start.

    `processes` describes the processes with memory on the device, such as `4711 python (20.5 GiB)`. `blocked` is the
    reason why no process can start on it, such as its compute mode; empty if none is known. `free_bytes` is the memory
    that new processes can use if devices share the memory of the machine; None if unknown. `pending` is what
    changes with the next reset of the device.
    """

    processes: tuple[str, ...] = ()
    blocked: str = ""
    free_bytes: int | None = None
    pending: str = ""


SLOW_RATIO = 1.25
"""A device is slow if its speed test takes at least this many times the median of the other devices. Identical chips
differ by a few percent."""

SLOW_CORE_RATIO = 2.0
"""The same ratio for CPU cores, which other processes slow down."""

LOW_CLOCK_RATIO = 0.85
"""A device is throttled if its clock is at most this share of the median of the other devices."""

SPEED_TEST, CLOCK, MEMORY_IN_USE = "speed_test_s", "clock_hertz", "memory_used_bytes"
"""Names of figures of a device."""


CORES, OTHERS_CORES = "cores", "cores_used_by_others"
"""Names of the telemetry of a host: its cores, and those that processes of other programs keep busy."""
DISK_WAIT, SWAPPED = "disk_wait", "swapped_bytes_per_second"
"""The same for the share of the cores' time that waits for a disk, and for the memory that is swapped in and out."""
BUSY_SHARE, WAIT_SHARE, SWAP_BYTES = 0.1, 0.1, 1e6
"""A message names a disturbance from these values on: shares of the cores, and bytes per second. Chosen."""


def disturbances(telemetry: Mapping[str, float]) -> Iterator[Message]:
    """Yield what slows a host down, from the means of its telemetry: other programs, a slow disk, swapping."""
    others, cores = telemetry.get(OTHERS_CORES, 0.0), telemetry.get(CORES, 0.0)
    if others > BUSY_SHARE * cores > 0.0:
        yield Message("other programs used {others:.1f} of {cores:.0f} cores", others=others, cores=cores)
    if (share := telemetry.get(DISK_WAIT, 0.0)) > WAIT_SHARE:
        yield Message("the cores waited for a disk {share:.0%} of the time", share=share)
    if (rate := telemetry.get(SWAPPED, 0.0)) > SWAP_BYTES:
        yield Message("{rate:.0f} MB/s of memory were swapped", rate=rate / 1e6)


def slow_devices(
    devices: Sequence[Mapping[str, float]],
    devices_per_node: int,
    slow_ratio: float = SLOW_RATIO,
    hosts: Sequence[str] = (),
) -> tuple[str, ...]:
    """Return a line for each slow or throttled device.

    `devices` has the figures of each device by name, with its number over all nodes as `device`. `hosts` are the names
    of the nodes, empty if unknown.
    """
    lines = []
    for name, describe in ((SPEED_TEST, partial(_speed_problem, slow_ratio)), (CLOCK, _clock_problem)):
        figures = [(int(each["device"]), float(each[name])) for each in devices if each.get(name, 0.0) > 0.0]
        for index, (number, figure) in enumerate(figures):
            others = [other for _, other in figures[:index] + figures[index + 1 :]]
            if others and (text := describe(figure, median(others))):
                node = number // devices_per_node
                host = hosts[node] if node < len(hosts) else f"node {node}"
                lines.append(f"device {number % devices_per_node} of {host} {text}")
    return tuple(lines)


def _speed_problem(slow_ratio: float, seconds: float, median_seconds: float) -> str:
    ratio = seconds / median_seconds
    return f"takes {ratio:.3g}x the median time of the other devices in the speed test" if ratio >= slow_ratio else ""


def _clock_problem(hertz: float, median_hertz: float) -> str:
    ratio = hertz / median_hertz
    text = f"runs at {ratio:.2g}x the median clock of the other devices ({hertz / 1e9:.3g} GHz)"
    return text if ratio <= LOW_CLOCK_RATIO else ""
