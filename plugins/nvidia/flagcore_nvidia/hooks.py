"""The hooks of the NVIDIA plugin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flagcore.contracts import KernelCosts, MemoryModel, Telemetry
from flagcore.domain.chip import Chip, Device, Support
from flagcore.domain.cluster import NodeGroup, Topology
from flagcore.domain.engine import EngineSupport
from flagcore.domain.knob import Knob
from flagcore.domain.launch import FailurePattern
from flagcore.domain.maturity import Maturity
from flagcore.domain.spec import Task
from flagcore.hooks import hookimpl
from flagcore.physics.collectives.curves import CollectiveTable
from flagcore.physics.collectives.topology import topology_of
from flagcore.vendorkit.chip_file import load_chips
from flagcore.vendorkit.collective_file import collective_table
from flagcore.vendorkit.cost_file import kernel_costs, serving_costs
from flagcore.vendorkit.knobs import knobs
from flagcore.vendorkit.maturity import maturity
from flagcore.vendorkit.quirks import failure_patterns, forced, notes, refused
from flagcore.vendorkit.telemetry import DeviceReading, SharedTable
from flagcore.vendorkit.variables import environment
from flagcore_nvidia import discover
from flagcore_nvidia.memory import memory_of

SERVING = ("vllm", "sglang", "llamacpp")
TABLE = SharedTable(discover.now)


@hookimpl
def flagcore_chips() -> Sequence[Chip]:
    """Return the chips of the YAML files."""
    return load_chips("flagcore_nvidia")


@hookimpl
def flagcore_devices() -> Sequence[Device]:
    """Return what nvidia-smi lists."""
    return discover.devices()


@hookimpl
def flagcore_maturity() -> Maturity:
    """Return what `maturity.yaml` says."""
    return maturity("flagcore_nvidia")


@hookimpl
def flagcore_topology(group: NodeGroup) -> Topology | None:
    """Return the levels with this machine's own adapters, where it is such a node; None for the chip's own facts."""
    own = discover.own_network(group) if _mine(group.chip) else None
    return topology_of(own) if own else None


@hookimpl
def flagcore_memory_model(group: NodeGroup) -> MemoryModel | None:
    """Return torch's caching allocator with the context and NCCL's buffers."""
    return memory_of(group) if _mine(group.chip) else None


@hookimpl
def flagcore_kernel_costs(chip: Chip, engine: str) -> KernelCosts | None:
    """Return what `costs/` holds for the chip: measured kernels, or a curve; None for the core's roofline."""
    if not _mine(chip):
        return None
    return kernel_costs("flagcore_nvidia", chip) if engine == "megatron" else serving_costs("flagcore_nvidia", chip)


@hookimpl
def flagcore_collective_costs(group: NodeGroup) -> CollectiveTable | None:
    """Return NCCL's published times for the chip, or for one with the same links; None for the core's formula."""
    return collective_table("flagcore_nvidia", group.chip) if _mine(group.chip) else None


@hookimpl
def flagcore_engine_support(chip: Chip, engine: str, engine_version: str | None) -> EngineSupport | None:
    """Say how megatron-core and the engines that serve run; nothing of others."""
    if not _mine(chip) or engine not in ("megatron", *SERVING):
        return None
    return EngineSupport(
        support=Support.YES,
        device_type="cuda",
        distributed_backend="nccl",
        visible_devices="CUDA_VISIBLE_DEVICES",
        refused=refused("flagcore_nvidia", chip, engine, engine_version),
        forced=forced("flagcore_nvidia", chip, engine, engine_version),
        notes=notes("flagcore_nvidia", chip, engine, engine_version),
    )


@hookimpl
def flagcore_knobs(chip: Chip, engine: str, engine_version: str | None) -> Sequence[Knob] | None:
    """Return the knobs of `knobs.yaml` for the chip and the release of the engine."""
    return knobs("flagcore_nvidia", chip, engine, engine_version) if _mine(chip) else None


@hookimpl
def flagcore_environment(
    chip: Chip, engine: str, engine_version: str | None, task: Task | None
) -> Mapping[str, str] | None:
    """Return the variables of `environment.yaml` that have a value, as far as their conditions hold."""
    return environment("flagcore_nvidia", chip, engine, engine_version, task) if _mine(chip) else None


@hookimpl
def flagcore_failure_patterns(chip: Chip, engine: str, engine_version: str | None) -> Sequence[FailurePattern] | None:
    """Return the failures of `quirks.yaml`: what the vendor's stack writes when something breaks."""
    return failure_patterns("flagcore_nvidia", engine, engine_version) if _mine(chip) else None


@hookimpl
def flagcore_telemetry(device: Device) -> Telemetry | None:
    """Return what nvidia-smi says of a device of this vendor: memory, power, temperature and load."""
    mine = any(chip.answers_to(device.chip) for chip in flagcore_chips())
    return DeviceReading(TABLE, device.index) if mine else None


def _mine(chip: Chip) -> bool:
    return chip.vendor == "nvidia"
