"""The hooks of the Iluvatar plugin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flagcore.contracts import KernelCosts, MemoryModel
from flagcore.domain.chip import Chip, Device, Support
from flagcore.domain.cluster import NodeGroup
from flagcore.domain.engine import EngineSupport
from flagcore.domain.launch import FailurePattern
from flagcore.domain.trial import TrialState
from flagcore.hooks import hookimpl
from flagcore.physics.collectives.curves import CollectiveTable
from flagcore.vendorkit.chipfile import load_chips
from flagcore.vendorkit.collectivefile import collective_table
from flagcore.vendorkit.costfile import kernel_costs
from flagcore_iluvatar import discover
from flagcore_iluvatar.memory import memory_of

SERVING = ("vllm", "sglang", "llamacpp")
PATTERNS = (
    FailurePattern(pattern=r"OutOfMemoryError|CUDA out of memory", state=TrialState.OUT_OF_MEMORY),
    FailurePattern(
        pattern=r"Watchdog caught collective operation timeout",
        state=TrialState.TIMED_OUT,
        advice="a collective did not end: a rank died, or the ranks disagree about it",
    ),
)


@hookimpl
def flagcore_chips() -> Sequence[Chip]:
    """Return the chips of the YAML files."""
    return load_chips("flagcore_iluvatar")


@hookimpl
def flagcore_devices() -> Sequence[Device]:
    """Return what ixsmi lists."""
    return discover.devices()


@hookimpl
def flagcore_memory_model(group: NodeGroup) -> MemoryModel | None:
    """Return torch's caching allocator with what the driver and the context take."""
    return memory_of(group) if _mine(group.chip) else None


@hookimpl
def flagcore_kernel_costs(chip: Chip) -> KernelCosts | None:
    """Return what `costs/` holds for the chip: measured kernels, or a curve; None for the core's roofline."""
    return kernel_costs("flagcore_iluvatar", chip) if _mine(chip) else None


@hookimpl
def flagcore_collective_costs(group: NodeGroup) -> CollectiveTable | None:
    """Return IXCCL's published times for the chip; None for the core's formula."""
    return collective_table("flagcore_iluvatar", group.chip) if _mine(group.chip) else None


@hookimpl
def flagcore_engine_support(chip: Chip, engine: str) -> EngineSupport | None:
    """Say how megatron-core would run: CoreX's torch answers to cuda and serves nccl through IXCCL."""
    if not _mine(chip) or engine not in ("megatron", *SERVING):
        return None
    if engine in SERVING:
        reason = f"no run of {engine} by flagcore has been reported on Iluvatar"
        return EngineSupport(
            support=Support.UNKNOWN,
            reason=reason,
            device_type="cuda",
            distributed_backend="nccl",
            visible_devices="CUDA_VISIBLE_DEVICES",
        )
    reason = "Iluvatar ships Megatron-LM 0.10; megatron-core 0.16 has not been reported there"
    return EngineSupport(support=Support.UNKNOWN, reason=reason, device_type="cuda", distributed_backend="nccl")


@hookimpl
def flagcore_environment(chip: Chip, engine: str) -> Mapping[str, str] | None:
    """Name the vendor to FlagGems; one hardware queue, as FlagPerf sets for training on CoreX."""
    if not _mine(chip):
        return None
    queue = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if engine == "megatron" else {}
    return {"GEMS_VENDOR": "iluvatar", **queue}


@hookimpl
def flagcore_failure_patterns(chip: Chip) -> Sequence[FailurePattern] | None:
    """Return what torch and IXCCL write when something breaks."""
    return PATTERNS if _mine(chip) else None


def _mine(chip: Chip) -> bool:
    return chip.vendor == "iluvatar"
