"""The plugin for NVIDIA GPUs, with the memory that a rank takes in addition to its tensors."""

from dataclasses import replace

from flagcore_vendorkit.plugin import VendorPlugin

from flagcore.contracts import MemoryModel
from flagcore.domain.chip import Chip
from flagcore.domain.cluster import NodeGroup
from flagcore.domain.engine import EngineSupport
from flagcore.hooks import hookimpl
from flagcore.physics.roofline import PlainMemory
from flagcore_nvidia.discover import DETECTOR

SLACK = 0.0075
"""Reserved memory divided by allocated memory, minus one: median of 25 megatron-core jobs on an H200 (0.05% to 3%, once
12%)."""

CONTEXT_BYTES = 0.82 * 2**30
"""Memory in use as reported by the driver, minus reserved memory: median of the same 25 jobs (0.75 to 0.82 GiB), torch
2.11, CUDA 13. What the driver says is in use has what it keeps for itself (NVML: the sum of reserved and allocated)."""

PAIR_BYTES, COLLECTIVE_BYTES = 342 * 2**20, 392 * 2**20
"""NCCL's buffers, 342 MiB with 2 ranks, and 392 MiB with 4 and 8 ranks: ai-dynamo/aiconfigurator systems/*.yaml of
aiconfigurator-core 0.12.0 (PyPI), which calls them observed corrections."""

NETWORK_BYTES = 999 * 2**20
"""What NCCL adds to each communicator of a training rank that reaches other hosts, 999 MiB: the mean of four in
DeepSeek-V3 with 14 layers on 64 H100, EP 16, PP 4, with 6,403 outside of torch (Megatron-LM PR 6429; 6,411 in a second
job). About half is a shared buffer of sends and receives (NVIDIA/nccl issue 2363), the rest those of channels."""

WORKSPACE_BYTES, SMALL_WORKSPACE_BYTES = 32 * 2**20, 2 * 2**22 + 8 * 2**14
"""What torch allocates for cuBLAS per handle and stream: 32 MiB on Hopper and Blackwell (compute capability 9 to 12),
8.1 MiB on other chips (`parseChosenWorkspaceSize` of pytorch aten/src/ATen/cuda/CublasHandlePool.cpp)."""

SMALL_WORKSPACE = ("A", "L", "T4", "V100", "RTX-3", "RTX-4")
"""Prefixes of the names of chips that are neither Hopper nor Blackwell."""


def memory_of(group: NodeGroup, engine: str, kind: str = "serve") -> PlainMemory:
    """Return the memory model of one device of `group`. Servers have one communicator.

    What the driver keeps for itself is not counted in a trainer's context if the capacity lacks it.
    """
    collective = COLLECTIVE_BYTES if group.devices > 2 else PAIR_BYTES if group.devices > 1 else 0
    small = group.chip.name.upper().startswith(SMALL_WORKSPACE)
    workspace = SMALL_WORKSPACE_BYTES if small else WORKSPACE_BYTES
    further = (collective, NETWORK_BYTES) if kind == "train" else (0.0, 0.0)
    nominal, usable = group.chip.memory_bytes, group.chip.usable_bytes
    context = CONTEXT_BYTES + collective
    if kind != "serve" and nominal and usable and (group.memory_bytes or 0) <= usable.value:
        context -= nominal.value - usable.value
    plain = PlainMemory.of(group, fragmentation=SLACK, context_bytes=max(context, 0.0), workspace=workspace)
    return replace(plain, further=further)


SPARSE = {"dsa_kernel_backend": "cudnn"}
RECIPES = {"sm_90": SPARSE, **dict.fromkeys(("sm_100", "sm_103"), SPARSE | {"cuda_graph_impl": "transformer_engine"})}
"""Settings of published training runs by architecture: kernels of sparse attention (Megatron-Bridge
`perf_recipes/glm_moe_dsa` @067f987d), and parts of layers as CUDA graphs (`perf_recipes/*/{b200,b300,gb200,gb300}`: all
but one of the models with experts, and most others)."""


class NvidiaPlugin(VendorPlugin):
    """Adds what recipes set on newer architectures to the settings of production jobs."""

    @hookimpl
    def flagcore_memory_model(self, group: NodeGroup, engine: str, kind: str) -> MemoryModel | None:
        return memory_of(group, engine, kind) if self.owns(group.chip) else None

    @hookimpl
    def flagcore_engine_support(
        self, chip: Chip, engine: str, engine_version: str | None, kind: str
    ) -> EngineSupport | None:
        support = super().flagcore_engine_support(chip, engine, engine_version, kind)
        if support is None or support.stack is None:
            return support
        settings = {**support.stack.settings, **RECIPES.get(chip.architecture, {})}
        return replace(support, stack=replace(support.stack, settings=settings))


plugin: VendorPlugin = NvidiaPlugin(package="flagcore_nvidia", vendor="nvidia", detector=DETECTOR, memory=memory_of)
