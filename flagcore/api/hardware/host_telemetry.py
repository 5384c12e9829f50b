"""Telemetry of devices on other hosts: a program on each host reports it while flagcore runs."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any

from flagcore.api.hardware.host_report import FIGURES, PERIOD_SECONDS
from flagcore.contracts import Launcher
from flagcore.domain.chip import Device
from flagcore.domain.devices import DeviceUse
from flagcore.domain.launch import Launch
from flagcore.errors import LaunchError
from flagcore.launchers.hosts import HostsLauncher

PROGRAM = "flagcore.api.hardware.host_report"
LAG_SECONDS = PERIOD_SECONDS + 0.7
"""Maximum age of a current reading: the period plus the time of the transfer."""
STALE_SECONDS = 10.0
"""Maximum age of a reading. Older readings count as unknown, because the host does not respond."""
RETRY_SECONDS = 10.0
"""Seconds from the end of a program, such as on a lost host, until the next start."""


@contextmanager
def host_telemetry(launcher: Launcher, devices: Sequence[Device]) -> Iterator[HostTelemetry | None]:
    """Watch the hosts of `devices` until the end of the block; None for a launcher without hosts."""
    if not isinstance(launcher, HostsLauncher) or not devices:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="flagcore-hosts-") as folder:
        watch = HostTelemetry(launcher, devices, Path(folder))
        try:
            yield watch
        finally:
            watch.close()


class HostTelemetry:
    """Readings of devices on other hosts."""

    def __init__(self, launcher: HostsLauncher, devices: Sequence[Device], folder: Path) -> None:
        self.launcher, self.folder, self._closed = launcher, folder, Event()
        by_host: dict[str, list[Device]] = {}
        for device in devices:
            by_host.setdefault(device.host, []).append(device)
        self._places = {device: place for own in by_host.values() for place, device in enumerate(own)}
        self._latest: dict[str, tuple[float, list[dict[str, Any]]]] = {}
        """By host: the time of its last reading, and the reading of each device."""
        self._threads = [Thread(target=self._watch, args=(host,), daemon=True) for host in by_host]
        for thread in self._threads:
            thread.start()

    def __call__(self, device: Device) -> HostDevice:
        """Return the telemetry of a device."""
        return HostDevice(self, device)

    def reading(self, device: Device) -> Mapping[str, Any]:
        """Return the last reading of a device since the end of the last trial; empty if unknown."""
        time.sleep(max(0.0, self.launcher.ended_at + LAG_SECONDS - time.monotonic()))
        at, readings = self._latest.get(device.host, (0.0, []))
        place = self._places[device]
        return readings[place] if time.monotonic() - at < STALE_SECONDS and place < len(readings) else {}

    def _watch(self, host: str) -> None:
        launcher = HostsLauncher(name=self.launcher.name, channel=self.launcher.channel)
        argv = (sys.executable, "-m", PROGRAM, "watch")
        launch = Launch(argv=argv, folder=str(self.folder / host), hosts=(host,), timeout_seconds=float("inf"))
        while not self._closed.is_set():
            with suppress(LaunchError, OSError):
                trial = launcher.start(launch)
                while (ended := trial.wait(0.3)) is None and not self._closed.is_set():
                    self._read_figures(host)
                if (ended or trial.stop()).ended_by != "host":
                    return
            self._closed.wait(RETRY_SECONDS)

    def _read_figures(self, host: str) -> None:
        with suppress(OSError, ValueError):
            figures_file = self.folder / host / FIGURES
            at = time.monotonic() - (time.time() - figures_file.stat().st_mtime)
            readings = json.loads(figures_file.read_text(encoding="utf-8"))
            if isinstance(readings, list) and all(isinstance(each, dict) for each in readings):
                self._latest[host] = (at, readings)

    def close(self) -> None:
        """End the programs."""
        self._closed.set()
        for thread in self._threads:
            thread.join(20.0)


class HostDevice:
    """Telemetry of one device on another host."""

    def __init__(self, watch: HostTelemetry, device: Device) -> None:
        self.watch, self.device = watch, device

    def sample(self) -> Mapping[str, float]:
        """Return the figures of the last second. Raises LookupError if the device does not respond."""
        figures = self.watch.reading(self.device)
        if figures.get("lost"):
            raise LookupError(self.device.title)
        return {name: float(value) for name, value in dict(figures.get("figures", {})).items()}

    def use(self) -> DeviceUse:
        """Return the processes that used the device in the last second."""
        use_fields = dict(self.watch.reading(self.device).get("use", {}))
        return DeviceUse(**{**use_fields, "processes": tuple(use_fields.get("processes", ()))})
