"""The plugin for Cambricon MLUs."""

from __future__ import annotations

from flagcore.domain.cluster import NodeGroup, Topology
from flagcore.hooks import hookimpl
from flagcore.vendorkit.plugin import VendorPlugin
from flagcore.vendorkit.smi import tool_output
from flagcore_cambricon.bridges import x8_topology
from flagcore_cambricon.discover import DETECTOR
from flagcore_cambricon.memory import memory_of


class CambriconPlugin(VendorPlugin):
    """Knows the bridges of an MLU370-X8 node."""

    @hookimpl
    def flagcore_topology(self, group: NodeGroup) -> Topology | None:
        return x8_topology(group, tool_output("cnmon", "topo", "-m")) if group.chip.name == "MLU370-X8" else None


plugin: VendorPlugin = CambriconPlugin(
    package="flagcore_cambricon", vendor="cambricon", detector=DETECTOR, memory=memory_of
)
