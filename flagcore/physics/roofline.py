"""Kernel times from the peak rates of a chip and the shares of them that kernels reach."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from flagcore.contracts import AttentionShape
from flagcore.domain.chip import Chip, NotNegative, Positive
from flagcore.domain.space import FloatArray

RUNS_AS = {"mxfp8": "fp8", "nvfp4": "fp4"}
"""Precisions that run at the rate of another precision."""

BYTES = {"fp64": 8.0, "fp32": 4.0, "tf32": 4.0, "fp8": 1.0, "mxfp8": 33 / 32, "int8": 1.0, "nvfp4": 9 / 16}
"""Bytes per element of an operand, 2 for other precisions. Block formats include one byte of scale per 32 (mxfp8) or 16
(nvfp4) elements. From the definitions of the number formats."""

BLOCK = 128.0
"""The number of queries in a block that a compute unit processes. Source: current attention kernels."""

GROUP_TENSORS = 2.2
"""The traffic of the sums over query heads in the backward pass of grouped attention, in tensors with the size of the
keys of all heads. Fitted to 33 backward shapes on one accelerator."""

HOST_LATENCY = 10e-6
"""The latency of a copy over the host link in seconds, an estimate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """The parameters of `Roofline`.

    The defaults were fitted to 354 kernels of one current data-centre accelerator (178 bf16 matrix products, 93
    forward and 83 backward passes of causal attention) that the host did not limit. The mean errors are 5.5%, 1.9% and
    3.0%. Since the parameters are relative to the peaks, they also apply to other chips with a similar design.
    """

    gemm_share: Positive = 0.81
    """The share of the peak that large matrix products reach."""
    gemm_shares: Mapping[str, Positive] = field(default_factory=dict)
    """The values of `gemm_share` for single precisions."""
    units: Positive = 132.0
    """The number of compute units. If the number of tiles is not a multiple of it, the last wave is incomplete."""
    tile: Positive = 64.0
    """The side length of a tile of a matrix product. Products are padded to whole tiles."""
    tile_overhead: NotNegative = 143.0
    """The overhead of a tile, as the depth k that a unit computes in this time in a 16-bit precision."""
    split_depth: NotNegative = 2048.0
    """The minimum depth from which a product with fewer tiles than units is split along k."""
    memory_share: Positive = 0.91
    """The share of the memory bandwidth that copies and operands of matrix products reach."""
    elementwise_share: Positive = 0.77
    """The share of the memory bandwidth that element-wise kernels reach, such as activations and optimizers."""
    kernel_seconds: NotNegative = 2e-6
    """The minimum time of a kernel on the device."""
    attention_share: Positive = 0.72
    """The share of the peak that the forward pass of long causal attention reaches, for heads of width 128. Relative to
    `gemm_share`, it is the same in the precisions of `gemm_shares`."""
    attention_overhead: NotNegative = 230.0
    """The overhead of a block of queries, as the number of keys that are processed in this time."""
    attention_backward_share: Positive = 0.69
    """The `attention_share` of the backward pass."""
    attention_backward_overhead: NotNegative = 580.0
    """The `attention_overhead` of the backward pass."""
    attention_tail: NotNegative = 0.61
    """The time that units wait for the last block, as a share of the time of the longest block of queries."""
    half_head: NotNegative = 76.0
    """The width of a head with half of the efficiency of a very wide one. The efficiency is constant above 128."""
    launch_seconds: NotNegative = 11e-6
    """The host time to launch one kernel, including the framework."""
    run_slowdown: NotNegative = 1.0
    """The slowdown of kernels in a run on many devices relative to the curve: 1 if it was fitted to such runs."""
    host_bytes_per_second: Positive = 25e9
    """The rate of copies between device and pinned host memory in one direction. PCIe 4.0 x16 reached 26 to 28 GB/s on
    two chips (FlagPerf interconnect-h2d; llaisys docs/hardware). Chips with newer links should set it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """A roofline (Williams et al. 2009) with efficiencies. Implements `KernelCosts`; NaN if a peak is unknown."""

    chip: Chip
    curve: Curve = field(default_factory=Curve)

    def gemm_seconds(self, m: FloatArray, n: FloatArray, k: FloatArray, precision: str) -> FloatArray:
        """Return the time of one matrix product: the larger of arithmetic and memory traffic, plus casts.

        A product is divided into tiles of depth `k`, which run in waves over the units. With fewer tiles than units, it
        is also split along k. In formats below 16 bits, the operand A is cast from 16 bits: it is read once, and
        written by rows and by columns. The operand B is already cast, as a weight or by the forward pass.
        """
        curve, peak = self.curve, self._peak(precision)
        tile, operand_bytes = curve.tile, BYTES.get(precision, 2.0)
        share = self._gemm_share(precision)
        bf16_peak = self._peak("bf16")
        overhead = curve.tile_overhead * (peak / bf16_peak if peak > bf16_peak else 1.0)
        tiles_per_unit = np.ceil(m * (1 / tile)) * np.ceil(n * (1 / tile)) * (1 / curve.units)
        partial_wave = np.minimum(1.0, np.maximum(tiles_per_unit, curve.split_depth / k))
        waves = np.where(tiles_per_unit < 1.0, partial_wave, np.ceil(tiles_per_unit))
        arithmetic = waves * (k + overhead) * (2.0 * tile * tile * curve.units / (peak * share))
        rate = self._bandwidth() * curve.memory_share
        traffic = (m * k + k * n) * (operand_bytes / rate) + m * n * (max(operand_bytes, 2.0) / rate)
        seconds = _smooth_max(arithmetic, traffic) + curve.kernel_seconds
        cast = cast_bytes(m, k, precision)
        return seconds if cast is None else seconds + self.memory_seconds(cast)

    def attention_seconds(self, shape: AttentionShape, precision: str) -> FloatArray:
        """Return the time of the forward pass of causal attention: two products over the unmasked scores.

        For formats below 16 bits, attention runs in bf16. With one query, the time is that of reading keys and values.
        """
        curve = self.curve
        product = self._score_product(shape, precision, curve.attention_share, curve.attention_overhead)
        tensors = shape.heads * shape.queries + shape.groups * shape.keys
        moved_bytes = 2.0 * shape.batch * shape.head_dim * tensors * self._attention_bytes(precision)
        return _smooth_max(2.0 * product, moved_bytes / self._stream_rate()) + curve.kernel_seconds

    def attention_backward_seconds(self, shape: AttentionShape, precision: str) -> FloatArray:
        """Return the time of the backward pass: five products (Dao 2023, arXiv 2307.08691), and sums over groups."""
        curve, width = self.curve, self._attention_bytes(precision)
        product = self._score_product(
            shape, precision, curve.attention_backward_share, curve.attention_backward_overhead
        )
        tensors = 5.0 * shape.heads * shape.queries + 4.0 * shape.groups * shape.keys
        traffic = shape.batch * shape.head_dim * tensors * (width / self._stream_rate())
        summed = shape.batch * shape.heads * shape.keys * shape.head_dim * (shape.heads > shape.groups)
        sums = summed * (GROUP_TENSORS * width / self._stream_rate())
        return _smooth_max(5.0 * product, traffic) + sums + curve.kernel_seconds

    def memory_seconds(self, bytes_moved: FloatArray) -> FloatArray:
        """Return the time of an element-wise kernel."""
        rate = self._bandwidth() * self.curve.elementwise_share
        return bytes_moved * (1 / rate) + self.curve.kernel_seconds

    def run_slowdown(self) -> float:
        """Return the slowdown of the curve."""
        return self.curve.run_slowdown

    def launch_seconds(self) -> float:
        """Return the host time to launch one kernel."""
        return self.curve.launch_seconds

    def host_copy_seconds(self, bytes_moved: FloatArray) -> FloatArray:
        """Return the time of a copy over the host link."""
        return bytes_moved * (1 / self.curve.host_bytes_per_second) + HOST_LATENCY

    def _score_product(self, shape: AttentionShape, precision: str, share: float, overhead: float) -> FloatArray:
        """Return the time of one product over the scores, including the wait for the longest block of queries."""
        curve, compute_precision = self.curve, "bf16" if BYTES.get(precision, 2.0) < 2.0 else precision
        peak = self._peak(compute_precision) * (self._gemm_share(compute_precision) / curve.gemm_share)
        width = np.maximum(shape.head_dim, (shape.head_dim + curve.half_head) * (BLOCK / (BLOCK + curve.half_head)))
        scores = shape.batch * shape.heads * shape.queries * (shape.keys + overhead - 0.5 * shape.queries)
        longest = np.minimum(shape.queries, BLOCK) * (shape.keys + overhead) * (curve.attention_tail * curve.units)
        return (scores + longest) * width * (2.0 / (peak * share))

    def _gemm_share(self, precision: str) -> float:
        return self.curve.gemm_shares.get(precision, self.curve.gemm_share)

    def _attention_bytes(self, precision: str) -> float:
        return max(2.0, BYTES.get(precision, 2.0))

    def _stream_rate(self) -> float:
        return self._bandwidth() * self.curve.memory_share

    def _peak(self, precision: str) -> float:
        fact = self.chip.dense_flops_per_second.get(RUNS_AS.get(precision, precision))
        return fact.value if fact is not None else float("nan")

    def _bandwidth(self) -> float:
        fact = self.chip.memory_bandwidth_bytes_per_second
        return fact.value if fact is not None else float("nan")


def cast_bytes(m: FloatArray, k: FloatArray, precision: str) -> FloatArray | None:
    """Return the bytes that are moved to cast A[m,k] from 16 bits, as in `Roofline.gemm_seconds`; None for no cast."""
    operand_bytes = BYTES.get(precision, 2.0)
    return m * k * (2.0 + 2.0 * operand_bytes) if operand_bytes < 2.0 else None


def _smooth_max(first: FloatArray, second: FloatArray) -> FloatArray:
    """Return the 4-norm of two times: their maximum, or more if both are similar, since they overlap incompletely."""
    first, second = first * first, second * second
    result: FloatArray = np.sqrt(np.sqrt(first * first + second * second))
    return result
