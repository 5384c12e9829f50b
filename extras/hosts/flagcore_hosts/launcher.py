"""The base class of launchers on several hosts, and the launchers `ssh` and `here`.

It checks the hosts before the first trial, and reads the telemetry of their devices over the channels of the agents.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flagcore.contracts import HeldHosts, HostCheck, Launcher
from flagcore.domain.chip import Device, DeviceUse
from flagcore.domain.launch import Launch
from flagcore.domain.spec import ClusterSpec
from flagcore.errors import NoDevice
from flagcore.i18n import _
from flagcore_hosts import checks
from flagcore_hosts.checks import REPORT, HostReport, HostSpeed
from flagcore_hosts.connection import agent_command, shared_variables
from flagcore_hosts.job import run_job
from flagcore_hosts.launching import MAX_LOSSES, HostTrials

MAX_COMPARED = 64
"""Maximum number of hosts whose speeds `flag tune` compares. The time of the comparison grows with their number."""
LAG_SECONDS = 1.7
"""The maximum age of a current reading, in seconds: the period of one second plus the time of the transfer."""
STALE_SECONDS = 10.0
"""The maximum age of a reading, in seconds. Older readings count as unknown, because the host does not respond."""


@dataclass(kw_only=True)
class HostsLauncher(HostTrials):
    """Starts trials on hosts that it has checked. Subclasses and instances differ in how agents are started."""

    @contextlib.contextmanager
    def use_hosts(self, cluster: ClusterSpec, check: HostCheck) -> Iterator[HeldHosts]:
        not_needed = len(cluster.hosts) - cluster.min_nodes if cluster.min_nodes else cluster.spares
        names = [group.kind for group in cluster.groups for _node in range(group.nodes)]
        with self.keep_agents() as agents:
            hosts = self.hold(cluster.hosts, cluster.users)
            reports = checks.inspect_hosts(self, hosts, check, dict(zip(cluster.hosts, names, strict=False)))
            problems = {report.host: "; ".join(checks.host_problems(report, reports)) for report in reports}
            unusable_hosts = [f"{host}: {lines}" for host, lines in problems.items() if lines]
            if len(unusable_hosts) > not_needed:
                raise NoDevice("; ".join(unusable_hosts))
            self.failures = Counter({host: MAX_LOSSES for host, lines in problems.items() if lines})
            reports = [report for report in reports if not problems[report.host]]
            checks.warn(_("{line}; the host is not used", line=line) for line in unusable_hosts)
            checks.warn(checks.host_warnings(reports))
            is_compared = not cluster.groups and 1 < len(reports) <= MAX_COMPARED
            speeds = checks.compare_hosts(self, check.speed, reports) if is_compared else []
            by_host = {report.host: report.devices or () for report in reports}
            if any(by_host.values()):
                agents.watch_devices((*REPORT, "watch"), shared_variables())
            yield HeldHosts(
                names=hosts,
                devices=tuple(device for devices in by_host.values() for device in devices),
                network=checks.measured_network(speeds, cluster.devices_per_node) if cluster.nodes > 1 else None,
                telemetry=lambda device: HostDevice(self, device, by_host[device.host].index(device)),
            )

    def report_hosts(
        self, kinds: Mapping[str, str], users: Mapping[str, str], check: HostCheck
    ) -> list[dict[str, Any]]:
        reports = checks.inspect_hosts(self, self.hold(tuple(kinds), users), check, kinds)
        checks.warn(checks.host_warnings(reports))
        speeds = {each.host: each for each in checks.compare_hosts(self, check.speed, reports)}
        if network := checks.measured_network(tuple(speeds.values())):
            checks.warn([network.note])
        return [_record(report, reports, speeds.get(report.host)) for report in reports]

    def run_job(
        self, job: Launch, users: Mapping[str, str], restarts: int, spares: Sequence[str], stall_s: float | None
    ) -> int:
        return run_job(self, job, users, restarts, spares, stall_s)


def _record(report: HostReport, reports: Sequence[HostReport], speed: HostSpeed | None) -> dict[str, Any]:
    """Return a host's report and speed as plain data, with times in milliseconds."""
    link_s, products = (speed.link_s, speed.products_s) if speed else (None, ())
    problems = list(checks.host_problems(report, reports))
    return {
        "host": report.host,
        "ok": not problems,
        "problem": "; ".join(problems),
        "devices": checks.device_names(report) if report.devices is not None else None,
        "python": report.python,
        "clock_s": report.clock_s,
        "free_disk_gib": None if report.free_disk_bytes is None else report.free_disk_bytes / 2**30,
        "product_ms": 1e3 * max(products) if products else None,
        "all_reduce_ms": 1e3 * link_s if link_s is not None else None,
        "versions": report.versions,
    }


@dataclass(frozen=True, slots=True)
class HostDevice:
    """Telemetry of one device on another host. `place` is the index of the device in the readings of its host."""

    launcher: HostTrials
    device: Device
    place: int

    def sample(self) -> Mapping[str, float]:
        """Return the telemetry of the last second. Raises LookupError if the device does not respond."""
        figures = self._reading()
        if figures.get("lost"):
            raise LookupError(self.device.title)
        return {name: float(value) for name, value in dict(figures.get("figures", {})).items()}

    def use(self) -> DeviceUse:
        """Return the processes that used the device in the last second."""
        use_fields = dict(self._reading().get("use", {}))
        return DeviceUse(**{**use_fields, "processes": tuple(use_fields.get("processes", ()))})

    def _reading(self) -> Mapping[str, Any]:
        """Return the latest reading of the device. It is empty if there is none since the end of the last trial."""
        time.sleep(max(0.0, self.launcher.ended_at + LAG_SECONDS - time.monotonic()))
        at, readings = self.launcher.agents.reading(self.device.host) if self.launcher.agents else (-math.inf, ())
        is_current = time.monotonic() - at < STALE_SECONDS and self.place < len(readings)
        return readings[self.place] if is_current else {}


SSH_OPTIONS = (
    *("BatchMode=yes", "ConnectTimeout=15", "ServerAliveInterval=3", "ServerAliveCountMax=3"),
    *("ControlPath=none", "ForwardAgent=no", "ForwardX11=no", "ClearAllForwardings=yes"),
)
"""Options of ssh. It prompts for nothing and forwards nothing. Each agent has its own connection, which detects a lost
host."""


def ssh_channel(host: str) -> list[str]:
    """Return the command that starts an agent on `host` (or USER@HOST) with OpenSSH and the user's configuration."""
    options = [word for option in SSH_OPTIONS for word in ("-o", option)]
    return ["ssh", "-T", *options, "--", host, agent_command()]


OWNER = f"process {os.getpid()} on {os.uname().nodename}: {os.path.realpath('/proc/self/cwd')}"
SSH: Launcher = HostsLauncher(name="ssh", channel=ssh_channel, logs_in=True, owner=OWNER)


class HereLauncher(HostsLauncher):
    """Runs a job under an agent on this machine, for `flag run --restarts`."""

    starts_elsewhere = False

    def find_hosts(self, nodes: int, /) -> tuple[str, ...]:
        """Return the only host."""
        return ("localhost",)


HERE: Launcher = HereLauncher(name="here", channel=lambda host: ["sh", "-c", agent_command()])
