"""The memory model of a device with a caching allocator. For plugins, which know its three figures."""

from __future__ import annotations

from dataclasses import dataclass

from flagcore.domain.cluster import NodeGroup
from flagcore.domain.space import FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class CachingAllocator:
    """`flagcore.contracts.MemoryModel`: reserved = allocated x (1 + slack), used = reserved + fixed bytes.

    `capacity` is the budget of one device in bytes (None: nobody knows), `slack` what fragmentation adds as a
    fraction, `fixed_bytes` what the driver, the context, the libraries and the collective buffers take.
    """

    capacity: float | None
    slack: float
    fixed_bytes: float

    @classmethod
    def of(cls, group: NodeGroup, *, slack: float, fixed_bytes: float) -> CachingAllocator:
        """Take the budget from the group, or else from what the chip is known to have."""
        known = group.chip.memory_bytes
        capacity = group.memory_bytes or (known.value if known else None)
        return cls(capacity=capacity, slack=slack, fixed_bytes=fixed_bytes)

    def capacity_bytes(self) -> float | None:
        """Return the budget."""
        return self.capacity

    def reserved_bytes(self, allocated: FloatArray) -> FloatArray:
        """Return `allocated` and the fragments between."""
        return allocated * (1 + self.slack)

    def device_used_bytes(self, reserved: FloatArray) -> FloatArray:
        """Return `reserved` and what is not the allocator's."""
        return reserved + self.fixed_bytes
