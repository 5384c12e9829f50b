"""The plugin for Cambricon MLUs, with the memory that a rank takes in addition to its tensors."""

from flagcore_vendorkit.machine import tool_output
from flagcore_vendorkit.plugin import VendorPlugin, usual_memory

from flagcore.domain.cluster import NodeGroup, Topology
from flagcore.hooks import hookimpl
from flagcore_cambricon.bridges import x8_topology
from flagcore_cambricon.discover import DETECTOR

CONTEXT_BYTES = 1.0 * 2**30
"""Estimated memory of the context and CNCL buffers. Megatron-LM's notes say 1 to 3 GiB on accelerators; not measured on
an MLU.

An idle device shows 0 MiB in use (cnmon 5.10.13, MLU370-X8), so the driver reserves nothing.
"""

SLACK = 0.02
"""Estimated: torch_mlu's allocator is derived from torch's, which reserves 0.05% to 3% more than it allocates on other
chips."""

MEMORY = usual_memory(fragmentation=SLACK, context_bytes=CONTEXT_BYTES)


class CambriconPlugin(VendorPlugin):
    """The plugin's hooks, with the topology of an MLU370-X8 node."""

    @hookimpl
    def flagcore_topology(self, group: NodeGroup) -> Topology | None:
        return x8_topology(group, tool_output("cnmon", "topo", "-m")) if group.chip.name == "MLU370-X8" else None


plugin: VendorPlugin = CambriconPlugin(
    package="flagcore_cambricon", vendor="cambricon", detector=DETECTOR, memory=MEMORY
)
