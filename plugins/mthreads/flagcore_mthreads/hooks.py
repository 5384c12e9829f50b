"""The plugin for Moore Threads GPUs."""

from __future__ import annotations

from flagcore.vendorkit.plugin import VendorPlugin
from flagcore_mthreads.discover import DETECTOR
from flagcore_mthreads.memory import memory_of

plugin: VendorPlugin = VendorPlugin(package="flagcore_mthreads", vendor="mthreads", detector=DETECTOR, memory=memory_of)
