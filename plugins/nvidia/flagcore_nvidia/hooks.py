"""The hooks of the NVIDIA plugin."""

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
from flagcore.vendorkit.costfile import kernel_costs, serving_costs
from flagcore_nvidia import discover
from flagcore_nvidia.memory import memory_of

SERVING = ("vllm", "sglang", "llamacpp")
PATTERNS = (
    FailurePattern(
        pattern=r"OutOfMemoryError|CUDA out of memory|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED",
        state=TrialState.OUT_OF_MEMORY,
    ),
    FailurePattern(
        pattern=r"Watchdog caught collective operation timeout",
        state=TrialState.TIMED_OUT,
        advice="a collective did not end: a rank died, or the ranks disagree about it",
    ),
    FailurePattern(
        pattern=r"uncorrectable ECC error|NVRM: Xid",
        state=TrialState.FAILED,
        advice="a GPU reports a hardware fault; see nvidia-smi -q and dmesg",
    ),
)


@hookimpl
def flagcore_chips() -> Sequence[Chip]:
    """Return the chips of the YAML files."""
    return load_chips("flagcore_nvidia")


@hookimpl
def flagcore_devices() -> Sequence[Device]:
    """Return what nvidia-smi lists."""
    return discover.devices()


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
def flagcore_engine_support(chip: Chip, engine: str) -> EngineSupport | None:
    """Say how megatron-core and the engines that serve run; nothing of others."""
    if not _mine(chip) or engine not in ("megatron", *SERVING):
        return None
    return EngineSupport(
        support=Support.YES, device_type="cuda", distributed_backend="nccl", visible_devices="CUDA_VISIBLE_DEVICES"
    )


@hookimpl
def flagcore_environment(chip: Chip, engine: str) -> Mapping[str, str] | None:
    """Name the vendor to FlagGems; one hardware queue, which Megatron's overlap of TP and SP needs."""
    if not _mine(chip):
        return None
    queue = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if engine == "megatron" else {}
    return {"GEMS_VENDOR": "nvidia", **queue}


@hookimpl
def flagcore_failure_patterns(chip: Chip) -> Sequence[FailurePattern] | None:
    """Return what CUDA, NCCL and the driver write when something breaks."""
    return PATTERNS if _mine(chip) else None


def _mine(chip: Chip) -> bool:
    return chip.vendor == "nvidia"
