"""Kernel times from a chip's peak rates and the shares of them that kernels reach."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from flagcore.contracts import AttentionShape
from flagcore.domain.chip import Chip, NotNegative, Positive
from flagcore.domain.space import FloatArray

RUNS_AS = {"mxfp8": "fp8", "nvfp4": "fp4"}
"""Precisions that run at the rate of another."""

BYTES = {"fp64": 8.0, "fp32": 4.0, "tf32": 4.0, "fp8": 1.0, "mxfp8": 33 / 32, "int8": 1.0, "nvfp4": 9 / 16}
"""Bytes of an operand's element where it is not 2; block formats with their scales (a byte each 32, each 16)."""

BLOCK = 128.0
"""Queries that a unit works on at a time."""

GROUP_TENSORS = 2.2
"""Backward, with fewer groups than heads: tensors of gradients of keys and values, one of each query head, that are
moved to sum them up. Fitted to 33 shapes of one accelerator."""

HOST_LATENCY = 10e-6
"""Seconds before a copy over the host link starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """The parameters of `Roofline`.

    The defaults were fitted to 354 kernels of one current data-centre accelerator (178 bf16 matrix products, 93
    forward and 83 backward passes of causal attention) whose times the host did not limit: mean error 5.5%, 1.9% and
    3.0%. They are shares of peak and counts, so they carry over to a chip of a like design with its own peaks.
    """

    gemm_share: Positive = 0.81
    """Share of the peak that large matrix products reach."""
    gemm_shares: Mapping[str, Positive] = field(default_factory=dict)
    """The same by precision, where one differs."""
    units: Positive = 132.0
    """Units that work side by side: pieces of a product beyond a multiple of them wait for another wave."""
    tile: Positive = 64.0
    """Side of the piece of a product that a unit works on; a product is padded to it."""
    tile_overhead: NotNegative = 143.0
    """Start and end of a piece, in the depth k that a unit computes meanwhile in a 16-bit precision."""
    split_depth: NotNegative = 2048.0
    """Depth below which a product of fewer pieces than units is not split along k."""
    memory_share: Positive = 0.91
    """Share of the memory's rate that copies and operands of matrix products reach."""
    elementwise_share: Positive = 0.77
    """The same for element-wise kernels: activation functions, optimizers."""
    kernel_seconds: NotNegative = 2e-6
    """The least that a kernel takes on the device."""
    attention_share: Positive = 0.72
    """Share of the peak that long causal attention reaches forward, with heads of 128, where products reach
    `gemm_share`; in a precision that is in `gemm_shares`, as much more or less."""
    attention_overhead: NotNegative = 230.0
    """Start and end of a block of queries, in keys."""
    attention_backward_share: Positive = 0.69
    """The same for its backward pass."""
    attention_backward_overhead: NotNegative = 580.0
    """The same for its backward pass."""
    attention_tail: NotNegative = 0.61
    """How much of the longest block of 128 queries the units spend waiting for the last one."""
    half_head: NotNegative = 76.0
    """Width of a head that reaches half of what a very wide one would; nothing is gained beyond 128."""
    launch_seconds: NotNegative = 11e-6
    """Host time to launch one kernel, including the framework."""
    run_slowdown: NotNegative = 1.0
    """Slowdown of kernels in a run on many devices against the curve: 1 if it was fitted to such runs."""
    host_bytes_per_second: Positive = 25e9
    """Rate of copies between device and pinned host memory, one way. PCIe 4.0 x16 reached 26 to 28 GB/s on two chips
    (FlagPerf interconnect-h2d; llaisys docs/hardware); newer links reach more, so a chip's curve should set it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """Roofline (Williams et al. 2009) with efficiencies. Implements `KernelCosts`; NaN where a peak is not known."""

    chip: Chip
    curve: Curve = field(default_factory=Curve)

    def gemm_seconds(self, m: FloatArray, n: FloatArray, k: FloatArray, precision: str) -> FloatArray:
        """Return the time of one matrix product: arithmetic in waves of pieces, or memory traffic, then the casts.

        A product is cut into pieces of `tile` x `tile`, each as long as `k`, and the pieces into waves over the
        units; with fewer pieces than units, k is cut too. Narrow formats cast one operand, A, from 16 bits: it is
        read, and written by rows and by columns; the other was cast before (a weight, or saved by the forward).
        """
        curve, peak = self.curve, self._peak(precision)
        tile, narrow = curve.tile, BYTES.get(precision, 2.0)
        share = self._gemm_share(precision)
        half = self._peak("bf16")
        overhead = curve.tile_overhead * (peak / half if peak > half else 1.0)
        pieces = np.ceil(m * (1 / tile)) * np.ceil(n * (1 / tile)) * (1 / curve.units)
        part = np.minimum(1.0, np.maximum(pieces, curve.split_depth / k))
        waves = np.where(pieces < 1.0, part, np.ceil(pieces))
        arithmetic = waves * (k + overhead) * (2.0 * tile * tile * curve.units / (peak * share))
        rate = self._bandwidth() * curve.memory_share
        left, out = m * k, m * n
        traffic = (left + k * n) * (narrow / rate) + out * (max(narrow, 2.0) / rate)
        seconds = _larger(arithmetic, traffic) + curve.kernel_seconds
        cast = cast_bytes(m, k, precision)
        return seconds if cast is None else seconds + self.memory_seconds(cast)

    def attention_seconds(self, shape: AttentionShape, precision: str) -> FloatArray:
        """Return the time of causal attention forward: two products over the scores that the mask leaves.

        Formats narrower than 16 bits compute attention in bf16. One query is bound by reading keys and values.
        """
        curve = self.curve
        busy = self._blocks(shape, precision, curve.attention_share, curve.attention_overhead)
        tensors = shape.heads * shape.queries + shape.groups * shape.keys
        moved = 2.0 * shape.batch * shape.head_dim * tensors * self._attention_bytes(precision)
        return _larger(2.0 * busy, moved / self._stream()) + curve.kernel_seconds

    def attention_backward_seconds(self, shape: AttentionShape, precision: str) -> FloatArray:
        """Return the time of its backward pass: five products (Dao 2023, arXiv 2307.08691), and sums over groups."""
        curve, width = self.curve, self._attention_bytes(precision)
        busy = self._blocks(shape, precision, curve.attention_backward_share, curve.attention_backward_overhead)
        tensors = 5.0 * shape.heads * shape.queries + 4.0 * shape.groups * shape.keys
        moved = shape.batch * shape.head_dim * tensors * (width / self._stream())
        summed = shape.batch * shape.heads * shape.keys * shape.head_dim * (shape.heads > shape.groups)
        sums = summed * (GROUP_TENSORS * width / self._stream())
        return _larger(5.0 * busy, moved) + sums + curve.kernel_seconds

    def memory_seconds(self, bytes_moved: FloatArray) -> FloatArray:
        """Return the time of an element-wise kernel."""
        rate = self._bandwidth() * self.curve.elementwise_share
        return bytes_moved * (1 / rate) + self.curve.kernel_seconds

    def run_slowdown(self) -> float:
        """Return the value of the curve."""
        return self.curve.run_slowdown

    def launch_seconds(self) -> float:
        """Return the host time to launch one kernel."""
        return self.curve.launch_seconds

    def host_copy_seconds(self, bytes_moved: FloatArray) -> FloatArray:
        """Return the time of a copy over the host link."""
        return bytes_moved * (1 / self.curve.host_bytes_per_second) + HOST_LATENCY

    def _blocks(self, shape: AttentionShape, precision: str, share: float, overhead: float) -> FloatArray:
        """Return the time of one product over the scores: all blocks of queries, and the wait for the longest.

        In another precision `share` changes as that of matrix products does.
        """
        curve, computed = self.curve, "bf16" if BYTES.get(precision, 2.0) < 2.0 else precision
        peak = self._peak(computed) * (self._gemm_share(computed) / curve.gemm_share)
        width = np.maximum(shape.head_dim, (shape.head_dim + curve.half_head) * (BLOCK / (BLOCK + curve.half_head)))
        scores = shape.batch * shape.heads * shape.queries * (shape.keys + overhead - 0.5 * shape.queries)
        longest = np.minimum(shape.queries, BLOCK) * (shape.keys + overhead) * (curve.attention_tail * curve.units)
        return (scores + longest) * width * (2.0 / (peak * share))

    def _gemm_share(self, precision: str) -> float:
        return self.curve.gemm_shares.get(precision, self.curve.gemm_share)

    def _attention_bytes(self, precision: str) -> float:
        return max(2.0, BYTES.get(precision, 2.0))

    def _stream(self) -> float:
        return self._bandwidth() * self.curve.memory_share

    def _peak(self, precision: str) -> float:
        fact = self.chip.dense_flops_per_second.get(RUNS_AS.get(precision, precision))
        return fact.value if fact is not None else float("nan")

    def _bandwidth(self) -> float:
        fact = self.chip.memory_bandwidth_bytes_per_second
        return fact.value if fact is not None else float("nan")


def cast_bytes(m: FloatArray, k: FloatArray, precision: str) -> FloatArray | None:
    """Return the bytes that a product moves to cast A[m,k] from 16 bits, see `Roofline.gemm_seconds`; None for no
    cast."""
    narrow = BYTES.get(precision, 2.0)
    return m * k * (2.0 + 2.0 * narrow) if narrow < 2.0 else None


def _larger(one: FloatArray, other: FloatArray) -> FloatArray:
    """Return the larger, or slightly more if both are close: neither hides the other fully."""
    one, other = one * one, other * other
    larger: FloatArray = np.sqrt(np.sqrt(one * one + other * other))
    return larger
