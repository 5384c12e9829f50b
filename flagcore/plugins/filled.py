"""A plugin's kernel times, and the core's roofline for what the plugin does not know."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from flagcore.contracts import KernelCosts
from flagcore.domain.space import FloatArray


@dataclass(frozen=True, slots=True)
class FilledKernelCosts:
    """`flagcore.contracts.KernelCosts`: each time of `table`, or that of `otherwise` where the table says NaN."""

    table: KernelCosts
    otherwise: KernelCosts

    def gemm_seconds(self, m: FloatArray, n: FloatArray, k: FloatArray, precision: str) -> FloatArray:
        """Return the time of a matrix product."""
        return _filled(
            self.table.gemm_seconds(m, n, k, precision), lambda: self.otherwise.gemm_seconds(m, n, k, precision)
        )

    def attention_seconds(
        self, batch: FloatArray, heads: FloatArray, sequence: FloatArray, head_dim: FloatArray, precision: str
    ) -> FloatArray:
        """Return the time of attention."""
        return _filled(
            self.table.attention_seconds(batch, heads, sequence, head_dim, precision),
            lambda: self.otherwise.attention_seconds(batch, heads, sequence, head_dim, precision),
        )

    def memory_seconds(self, bytes_moved: FloatArray) -> FloatArray:
        """Return the time of an element-wise kernel."""
        return _filled(self.table.memory_seconds(bytes_moved), lambda: self.otherwise.memory_seconds(bytes_moved))


def _filled(known: FloatArray, rest: Callable[[], FloatArray]) -> FloatArray:
    missing = np.isnan(known)
    return np.where(missing, rest(), known) if missing.any() else known
