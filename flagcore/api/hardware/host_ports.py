"""Checks that the other hosts can connect to the first one."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence

from flagcore.domain.launch import HOSTS, Launch, log_tail
from flagcore.i18n import _
from flagcore.launchers import rendezvous
from flagcore.launchers.hosts import HostLost, HostsLauncher

SECONDS = 60.0
RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT")


def port_problems(launcher: HostsLauncher, hosts: Sequence[str], variables: Mapping[str, str]) -> dict[str, str]:
    """Return the problem of each host that cannot connect to the first one, or of the first one itself.

    The port is MASTER_PORT of `variables`, else a free port. Raises LaunchError if no host can start the check.
    """
    given = {name: variables[name] for name in RENDEZVOUS if name in variables}
    with tempfile.TemporaryDirectory(prefix="flagcore-hosts-") as folder:
        argv = (sys.executable, "-I", "-S", shutil.copy(rendezvous.__file__, folder))
        launch = Launch(argv=argv, folder=folder, hosts=tuple(hosts), environment=given, timeout_seconds=SECONDS)
        try:
            trial = launcher.for_checks().start(launch)
        except HostLost as lost:
            return {lost.host: str(lost).partition(": ")[2]}
        ended = trial.wait(SECONDS) or trial.stop()
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
