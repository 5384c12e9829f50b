"""Compares the speeds of hosts.

A matrix product is measured on each device, an all-reduce between neighbors, and messages between neighbors, which
measure the network.
"""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from flagcore.contracts import Network
from flagcore.domain.chip import SLOW_CORE_RATIO, SLOW_RATIO, SPEED_TEST, slow_devices
from flagcore.domain.launch import HOSTS, Launch, log_tail
from flagcore.errors import LaunchError
from flagcore.i18n import _
from flagcore_hosts.checks import HostReport, usable
from flagcore_hosts.trials import HostTrials

LOG = logging.getLogger("flagcore")
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
        LOG.warning("%s", _("the hosts cannot be compared: {reason}", reason=error))
        return []
    for line in slow_hosts(speeds, cores=job["kind"] == "cpu"):
        LOG.warning("%s", line)
    return speeds


def measure_speed(
    launcher: HostTrials, program: Sequence[str], hosts: Sequence[str], job: Mapping[str, Any]
) -> list[HostSpeed]:
    """Return the speed of each host, which `program` measures. Raises LaunchError if the hosts cannot connect.

    `job` contains the device type and the backend of torch.
    """
    words = ("{node_rank}", "{nnodes}", "{master_addr}", "{master_port}")
    argv = (*program, json.dumps(job), *words)
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
