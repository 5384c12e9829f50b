"""Memory of a rank on a CPU. Without a caching allocator, reserved memory equals allocated memory."""

from __future__ import annotations

from dataclasses import dataclass

from flagcore.domain.cluster import NodeGroup
from flagcore.domain.space import FloatArray

CONTEXT_BYTES = 305 * 2**20
"""A rank before its first tensor: Python, torch 2.13 and megatron-core 0.16.1 took 305 MiB of resident memory.

Measured (ru_maxrss of one process, the constant of a fit over 10 layouts, AMD EPYC, 2 cores).
"""


SERVER_BYTES = {"llamacpp": 40 * 2**20}
"""The same for engines without torch: peak resident memory of the xllamacpp wheel's server minus the buffers in its
log, 39 and 40 MiB (4 settings of a model of 50 million parameters; 22 and 30 with partly filled buffers)."""


@dataclass(frozen=True, slots=True)
class CpuMemory:
    """`flagcore.contracts.MemoryModel` of one core's share of the memory. `context` is the memory of a process at its
    start."""

    capacity: float | None
    context: float = CONTEXT_BYTES

    def capacity_bytes(self) -> float | None:
        """Return the share, in bytes."""
        return self.capacity

    def workspace_bytes(self) -> float:
        """Return 0: the library's workspace is part of the memory of a rank before its first tensor."""
        return 0.0

    def reserved_bytes(self, allocated: FloatArray) -> FloatArray:
        """Return `allocated`."""
        return allocated

    def device_used_bytes(self, reserved: FloatArray) -> FloatArray:
        """Return the resident memory of the rank's process."""
        return reserved + self.context


def memory_of(group: NodeGroup, engine: str) -> CpuMemory:
    """Return the memory model of one device of `group`: its share of the machine's memory."""
    total = group.chip.memory_bytes
    # less than a core's share if more ranks than cores share the machine
    share = total.value * min(1.0, group.chip.devices_per_node / group.devices_per_node) if total else None
    return CpuMemory(group.memory_bytes or share, SERVER_BYTES.get(engine, CONTEXT_BYTES))
