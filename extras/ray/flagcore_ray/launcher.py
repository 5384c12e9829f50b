"""The ray launcher: agents are actors on whole nodes of a Ray cluster, which are reserved until the search ends."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from flagcore_hosts.hub import Hub
from flagcore_hosts.launcher import HostsLauncher

from flagcore.contracts import Launcher
from flagcore.errors import NoDevice

ANY = "any-"
"""Prefix of placeholder names, for hosts that Ray has not chosen yet."""
HOLD_SECONDS = 120.0
HUB = Hub("ray", "flagcore_ray.hub")


@dataclass(kw_only=True)
class RayLauncher(HostsLauncher):
    """Starts trials on the nodes of a Ray cluster."""

    replaces_hosts = True

    def find_hosts(self, nodes: int, /) -> tuple[str, ...]:
        """Return placeholders for `nodes` hosts, which `hold` replaces. A plan needs no cluster."""
        return tuple(f"{ANY}{number}" for number in range(1, nodes + 1))

    def hold(self, hosts: Sequence[str], users: Mapping[str, str] = {}) -> tuple[str, ...]:
        """Reserve hosts of the cluster until this process ends, and return their addresses. Raises NoDevice."""
        if find_spec("ray") is None:
            raise NoDevice('auto_tuner.launcher = ray: Ray is not installed; pip install "flagcore[ray]"')
        names = [host for host in hosts if not host.startswith(ANY)]
        return tuple(HUB.ask(HOLD_SECONDS, nodes=len(hosts), names=names)["hosts"])

    def choose_hosts(self, hosts: Sequence[str], count: int) -> tuple[str, ...]:
        """Return the hosts for the next trial, as usual. If Ray has replaced a lost node, return the new node."""
        replaced = HUB.ask(HOLD_SECONDS, replaced=True)["replaced"] if self.failures else {}
        return super().choose_hosts([replaced.get(host, host) for host in hosts], count)


LAUNCHER: Launcher = RayLauncher(name="ray", channel=HUB.channel)
