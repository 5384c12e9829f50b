"""The C500 node: two islands of four devices behind MetaXLink bridges, and PCIe between them."""

from flagcore_vendorkit.rows import group_size

from flagcore.domain.cluster import Level, NodeGroup, Topology
from flagcore.physics.collective_costs import network_level

ISLAND = 4
"""Devices of an island, if this machine is not a C500 node that shows it. The vendor's bridge joins two or four cards,
and `mx-smi topo -m` shows MX within an island and NODE or SYS between islands. Every published matrix has islands of
four."""

BUS_BYTES_PER_SECOND = 65.1e9
LATENCY_SECONDS = 10e-6
"""All-reduce over all eight devices: the bus bandwidth at 1 GiB, and the remaining part of the start-up, which is 14.6
us for two devices. MCCL 2.32 on C500, published in wangzheng422/docker_env 2025.12.metax.mccl.perf.debug.md 3.1. The
rate of one island is unpublished; it is at least this."""

BETWEEN_NODES_SECONDS = 34e-6
"""Additional start-up of an all-reduce over two nodes: 48.7 minus 14.6 us (same source, section 5.3)."""


def island_size(group: NodeGroup, topo: str | None) -> int:
    """Return the number of devices of a C500 node that a bridge joins. It is read from `topo`, the output of `mx-smi
    topo -m`, or else 4. ht-smi calls the link HT."""
    return group_size(group, topo, "MX|HT", ISLAND)


def c500_topology(group: NodeGroup, island: int = ISLAND, adapters: float | None = None) -> Topology | None:
    """Return the levels island, node and, for several nodes, network. Returns None if the rate of the network is
    unknown.

    `adapters` is each device's share of the rate of this machine's adapters. It overrides published values of other
    machines, but not the user's value. Rates within a node were measured with collectives, so no efficiency is applied
    to them. The devices of an island share the link to the other island.
    """
    node, bus, latency = group.devices_per_node, BUS_BYTES_PER_SECOND, LATENCY_SECONDS
    inner = min(island, node)
    levels = [Level(name="island", devices=inner, bytes_per_second=bus, latency_seconds=latency, efficiency=1.0)]
    if node > island:
        levels.append(
            Level(name="node", devices=node, bytes_per_second=bus / ISLAND, latency_seconds=latency, efficiency=1.0)
        )
    if group.nodes > 1:
        known = group.chip.nic_bytes_per_second
        published = known.value if known else None
        network = published if known and known.source.kind == "user" else adapters or published
        if network is None:
            return None
        levels.append(network_level(group, network, BETWEEN_NODES_SECONDS))
    return Topology(levels=tuple(levels))
