"""The load of this machine as telemetry: memory in use, and how far other programs, the disk and swapping slow trials
down."""

import os
import time
from collections.abc import Mapping
from functools import cache
from threading import Lock
from typing import Any

import psutil

from flagcore.domain.chip import CORES, DISK_WAIT, MEMORY_IN_USE, OTHERS_CORES, SWAPPED, DeviceUse


class MachineReading:
    """Telemetry (`flagcore.contracts.Telemetry`) of the whole machine."""

    def sample(self) -> Mapping[str, float]:
        """Return the load of the machine since the last call (see `MachineLoad`)."""
        return of_this_machine().read()

    def use(self) -> DeviceUse:
        """Return the memory available to new processes."""
        return DeviceUse(free_bytes=psutil.virtual_memory().available)


FRESH_SECONDS = 0.5
"""Seconds for which a reading is reused: each core is read as a device, and all cores have the same load."""


class MachineLoad:
    """Mean load between two readings. Processes that this process started, directly or not, do not count as others.

    Only cores that this process may use count. The use by others is reported as 0 while as many cores are idle, because
    it does not slow trials down then: in a container with a quota, all cores of the machine are visible.
    """

    def __init__(self) -> None:
        self._lock, self._until, self._reading = Lock(), 0.0, dict[str, float]()
        self._busy = self._idle = self._waiting = self._swapped = self._at = 0.0
        self._own = dict[int, float]()

    def read(self) -> Mapping[str, float]:
        """Return the memory in use in bytes and the load average of the last minute. From the second call on, also
        return the mean figures that `flagcore.domain.chip.disturbances` reads."""
        with self._lock:
            if time.monotonic() >= self._until:
                self._reading = self._read()
                self._until = time.monotonic() + FRESH_SECONDS
            return self._reading

    def _read(self) -> dict[str, float]:
        swap, now, own, cores = psutil.swap_memory(), time.monotonic(), _own_seconds(), _allowed_cores()
        swapped, busy, idle, waiting = float(swap.sin + swap.sout), 0.0, 0.0, 0.0
        for times in cores:
            waits = getattr(times, "iowait", 0.0)
            guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)  # user time includes them
            busy += sum(times) - times.idle - waits - guests
            idle += times.idle
            waiting += waits
        reading = {MEMORY_IN_USE: float(psutil.virtual_memory().used), "load_average": os.getloadavg()[0]}
        if self._at:
            seconds = max(now - self._at, 1e-3)
            used = sum(max(0.0, own[pid] - self._own.get(pid, 0.0)) for pid in own)
            others = max(0.0, (busy - self._busy - used) / seconds)
            reading[CORES] = float(len(cores))
            reading[OTHERS_CORES] = others if (idle - self._idle) / seconds < others else 0.0
            reading[DISK_WAIT] = max(0.0, waiting - self._waiting) / seconds / len(cores)
            reading[SWAPPED] = max(0.0, swapped - self._swapped) / seconds
        self._busy, self._idle, self._waiting, self._swapped, self._at = busy, idle, waiting, swapped, now
        self._own = own
        return reading


def _allowed_cores() -> list[Any]:
    """Return the CPU times of the cores that this process may use."""
    times = psutil.cpu_times(percpu=True)
    if not hasattr(os, "sched_getaffinity"):
        return times
    return [times[core] for core in os.sched_getaffinity(0) if core < len(times)] or times


def _own_seconds() -> dict[int, float]:
    """Return the processor time of this process and of its descendants, by process ID."""
    found, this = {}, psutil.Process()
    for process in (this, *this.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.Error:  # the process has ended
            continue
        found[process.pid] = times.user + times.system
    return found


@cache
def of_this_machine() -> MachineLoad:
    """Return the load of this machine, which all of its devices share."""
    return MachineLoad()
