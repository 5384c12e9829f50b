"""The hooks of the Cambricon plugin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flagcore.contracts import KernelCosts, MemoryModel
from flagcore.domain.chip import Chip, Device, Support
from flagcore.domain.cluster import NodeGroup
from flagcore.domain.engine import EngineSupport
from flagcore.domain.launch import FailurePattern
from flagcore.domain.trial import TrialState
from flagcore.hooks import hookimpl
from flagcore.vendorkit.chipfile import load_chips
from flagcore.vendorkit.costfile import kernel_costs
from flagcore_cambricon import discover
from flagcore_cambricon.memory import memory_of

SERVING = ("vllm", "sglang", "llamacpp")
PATTERNS = (
    FailurePattern(pattern=r"OutOfMemoryError|MLU out of memory", state=TrialState.OUT_OF_MEMORY),
    FailurePattern(
        pattern=r"Watchdog caught collective operation timeout",
        state=TrialState.TIMED_OUT,
        advice="a collective did not end: a rank died, or the ranks disagree about it",
    ),
)


@hookimpl
def flagcore_chips() -> Sequence[Chip]:
    """Return the chips of the YAML files."""
    return load_chips("flagcore_cambricon")


@hookimpl
def flagcore_devices() -> Sequence[Device]:
    """Return what cnmon lists."""
    return discover.devices()


@hookimpl
def flagcore_memory_model(group: NodeGroup) -> MemoryModel | None:
    """Return torch's caching allocator with what the context takes."""
    return memory_of(group) if _mine(group.chip) else None


@hookimpl
def flagcore_kernel_costs(chip: Chip) -> KernelCosts | None:
    """Return what `costs/` holds for the chip: measured kernels, or a curve; None for the core's roofline."""
    return kernel_costs("flagcore_cambricon", chip) if _mine(chip) else None


@hookimpl
def flagcore_engine_support(chip: Chip, engine: str) -> EngineSupport | None:
    """Say how megatron-core would run: torch_mlu, imported first, adds the device mlu and the backend cncl."""
    if not _mine(chip) or engine not in ("megatron", *SERVING):
        return None
    if engine in SERVING:
        reason = f"no run of {engine} by flagcore has been reported on MLUs"
        return EngineSupport(
            support=Support.UNKNOWN,
            reason=reason,
            device_type="mlu",
            distributed_backend="cncl",
            visible_devices="MLU_VISIBLE_DEVICES",
        )
    return EngineSupport(
        support=Support.UNKNOWN,
        reason="FlagScale patches Megatron-LM 0.12 for MLUs; megatron-core 0.16 has not been reported there",
        device_type="mlu",
        distributed_backend="cncl",
        preload=("torch_mlu",),
    )


@hookimpl
def flagcore_environment(chip: Chip, engine: str) -> Mapping[str, str] | None:
    """Name the vendor to FlagGems; one hardware queue, as FlagScale sets for MLUs except with FSDP2."""
    if not _mine(chip):
        return None
    queue = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if engine == "megatron" else {}
    return {"GEMS_VENDOR": "cambricon", **queue}


@hookimpl
def flagcore_failure_patterns(chip: Chip) -> Sequence[FailurePattern] | None:
    """Return what torch_mlu and CNCL write when something breaks."""
    return PATTERNS if _mine(chip) else None


def _mine(chip: Chip) -> bool:
    return chip.vendor == "cambricon"
