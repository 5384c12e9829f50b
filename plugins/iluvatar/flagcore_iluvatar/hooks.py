"""The plugin for Iluvatar GPUs, with the memory that a rank takes in addition to its tensors."""

from flagcore_vendorkit.plugin import VendorPlugin, usual_memory

from flagcore_iluvatar.discover import DETECTOR

DRIVER_BYTES = 257 * 2**20
"""Memory in use on an idle device: ixsmi shows 64 to 116 MiB on BI-V150 and MR-V100, 257 MiB on BI-V100 (driver 3.1.0;
513 MiB with 3.0.1)."""

CONTEXT_BYTES = 1.0 * 2**30
"""Estimated memory of the context and IXCCL buffers: Megatron-LM's notes say 1 to 3 GiB; not measured here."""

MEMORY = usual_memory(context_bytes=DRIVER_BYTES + CONTEXT_BYTES)

plugin: VendorPlugin = VendorPlugin(package="flagcore_iluvatar", vendor="iluvatar", detector=DETECTOR, memory=MEMORY)
