"""The plugin for MetaX GPUs, with the memory that a rank takes in addition to its tensors.

The C500 node has two islands of four devices behind MetaXLink bridges, and PCIe between them.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from flagcore_vendorkit.plugin import VendorPlugin, usual_memory
from flagcore_vendorkit.rows import group_size

from flagcore.domain.chip import Chip
from flagcore.domain.cluster import Level, NodeGroup, Topology
from flagcore.domain.engine import TaskAdvice
from flagcore.domain.spec import Task
from flagcore.hooks import hookimpl
from flagcore.physics.collective_costs import network_level
from flagcore_metax.discover import DETECTOR, DEVICE_FILE, adapters, topology

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


DRIVER_BYTES = 826 * 2**20
"""Memory in use on an idle device: mx-smi on C500 (drivers 3.4.4 and 3.8.30) shows 826 MiB, on C550 (driver 2.5.014)
810 MiB, on N260 (driver 3.0.11) 666 MiB."""

CONTEXT_BYTES = 1.0 * 2**30
"""Estimated memory of the context and MCCL buffers: Megatron-LM's notes say 1 to 3 GiB; not measured on MetaX."""

MEMORY = usual_memory(context_bytes=DRIVER_BYTES + CONTEXT_BYTES)


PEER_MEMORY = "sys/kernel/mm/memory_peers/mxcd/version"
"""A file that exists if GPUDirect RDMA works. It is missing if the kernel does not export mm_kobj (RHEL 9.6, for
example). An all-reduce over two C500 nodes then fell from 73 to 8 GB/s: wangzheng422/docker_env
redhat/notes/2025/2025.12.metax.mccl.perf.debug.md."""


def peer_memory_problem(root: Path = Path("/")) -> str:
    """Return why network adapters cannot access the devices' memory. It is empty if they can, or if there are no
    devices."""
    if (root / PEER_MEMORY).exists() or not (root / DEVICE_FILE).exists():
        return ""
    return f"/{PEER_MEMORY} is missing: GPUDirect RDMA of MetaX is off, so nodes exchange data slowly"


class MetaxPlugin(VendorPlugin):
    """The plugin's hooks, with the topology of a C500 node and a check of GPUDirect RDMA."""

    @hookimpl
    def flagcore_health(self, chip: Chip) -> Sequence[str] | None:
        found, problem = super().flagcore_health(chip), peer_memory_problem()
        return found if found is None or not problem else (*found, problem)

    @hookimpl
    def flagcore_topology(self, group: NodeGroup) -> Topology | None:
        if group.chip.name != "C500":
            return super().flagcore_topology(group)
        return c500_topology(group, island_size(group, topology()), adapters() if group.nodes > 1 else None)

    @hookimpl
    def flagcore_check_task(self, task: Task, engine_version: str | None) -> TaskAdvice | None:
        advice, groups = super().flagcore_check_task(task, engine_version), task.cluster.groups
        has_network = any(self.owns(group.chip) for group in groups) and sum(group.nodes for group in groups) > 1
        problem = peer_memory_problem() if has_network else ""
        if not problem:
            return advice
        advice = advice or TaskAdvice()
        return replace(advice, notes=(*advice.notes, problem))


plugin: VendorPlugin = MetaxPlugin(package="flagcore_metax", vendor="metax", detector=DETECTOR, memory=MEMORY)
