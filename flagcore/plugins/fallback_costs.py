"""A plugin's costs, and the core's own for what the plugin does not know: NaN."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from flagcore.contracts import AttentionShape, CollectiveCosts, KernelCosts
from flagcore.domain.space import FloatArray, IntArray

C = TypeVar("C", KernelCosts, CollectiveCosts)


@dataclass(frozen=True, slots=True)
class FilledKernelCosts:
    """`flagcore.contracts.KernelCosts`: each time of `table`, or that of `otherwise` where the table says NaN."""

    table: KernelCosts
    otherwise: KernelCosts

    def gemm_seconds(self, m: FloatArray, n: FloatArray, k: FloatArray, precision: str) -> FloatArray:
        """Return the time of a matrix product."""
        return _filled(lambda costs: costs.gemm_seconds(m, n, k, precision), self)

    def attention_seconds(self, shape: AttentionShape, precision: str) -> FloatArray:
        """Return the time of attention."""
        return _filled(lambda costs: costs.attention_seconds(shape, precision), self)

    def attention_backward_seconds(self, shape: AttentionShape, precision: str) -> FloatArray:
        """Return the time of attention's backward pass."""
        return _filled(lambda costs: costs.attention_backward_seconds(shape, precision), self)

    def memory_seconds(self, bytes_moved: FloatArray) -> FloatArray:
        """Return the time of an element-wise kernel."""
        return _filled(lambda costs: costs.memory_seconds(bytes_moved), self)

    def launch_seconds(self) -> float:
        """Return the time to launch a kernel."""
        known = self.table.launch_seconds()
        return self.otherwise.launch_seconds() if math.isnan(known) else known

    def run_slowdown(self) -> float:
        """Return how much longer kernels are in runs."""
        known = self.table.run_slowdown()
        return self.otherwise.run_slowdown() if math.isnan(known) else known

    def host_copy_seconds(self, bytes_moved: FloatArray) -> FloatArray:
        """Return the time of a copy between device and host."""
        return _filled(lambda costs: costs.host_copy_seconds(bytes_moved), self)


@dataclass(frozen=True, slots=True)
class FilledCollectiveCosts:
    """`flagcore.contracts.CollectiveCosts`: each figure of `table`, or that of `otherwise` where the table says NaN."""

    table: CollectiveCosts
    otherwise: CollectiveCosts

    def seconds(self, kind: str, payload_bytes: FloatArray, ranks: IntArray, stride: IntArray) -> FloatArray:
        """Return the time of a collective."""
        return _either(lambda costs: costs.seconds(kind, payload_bytes, ranks, stride), self.table, self.otherwise)

    def compute_share(self, ranks: IntArray, stride: IntArray) -> FloatArray:
        """Return the share of compute that a running collective takes."""
        return _either(lambda costs: costs.compute_share(ranks, stride), self.table, self.otherwise)


def _filled(ask: Callable[[KernelCosts], FloatArray], costs: FilledKernelCosts) -> FloatArray:
    return _either(ask, costs.table, costs.otherwise)


def _either(ask: Callable[[C], FloatArray], table: C, otherwise: C) -> FloatArray:
    known = ask(table)
    missing = np.isnan(known)
    return np.where(missing, ask(otherwise), known) if missing.any() else known
