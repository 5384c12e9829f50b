"""Devices of other hosts are read over the channel. A shell on this machine stands for it; the program is real."""

import time

import pytest

from flagcore.api.managing.host_report import host_telemetry
from flagcore.api.managing.hosts import require_hosts
from flagcore.contracts import Telemetry, device_use
from flagcore.launchers.connection import agent_command
from flagcore.launchers.hosts import HostsLauncher

pytestmark = pytest.mark.slow


def free_bytes(reader: Telemetry) -> int:
    deadline = time.monotonic() + 200.0
    while not (free := device_use(reader).free_bytes) and time.monotonic() < deadline:
        time.sleep(0.05)
    return free or 0


def test_devices_of_hosts_are_read_over_the_channel_of_the_agent() -> None:
    started: list[str] = []

    def shell(host: str) -> list[str]:
        started.append(host)
        return ["sh", "-c", agent_command()]

    launcher = HostsLauncher(name="shell", channel=shell)
    with launcher.keep_agents():
        _, devices = require_hosts(launcher, ("a", "b"))
        assert {device.host for device in devices} == {"a", "b"}
        telemetry = host_telemetry(launcher, devices)
        readers = [telemetry(device) for device in (devices[0], devices[-1])]
        assert min(map(free_bytes, readers)) > 0
        assert sorted(started) == ["a", "b"]
        assert launcher.agents is not None
        launcher.agents.of_hosts["a"].problem = "lost"
        assert [device_use(reader).free_bytes is None for reader in readers] == [True, False]
    assert device_use(readers[1]).free_bytes is None
