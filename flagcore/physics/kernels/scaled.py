"""Kernels that take longer than they do alone."""

from __future__ import annotations

from dataclasses import dataclass

from flagcore.contracts import AttentionShape, KernelCosts
from flagcore.domain.space import FloatArray


@dataclass(frozen=True, slots=True)
class LongerKernels:
    """`flagcore.contracts.KernelCosts`: the device's kernels take `times` as long; launches and copies do not."""

    kernels: KernelCosts
    times: float

    def gemm_seconds(self, m: FloatArray, n: FloatArray, k: FloatArray, precision: str) -> FloatArray:
        """Return the time of a matrix product."""
        return self.times * self.kernels.gemm_seconds(m, n, k, precision)

    def attention_seconds(self, shape: AttentionShape, precision: str) -> FloatArray:
        """Return the time of attention."""
        return self.times * self.kernels.attention_seconds(shape, precision)

    def attention_backward_seconds(self, shape: AttentionShape, precision: str) -> FloatArray:
        """Return the time of attention's backward pass."""
        return self.times * self.kernels.attention_backward_seconds(shape, precision)

    def memory_seconds(self, bytes_moved: FloatArray) -> FloatArray:
        """Return the time of an element-wise kernel."""
        return self.times * self.kernels.memory_seconds(bytes_moved)

    def launch_seconds(self) -> float:
        """Return the time to launch a kernel."""
        return self.kernels.launch_seconds()

    def host_copy_seconds(self, bytes_moved: FloatArray) -> FloatArray:
        """Return the time of a copy between device and host."""
        return self.kernels.host_copy_seconds(bytes_moved)

    def run_slowdown(self) -> float:
        """Return 1: they are as long as in runs already."""
        return 1.0
