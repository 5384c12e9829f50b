"""Checks the hosts of a cluster before the first trial: reachable, equal, and with the devices of the spec."""

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
from flagcore.api.hardware.host_ports import port_problems
from flagcore.api.hardware.host_speed import HostSpeed, measure_speed, slow_hosts
from flagcore.contracts import Launcher
from flagcore.domain.chip import Device
from flagcore.domain.launch import Launch
from flagcore.errors import LaunchError, NoDevice, UsageError
from flagcore.i18n import N_, _
from flagcore.launchers.hosts import MAX_LOSSES, HostsLauncher
from flagcore.spec.host_file import read_hosts

PROGRAM = "flagcore.api.hardware.host_report"
AT_ONCE = 64
"""Maximum number of hosts to check at the same time."""
MAX_COMPARED = 64
"""Maximum number of hosts whose speeds `flag tune` compares. The time of the comparison grows with their number."""
SECONDS = 120.0
MAX_CLOCK_SECONDS = 5.0
"""Maximum difference of clocks without a warning. Certificates and logs of distributed jobs depend on clocks."""


@dataclass(frozen=True, kw_only=True)
class HostReport:
    """The report of a host. `problem` is the reason why it cannot be used, empty if it can.

    `clock_s` is how far its clock is ahead. Without flagcore on the host, `devices` and `versions` are None. `torch`
    has the device type and the backend of torch, None without torch. `files` are digests of files and folders, empty
    for missing ones. `busy` has a line per device that does not respond, or whose memory others use. Hosts of one
    `kind` must have the same devices and versions.
    """

    host: str
    problem: str = ""
    devices: tuple[Device, ...] | None = None
    versions: Mapping[str, str] | None = None
    torch: Mapping[str, Any] | None = None
    files: Mapping[str, str] = field(default_factory=dict)
    busy: tuple[str, ...] = ()
    kind: str = ""
    python: str = ""
    clock_s: float = 0.0
    free_disk_bytes: int = 0

    @property
    def chips(self) -> Counter[str]:
        """The number of devices of each chip."""
        return Counter(device.chip for device in self.devices or ())


def inspect_hosts(
    launcher: HostsLauncher, hosts: Sequence[str], files: Sequence[str] = (), kinds: Mapping[str, str] | None = None
) -> list[HostReport]:
    """Return the report of each host, in order. Hosts are checked in parallel, including digests of `files`.

    `kinds` are the kinds of hosts, if there are several.
    """
    with tempfile.TemporaryDirectory(prefix="flagcore-hosts-") as folder, ThreadPoolExecutor(AT_ONCE) as pool:
        reports = pool.map(lambda host: _inspect(launcher, host, Path(folder, host), files), hosts)
        return [replace(report, kind=(kinds or {}).get(report.host, "")) for report in reports]


def _inspect(launcher: HostsLauncher, host: str, folder: Path, files: Sequence[str]) -> HostReport:
    own_launcher = launcher.for_checks()
    argv = (sys.executable, "-m", PROGRAM, *files)
    try:
        trial = own_launcher.start(Launch(argv=argv, folder=str(folder), hosts=(host,), timeout_seconds=SECONDS))
    except LaunchError as error:
        return HostReport(host=host, problem=str(error).removeprefix(f"host {host}: "))
    hello, ready = trial.connections[0].hello or {}, trial.connections[0].ready or {}
    clock = float(hello["time"]) - time.time()
    exit_record = trial.wait(SECONDS + 30) or trial.stop()
    host_report = HostReport(
        host=host,
        problem=exit_record.detail.partition(": ")[2] if exit_record.ended_by == "host" else "",
        python=str(hello["python"]),
        clock_s=clock,
        free_disk_bytes=ready["free_disk_bytes"],
    )
    try:
        figures = json.loads((folder / "stdout.log").read_text(encoding="utf-8"))
        devices = tuple(Device(**{**each, "host": host}) for each in figures["devices"])
        versions, torch = dict(figures["versions"]), figures["torch"]
        host_report = replace(host_report, devices=devices, versions=versions, files=dict(figures["files"]))
        return replace(host_report, torch=None if torch is None else dict(torch), busy=tuple(figures["busy"]))
    except (OSError, ValueError, KeyError, TypeError):
        return host_report


def check_hosts(hostfile: Path, launcher: str = "ssh") -> list[dict[str, Any]]:
    """Return one record per host of a host file: its problem, if any, its devices, versions and speed.

    Raises SpecError for an unreadable file, UsageError for a launcher without hosts.
    """
    kinds = {line.host: line.kind for line in read_hosts(hostfile, file=str(hostfile))}
    host_launcher = plugins.launcher(launcher)
    if not isinstance(host_launcher, HostsLauncher):
        text = N_("--launcher = {launcher}: starts trials on this machine; use ssh, slurm or ray")
        raise UsageError(_(text, launcher=launcher))
    reports = inspect_hosts(host_launcher, host_launcher.hold(tuple(kinds)), kinds=kinds)
    reports = _with_ports(host_launcher, reports, {})
    warn(host_warnings(reports))
    speeds = {each.host: each for each in _speeds(host_launcher, reports)}
    return [_record(report, reports, speeds.get(report.host)) for report in reports]


def _with_ports(
    launcher: HostsLauncher, reports: Sequence[HostReport], variables: Mapping[str, str]
) -> list[HostReport]:
    """Return reports with the problems of usable hosts that cannot connect to the first of them."""
    hosts = [report.host for report in reports if not list(host_problems(report, reports))]
    problems = port_problems(launcher, hosts, variables) if len(hosts) > 1 else {}
    return [replace(report, problem=problems.get(report.host, report.problem)) for report in reports]


def _speeds(launcher: HostsLauncher, reports: Sequence[HostReport]) -> list[HostSpeed]:
    """Return the speed of the usable hosts, empty without torch, and warn of slow devices and networks.

    Hosts of different kinds are not compared.
    """
    usable_reports = [report for report in reports if not list(host_problems(report, reports))]
    if len(kinds := dict.fromkeys(report.kind for report in usable_reports)) > 1:
        of_kinds = ([report for report in usable_reports if report.kind == kind] for kind in kinds)
        return [speed for of_kind in of_kinds for speed in _speeds(launcher, of_kind)]
    job = usable_reports[0].torch if usable_reports else None
    if job is None or any(report.torch != job for report in usable_reports):
        return []
    try:
        speeds = measure_speed(launcher, [report.host for report in usable_reports], job)
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
    launcher: HostsLauncher,
    hosts: Sequence[str],
    spares: int = 0,
    files: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
    *,
    kinds: Mapping[str, str] | None = None,
    compare: bool = False,
) -> tuple[tuple[str, ...], tuple[Device, ...]]:
    """Reserve hosts for this process. Return their names, and the devices of the usable hosts, empty if unknown.

    `files` must be the same on all hosts, devices and versions on hosts of one kind (`kinds`). If hosts have to connect
    to the first one, `variables` may set the port. Up to `spares` unusable hosts are skipped with a warning. With
    `compare`, slow devices and networks cause warnings, too. Raises NoDevice with a line per unusable host if more are
    unusable.
    """
    hosts = launcher.hold(hosts)
    reports = inspect_hosts(launcher, hosts, files, kinds)
    if variables is not None:
        reports = _with_ports(launcher, reports, variables)
    problems = {report.host: "; ".join(host_problems(report, reports)) for report in reports}
    unusable_hosts = [f"{host}: {lines}" for host, lines in problems.items() if lines]
    if len(unusable_hosts) > spares:
        raise NoDevice("; ".join(unusable_hosts))
    launcher.failures = Counter({host: MAX_LOSSES for host, lines in problems.items() if lines})
    usable_reports = [report for report in reports if not problems[report.host]]
    launcher.reached.update(report.host for report in usable_reports)
    warn(_("{line}; it is not used", line=line) for line in unusable_hosts)
    warn(host_warnings(usable_reports))
    if compare and 1 < len(usable_reports) <= MAX_COMPARED:
        _speeds(launcher, usable_reports)
    return hosts, tuple(device for report in usable_reports for device in report.devices or ())


def host_problems(
    report: HostReport, reports: Sequence[HostReport], groups: Sequence[Sequence[str]] = ()
) -> Iterator[str]:
    """Yield why a host cannot run trials together with the others, one line each.

    Its devices must be those of the other hosts or, with `groups`, of the other hosts of its group.
    """
    if report.problem:
        yield report.problem
        return
    usable = [each for each in reports if not each.problem]
    first = next(each for each in usable if each.kind == report.kind)
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
        elif usable[0].files.get(path) not in (content, ""):
            yield _("{path} differs from the one on {host}", path=path, host=usable[0].host)


def host_warnings(reports: Sequence[HostReport]) -> Iterator[str]:
    """Yield warnings about usable hosts."""
    for report in reports:
        if abs(report.clock_s) > MAX_CLOCK_SECONDS:
            yield _("{host}: its clock differs by {seconds} s", host=report.host, seconds=f"{report.clock_s:.0f}")
        yield from (f"{report.host}: {line}" for line in report.busy)
        if report.devices is None and not report.problem:
            yield _("{host}: flagcore is not installed on this host, so its devices are not checked", host=report.host)


def _names(report: HostReport) -> str:
    return ", ".join(f"{count} x {chip}" for chip, count in report.chips.items()) or _("no device")
