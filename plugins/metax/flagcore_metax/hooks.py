"""The hooks of the MetaX plugin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flagcore.contracts import KernelCosts, MemoryModel, PruningRule, Telemetry
from flagcore.domain.chip import Chip, Device, Support
from flagcore.domain.cluster import NodeGroup, Topology
from flagcore.domain.engine import EngineSupport
from flagcore.domain.knob import Knob
from flagcore.domain.launch import FailurePattern, Launch
from flagcore.domain.maturity import Maturity
from flagcore.domain.spec import Task
from flagcore.hooks import hookimpl
from flagcore.physics.collectives.curves import CollectiveTable
from flagcore.physics.collectives.topology import topology_of
from flagcore.vendorkit.chip_file import load_chips
from flagcore.vendorkit.collective_file import collective_table
from flagcore.vendorkit.cost_file import kernel_costs
from flagcore.vendorkit.knobs import knobs
from flagcore.vendorkit.maturity import maturity
from flagcore.vendorkit.quirks import failure_patterns, forced, notes, reason, refused
from flagcore.vendorkit.telemetry import DeviceReading, SharedTable
from flagcore.vendorkit.variables import environment
from flagcore_metax import discover
from flagcore_metax.islands import StayInsideIsland, c500_topology, island_size
from flagcore_metax.memory import memory_of
from flagcore_metax.preflight import peer_memory

SERVING = ("vllm", "sglang", "llamacpp")
TABLE = SharedTable(discover.now)


@hookimpl
def flagcore_chips() -> Sequence[Chip]:
    """Return the chips of the YAML files."""
    return load_chips("flagcore_metax")


@hookimpl
def flagcore_devices() -> Sequence[Device]:
    """Return what mx-smi lists."""
    return discover.devices()


@hookimpl
def flagcore_topology(group: NodeGroup) -> Topology | None:
    """Return the islands of a C500, as mx-smi shows them here; of the other chips, whose links say the rest, the levels
    with this machine's own adapters."""
    if group.chip.name != "C500":
        own = discover.own_network(group) if _mine(group.chip) else None
        return topology_of(own) if own else None
    return c500_topology(group, island_size(group, discover.topo()), discover.adapters() if group.nodes > 1 else None)


@hookimpl
def flagcore_maturity() -> Maturity:
    """Return what `maturity.yaml` says."""
    return maturity("flagcore_metax")


@hookimpl
def flagcore_memory_model(group: NodeGroup) -> MemoryModel | None:
    """Return torch's caching allocator with what the driver and the context take."""
    return memory_of(group) if _mine(group.chip) else None


@hookimpl
def flagcore_kernel_costs(chip: Chip) -> KernelCosts | None:
    """Return what `costs/` holds for the chip: measured kernels, or a curve; None for the core's roofline."""
    return kernel_costs("flagcore_metax", chip) if _mine(chip) else None


@hookimpl
def flagcore_collective_costs(group: NodeGroup) -> CollectiveTable | None:
    """Return MCCL's published times for the chip; None for the core's formula."""
    return collective_table("flagcore_metax", group.chip) if _mine(group.chip) else None


@hookimpl
def flagcore_engine_support(chip: Chip, engine: str, engine_version: str | None) -> EngineSupport | None:
    """Say how megatron-core would run: MetaX's torch answers to cuda and serves nccl through MCCL."""
    if not _mine(chip) or engine not in ("megatron", *SERVING):
        return None
    return EngineSupport(
        support=Support.UNKNOWN,
        reason=reason("flagcore_metax", chip, engine, engine_version)
        or f"no run of {engine} has been reported on MetaX",
        device_type="cuda",
        distributed_backend="nccl",
        visible_devices="MACA_VISIBLE_DEVICES" if engine in SERVING else None,
        refused=refused("flagcore_metax", chip, engine, engine_version),
        forced=forced("flagcore_metax", chip, engine, engine_version),
        notes=notes("flagcore_metax", chip, engine, engine_version),
    )


@hookimpl
def flagcore_knobs(chip: Chip, engine: str, engine_version: str | None) -> Sequence[Knob] | None:
    """Return the knobs of `knobs.yaml` for the chip and the release of the engine."""
    return knobs("flagcore_metax", chip, engine, engine_version) if _mine(chip) else None


@hookimpl
def flagcore_environment(
    chip: Chip, engine: str, engine_version: str | None, task: Task | None
) -> Mapping[str, str] | None:
    """Return the variables of `environment.yaml` that have a value, as far as their conditions hold."""
    return environment("flagcore_metax", chip, engine, engine_version, task) if _mine(chip) else None


@hookimpl
def flagcore_pruning_rules(task: Task) -> Sequence[PruningRule] | None:
    """Keep wide parallelism inside the islands of a C500."""
    groups = [group for group in task.cluster.groups if group.chip.name == "C500"]
    return (StayInsideIsland(max(island_size(group, discover.topo()) for group in groups)),) if groups else None


@hookimpl
def flagcore_prepare_launch(task: Task) -> Launch | None:
    """Warn once if several nodes of MetaX would talk without GPUDirect RDMA; the launch stays as it is."""
    groups = task.cluster.groups
    if any(_mine(group.chip) for group in groups) and sum(group.nodes for group in groups) > 1:
        peer_memory()
    return None


@hookimpl
def flagcore_failure_patterns(chip: Chip, engine: str, engine_version: str | None) -> Sequence[FailurePattern] | None:
    """Return the failures of `quirks.yaml`: what the vendor's stack writes when something breaks."""
    return failure_patterns("flagcore_metax", engine, engine_version) if _mine(chip) else None


@hookimpl
def flagcore_telemetry(device: Device) -> Telemetry | None:
    """Return what mx-smi says of a device of this vendor: memory, power, temperature and load."""
    mine = any(chip.answers_to(device.chip) for chip in flagcore_chips())
    return DeviceReading(TABLE, device.index) if mine else None


def _mine(chip: Chip) -> bool:
    return chip.vendor == "metax"
