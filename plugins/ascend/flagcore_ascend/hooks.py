"""The plugin for Ascend NPUs, with the memory that a rank takes in addition to its tensors."""

from flagcore_vendorkit.plugin import VendorPlugin, usual_memory

from flagcore.contracts import MemoryModel
from flagcore.domain.cluster import NodeGroup
from flagcore_ascend.discover import DETECTOR

DRIVER_BYTES = 3460 * 2**20
"""Memory in use on an idle device with 64 GiB: npu-smi 24.1 to 26.0 shows 2.8 to 3.4 GiB on 910B1 to 910C
(vllm-project/vllm-ascend issues 2534, 6245, 10504 and 12980). Chips with `usable_bytes` have that much less."""

CONTEXT_BYTES = 0.5 * 2**30
"""Estimated memory of a process's context, 0.5 GiB, without HCCL's buffers. Not measured on an NPU."""

COMMUNICATOR_BYTES = 2 * 200 * 2**20
"""Each communicator allocates 400 MiB: twice HCCL_BUFFSIZE (default: 200 MB), for data that is sent and for data that
is received (CANN 9.0, reference of environment variables, envref_07_0080)."""


def memory(group: NodeGroup, engine: str) -> MemoryModel:
    """Return the memory model of a device of `group`. The driver's memory is in use, unless the capacity lacks it."""
    usable = group.chip.usable_bytes
    driver = 0 if usable and (group.memory_bytes or 0) <= usable.value else DRIVER_BYTES
    figures = {"context_bytes": driver + CONTEXT_BYTES, "communicator": COMMUNICATOR_BYTES}
    return usual_memory(**figures)(group, engine)


plugin: VendorPlugin = VendorPlugin(package="flagcore_ascend", vendor="ascend", detector=DETECTOR, memory=memory)
