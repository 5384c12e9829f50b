"""Devices of other hosts are read over the channel. A shell on this machine stands for it; the program is real."""

from __future__ import annotations

import time

import pytest

from flagcore.api.hardware.host_telemetry import host_telemetry
from flagcore.api.hardware.hosts import require_hosts
from flagcore.contracts import Telemetry, device_use
from flagcore.launchers.connection import agent_command
from flagcore.launchers.hosts import HostsLauncher
from flagcore.launchers.local import LAUNCHER

pytestmark = pytest.mark.slow


def free_bytes(reader: Telemetry) -> int:
    deadline = time.monotonic() + 30.0
    while not (free := device_use(reader).free_bytes) and time.monotonic() < deadline:
        time.sleep(0.05)
    return free or 0


def test_devices_of_hosts_are_read_until_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flagcore.api.hardware.host_telemetry.RETRY_SECONDS", 0.1)
    started: list[str] = []

    def shell(host: str) -> list[str]:
        started.append(host)
        return ["sh", "-c", "exit 255" if len(started) == 3 else agent_command()]

    launcher = HostsLauncher(name="shell", channel=shell)
    _, devices = require_hosts(launcher, ("a", "b"))
    assert {device.host for device in devices} == {"a", "b"}
    with host_telemetry(launcher, devices) as telemetry:
        assert telemetry is not None
        readers = [telemetry(device) for device in (devices[0], devices[-1])]
        for reader in readers:
            assert free_bytes(reader) > 0
        threads = [thread for thread in telemetry._threads if thread.is_alive()]
        assert len(threads) == 2
    assert len(started) == 5
    assert not any(thread.is_alive() for thread in threads)


def test_this_machine_needs_no_channel() -> None:
    with host_telemetry(LAUNCHER, ()) as telemetry:
        assert telemetry is None
