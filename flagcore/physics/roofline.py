"""Kernel times from a chip's peak rates, for chips of which nothing better is known."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flagcore.domain.chip import Chip
from flagcore.domain.space import FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """Roofline (Williams et al. 2009) with efficiencies. Implements `KernelCosts`; NaN where a peak is not known.

    `gemm_share` and `attention_share` are the shares of peak that large shapes reach, `memory_share` that of
    the memory's rate; `half_side` is the shortest side of a matrix product, and `half_length` the sequence,
    at which half of the share is reached; `launch_seconds` passes between two kernels. The defaults describe a
    451-point sheet of kernels of one current data-centre accelerator (bf16 products, causal flash attention,
    normalisation), most of them within 15%.
    """

    chip: Chip
    gemm_share: float = 0.82
    half_side: float = 64.0
    attention_share: float = 0.7
    half_length: float = 1024.0
    memory_share: float = 0.8
    launch_seconds: float = 5e-6

    def gemm_seconds(self, m: FloatArray, n: FloatArray, k: FloatArray, precision: str) -> FloatArray:
        """Return the time of one matrix product: the larger of arithmetic and memory traffic, and a launch."""
        shortest = np.minimum(np.minimum(m, n), k)
        share = self.gemm_share * shortest / (shortest + self.half_side)
        width = {"fp32": 4.0, "tf32": 4.0}.get(precision, 2.0)
        traffic = width * (m * k + k * n + m * n) / (self._bandwidth() * self.memory_share)
        return np.maximum(2.0 * m * n * k / (self._peak(precision) * share), traffic) + self.launch_seconds

    def attention_seconds(
        self, batch: FloatArray, heads: FloatArray, sequence: FloatArray, head_dim: FloatArray, precision: str
    ) -> FloatArray:
        """Return the time of causal attention forward: two products over half of the scores, and a launch.

        Short sequences and narrow heads reach less of the peak.
        """
        narrow = np.minimum(1.0, 1.75 * head_dim / (head_dim + 96.0))
        share = self.attention_share * narrow * sequence / (sequence + self.half_length)
        flops = 2.0 * batch * heads * sequence * sequence * head_dim
        return flops / (self._peak(precision) * share) + self.launch_seconds

    def memory_seconds(self, bytes_moved: FloatArray) -> FloatArray:
        """Return the time to move bytes, and a launch."""
        return bytes_moved / (self._bandwidth() * self.memory_share) + self.launch_seconds

    def _peak(self, precision: str) -> float:
        """Return the peak of `precision`; the microscaled 8-bit format runs at the rate of fp8."""
        name = {"mxfp8": "fp8"}.get(precision, precision)
        fact = self.chip.dense_flops_per_second.get(name)
        return fact.value if fact is not None else float("nan")

    def _bandwidth(self) -> float:
        fact = self.chip.memory_bandwidth_bytes_per_second
        return fact.value if fact is not None else float("nan")
