"""What a rank takes on an NVIDIA GPU beyond its tensors."""

from __future__ import annotations

from flagcore.domain.cluster import NodeGroup
from flagcore.physics.memory import PlainMemory

SLACK = 0.0075
"""Reserved over allocated, minus one: median of 25 megatron-core jobs on an H200 (0.05% to 3%, once 12%)."""

CONTEXT_BYTES = 0.82 * 2**30
"""Used by the driver's count minus reserved: median of the same 25 jobs (0.75 to 0.82 GiB), torch 2.11, CUDA 13."""

COLLECTIVE_BYTES = 392e6
"""NCCL's buffers at 4 and 8 ranks, 342 MB at 2: ai-dynamo/aiconfigurator systems/*.yaml @095f58a5."""


def memory_of(group: NodeGroup) -> PlainMemory:
    """Return the memory model of one device of `group`."""
    collective = COLLECTIVE_BYTES if group.devices > 1 else 0
    return PlainMemory.of(group, fragmentation=SLACK, context_bytes=CONTEXT_BYTES + collective)
