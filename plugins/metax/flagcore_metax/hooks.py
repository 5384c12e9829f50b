"""The plugin for MetaX GPUs."""

from __future__ import annotations

from collections.abc import Sequence

from flagcore.domain.chip import Chip
from flagcore.domain.cluster import NodeGroup, Topology
from flagcore.domain.launch import Launch
from flagcore.domain.spec import Task
from flagcore.hooks import hookimpl
from flagcore.vendorkit.plugin import VendorPlugin
from flagcore_metax.discover import DETECTOR, adapters, topology
from flagcore_metax.islands import c500_topology, island_size
from flagcore_metax.memory import memory_of
from flagcore_metax.preflight import peer_memory_problem, warn_of_peer_memory


class MetaxPlugin(VendorPlugin):
    """Knows the islands of a C500 node and checks GPUDirect RDMA."""

    @hookimpl
    def flagcore_health(self, chip: Chip) -> Sequence[str] | None:
        found, problem = super().flagcore_health(chip), peer_memory_problem()
        return found if found is None or not problem else (*found, problem)

    @hookimpl
    def flagcore_topology(self, group: NodeGroup) -> Topology | None:
        if group.chip.name != "C500":
            return super().flagcore_topology(group)
        return c500_topology(group, _island(group), adapters() if group.nodes > 1 else None)

    @hookimpl
    def flagcore_prepare_launch(self, task: Task) -> Launch | None:
        groups = task.cluster.groups
        if any(self.owns(group.chip) for group in groups) and sum(group.nodes for group in groups) > 1:
            warn_of_peer_memory()
        return None


def _island(group: NodeGroup) -> int:
    return island_size(group, topology())


plugin: VendorPlugin = MetaxPlugin(package="flagcore_metax", vendor="metax", detector=DETECTOR, memory=memory_of)
