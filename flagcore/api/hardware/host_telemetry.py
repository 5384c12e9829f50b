"""Telemetry of devices on other hosts: a program on each host reports it over the channel of the agent."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flagcore.api.hardware.host_report import PERIOD_SECONDS
from flagcore.domain.chip import Device
from flagcore.domain.devices import DeviceUse
from flagcore.launchers.hosts import HostsLauncher
from flagcore.launchers.orders import shared_variables

PROGRAM = "flagcore.api.hardware.host_report"
LAG_SECONDS = PERIOD_SECONDS + 0.7
"""Maximum age of a current reading: the period plus the time of the transfer."""
STALE_SECONDS = 10.0
"""Maximum age of a reading. Older readings count as unknown, because the host does not respond."""


def host_telemetry(launcher: HostsLauncher, devices: Sequence[Device]) -> Callable[[Device], HostDevice]:
    """Watch the hosts of `devices` while the launcher keeps its agents. Return what reads a device."""
    if launcher.agents and devices:
        launcher.agents.watch_devices((sys.executable, "-m", PROGRAM, "watch"), shared_variables())
    by_host: dict[str, list[Device]] = {}
    for device in devices:
        by_host.setdefault(device.host, []).append(device)
    return lambda device: HostDevice(launcher, device, by_host[device.host].index(device))


@dataclass(frozen=True, slots=True)
class HostDevice:
    """Telemetry of one device on another host, the device at a `place` of its readings."""

    launcher: HostsLauncher
    device: Device
    place: int

    def sample(self) -> Mapping[str, float]:
        """Return the figures of the last second. Raises LookupError if the device does not respond."""
        figures = self._reading()
        if figures.get("lost"):
            raise LookupError(self.device.title)
        return {name: float(value) for name, value in dict(figures.get("figures", {})).items()}

    def use(self) -> DeviceUse:
        """Return the processes that used the device in the last second."""
        use_fields = dict(self._reading().get("use", {}))
        return DeviceUse(**{**use_fields, "processes": tuple(use_fields.get("processes", ()))})

    def _reading(self) -> Mapping[str, Any]:
        """Return the last reading of the device since the end of the last trial; empty if unknown."""
        time.sleep(max(0.0, self.launcher.ended_at + LAG_SECONDS - time.monotonic()))
        at, readings = self.launcher.agents.reading(self.device.host) if self.launcher.agents else (-math.inf, ())
        is_current = time.monotonic() - at < STALE_SECONDS and self.place < len(readings)
        return readings[self.place] if is_current else {}
