"""The plugin for Moore Threads GPUs, with the memory that a rank takes in addition to its tensors."""

from flagcore_vendorkit.plugin import VendorPlugin, usual_memory

from flagcore_mthreads.discover import DETECTOR

DRIVER_BYTES = 86 * 2**20
"""Memory that mthreads-gmi includes in the total and the runtime does not, 86 MiB: the runtime of an S5000 sees
85813358592 bytes of 81920 MiB (aosudh.github.io, 2026-07-13). An idle device shows 0 to 10 MiB in use."""

CONTEXT_BYTES = 1.0 * 2**30
"""Estimated memory of the MUSA context and MCCL buffers: Megatron-LM's notes say 1 to 3 GiB; not measured here."""

MEMORY = usual_memory(context_bytes=DRIVER_BYTES + CONTEXT_BYTES)

plugin: VendorPlugin = VendorPlugin(package="flagcore_mthreads", vendor="mthreads", detector=DETECTOR, memory=MEMORY)
