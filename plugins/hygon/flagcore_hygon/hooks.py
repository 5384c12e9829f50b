"""The plugin for Hygon DCUs, with the memory that a rank takes in addition to its tensors."""

from flagcore_vendorkit.plugin import VendorPlugin, usual_memory

from flagcore_hygon.discover import DETECTOR

DRIVER_BYTES = 2 * 2**20
"""2 MiB are in use on an idle K100_AI and BW1000 (gpustack/runtime, samples of its detector @88026d62; public logs of
hy-smi)."""

CONTEXT_BYTES = 1.5 * 2**30
"""Estimated memory of the HIP context and RCCL buffers: Megatron-LM's notes say 1 to 3 GiB; not measured here."""

MEMORY = usual_memory(context_bytes=DRIVER_BYTES + CONTEXT_BYTES)

plugin: VendorPlugin = VendorPlugin(package="flagcore_hygon", vendor="hygon", detector=DETECTOR, memory=MEMORY)
