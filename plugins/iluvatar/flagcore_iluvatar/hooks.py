"""The plugin for Iluvatar GPUs."""

from __future__ import annotations

from flagcore.vendorkit.plugin import VendorPlugin
from flagcore_iluvatar.discover import DETECTOR
from flagcore_iluvatar.memory import memory_of

plugin: VendorPlugin = VendorPlugin(package="flagcore_iluvatar", vendor="iluvatar", detector=DETECTOR, memory=memory_of)
