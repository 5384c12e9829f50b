"""The plugin for Enflame GCUs, with the memory that a rank takes in addition to its tensors."""

from flagcore_vendorkit.plugin import VendorPlugin, usual_memory

from flagcore_enflame.discover import DETECTOR

DRIVER_BYTES = 1129 * 2**20
"""Memory of an S60 that `efsmi -q` shows as reserved, in addition to the memory in use: 1129 MiB."""

CONTEXT_BYTES = 1.0 * 2**30
"""Estimated memory of the context and ECCL buffers: Megatron-LM's notes say 1 to 3 GiB; not measured here."""

MEMORY = usual_memory(context_bytes=DRIVER_BYTES + CONTEXT_BYTES)

plugin: VendorPlugin = VendorPlugin(package="flagcore_enflame", vendor="enflame", detector=DETECTOR, memory=MEMORY)
