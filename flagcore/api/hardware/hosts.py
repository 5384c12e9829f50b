"""Looks at the hosts of a cluster before the first trial: reachable, equal, with the devices that the spec expects."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flagcore import plugins
from flagcore.api.common.inputs import warn
from flagcore.api.hardware.host_speed import HostSpeed, measure_speed, slow_hosts
from flagcore.contracts import Launcher
from flagcore.domain.chip import Device
from flagcore.domain.launch import Launch
from flagcore.errors import LaunchError, NoDevice, UsageError
from flagcore.i18n import N_, _
from flagcore.launchers.hosts import MAX_LOSSES, HostsLauncher
from flagcore.spec.convert import read_hosts

PROGRAM = "flagcore.api.hardware.host_report"
AT_ONCE = 64
"""Hosts that are asked at the same time."""
MOST_COMPARED = 64
"""Hosts whose speeds `flag tune` compares: the comparison takes longer with each."""
SECONDS = 120.0
MAX_CLOCK_SECONDS = 5.0
"""A larger difference of clocks is reported: certificates and logs of distributed jobs depend on them."""


@dataclass(frozen=True, kw_only=True)
class HostReport:
    """What a host answered. `problem` is why it cannot be used, empty if it can. Its clock is ahead by `clock_s`.

    Without flagcore on the host, `devices` and `versions` are None. `torch` is how torch runs there, None without it.
    `files` are digests of files and folders, empty for missing ones.
    """

    host: str
    problem: str = ""
    devices: tuple[Device, ...] | None = None
    versions: Mapping[str, str] | None = None
    torch: Mapping[str, Any] | None = None
    files: Mapping[str, str] = field(default_factory=dict)
    python: str = ""
    clock_s: float = 0.0
    free_disk_bytes: int = 0

    @property
    def chips(self) -> Counter[str]:
        """The number of devices of each chip."""
        return Counter(device.chip for device in self.devices or ())


def inspect_hosts(launcher: HostsLauncher, hosts: Sequence[str], files: Sequence[str] = ()) -> list[HostReport]:
    """Return what each host answers, in order. Hosts are asked in parallel, for `files`, too."""
    with tempfile.TemporaryDirectory(prefix="flagcore-hosts-") as folder, ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(lambda host: _inspect(launcher, host, Path(folder, host), files), hosts))


def _inspect(launcher: HostsLauncher, host: str, folder: Path, files: Sequence[str]) -> HostReport:
    fresh = HostsLauncher(name=launcher.name, channel=launcher.channel)
    argv = (sys.executable, "-m", PROGRAM, *files)
    try:
        running = fresh.start(Launch(argv=argv, folder=str(folder), hosts=(host,), timeout_seconds=SECONDS))
    except LaunchError as error:
        return HostReport(host=host, problem=str(error).removeprefix(f"host {host}: "))
    hello = running.connections[0].hello or {}
    clock = float(hello["time"]) - time.time()
    ended = running.wait(SECONDS + 30) or running.stop()
    seen = HostReport(
        host=host,
        problem=ended.detail.partition(": ")[2] if ended.ended_by == "host" else "",
        python=str(hello["python"]),
        clock_s=clock,
        free_disk_bytes=int(hello["free_disk_bytes"]),
    )
    try:
        found = json.loads((folder / "stdout.log").read_text(encoding="utf-8"))
        devices = tuple(Device(**{**each, "host": host}) for each in found["devices"])
        versions, torch = dict(found["versions"]), found["torch"]
        seen = replace(seen, devices=devices, versions=versions, files=dict(found["files"]))
        return replace(seen, torch=None if torch is None else dict(torch))
    except (OSError, ValueError, KeyError, TypeError):
        return seen


def check_hosts(hostfile: Path, launcher: str = "ssh") -> list[dict[str, Any]]:
    """Return one record per host of a host file: whether it can be used, or why not, and what it has.

    Raises SpecError for a file that cannot be read, UsageError for a launcher that starts nothing on hosts.
    """
    hosts, _slots = read_hosts(hostfile, file=str(hostfile))
    found = plugins.launcher(launcher)
    if not isinstance(found, HostsLauncher):
        text = N_("--launcher = {launcher}: starts trials on this machine; use ssh, slurm or ray")
        raise UsageError(_(text, launcher=launcher))
    reports = inspect_hosts(found, found.hold(hosts))
    warn(host_warnings(reports))
    speeds = {each.host: each for each in _speeds(found, reports)}
    return [_record(report, reports, speeds.get(report.host)) for report in reports]


def _speeds(launcher: HostsLauncher, reports: Sequence[HostReport]) -> list[HostSpeed]:
    """Return the speed of the hosts that can be used, none without torch, and warn of slow devices and networks."""
    usable = [report for report in reports if not list(host_problems(report, reports))]
    job = usable[0].torch if usable else None
    if job is None or any(report.torch != job for report in usable):
        return []
    try:
        speeds = measure_speed(launcher, [report.host for report in usable], job)
    except LaunchError as error:
        warn([_("the hosts cannot be compared: {reason}", reason=error)])
        return []
    warn(slow_hosts(speeds, cores=job["kind"] == "cpu"))
    return speeds


def _record(report: HostReport, reports: Sequence[HostReport], speed: HostSpeed | None) -> dict[str, Any]:
    link_s, products = (speed.link_s, speed.products_s) if speed else (None, ())
    problems = list(host_problems(report, reports))
    return {
        "host": report.host,
        "ok": not problems,
        "problem": "; ".join(problems),
        "devices": _names(report) if report.devices is not None else None,
        "python": report.python,
        "clock_s": report.clock_s,
        "free_disk_gib": report.free_disk_bytes / 2**30,
        "product_ms": 1e3 * max(products) if products else None,
        "all_reduce_ms": 1e3 * link_s if link_s is not None else None,
        "versions": report.versions,
    }


def require_any_host(launcher: Launcher, hosts: Sequence[str]) -> None:
    """Raise NoDevice if a launcher for several hosts has none."""
    if isinstance(launcher, HostsLauncher) and not hosts:
        raise NoDevice(launcher.no_hosts)


def require_hosts(
    launcher: Launcher, hosts: Sequence[str], spares: int = 0, files: Sequence[str] = (), *, compare: bool = False
) -> tuple[tuple[str, ...], tuple[Device, ...]]:
    """Hold hosts for this process. Return their names, and the devices of those that can be used, none if unknown.

    `files` must be the same on all. Up to `spares` hosts that cannot be used are left out, with a warning each. With
    `compare`, slow devices and networks are warned of, too. Raises NoDevice with a line for each host if more than
    `spares` cannot be used.
    """
    if not isinstance(launcher, HostsLauncher):
        return tuple(hosts), ()
    hosts = launcher.hold(hosts)
    reports = inspect_hosts(launcher, hosts, files)
    problems = {report.host: "; ".join(host_problems(report, reports)) for report in reports}
    unusable = [f"{host}: {lines}" for host, lines in problems.items() if lines]
    if len(unusable) > spares:
        raise NoDevice("; ".join(unusable))
    launcher.failures = Counter({host: MAX_LOSSES for host, lines in problems.items() if lines})
    usable = [report for report in reports if not problems[report.host]]
    launcher.reached.update(report.host for report in usable)
    warn(_("{line}; it is not used", line=line) for line in unusable)
    warn(host_warnings(usable))
    if compare and 1 < len(usable) <= MOST_COMPARED:
        _speeds(launcher, usable)
    return hosts, tuple(device for report in usable for device in report.devices or ())


def host_problems(report: HostReport, reports: Sequence[HostReport]) -> Iterator[str]:
    """Yield why a host cannot run trials together with the others, one line each."""
    if report.problem:
        yield report.problem
        return
    first = next(each for each in reports if not each.problem)
    if report.devices is not None and first.devices is not None and report.chips != first.chips:
        yield _("{devices}, but {host} has {others}", devices=_names(report), host=first.host, others=_names(first))
    for name in sorted((report.versions or {}).keys() & (first.versions or {}).keys()):
        own, other = (report.versions or {})[name], (first.versions or {})[name]
        if own != other:
            text = N_("{package} {version}, but {host} has {other}")
            yield _(text, package=name, version=own, host=first.host, other=other)
    for path, content in report.files.items():
        if not content:
            yield _("{path} is missing", path=path)
        elif first.files.get(path) not in (content, ""):
            yield _("{path} differs from that of {host}", path=path, host=first.host)


def host_warnings(reports: Sequence[HostReport]) -> Iterator[str]:
    """Yield what is unusual about hosts that can be used."""
    for report in reports:
        if abs(report.clock_s) > MAX_CLOCK_SECONDS:
            yield _("{host}: its clock differs by {seconds} s", host=report.host, seconds=f"{report.clock_s:.0f}")
        if report.devices is None and not report.problem:
            yield _("{host}: flagcore is not installed there, so its devices are not checked", host=report.host)


def _names(report: HostReport) -> str:
    return ", ".join(f"{count} x {chip}" for chip, count in report.chips.items()) or _("no device")
