"""Checks the hosts of a cluster before the first trial.

The hosts must be reachable and identical, have the devices of the spec, and be able to connect to the first host. The
speed of hosts is compared with a matrix product on each device, and with an all-reduce between neighbors. Messages
between neighbors measure the network.
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from flagcore.contracts import HostCheck, Network
from flagcore.domain.chip import SLOW_CORE_RATIO, SLOW_RATIO, SPEED_TEST, Device, slow_devices
from flagcore.domain.launch import HOSTS, Launch, log_tail
from flagcore.errors import HostLost, LaunchError, NoDevice
from flagcore.i18n import N_, _
from flagcore_hosts import rendezvous
from flagcore_hosts.launching import HostsApart, HostTrials

LOG = logging.getLogger("flagcore")
REPORT = (sys.executable, "-m", "flagcore_hosts.report")
"""The command that prints the report of the host on which it runs."""
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


def warn(lines: Iterable[str]) -> None:
    """Log each of `lines` as a warning."""
    for line in lines:
        LOG.warning("%s", line)


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
            reports += _inspect(launcher, hosts[start : start + AT_ONCE], folder, (*REPORT, *check.files))
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
        names = {"devices": device_names(report), "host": first.host, "others": device_names(first)}
        yield _("{devices}, but {host} has {others}", **names)
    versions, others = report.versions or {}, first.versions or {}
    for name in sorted(name for name in versions.keys() & others.keys() if versions[name] != others[name]):
        text = N_("{package} {version}, but {host} has {other}")
        yield _(text, package=name, version=versions[name], host=first.host, other=others[name])
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
        return {first: _("the other hosts cannot connect to port {port}: {reason}", port=port, reason=reason)}
    return {
        host: _("cannot connect to port {port} of {first}: {reason}", port=port, first=first, reason=reason)
        for host, (port, reason) in reasons.items()
    }


SPEED_SECONDS = 180.0
SLOW_LINK_RATIO = 2.0
"""A host's network is slow if its fastest all-reduce takes this many times the median of the others."""


@dataclass(frozen=True, kw_only=True)
class HostSpeed:
    """The speed of a host, in seconds.

    `products_s`: a matrix product on each device. `link_s`: the fastest all-reduce with a neighbor, or None without a
    neighbor. `network`: the fastest link to a neighbor. `cores`: whether the devices are cores, which share the
    network.
    """

    host: str
    products_s: tuple[float, ...]
    link_s: float | None
    network: Network | None = None
    cores: bool = False


def compare_hosts(launcher: HostTrials, program: Sequence[str], reports: Sequence[HostReport]) -> list[HostSpeed]:
    """Measure the speed of the usable hosts, and warn about slow devices and networks. The result is empty without
    torch or without `program`. Hosts of different kinds are not compared."""
    usable_reports = usable(reports)
    if len(kinds := dict.fromkeys(report.kind for report in usable_reports)) > 1:
        of_kinds = ([report for report in usable_reports if report.kind == kind] for kind in kinds)
        return [speed for of_kind in of_kinds for speed in compare_hosts(launcher, program, of_kind)]
    job = usable_reports[0].torch if usable_reports else None
    if not program or job is None or any(report.torch != job for report in usable_reports):
        return []
    try:
        speeds = measure_speed(launcher, program, [report.host for report in usable_reports], job)
    except LaunchError as error:
        warn([_("the hosts cannot be compared: {reason}", reason=error)])
        return []
    warn(slow_hosts(speeds, cores=job["kind"] == "cpu"))
    return speeds


def measure_speed(
    launcher: HostTrials, program: Sequence[str], hosts: Sequence[str], job: Mapping[str, Any]
) -> list[HostSpeed]:
    """Return the speed of each host, which `program` measures. Raises LaunchError if the hosts cannot connect.

    `job` contains the device type and the backend of torch.
    """
    argv = (*program, json.dumps(job), "{node_rank}", "{nnodes}", "{master_addr}", "{master_port}")
    with tempfile.TemporaryDirectory(prefix="flagcore-hosts-") as folder:
        envs = {"GLOO_SOCKET_IFNAME": "{interface}"}
        launch = Launch(argv=argv, folder=folder, hosts=tuple(hosts), environment=envs, timeout_seconds=SPEED_SECONDS)
        trial = launcher.for_checks().start(launch)
        try:
            trial.wait(SPEED_SECONDS + 30.0)
        finally:
            ended = trial.stop()
        if ended.code:
            lines = [line.strip() for line in log_tail(folder).splitlines() if line.strip()]
            reasons = [line for line in lines if "Error" in line] or lines or ["no answer"]
            raise LaunchError(reasons[-1][:300])
        logs = {host: Path(folder, HOSTS, host, "stdout.log") for host in hosts}
        return [_read_speed(host, log, cores=job["kind"] == "cpu") for host, log in logs.items()]


def _read_speed(host: str, log: Path, *, cores: bool) -> HostSpeed:
    try:
        figures = json.loads(log.read_text(encoding="utf-8").strip().splitlines()[-1])
        links = [{name: float(value) for name, value in link.items()} for link in figures["links"].values()]
        products = tuple(float(each) for each in figures["products_s"])
        link_s, latency_s = (
            min((link[name] for link in links), default=None) for name in ("all_reduce_s", "latency_s")
        )
        rate = max((link["bytes_per_second"] for link in links), default=None)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise LaunchError(f"{host}: no result ({type(error).__name__})") from None
    network = Network(nic_bytes_per_second=rate, nic_latency_seconds=latency_s) if rate and latency_s else None
    return HostSpeed(host=host, products_s=products, link_s=link_s, network=network, cores=cores)


def measured_network(speeds: Sequence[HostSpeed], devices_per_node: int | None = None) -> Network | None:
    """Return the network of the slowest host, as one device uses it, or None if no link was measured.

    `devices_per_node`: the number of devices of a host that a trial uses; by default all. Cores share the rate of their
    host. Each accelerator is assumed to have the rate that one of them has alone.
    """
    measured = [(each, each.network) for each in speeds if each.network]
    if not measured:
        return None
    rates = [
        network.nic_bytes_per_second / ((devices_per_node or len(speed.products_s)) if speed.cores else 1)
        for speed, network in measured
    ]
    latency_s = max(network.nic_latency_seconds for _speed, network in measured)
    return Network(nic_bytes_per_second=min(rates), nic_latency_seconds=latency_s)


def slow_hosts(speeds: Sequence[HostSpeed], *, cores: bool) -> Iterator[str]:
    """Yield a line for each slow device, and for each host whose network is slow."""
    hosts = [each.host for each in speeds]
    per_host = max((len(each.products_s) for each in speeds), default=1)
    devices = [
        {"device": node * per_host + place, SPEED_TEST: seconds}
        for node, each in enumerate(speeds)
        for place, seconds in enumerate(each.products_s)
    ]
    yield from slow_devices(devices, per_host, SLOW_CORE_RATIO if cores else SLOW_RATIO, hosts)
    for each in speeds:
        other_links_s = [other.link_s for other in speeds if other is not each and other.link_s is not None]
        if each.link_s is not None and other_links_s and each.link_s > SLOW_LINK_RATIO * median(other_links_s):
            ratio = f"{each.link_s / median(other_links_s):.3g}"
            yield _("{host}: an all-reduce takes {ratio}x the median of the other hosts", host=each.host, ratio=ratio)
