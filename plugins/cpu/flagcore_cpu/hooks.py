"""The plugin for CPUs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import psutil

from flagcore.contracts import Telemetry
from flagcore.domain.chip import Chip, Device
from flagcore.domain.devices import DeviceUse
from flagcore.hooks import hookimpl
from flagcore.vendorkit.chip_file import load_chips
from flagcore.vendorkit.plugin import VendorPlugin
from flagcore_cpu import discover
from flagcore_cpu.machine import Processor, this_machine
from flagcore_cpu.memory import memory_of


class CpuPlugin(VendorPlugin):
    """Describes the processor of this machine."""

    @hookimpl
    def flagcore_chips(self) -> Sequence[Chip]:
        return [this_machine(chip, Processor.read()) for chip in load_chips(self.package)]

    @hookimpl
    def flagcore_devices(self) -> Sequence[Device]:
        return discover.devices()

    @hookimpl
    def flagcore_telemetry(self, device: Device) -> Telemetry | None:
        known = any(chip.has_name(device.chip) for chip in self.flagcore_chips())
        return MachineReading() if known else None


class MachineReading:
    """`flagcore.contracts.Telemetry` of the machine."""

    def sample(self) -> Mapping[str, float]:
        """Return the memory in use on the machine in bytes, and the load average of the last minute."""
        return {"memory_used_bytes": psutil.virtual_memory().used, "load_average": os.getloadavg()[0]}

    def use(self) -> DeviceUse:
        """Return the memory available to new processes."""
        return DeviceUse(free_bytes=psutil.virtual_memory().available)


plugin: VendorPlugin = CpuPlugin(package="flagcore_cpu", vendor="cpu", memory=memory_of)
