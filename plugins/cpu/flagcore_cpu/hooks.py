"""The hooks of the CPU plugin."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import psutil

from flagcore.contracts import KernelCosts, MemoryModel, Telemetry
from flagcore.domain.chip import Chip, Device, Support
from flagcore.domain.cluster import NodeGroup
from flagcore.domain.engine import EngineSupport
from flagcore.domain.launch import FailurePattern
from flagcore.domain.maturity import Maturity
from flagcore.domain.trial import TrialState
from flagcore.hooks import hookimpl
from flagcore.vendorkit.chip_file import load_chips
from flagcore.vendorkit.cost_file import kernel_costs
from flagcore.vendorkit.maturity import maturity
from flagcore_cpu import discover
from flagcore_cpu.machine import Processor, this_machine
from flagcore_cpu.memory import CONTEXT_BYTES, SERVER_BYTES, CpuMemory

OUT_OF_MEMORY = FailurePattern(
    pattern=r"DefaultCPUAllocator: (can't|not enough).*memory|std::bad_alloc|\bMemoryError\b|Cannot allocate memory",
    state=TrialState.OUT_OF_MEMORY,
)
SERVING: Mapping[str, Mapping[str, str]] = {
    "llamacpp": {"OMP_WAIT_POLICY": "passive"},
    "vllm": {},
    "sglang": {},
}
"""Engines that serve on a CPU, and what each needs there. Measured with other work on two cores: llama.cpp gave 17 to
64 tokens a second where threads spin (OpenMP's own choice), 67 to 97 where they sleep."""
PEER_LOST = FailurePattern(
    pattern=r"gloo.*(Connection (closed|reset) by peer|Timed out waiting)",
    state=TrialState.FAILED,
    advice="another rank ended first; the reason is in its part of the log",
)


@hookimpl
def flagcore_chips() -> Sequence[Chip]:
    """Return the one chip, with this machine's memory and rates."""
    return [this_machine(chip, Processor.read()) for chip in load_chips("flagcore_cpu")]


@hookimpl
def flagcore_devices() -> Sequence[Device]:
    """Return one device a usable core."""
    return discover.devices()


@hookimpl
def flagcore_maturity() -> Maturity:
    """Return what `maturity.yaml` says."""
    return maturity("flagcore_cpu")


@hookimpl
def flagcore_memory_model(group: NodeGroup, engine: str) -> MemoryModel | None:
    """Return what a rank may use of the machine's memory."""
    if not _mine(group.chip):
        return None
    return CpuMemory(group.memory_bytes or _share(group), SERVER_BYTES.get(engine, CONTEXT_BYTES))


@hookimpl
def flagcore_kernel_costs(chip: Chip) -> KernelCosts | None:
    """Return the curve of a core: one unit that works on small pieces."""
    return kernel_costs("flagcore_cpu", chip) if _mine(chip) else None


@hookimpl
def flagcore_engine_support(chip: Chip, engine: str) -> EngineSupport | None:
    """Say that megatron-core trains on CPU over gloo, and which engines serve there; nothing of others."""
    if not _mine(chip) or engine not in ("megatron", *SERVING):
        return None
    return EngineSupport(support=Support.YES, device_type="cpu", distributed_backend="gloo", shared_devices=True)


@hookimpl
def flagcore_environment(chip: Chip, engine: str) -> Mapping[str, str] | None:
    """Give each rank one core, and spare torch the search for a C++ compiler.

    A server chooses how many threads it has; those that wait must not spin, or they keep the others' cores busy.
    """
    if not _mine(chip):
        return None
    if engine in SERVING:
        return SERVING[engine]
    compiler = {"TORCHDYNAMO_DISABLE": "1"} if engine == "megatron" else {}
    return {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", **compiler}


@hookimpl
def flagcore_failure_patterns(chip: Chip) -> Sequence[FailurePattern] | None:
    """Return what allocation failures and lost peers look like."""
    return (OUT_OF_MEMORY, PEER_LOST) if _mine(chip) else None


@hookimpl
def flagcore_telemetry(device: Device) -> Telemetry | None:
    """Return a reading of the whole machine: cores have no memory of their own."""
    mine = any(chip.answers_to(device.chip) for chip in flagcore_chips())
    return MachineReading() if mine else None


class MachineReading:
    """`flagcore.contracts.Telemetry` of the machine."""

    def sample(self) -> Mapping[str, float]:
        """Return memory in use (bytes, machine-wide) and the load average of the last minute."""
        return {"memory_used_bytes": psutil.virtual_memory().used, "load_average": os.getloadavg()[0]}


def _share(group: NodeGroup) -> float | None:
    """Return the memory of a core, or less where more ranks than cores share the machine."""
    known = group.chip.memory_bytes
    return known.value * min(1.0, group.chip.devices_per_node / group.devices_per_node) if known else None


def _mine(chip: Chip) -> bool:
    return chip.vendor == "cpu"
