"""The plugin for Kunlunxin XPUs, with the memory that a rank takes in addition to its tensors."""

from flagcore_vendorkit.plugin import VendorPlugin, usual_memory

from flagcore_kunlunxin.discover import DETECTOR

DRIVER_BYTES = 100 * 2**20
"""100 MiB are in use on an idle P800 in a container (PaddlePaddle's guide). Other sources show 0 to 4 MiB."""

CONTEXT_BYTES = 1.5 * 2**30
"""Estimated memory of the context and BKCL buffers: Megatron-LM's notes say 1 to 3 GiB; not measured here."""

MEMORY = usual_memory(context_bytes=DRIVER_BYTES + CONTEXT_BYTES)

plugin: VendorPlugin = VendorPlugin(package="flagcore_kunlunxin", vendor="kunlunxin", detector=DETECTOR, memory=MEMORY)
