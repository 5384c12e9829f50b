"""Costs from an ordered stack of sources. If a source returns NaN, the next one is used."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from flagcore.contracts import AttentionShape, CollectiveCosts, KernelCosts
from flagcore.domain.space import FloatArray, IntArray

ROOFLINE = "roofline"
"""The name of the core's roofline among the sources."""

C = TypeVar("C", KernelCosts, CollectiveCosts)


@dataclass(frozen=True, slots=True)
class KernelCostStack:
    """A stack of named kernel costs, the most trusted source first. Implements `flagcore.contracts.KernelCosts`.

    The times of kernels on the device are multiplied by `slowdown`, those of launches by `launch_slowdown`. If
    `used_sources` is given, it collects the names of the sources that were used, by kind of kernel.
    """

    sources: tuple[tuple[str, KernelCosts], ...]
    slowdown: float = 1.0
    launch_slowdown: float = 1.0
    used_sources: dict[str, set[str]] | None = field(default=None, compare=False)

    def recording(self) -> KernelCostStack:
        """Return the same costs with an empty `used_sources`."""
        return replace(self, used_sources={})

    def gemm_seconds(self, m: FloatArray, n: FloatArray, k: FloatArray, precision: str) -> FloatArray:
        return self._scaled("gemm", lambda costs: costs.gemm_seconds(m, n, k, precision))

    def attention_seconds(self, shape: AttentionShape, precision: str) -> FloatArray:
        return self._scaled("attention", lambda costs: costs.attention_seconds(shape, precision))

    def attention_backward_seconds(self, shape: AttentionShape, precision: str) -> FloatArray:
        return self._scaled("attention_backward", lambda costs: costs.attention_backward_seconds(shape, precision))

    def memory_seconds(self, bytes_moved: FloatArray) -> FloatArray:
        return self._scaled("memory", lambda costs: costs.memory_seconds(bytes_moved))

    def host_copy_seconds(self, bytes_moved: FloatArray) -> FloatArray:
        return self._first_known("host_copy", lambda costs: costs.host_copy_seconds(bytes_moved))

    def launch_seconds(self) -> float:
        return self.launch_slowdown * _first_known_figure([costs.launch_seconds for _, costs in self.sources])

    def run_slowdown(self) -> float:
        """Return the slowdown of the first source that knows it, 1 if a slowdown is already applied."""
        return 1.0 if self.slowdown != 1.0 else _first_known_figure([costs.run_slowdown for _, costs in self.sources])

    def _scaled(self, kind: str, seconds_of: Callable[[KernelCosts], FloatArray]) -> FloatArray:
        seconds = self._first_known(kind, seconds_of)
        return seconds if self.slowdown == 1.0 else self.slowdown * seconds

    def _first_known(self, kind: str, seconds_of: Callable[[KernelCosts], FloatArray]) -> FloatArray:
        if self.used_sources is not None:
            self.used_sources.setdefault(kind, set()).update(_used_sources(self.sources, seconds_of))
        return _first_known([costs for _, costs in self.sources], seconds_of)


@dataclass(frozen=True, slots=True)
class CollectiveCostStack:
    """A stack of collective costs, the most trusted source first. Implements `flagcore.contracts.CollectiveCosts`."""

    sources: tuple[CollectiveCosts, ...]

    def seconds(self, kind: str, payload_bytes: FloatArray, ranks: IntArray, stride: IntArray) -> FloatArray:
        return _first_known(self.sources, lambda costs: costs.seconds(kind, payload_bytes, ranks, stride))

    def compute_share(self, ranks: IntArray, stride: IntArray) -> FloatArray:
        return _first_known(self.sources, lambda costs: costs.compute_share(ranks, stride))


def with_slowdown(kernels: KernelCosts, slowdown: float, *, launches: float = 1.0) -> KernelCosts:
    """Return costs with the times of kernels multiplied by `slowdown`, and those of launches by `launches`."""
    stack = kernels if isinstance(kernels, KernelCostStack) else KernelCostStack((("", kernels),))
    return replace(stack, slowdown=stack.slowdown * slowdown, launch_slowdown=stack.launch_slowdown * launches)


def _first_known(sources: Sequence[C], seconds_of: Callable[[C], FloatArray]) -> FloatArray:
    seconds = seconds_of(sources[0])
    for costs in sources[1:]:
        missing = np.isnan(seconds)
        if not missing.any():
            break
        seconds = np.where(missing, seconds_of(costs), seconds)
    return seconds


def _first_known_figure(figures: Sequence[Callable[[], float]]) -> float:
    return next((figure for each in figures if not math.isnan(figure := each())), math.nan)


def _used_sources(
    sources: Sequence[tuple[str, KernelCosts]], seconds_of: Callable[[KernelCosts], FloatArray]
) -> set[str]:
    """Return the names of the sources that are used for at least one element."""
    names, missing = set(), np.array(True)
    for name, costs in sources:
        unknown = np.isnan(seconds_of(costs))
        if (missing & ~unknown).any():
            names.add(name)
        missing = missing & unknown
    return names
