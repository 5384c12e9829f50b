"""Costs from an ordered stack of sources: where the first does not know a time (NaN), the next one answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from flagcore.contracts import AttentionShape, CollectiveCosts, KernelCosts
from flagcore.domain.space import FloatArray, IntArray

ROOFLINE = "roofline"
"""The name of the core's own formula among sources."""

C = TypeVar("C", KernelCosts, CollectiveCosts)


@dataclass(frozen=True, slots=True)
class KernelCostStack:
    """`flagcore.contracts.KernelCosts` of several sources, each with its name, the most trusted first.

    Kernels on the device take `slowdown` as long as the sources say; launches and copies do not.
    `answered` collects, by kind of kernel, the names of the sources that answered, if it is given.
    """

    sources: tuple[tuple[str, KernelCosts], ...]
    slowdown: float = 1.0
    answered: dict[str, set[str]] | None = field(default=None, compare=False)

    def recording(self) -> KernelCostStack:
        """Return the same costs with a new and empty `answered`."""
        return replace(self, answered={})

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
        return _first_known_figure([costs.launch_seconds for _, costs in self.sources])

    def run_slowdown(self) -> float:
        """Return 1 if `slowdown` is already applied."""
        return 1.0 if self.slowdown != 1.0 else _first_known_figure([costs.run_slowdown for _, costs in self.sources])

    def _scaled(self, kind: str, ask: Callable[[KernelCosts], FloatArray]) -> FloatArray:
        seconds = self._first_known(kind, ask)
        return seconds if self.slowdown == 1.0 else self.slowdown * seconds

    def _first_known(self, kind: str, ask: Callable[[KernelCosts], FloatArray]) -> FloatArray:
        if self.answered is not None:
            self.answered.setdefault(kind, set()).update(_names(self.sources, ask))
        return _first_known([costs for _, costs in self.sources], ask)


@dataclass(frozen=True, slots=True)
class CollectiveCostStack:
    """`flagcore.contracts.CollectiveCosts` of several sources, the most trusted first."""

    sources: tuple[CollectiveCosts, ...]

    def seconds(self, kind: str, payload_bytes: FloatArray, ranks: IntArray, stride: IntArray) -> FloatArray:
        return _first_known(self.sources, lambda costs: costs.seconds(kind, payload_bytes, ranks, stride))

    def compute_share(self, ranks: IntArray, stride: IntArray) -> FloatArray:
        return _first_known(self.sources, lambda costs: costs.compute_share(ranks, stride))


def slowed(kernels: KernelCosts, slowdown: float) -> KernelCosts:
    """Return costs whose kernels on the device take `slowdown` as long."""
    stack = kernels if isinstance(kernels, KernelCostStack) else KernelCostStack((("", kernels),))
    return replace(stack, slowdown=stack.slowdown * slowdown)


def _first_known(sources: Sequence[C], ask: Callable[[C], FloatArray]) -> FloatArray:
    found = ask(sources[0])
    for costs in sources[1:]:
        missing = np.isnan(found)
        if not missing.any():
            break
        found = np.where(missing, ask(costs), found)
    return found


def _first_known_figure(ask: Sequence[Callable[[], float]]) -> float:
    return next((figure for each in ask if not math.isnan(figure := each())), math.nan)


def _names(sources: Sequence[tuple[str, KernelCosts]], ask: Callable[[KernelCosts], FloatArray]) -> set[str]:
    """Return the names of the sources that have an element missing in all earlier sources."""
    names, missing = set(), np.array(True)
    for name, costs in sources:
        unknown = np.isnan(ask(costs))
        if (missing & ~unknown).any():
            names.add(name)
        missing = missing & unknown
    return names
