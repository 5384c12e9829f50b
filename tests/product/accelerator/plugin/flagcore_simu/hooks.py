"""The plugin for Simu devices."""

from flagcore_simu.discover import DETECTOR
from flagcore_vendorkit.plugin import VendorPlugin

from flagcore.domain.cluster import NodeGroup
from flagcore.physics.roofline import PlainMemory

CONTEXT_BYTES = 64 * 2**20
"""64 MiB, which simu-smi shows in use before a process's first tensor."""


def memory_of(group: NodeGroup, engine: str) -> PlainMemory:
    """Return the memory model of torch_simu's allocator, which reserves steps of 2 MiB."""
    return PlainMemory.of(group, fragmentation=0.0, context_bytes=CONTEXT_BYTES)


plugin = VendorPlugin(package="flagcore_simu", vendor="simu", detector=DETECTOR, memory=memory_of)
