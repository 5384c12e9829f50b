"""Checks the hosts of a cluster before the first trial.

The hosts must be reachable and identical, have the devices of the spec, and be able to connect to the first host.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flagcore.contracts import HostCheck
from flagcore.domain.chip import Device
from flagcore.domain.launch import HOSTS, Launch, log_tail
from flagcore.errors import HostLost, LaunchError, NoDevice
from flagcore.i18n import N_, _
from flagcore_hosts import rendezvous
from flagcore_hosts.trials import HostsApart, HostTrials

AT_ONCE = 512
"""Maximum number of hosts to check at the same time."""
SECONDS = 120.0
STATE = ("python", "machine", "clock_s", "free_disk_bytes")
"""The fields of a report that are known when the agent of a host has started."""
MAX_CLOCK_SECONDS = 5.0
"""Maximum difference of clocks without a warning. Certificates and logs of distributed jobs depend on clocks."""


@dataclass(frozen=True, kw_only=True)
class HostReport:
    """The report of a host.

    - `problem`: why it cannot be used, or an empty string.
    - `machine`: the same text for two names of one machine. Empty if unknown.
    - `clock_s`: how many seconds its clock is ahead. None if the host cannot be reached.
    - `free_disk_bytes`: the free space of the folder for trials. None if the host cannot be reached.
    - `devices`, `versions`: its devices and versions, or None if flagcore is not installed on the host.
    - `torch`: the device type and the backend of torch, or None without torch.
    - `files`: digests of files and folders. The digest of a missing file is empty.
    - `busy`: a line for each device that does not respond, or whose memory other processes use.
    - `kind`: the kind of the host. Hosts of the same kind must have the same devices and versions.
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
    machine: str = ""
    clock_s: float | None = None
    free_disk_bytes: int | None = None

    @property
    def chips(self) -> Counter[str]:
        """The number of devices of each kind of chip, by name."""
        return Counter(device.chip for device in self.devices or ())


def inspect_hosts(
    launcher: HostTrials, hosts: Sequence[str], check: HostCheck, kinds: Mapping[str, str] | None = None
) -> list[HostReport]:
    """Return the report of each host, in the given order. Hosts are checked in parallel.

    Hosts that cannot connect to the first usable one have a problem, unless `check.variables` is None. `kinds` contains
    the kind of each host, if there are several kinds. Raises NoDevice if another search has the hosts.
    """
    reports: list[HostReport] = []
    for start in range(0, len(hosts), AT_ONCE):
        with tempfile.TemporaryDirectory(prefix="flagcore-hosts-") as folder:
            reports += _inspect(launcher, hosts[start : start + AT_ONCE], folder, (*check.report, *check.files))
    reports = [replace(report, kind=(kinds or {}).get(report.host, "")) for report in reports]
    if launcher.logs_in:
        reports = list(_without_aliases(reports))
    connected = [] if check.variables is None else [report.host for report in usable(reports)]
    if len(connected) < 2:
        return reports
    problems = port_problems(launcher, connected, check.variables or {})
    return [replace(report, problem=problems.get(report.host, report.problem)) for report in reports]


def _without_aliases(reports: Sequence[HostReport]) -> Iterator[HostReport]:
    """Yield the reports, with a problem for each host that is the same machine as an earlier one."""
    host_of_machine: dict[str, str] = {}
    for report in reports:
        first = host_of_machine.setdefault(report.machine or report.host, report.host)
        same = first != report.host and not report.problem
        yield replace(report, problem=_("is the same machine as {host}", host=first)) if same else report


def _inspect(launcher: HostTrials, hosts: Sequence[str], folder: str, argv: tuple[str, ...]) -> Iterator[HostReport]:
    """Yield the reports of hosts, which the command `argv` prints. The files of the check are in `folder` here."""
    launch = Launch(argv=argv, folder=folder, hosts=tuple(hosts), timeout_seconds=SECONDS)
    try:
        trial = launcher.for_checks().start(launch, HostsApart)
    except HostLost as used:  # by another search
        raise NoDevice(str(used)) from None
    except LaunchError as error:
        yield from (HostReport(host=host, problem=str(error)) for host in hosts)
        return
    connections = [(each, each.ready) for each in trial.connections]  # an agent that is kept forgets its trial
    if trial.wait(SECONDS + 30) is None:
        trial.stop()
    for each, ready in connections:
        report_fields: dict[str, Any] = {name: ready[name] for name in STATE} if ready else {}
        with suppress(OSError, ValueError, KeyError, TypeError):  # raised if flagcore is not installed on the host
            figures = json.loads(Path(folder, HOSTS, each.host, "stdout.log").read_text(encoding="utf-8"))
            report_fields |= {
                "devices": tuple(Device(**{**device, "host": each.host}) for device in figures["devices"]),
                "versions": dict(figures["versions"]),
                "torch": None if figures["torch"] is None else dict(figures["torch"]),
                "files": dict(figures["files"]),
                "busy": tuple(figures["busy"]),
            }
        yield HostReport(host=each.host, problem=each.problem, **report_fields)


def usable(reports: Sequence[HostReport]) -> list[HostReport]:
    """Return the reports without a problem."""
    return [report for report in reports if not list(host_problems(report, reports))]


def host_problems(report: HostReport, reports: Sequence[HostReport]) -> Iterator[str]:
    """Yield a line for each reason why a host cannot run trials together with the others.

    Its devices and versions must be the same as on the other hosts of its kind.
    """
    if report.problem:
        yield report.problem
        return
    first_of_all = next(each for each in reports if not each.problem)
    first = next(each for each in reports if not each.problem and each.kind == report.kind)
    if report.devices is not None and first.devices is not None and report.chips != first.chips:
        yield _(
            "{devices}, but {host} has {others}",
            devices=device_names(report),
            host=first.host,
            others=device_names(first),
        )
    for name in sorted((report.versions or {}).keys() & (first.versions or {}).keys()):
        own_version, other_version = (report.versions or {})[name], (first.versions or {})[name]
        if own_version != other_version:
            text = N_("{package} {version}, but {host} has {other}")
            yield _(text, package=name, version=own_version, host=first.host, other=other_version)
    for path, content in report.files.items():
        if not content:
            yield _("{path} is missing", path=path)
        elif first_of_all.files.get(path) not in (content, ""):
            yield _("{path} differs from the one on {host}", path=path, host=first_of_all.host)


def host_warnings(reports: Sequence[HostReport]) -> Iterator[str]:
    """Yield warnings about usable hosts."""
    for report in reports:
        if report.clock_s is not None and abs(report.clock_s) > MAX_CLOCK_SECONDS:
            yield _("{host}: its clock differs by {seconds} s", host=report.host, seconds=f"{report.clock_s:.0f}")
        yield from (f"{report.host}: {line}" for line in report.busy)
        if report.devices is None and not report.problem:
            yield _("{host}: flagcore is not installed on this host, so its devices are not checked", host=report.host)


def device_names(report: HostReport) -> str:
    """Return the number of devices of each kind of chip, in words."""
    return ", ".join(f"{count} x {chip}" for chip, count in report.chips.items()) or _("no device")


PORT_SECONDS = 60.0
RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT")


def port_problems(launcher: HostTrials, hosts: Sequence[str], variables: Mapping[str, str]) -> dict[str, str]:
    """Return the problem of each host that cannot connect to the first one, or of the first one itself.

    The port is MASTER_PORT in `variables`, or else a free port. Raises LaunchError if no host can start the check.
    """
    address = {name: variables[name] for name in RENDEZVOUS if name in variables}
    with tempfile.TemporaryDirectory(prefix="flagcore-hosts-") as folder:
        argv = (sys.executable, "-I", "-S", shutil.copy(rendezvous.__file__, folder))
        launch = Launch(argv=argv, folder=folder, hosts=tuple(hosts), environment=address, timeout_seconds=PORT_SECONDS)
        try:
            trial = launcher.for_checks().start(launch)
        except HostLost as lost:
            return {lost.host: str(lost).partition(": ")[2]}
        ended = trial.wait(PORT_SECONDS) or trial.stop()
        if ended.lost_host:
            return {ended.lost_host: ended.detail.partition(": ")[2]}
        lines = {host: log_tail(f"{folder}/{HOSTS}/{host}").partition("\n")[0] for host in hosts}
    reasons = {host: line.split(None, 1) for host, line in lines.items() if " " in line}
    first, others = hosts[0], hosts[1:]
    if first in reasons:
        port, reason = reasons[first]
        return {first: _("port {port} cannot be used: {reason}", port=port, reason=reason)}
    if reasons.keys() == set(others):
        port, reason = reasons[others[0]]
        text = _("the other hosts cannot connect to port {port}: {reason}", port=port, reason=reason)
        return {first: text}
    return {
        host: _("cannot connect to port {port} of {first}: {reason}", port=port, first=first, reason=reason)
        for host, (port, reason) in reasons.items()
    }
