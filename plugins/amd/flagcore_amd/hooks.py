"""The plugin for AMD GPUs."""

from __future__ import annotations

from flagcore.vendorkit.plugin import VendorPlugin
from flagcore_amd.discover import DETECTOR
from flagcore_amd.memory import memory_of

plugin: VendorPlugin = VendorPlugin(package="flagcore_amd", vendor="amd", detector=DETECTOR, memory=memory_of)
