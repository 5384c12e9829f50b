"""The plugin for CPUs. Without a caching allocator, the reserved memory of a rank equals its allocated memory."""

from collections.abc import Mapping, Sequence

from flagcore_vendorkit.chip_file import kernel_costs, load_chips
from flagcore_vendorkit.plugin import VendorPlugin

from flagcore.contracts import KernelCosts, Telemetry
from flagcore.domain.chip import Chip, Device
from flagcore.domain.cluster import NodeGroup
from flagcore.hooks import hookimpl
from flagcore.physics.roofline import PlainMemory, Roofline
from flagcore_cpu import rates
from flagcore_cpu.machine import Processor, devices, this_machine

CONTEXT_BYTES = 305 * 2**20
"""Memory of a rank before its first tensor: 305 MiB resident with Python, torch 2.13 and megatron-core 0.16.1.

Measured (ru_maxrss of one process, the constant of a fit over 10 layouts, AMD EPYC, 2 cores).
"""


SERVER_BYTES = {"llamacpp": 40 * 2**20}
"""The same for engines without torch: peak resident memory of the xllamacpp wheel's server minus the buffers in its
log. It was 39 and 40 MiB (4 settings of a model of 50 million parameters; 22 and 30 with partly filled buffers)."""


def memory_of(group: NodeGroup, engine: str) -> PlainMemory:
    """Return the memory model of one device of `group`: its share of the machine's memory.

    There is no caching allocator. The context is the memory of a process at its start, with the library's workspace.
    """
    total = group.chip.memory_bytes
    # smaller than a core's share of the memory if more ranks than cores share the machine
    share = total.value * min(1.0, group.chip.devices_per_node / group.devices_per_node) if total else None
    context_bytes = SERVER_BYTES.get(engine, CONTEXT_BYTES)
    return PlainMemory(capacity=group.memory_bytes or share, context_bytes=context_bytes, fragmentation=0.0)


class CpuPlugin(VendorPlugin):
    """The plugin's hooks, which describe the processor of this machine."""

    @hookimpl
    def flagcore_chips(self, name: str) -> Sequence[Chip]:
        return self._chips(name)

    @hookimpl
    def flagcore_measured_chip(self, chip: Chip) -> Chip | None:
        return self._chips(measure=True)[0] if self.owns(chip) else None

    def _chips(self, name: str = "", *, measure: bool = False) -> list[Chip]:
        if not (chips := load_chips(self.package, name)):
            return []
        processor = Processor.read()
        return [this_machine(chip, processor, _rates(processor, measure=measure)) for chip in chips]

    @hookimpl
    def flagcore_devices(self, environment: Mapping[str, str]) -> Sequence[Device]:
        return devices()

    @hookimpl
    def flagcore_kernel_costs(  # type: ignore[override]  # hooks are called with the arguments that they name
        self, chip: Chip, engine: str, kind: str
    ) -> KernelCosts | None:
        costs = kernel_costs(self.package, chip) if self.owns(chip) else None
        if not isinstance(costs, Roofline):
            return costs
        from flagcore_cpu.costs import MeasuredCosts, ServerCosts  # plans for other chips need none

        if engine in SERVER_BYTES:
            return ServerCosts.of(chip, costs.curve, Processor.read())
        here = _rates(Processor.read(), measure=False)
        return MeasuredCosts.of(chip, costs.curve, here) if here else costs

    @hookimpl
    def flagcore_telemetry(self, device: Device) -> Telemetry | None:
        if not any(chip.has_name(device.chip) for chip in self.flagcore_chips("")):
            return None
        from flagcore_cpu.load import MachineReading  # plans for other chips need none

        return MachineReading()


def _rates(processor: Processor | None, *, measure: bool) -> rates.Rates | None:
    return rates.rates_here(processor.identity if processor else "", measure=measure)


plugin: VendorPlugin = CpuPlugin(package="flagcore_cpu", vendor="cpu", memory=memory_of)
