"""The plugin for Hygon DCUs."""

from __future__ import annotations

from flagcore.vendorkit.plugin import VendorPlugin
from flagcore_hygon.discover import DETECTOR
from flagcore_hygon.memory import memory_of

plugin: VendorPlugin = VendorPlugin(package="flagcore_hygon", vendor="hygon", detector=DETECTOR, memory=memory_of)
