"""The memory of a device beyond its tensors: allocator, context and libraries."""

from __future__ import annotations

from dataclasses import dataclass

from flagcore.domain.cluster import NodeGroup
from flagcore.domain.space import FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainMemory:
    """The memory model of a device with a caching allocator. Implements `MemoryModel`.

    `capacity` is the budget of one device in bytes (None: unknown), `context_bytes` the memory in use before the first
    tensor, `fragmentation` the memory that the allocator reserves beyond tensors, as a share of the tensors, and
    `workspace` the bytes of a workspace of the matrix library. The defaults are rounded medians of 25 training ranks on
    one accelerator with torch's caching allocator, plus 0.4 GB for the buffers of collectives. `communicator` is the
    size of the buffers of each communicator, if they are not part of `context_bytes`.
    """

    capacity: float | None
    context_bytes: float = 1.2e9
    fragmentation: float = 0.01
    workspace: float = 0.0
    communicator: float = 0.0

    @classmethod
    def of(cls, group: NodeGroup, **figures: float) -> PlainMemory:
        """Return the memory model of a group, with the memory budget of the group or else of the chip."""
        fact = group.chip.memory_bytes
        capacity = group.memory_bytes or (fact.value if fact else None)
        return cls(capacity=capacity, **figures)

    def capacity_bytes(self) -> float | None:
        return self.capacity

    def workspace_bytes(self) -> float:
        return self.workspace

    def reserved_bytes(self, allocated: FloatArray) -> FloatArray:
        return allocated * (1.0 + self.fragmentation)

    def device_used_bytes(self, reserved: FloatArray) -> FloatArray:
        return reserved + self.context_bytes

    def communicator_bytes(self) -> float:
        return self.communicator
