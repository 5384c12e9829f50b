"""Memory of a rank on a MetaX GPU in addition to its tensors."""

from __future__ import annotations

from flagcore.domain.cluster import NodeGroup
from flagcore.physics.device_memory import PlainMemory

DRIVER_BYTES = 826 * 2**20
"""In use on an idle device: mx-smi on C500 (drivers 3.4.4 and 3.8.30) shows 826 MiB, on C550 (driver
2.5.014) 810 MiB, on N260 (driver 3.0.11) 666 MiB."""

CONTEXT_BYTES = 1.0 * 2**30
"""Estimated: context and MCCL buffers. Megatron-LM's notes say 1 to 3 GiB on accelerators; not measured on MetaX."""

SLACK = 0.02
"""Estimated: MACA's torch has torch's caching allocator, which adds 0.05% to 3% on other chips."""


def memory_of(group: NodeGroup, engine: str) -> PlainMemory:
    """Return the memory model of one device of `group`."""
    return PlainMemory.of(group, fragmentation=SLACK, context_bytes=DRIVER_BYTES + CONTEXT_BYTES)
