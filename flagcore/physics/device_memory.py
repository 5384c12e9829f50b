"""Memory of a device beyond its tensors: allocator, context, libraries."""

from __future__ import annotations

from dataclasses import dataclass

from flagcore.domain.cluster import NodeGroup
from flagcore.domain.space import FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainMemory:
    """A device with a caching allocator. Implements `MemoryModel`; for plugins, and for chips without one.

    `capacity` is the budget of one device in bytes (None: unknown), `context_bytes` the memory in use before the first
    tensor, `fragmentation` the share that the allocator reserves beyond tensors, `workspace` a workspace of the matrix
    library. Defaults: rounded medians of 25 training ranks on one accelerator with torch's caching allocator, plus
    0.4 GB for the buffers of collectives.
    """

    capacity: float | None
    context_bytes: float = 1.2e9
    fragmentation: float = 0.01
    workspace: float = 0.0

    @classmethod
    def of(
        cls, group: NodeGroup, *, context_bytes: float = 1.2e9, fragmentation: float = 0.01, workspace: float = 0.0
    ) -> PlainMemory:
        """Return the model of a group, whose budget is the group's or the chip's."""
        known = group.chip.memory_bytes
        capacity = group.memory_bytes or (known.value if known else None)
        return cls(capacity=capacity, context_bytes=context_bytes, fragmentation=fragmentation, workspace=workspace)

    def capacity_bytes(self) -> float | None:
        return self.capacity

    def workspace_bytes(self) -> float:
        return self.workspace

    def reserved_bytes(self, allocated: FloatArray) -> FloatArray:
        return allocated * (1.0 + self.fragmentation)

    def device_used_bytes(self, reserved: FloatArray) -> FloatArray:
        return reserved + self.context_bytes
