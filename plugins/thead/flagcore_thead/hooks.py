"""The plugin for T-Head PPUs, with the memory that a rank takes in addition to its tensors."""

from flagcore_vendorkit.plugin import VendorPlugin, usual_memory

from flagcore_thead.discover import DETECTOR

DRIVER_BYTES = 9 * 2**20
"""Memory in use on an idle PPU-ZW810E: ppu-smi 1.17 to 1.28 shows 1 to 9 MiB."""

CONTEXT_BYTES = 1.0 * 2**30
"""Estimated memory of the context and PCCL buffers: Megatron-LM's notes say 1 to 3 GiB; not measured here."""

MEMORY = usual_memory(context_bytes=DRIVER_BYTES + CONTEXT_BYTES)

plugin: VendorPlugin = VendorPlugin(package="flagcore_thead", vendor="thead", detector=DETECTOR, memory=MEMORY)
