"""Kernel times from a chip's peak rates, for chips of which nothing better is known."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flagcore.domain.chip import Chip
from flagcore.domain.space import FloatArray

RATE = {"mxfp8": "fp8", "nvfp4": "fp4"}
"""Precisions that run at the rate of another."""

BYTES = {"fp64": 8.0, "fp32": 4.0, "tf32": 4.0, "fp8": 1.0, "mxfp8": 1.03125, "int8": 1.0, "nvfp4": 0.5625}
"""Bytes of one operand's element where it is not 2; block formats with their scales (1 a 32, 1 a 16)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """What shares of its peaks a chip reaches."""

    gemm_share: float = 0.82
    half_side: float = 64.0
    attention_share: float = 0.7
    attention_backward_share: float = 0.58
    half_length: float = 1024.0
    memory_share: float = 0.8
    launch_seconds: float = 5e-6
    host_bytes_per_second: float = 50e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """Roofline (Williams et al. 2009) with efficiencies. Implements `KernelCosts`; NaN where a peak is not known."""

    chip: Chip
    curve: Curve = Curve()

    def gemm_seconds(self, m: FloatArray, n: FloatArray, k: FloatArray, precision: str) -> FloatArray:
        """Return the time of one matrix product: the larger of arithmetic and memory traffic."""
        shortest = np.minimum(np.minimum(m, n), k)
        share = self.curve.gemm_share * shortest / (shortest + self.curve.half_side)
        width = BYTES.get(precision, 2.0)
        traffic = (width * (m * k + k * n) + max(width, 2.0) * (m * n)) / (self._bandwidth() * self.curve.memory_share)
        return np.maximum(2.0 * m * n * k / (self._peak(precision) * share), traffic)

    def attention_seconds(
        self,
        batch: FloatArray,
        heads: FloatArray,
        groups: FloatArray,
        queries: FloatArray,
        keys: FloatArray,
        head_dim: FloatArray,
        precision: str,
    ) -> FloatArray:
        """Return the time of causal attention forward: two products over the scores that the mask leaves."""
        share = self.curve.attention_share
        return self._attention(2.0, share, batch, heads, groups, queries, keys, head_dim, precision)

    def attention_backward_seconds(
        self,
        batch: FloatArray,
        heads: FloatArray,
        groups: FloatArray,
        queries: FloatArray,
        keys: FloatArray,
        head_dim: FloatArray,
        precision: str,
    ) -> FloatArray:
        """Return the time of its backward pass: five products (Dao 2023, arXiv 2307.08691)."""
        share = self.curve.attention_backward_share
        return self._attention(5.0, share, batch, heads, groups, queries, keys, head_dim, precision)

    def memory_seconds(self, bytes_moved: FloatArray) -> FloatArray:
        """Return the time to move bytes."""
        return bytes_moved / (self._bandwidth() * self.curve.memory_share)

    def launch_seconds(self) -> float:
        """Return the time between two kernels that do nothing."""
        return self.curve.launch_seconds

    def host_copy_seconds(self, bytes_moved: FloatArray) -> FloatArray:
        """Return the time of a copy over the host link."""
        return bytes_moved / self.curve.host_bytes_per_second

    def _attention(
        self,
        products: float,
        share: float,
        batch: FloatArray,
        heads: FloatArray,
        groups: FloatArray,
        queries: FloatArray,
        keys: FloatArray,
        head_dim: FloatArray,
        precision: str,
    ) -> FloatArray:
        narrow = np.minimum(1.0, 1.75 * head_dim / (head_dim + 96.0))
        scores = batch * heads * queries * (keys - 0.5 * queries)
        reached = share * narrow * queries / (queries + self.curve.half_length)
        traffic = self.memory_seconds(products * batch * head_dim * (heads * queries + groups * keys) * 2.0)
        return np.maximum(products * 2.0 * scores * head_dim / (self._peak(precision) * reached), traffic)

    def _peak(self, precision: str) -> float:
        fact = self.chip.dense_flops_per_second.get(RATE.get(precision, precision))
        return fact.value if fact is not None else float("nan")

    def _bandwidth(self) -> float:
        fact = self.chip.memory_bandwidth_bytes_per_second
        return fact.value if fact is not None else float("nan")
