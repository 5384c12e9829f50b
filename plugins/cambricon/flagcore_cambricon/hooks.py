"""The plugin for Cambricon MLUs, with the memory that a rank takes in addition to its tensors.

The MLU370-X8 node has bridge groups of eight devices joined by MLU-Link, and PCIe between the groups.
"""

from dataclasses import replace

from flagcore_vendorkit.machine import tool_output
from flagcore_vendorkit.plugin import VendorPlugin, usual_memory
from flagcore_vendorkit.rows import group_size

from flagcore.domain.cluster import Level, NodeGroup, Topology
from flagcore.hooks import hookimpl
from flagcore.physics.collective_costs import (
    EFFICIENCY,
    NETWORK_HOP_SECONDS,
    NETWORK_LATENCY_SECONDS,
    network_level,
    topology_of,
)
from flagcore_cambricon.discover import DETECTOR

GROUP = 8
"""Number of devices joined by bridges: four cards with two devices each (vendor's page). yao-matrix/mblog
intra-node-connectivity.md shows the same for two kinds of servers in `cnmon topo -m`: MLU0 to MLU7 and MLU8 to MLU15,
each group behind a separate PCIe switch."""

UPLINK_BYTES_PER_SECOND = 32e9
"""Estimated rate between groups: one PCIe 4.0 x16 uplink per switch, shared by its eight devices. The share that
collectives reach is unpublished."""

LATENCY_SECONDS = 10e-6
"""Estimated latency between groups: the core's value for PCIe."""


def x8_topology(group: NodeGroup, topo: str | None = None) -> Topology | None:
    """Return the levels bridge group, node and, for several nodes, network. Returns None if a node is one group, or if
    a rate is unknown.

    `topo` is the output of `cnmon topo -m`, which shows the devices joined by MLU-Link (MLK). Without it, each group
    has eight devices.
    """
    node, joined = group.devices_per_node, group_size(group, topo, "MLK", GROUP)
    if node <= joined:
        return None
    link = group.chip.link and replace(group.chip.link, domain_size=joined)
    inner = topology_of(replace(group, nodes=1, devices_per_node=joined, chip=replace(group.chip, link=link))).levels
    share = UPLINK_BYTES_PER_SECOND / joined
    between = Level(
        name="node",
        devices=node,
        bytes_per_second=share,
        latency_seconds=LATENCY_SECONDS,
        efficiency=EFFICIENCY["pcie"],
    )
    levels = [*inner, between]
    if group.nodes > 1:
        network = group.chip.nic_bytes_per_second
        if network is None:
            return None
        levels.append(network_level(group, network.value, NETWORK_LATENCY_SECONDS, NETWORK_HOP_SECONDS))
    return Topology(levels=tuple(levels))


CONTEXT_BYTES = 1.0 * 2**30
"""Estimated memory of the context and CNCL buffers: Megatron-LM's notes say 1 to 3 GiB; not measured on an MLU.

An idle device shows 0 MiB in use (cnmon 5.10.13, MLU370-X8), so the driver reserves nothing.
"""

MEMORY = usual_memory(context_bytes=CONTEXT_BYTES)


class CambriconPlugin(VendorPlugin):
    """The plugin's hooks, with the topology of an MLU370-X8 node."""

    @hookimpl
    def flagcore_topology(self, group: NodeGroup) -> Topology | None:
        return x8_topology(group, tool_output("cnmon", "topo", "-m")) if group.chip.name == "MLU370-X8" else None


plugin: VendorPlugin = CambriconPlugin(
    package="flagcore_cambricon", vendor="cambricon", detector=DETECTOR, memory=MEMORY
)
