"""The plugin for Kunlunxin XPUs."""

from __future__ import annotations

from flagcore.vendorkit.plugin import VendorPlugin
from flagcore_kunlunxin.discover import DETECTOR
from flagcore_kunlunxin.memory import memory_of

plugin: VendorPlugin = VendorPlugin(
    package="flagcore_kunlunxin", vendor="kunlunxin", detector=DETECTOR, memory=memory_of
)
