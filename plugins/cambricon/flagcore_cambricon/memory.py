"""Memory of a rank on an MLU in addition to its tensors."""

from __future__ import annotations

from flagcore.domain.cluster import NodeGroup
from flagcore.physics.device_memory import PlainMemory

CONTEXT_BYTES = 1.0 * 2**30
"""Estimated: context and CNCL buffers. Megatron-LM's notes say 1 to 3 GiB on accelerators; not measured on an MLU.

An idle device shows 0 MiB in use (cnmon 5.10.13, MLU370-X8), so the driver reserves nothing.
"""

SLACK = 0.02
"""Estimated: torch_mlu's allocator is derived from torch's, which adds 0.05% to 3% on other chips."""


def memory_of(group: NodeGroup, engine: str) -> PlainMemory:
    """Return the memory model of one device of `group`."""
    return PlainMemory.of(group, fragmentation=SLACK, context_bytes=CONTEXT_BYTES)
