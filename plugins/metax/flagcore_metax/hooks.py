"""The plugin for MetaX GPUs, with the memory that a rank takes in addition to its tensors."""

from collections.abc import Sequence
from dataclasses import replace

from flagcore_vendorkit.plugin import VendorPlugin, usual_memory

from flagcore.domain.chip import Chip
from flagcore.domain.cluster import NodeGroup, Topology
from flagcore.domain.engine import TaskAdvice
from flagcore.domain.spec import Task
from flagcore.hooks import hookimpl
from flagcore_metax.discover import DETECTOR, adapters, peer_memory_problem, topology
from flagcore_metax.islands import c500_topology, island_size

DRIVER_BYTES = 826 * 2**20
"""Memory in use on an idle device: mx-smi on C500 (drivers 3.4.4 and 3.8.30) shows 826 MiB, on C550 (driver 2.5.014)
810 MiB, on N260 (driver 3.0.11) 666 MiB."""

CONTEXT_BYTES = 1.0 * 2**30
"""Estimated memory of the context and MCCL buffers. Megatron-LM's notes say 1 to 3 GiB on accelerators; not measured on
MetaX."""

SLACK = 0.02
"""Estimated: MACA's torch uses torch's caching allocator, which reserves 0.05% to 3% more than it allocates on other
chips."""

MEMORY = usual_memory(fragmentation=SLACK, context_bytes=DRIVER_BYTES + CONTEXT_BYTES)


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
