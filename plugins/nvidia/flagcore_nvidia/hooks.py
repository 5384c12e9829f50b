"""The plugin for NVIDIA GPUs, with the memory that a rank takes in addition to its tensors."""

from flagcore.domain.cluster import NodeGroup
from flagcore.physics.roofline import PlainMemory
from flagcore.vendorkit.plugin import VendorPlugin
from flagcore_nvidia.discover import DETECTOR

SLACK = 0.0075
"""Reserved memory divided by allocated memory, minus one: median of 25 megatron-core jobs on an H200 (0.05% to 3%, once
12%)."""

CONTEXT_BYTES = 0.82 * 2**30
"""Memory in use as reported by the driver, minus reserved memory: median of the same 25 jobs (0.75 to 0.82 GiB), torch
2.11, CUDA 13."""

PAIR_BYTES, COLLECTIVE_BYTES = 342 * 2**20, 392 * 2**20
"""NCCL's buffers, 342 MiB with 2 ranks, and 392 MiB with 4 and 8 ranks: ai-dynamo/aiconfigurator systems/*.yaml of
aiconfigurator-core 0.12.0 (PyPI), which calls them observed corrections."""

WORKSPACE_BYTES, SMALL_WORKSPACE_BYTES = 32 * 2**20, 2 * 2**22 + 8 * 2**14
"""What torch allocates for cuBLAS per handle and stream: 32 MiB on Hopper and Blackwell (compute capability 9 to 12),
8.1 MiB on other chips (`parseChosenWorkspaceSize` of pytorch aten/src/ATen/cuda/CublasHandlePool.cpp)."""

SMALL_WORKSPACE = ("A", "L", "T4", "V100", "RTX-3", "RTX-4")
"""Prefixes of the names of chips that are neither Hopper nor Blackwell."""


def memory_of(group: NodeGroup, engine: str) -> PlainMemory:
    """Return the memory model of one device of `group`."""
    collective = COLLECTIVE_BYTES if group.devices > 2 else PAIR_BYTES if group.devices > 1 else 0
    small = group.chip.name.upper().startswith(SMALL_WORKSPACE)
    workspace = SMALL_WORKSPACE_BYTES if small else WORKSPACE_BYTES
    return PlainMemory.of(group, fragmentation=SLACK, context_bytes=CONTEXT_BYTES + collective, workspace=workspace)


plugin: VendorPlugin = VendorPlugin(package="flagcore_nvidia", vendor="nvidia", detector=DETECTOR, memory=memory_of)
