"""Compares the speed of hosts: a matrix product on each device, and an all-reduce between neighbors."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from flagcore.domain.devices import SLOW_CORE_RATIO, SLOW_RATIO, SPEED_TEST, slow_devices
from flagcore.domain.launch import HOSTS, Launch, log_tail
from flagcore.errors import LaunchError
from flagcore.i18n import _
from flagcore.launchers.hosts import HostsLauncher

PROGRAM = "flagcore.microbench.hosts"
SECONDS = 180.0
SLOW_LINK_RATIO = 2.0
"""A host's network is slow if its fastest all-reduce takes this many times the median of the others."""


@dataclass(frozen=True, kw_only=True)
class HostSpeed:
    """Seconds of a matrix product on each device of a host, and of its fastest all-reduce with a neighbor, if any."""

    host: str
    products_s: tuple[float, ...]
    link_s: float | None


def measure_speed(launcher: HostsLauncher, hosts: Sequence[str], job: Mapping[str, Any]) -> list[HostSpeed]:
    """Return the speed of each host. `job` names the device type and the backend of torch. Raises LaunchError if the
    hosts cannot connect.
    """
    words = ("{node_rank}", "{nnodes}", "{master_addr}", "{master_port}")
    variables = {"GLOO_SOCKET_IFNAME": "{interface}"} if job["backend"] == "gloo" else {}
    with tempfile.TemporaryDirectory(prefix="flagcore-hosts-") as folder:
        argv = (sys.executable, "-m", PROGRAM, json.dumps(job), *words)
        trial = launcher.for_checks().start(
            Launch(argv=argv, folder=folder, hosts=tuple(hosts), environment=variables, timeout_seconds=SECONDS)
        )
        try:
            exit_record = trial.wait(SECONDS + 30.0)
        finally:
            trial.stop()
        if exit_record is None or exit_record.code:
            lines = [line.strip() for line in log_tail(folder).splitlines() if line.strip()]
            reasons = [line for line in lines if "Error" in line] or lines or ["no answer"]
            raise LaunchError(reasons[-1][:300])
        return [_read(host, Path(folder, HOSTS, host, "stdout.log")) for host in hosts]


def _read(host: str, log: Path) -> HostSpeed:
    try:
        figures = json.loads(log.read_text(encoding="utf-8").strip().splitlines()[-1])
        links = [float(each) for each in figures["links_s"].values()]
        products = tuple(float(each) for each in figures["products_s"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise LaunchError(f"{host}: no result ({type(error).__name__})") from None
    return HostSpeed(host=host, products_s=products, link_s=min(links, default=None))


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
            yield _("{host}: its network takes {ratio}x the median of the others", host=each.host, ratio=ratio)
