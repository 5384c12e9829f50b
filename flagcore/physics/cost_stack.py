"""Costs from an ordered stack of sources, and a simple memory model of a device.

If a source returns NaN for a time, the next source is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from flagcore.contracts import AttentionShape, CollectiveCosts, KernelCosts
from flagcore.domain.cluster import NodeGroup
from flagcore.domain.space import FloatArray, IntArray

C = TypeVar("C", KernelCosts, CollectiveCosts)


@dataclass(frozen=True, slots=True)
class KernelCostStack:
    """A stack of kernel costs. Implements `flagcore.contracts.KernelCosts`.

    `sources`: the costs, the most trusted source first.
    `slowdown`: the factor of all kernel times on the device.
    `launch_slowdown`: the factor of launch times.
    """

    sources: tuple[KernelCosts, ...]
    slowdown: float = 1.0
    launch_slowdown: float = 1.0

    def gemm_seconds(self, m: FloatArray, n: FloatArray, k: FloatArray, precision: str) -> FloatArray:
        return self._scaled(lambda costs: costs.gemm_seconds(m, n, k, precision))

    def attention_seconds(self, shape: AttentionShape, precision: str) -> FloatArray:
        return self._scaled(lambda costs: costs.attention_seconds(shape, precision))

    def attention_backward_seconds(self, shape: AttentionShape, precision: str) -> FloatArray:
        return self._scaled(lambda costs: costs.attention_backward_seconds(shape, precision))

    def memory_seconds(self, bytes_moved: FloatArray) -> FloatArray:
        return self._scaled(lambda costs: costs.memory_seconds(bytes_moved))

    def host_copy_seconds(self, bytes_moved: FloatArray) -> FloatArray:
        return _first_known(self.sources, lambda costs: costs.host_copy_seconds(bytes_moved))

    def launch_seconds(self) -> float:
        return self.launch_slowdown * _first_known_figure([costs.launch_seconds for costs in self.sources])

    def run_slowdown(self) -> float:
        """Return the first known slowdown of the sources in a run, or 1.0 if `slowdown` already includes one."""
        return 1.0 if self.slowdown != 1.0 else _first_known_figure([costs.run_slowdown for costs in self.sources])

    def _scaled(self, seconds_of: Callable[[KernelCosts], FloatArray]) -> FloatArray:
        seconds = _first_known(self.sources, seconds_of)
        return seconds if self.slowdown == 1.0 else self.slowdown * seconds


@dataclass(frozen=True, slots=True)
class CollectiveCostStack:
    """A stack of collective costs. Implements `flagcore.contracts.CollectiveCosts`.

    `sources`: the costs, the most trusted source first.
    """

    sources: tuple[CollectiveCosts, ...]

    def seconds(self, kind: str, payload_bytes: FloatArray, ranks: IntArray, stride: IntArray) -> FloatArray:
        return _first_known(self.sources, lambda costs: costs.seconds(kind, payload_bytes, ranks, stride))

    def compute_share(self, ranks: IntArray, stride: IntArray) -> FloatArray:
        return _first_known(self.sources, lambda costs: costs.compute_share(ranks, stride))


def with_slowdown(kernels: KernelCosts, slowdown: float, *, launches: float = 1.0) -> KernelCosts:
    """Return costs with kernel times multiplied by `slowdown`, and launch times multiplied by `launches`."""
    stack = kernels if isinstance(kernels, KernelCostStack) else KernelCostStack((kernels,))
    return replace(stack, slowdown=stack.slowdown * slowdown, launch_slowdown=stack.launch_slowdown * launches)


def _first_known(sources: Sequence[C], seconds_of: Callable[[C], FloatArray]) -> FloatArray:
    """Return an array of times. Each is taken from the first source that knows it, and is NaN if no source does."""
    seconds = seconds_of(sources[0])
    for costs in sources[1:]:
        missing = np.isnan(seconds)
        if not missing.any():
            break
        seconds = np.where(missing, seconds_of(costs), seconds)
    return seconds


def _first_known_figure(figures: Sequence[Callable[[], float]]) -> float:
    return next((figure for each in figures if not math.isnan(figure := each())), math.nan)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainMemory:
    """The memory model of a device with a caching allocator. Implements `MemoryModel`.

    The defaults are rounded medians of 25 training ranks on one accelerator with torch's caching allocator, plus 0.4 GB
    for the buffers of collectives.

    `capacity`: the memory budget of one device in bytes. None if unknown.
    `context_bytes`: the memory in use before the first tensor.
    `fragmentation`: the memory that the allocator reserves beyond tensors, as a share of the tensors.
    `workspace`: the bytes of the matrix library's workspace.
    `communicator`: the bytes of each communicator's buffers, if they are not part of `context_bytes`.
    """

    capacity: float | None
    context_bytes: float = 1.2e9
    fragmentation: float = 0.01
    workspace: float = 0.0
    communicator: float = 0.0

    @classmethod
    def of(cls, group: NodeGroup, **figures: float) -> PlainMemory:
        """Return the memory model of a node group.

        The capacity is the group's memory budget, or else the memory of its chip. `figures` set other fields.
        """
        fact = group.chip.memory_bytes
        capacity = group.memory_bytes or (fact.value if fact else None)
        return cls(capacity=capacity, **figures)

    def capacity_bytes(self) -> float | None:
        return self.capacity

    def workspace_bytes(self) -> float:
        return self.workspace

    def reserved_bytes(self, allocated: FloatArray) -> FloatArray:
        return allocated * (1.0 + self.fragmentation)

    def device_used_bytes(self, reserved: FloatArray) -> FloatArray:
        return reserved + self.context_bytes

    def communicator_bytes(self) -> float:
        return self.communicator
