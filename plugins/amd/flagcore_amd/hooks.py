"""The plugin for AMD GPUs, with the memory that a rank takes in addition to its tensors."""

from flagcore_vendorkit.plugin import VendorPlugin, usual_memory

from flagcore_amd.discover import DETECTOR

DRIVER_BYTES = 284 * 2**20
"""284 MiB are in use on an idle MI300X and MI308X (gpustack/runtime, samples of its detector @88026d62)."""

CONTEXT_BYTES = 1.5 * 2**30
"""Estimated memory of the HIP context and RCCL buffers: Megatron-LM's notes say 1 to 3 GiB; not measured here."""

MEMORY = usual_memory(context_bytes=DRIVER_BYTES + CONTEXT_BYTES)

plugin: VendorPlugin = VendorPlugin(package="flagcore_amd", vendor="amd", detector=DETECTOR, memory=MEMORY)
