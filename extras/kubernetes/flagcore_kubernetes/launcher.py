"""The kubernetes launcher: the pods of one job connect to the pod that runs `flag tune` (`flagcore_kubernetes.join`).

It also exports jobs as manifests.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flagcore_hosts.connection import agent_command
from flagcore_hosts.hub import Hub
from flagcore_hosts.launcher import HostsLauncher

from flagcore.contracts import ExportJob, Launcher
from flagcore.errors import UsageError
from flagcore_kubernetes import dynamo
from flagcore_kubernetes.job import HOSTS, export
from flagcore_kubernetes.join import PORT, TOKEN

PORT_VARIABLE = "FLAGCORE_PORT"
"""Environment variable with the port on which the tuning pod listens."""
JOIN_SECONDS = 600.0
"""Maximum time in seconds until all pods have joined. Pulling large images takes long."""
TARGETS = {
    "kubernetes": ("image", "kind", "pods", "queue", "rdma", "replicas", "resource", "restarts", "user", "volume"),
    "dynamo": ("image", "replicas", "resource", "volume"),
}
HUB = Hub("kubernetes", "flagcore_kubernetes.hub")


def pod_names() -> tuple[str, ...]:
    """Return the names of this job's pods. The result is empty outside of a job."""
    return tuple(os.environ.get(HOSTS, "").split())


def channel(host: str) -> list[str]:
    """Return the command that connects to an agent in a pod."""
    return ["env", "-u", TOKEN, "sh", "-c", agent_command()] if _is_this(host) else HUB.channel(_name(host))


def _is_this(host: str) -> bool:
    return host == next(iter(pod_names()), "")


def _name(host: str) -> str:
    """Return the host name of a pod without the domain of the service."""
    return host.partition(".")[0]


@dataclass(kw_only=True)
class KubernetesLauncher(HostsLauncher):
    """The launcher, which also exports jobs as manifests."""

    targets = TARGETS
    per_server: bool = True
    fix = "start the job that `flag manifest` writes"

    def find_hosts(self, nodes: int, /) -> tuple[str, ...]:
        return pod_names()

    def hold(self, hosts: Sequence[str], users: Mapping[str, str] = {}) -> tuple[str, ...]:
        """Wait until all other pods have joined. Raises NoDevice, UsageError."""
        names = [_name(host) for host in hosts if not _is_this(host)]
        port = os.environ.get(PORT_VARIABLE, str(PORT))
        if not port.isdecimal():
            raise UsageError(f"{PORT_VARIABLE} = {port!r} is not a port number; omit it or use a number")
        HUB.ask(JOIN_SECONDS + 10, names=names, port=int(port), seconds=JOIN_SECONDS)
        return tuple(hosts)

    def export(self, job: ExportJob, target: str) -> Mapping[str, str]:
        """Return the manifest of a job. Raises UsageError."""
        return dynamo.export(job) if target == "dynamo" else export(job)


LAUNCHER: Launcher = KubernetesLauncher(name="kubernetes", channel=channel)
