"""The plugin for NVIDIA GPUs."""

from __future__ import annotations

from flagcore.vendorkit.plugin import VendorPlugin
from flagcore_nvidia.discover import DETECTOR
from flagcore_nvidia.memory import memory_of

plugin: VendorPlugin = VendorPlugin(package="flagcore_nvidia", vendor="nvidia", detector=DETECTOR, memory=memory_of)
