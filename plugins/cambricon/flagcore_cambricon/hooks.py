"""The hooks of the Cambricon plugin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flagcore.contracts import KernelCosts, MemoryModel, Telemetry
from flagcore.domain.chip import Chip, Device, Support
from flagcore.domain.cluster import NodeGroup, Topology
from flagcore.domain.engine import EngineSupport
from flagcore.domain.launch import FailurePattern
from flagcore.domain.maturity import Maturity
from flagcore.domain.spec import Task
from flagcore.hooks import hookimpl
from flagcore.vendorkit.chip_file import load_chips
from flagcore.vendorkit.cost_file import kernel_costs
from flagcore.vendorkit.maturity import maturity
from flagcore.vendorkit.quirks import failure_patterns, forced, notes, reason, refused
from flagcore.vendorkit.telemetry import DeviceReading, SharedTable
from flagcore.vendorkit.variables import environment
from flagcore_cambricon import discover
from flagcore_cambricon.bridges import x8_topology
from flagcore_cambricon.memory import memory_of

SERVING = ("vllm", "sglang", "llamacpp")
TABLE = SharedTable(discover.now)


@hookimpl
def flagcore_chips() -> Sequence[Chip]:
    """Return the chips of the YAML files."""
    return load_chips("flagcore_cambricon")


@hookimpl
def flagcore_devices() -> Sequence[Device]:
    """Return what cnmon lists."""
    return discover.devices()


@hookimpl
def flagcore_topology(group: NodeGroup) -> Topology | None:
    """Return the bridge groups of an MLU370-X8 node, as cnmon shows them here; the other chips' links say it all."""
    return x8_topology(group, discover.topo()) if group.chip.name == "MLU370-X8" else None


@hookimpl
def flagcore_maturity() -> Maturity:
    """Return what `maturity.yaml` says."""
    return maturity("flagcore_cambricon")


@hookimpl
def flagcore_memory_model(group: NodeGroup) -> MemoryModel | None:
    """Return torch's caching allocator with what the context takes."""
    return memory_of(group) if _mine(group.chip) else None


@hookimpl
def flagcore_kernel_costs(chip: Chip) -> KernelCosts | None:
    """Return what `costs/` holds for the chip: measured kernels, or a curve; None for the core's roofline."""
    return kernel_costs("flagcore_cambricon", chip) if _mine(chip) else None


@hookimpl
def flagcore_engine_support(chip: Chip, engine: str, engine_version: str | None) -> EngineSupport | None:
    """Say how megatron-core would run: torch_mlu, imported first, adds the device mlu and the backend cncl."""
    if not _mine(chip) or engine not in ("megatron", *SERVING):
        return None
    return EngineSupport(
        support=Support.UNKNOWN,
        reason=reason("flagcore_cambricon", chip, engine, engine_version)
        or f"no run of {engine} has been reported on MLUs",
        device_type="mlu",
        distributed_backend="cncl",
        preload=() if engine in SERVING else ("torch_mlu",),
        visible_devices="MLU_VISIBLE_DEVICES" if engine in SERVING else None,
        refused=refused("flagcore_cambricon", chip, engine, engine_version),
        forced=forced("flagcore_cambricon", chip, engine, engine_version),
        notes=notes("flagcore_cambricon", chip, engine, engine_version),
    )


@hookimpl
def flagcore_environment(
    chip: Chip, engine: str, engine_version: str | None, task: Task | None
) -> Mapping[str, str] | None:
    """Return the variables of `environment.yaml` that have a value, as far as their conditions hold."""
    return environment("flagcore_cambricon", chip, engine, engine_version, task) if _mine(chip) else None


@hookimpl
def flagcore_failure_patterns(chip: Chip, engine: str, engine_version: str | None) -> Sequence[FailurePattern] | None:
    """Return the failures of `quirks.yaml`: what the vendor's stack writes when something breaks."""
    return failure_patterns("flagcore_cambricon", engine, engine_version) if _mine(chip) else None


@hookimpl
def flagcore_telemetry(device: Device) -> Telemetry | None:
    """Return what cnmon says of a device of this vendor: memory, power, temperature and load."""
    mine = any(chip.answers_to(device.chip) for chip in flagcore_chips())
    return DeviceReading(TABLE, device.index) if mine else None


def _mine(chip: Chip) -> bool:
    return chip.vendor == "cambricon"
