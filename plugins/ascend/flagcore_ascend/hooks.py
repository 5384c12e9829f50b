"""The plugin for Ascend NPUs."""

from __future__ import annotations

from flagcore.vendorkit.plugin import VendorPlugin
from flagcore_ascend.discover import DETECTOR
from flagcore_ascend.memory import memory_of

plugin: VendorPlugin = VendorPlugin(package="flagcore_ascend", vendor="ascend", detector=DETECTOR, memory=memory_of)
