"""Kernel times from a chip's peak rates, costs from an ordered stack of sources, and a simple memory model of a device.

If a source returns NaN for a time, the next source is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np

from flagcore.contracts import AttentionShape, CollectiveCosts, KernelCosts
from flagcore.domain.chip import Chip, NotNegative, Positive
from flagcore.domain.cluster import NodeGroup
from flagcore.domain.space import FloatArray, IntArray

RUNS_AS = {"mxfp8": "fp8", "nvfp4": "fp4", "mxfp4": "fp4"}
"""Precisions whose matrix products run at the rate of another precision."""

BYTES = {"fp64": 8.0, "fp32": 4.0, "tf32": 4.0, "fp8": 1.0, "int8": 1.0, "mxfp8": 33 / 32, "mxfp4": 17 / 32}
BYTES["nvfp4"] = 9 / 16
"""Bytes per element of an operand; others have 2. Blocks of 32 elements, or 16 (nvfp4), have a scale of a byte."""

BLOCK = 128.0
"""The number of queries that a compute unit processes at a time. Source: current attention kernels."""

GROUP_TENSORS = 2.2
"""The memory traffic for summing gradients over query heads, in the backward pass of grouped-query attention. The unit
is the size of a key tensor with one head per query head. Fitted to 33 backward shapes on one accelerator."""

SIMILAR_PRECISION = {"fp16": "bf16", "bf16": "fp16"}
"""Precisions with similar kernels, whose corrections are used if a precision was not measured."""

HOST_LATENCY = 10e-6
"""The latency in seconds of a copy between device and host. An estimate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """The parameters of `Roofline`.

    The defaults were fitted to 354 kernels that the host did not limit, on one current data-centre accelerator: 178
    bf16 matrix products, 93 forward and 83 backward passes of causal attention. Their mean errors are 5.5%, 1.9% and
    3.0%. The parameters are relative to the peaks, so they also apply to other chips with a similar design.
    """

    gemm_share: Positive = 0.81
    """The share of the peak flops that large matrix products reach."""
    gemm_shares: Mapping[str, Positive] = field(default_factory=dict)
    """The values that replace `gemm_share`, by precision."""
    units: Positive = 132.0
    """The number of compute units. Tiles run in waves of at most this many tiles."""
    tile: Positive = 64.0
    """The side length of a tile of a matrix product. Products are padded to whole tiles."""
    least_rows: Positive = 64.0
    """The multiple to which the rows of products with fewer rows than a tile are padded. It matters only if a chip has
    few peak flops per byte of bandwidth; on others, such products wait for memory."""
    tile_overhead: NotNegative = 143.0
    """The overhead per tile, as the depth k that a unit could compute in this time in a 16-bit precision."""
    split_depth: NotNegative = 2048.0
    """The minimum depth of the pieces into which a product is split along k. Only products with fewer tiles than units
    are split."""
    memory_share: Positive = 0.91
    """The share of the memory bandwidth that copies and the operands of matrix products reach."""
    elementwise_share: Positive = 0.77
    """The share of the memory bandwidth that element-wise kernels, such as activations and optimizers, reach."""
    kernel_seconds: NotNegative = 2e-6
    """The minimum time of a kernel on the device."""
    attention_share: Positive = 0.72
    """The share of the peak flops that the forward pass of long causal attention reaches, for heads of width 128. In
    precisions of `gemm_shares`, it is scaled by their share relative to `gemm_share`."""
    attention_shares: Mapping[str, Positive] = field(default_factory=dict)
    """The values that replace `attention_share`, by `AttentionShape.kernel`; the backward pass changes alike."""
    attention_overhead: NotNegative = 230.0
    """The overhead per block of queries, as the number of keys that could be processed in this time."""
    attention_backward_share: Positive = 0.69
    """As `attention_share`, for the backward pass."""
    attention_backward_overhead: NotNegative = 580.0
    """As `attention_overhead`, for the backward pass."""
    attention_tail: NotNegative = 0.61
    """The time that units wait for the last block of queries, as a share of the time of the longest block."""
    half_head: NotNegative = 76.0
    """The head width at which attention has half the efficiency of very wide heads. The efficiency is constant above
    128."""
    launch_seconds: NotNegative = 11e-6
    """The host's time to launch one kernel, including the framework."""
    run_slowdown: NotNegative = 1.0
    """The factor by which kernels are slower in a run on many devices. 1 if the curve was fitted to such runs."""
    host_bytes_per_second: Positive = 25e9
    """The rate of copies between device and pinned host memory in one direction. PCIe 4.0 x16 reached 26 to 28 GB/s on
    two chips (FlagPerf interconnect-h2d; llaisys docs/hardware). Chips with newer links should override it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """A roofline model (Williams et al. 2009) with the efficiencies of `curve`. Implements `KernelCosts`.

    Times are NaN if a peak rate of the chip is unknown.

    `corrections`: by kind of kernel and precision, a function of the kernel's sizes that returns the ratio of measured
    to modelled times. `flagcore_vendorkit.kernel_table` learns them. Kernels that were not measured have none.
    """

    chip: Chip
    curve: Curve = field(default_factory=Curve)
    corrections: Mapping[tuple[str, str], Callable[..., FloatArray]] = field(default_factory=dict)

    def gemm_seconds(self, m: FloatArray, n: FloatArray, k: FloatArray, precision: str) -> FloatArray:
        """Return the time of one matrix product: the maximum of arithmetic and memory traffic, plus casts.

        A product is divided into tiles of depth `k`, which run in waves over the compute units. If there are fewer
        tiles than units, it is also split along k. In formats below 16 bits, operand A is cast from 16 bits: it is read
        once and written twice, by rows and by columns. Operand B is already cast, because it is a weight or was cast in
        the forward pass.
        """
        curve, peak = self.curve, self._peak(precision)
        tile, operand_bytes = curve.tile, BYTES.get(precision, 2.0)
        share = self._gemm_share(precision)
        bf16_peak = self._peak("bf16")
        overhead = curve.tile_overhead * (peak / bf16_peak if peak > bf16_peak else 1.0)
        tiles_per_unit = np.ceil(m * (1 / tile)) * np.ceil(n * (1 / tile)) * (1 / curve.units)
        partial_wave = np.minimum(1.0, np.maximum(tiles_per_unit, curve.split_depth / np.maximum(k, 1.0)))
        waves = np.where(tiles_per_unit < 1.0, partial_wave, np.ceil(tiles_per_unit))
        arithmetic = waves * (k + overhead) * (2.0 * tile * tile * curve.units / (peak * share))
        if curve.least_rows < tile:
            arithmetic = arithmetic * np.minimum(np.ceil(m / curve.least_rows) * (curve.least_rows / tile), 1.0)
        rate = self._bandwidth() * curve.memory_share
        traffic = (m * k + k * n) * (operand_bytes / rate) + m * n * (max(operand_bytes, 2.0) / rate)
        seconds = _smooth_max(arithmetic, traffic) + curve.kernel_seconds
        cast = cast_bytes(m, k, precision)
        seconds = seconds if cast is None else seconds + self._elementwise_seconds(cast)
        return self._corrected("gemm", precision, seconds, m, n, k)

    def attention_seconds(self, shape: AttentionShape, precision: str) -> FloatArray:
        """Return the time of the forward pass of causal attention: two matrix products over the unmasked scores.

        For formats below 16 bits, attention runs in bf16. For a single query, reading keys and values dominates.
        """
        curve = self.curve
        product = self._score_product(shape, precision, curve.attention_share, curve.attention_overhead)
        tensors = shape.heads * shape.queries + shape.groups * shape.keys
        moved_bytes = 2.0 * shape.batch * shape.head_dim * tensors * self._attention_bytes(precision)
        seconds = _smooth_max(2.0 * product, moved_bytes / self._stream_rate()) + curve.kernel_seconds
        return self._corrected("attention", precision, seconds, *attention_sizes(shape))

    def attention_backward_seconds(self, shape: AttentionShape, precision: str) -> FloatArray:
        """Return the time of the backward pass of causal attention.

        It consists of five matrix products (Dao 2023, arXiv 2307.08691) and of sums over grouped query heads.
        """
        curve, width = self.curve, self._attention_bytes(precision)
        product = self._score_product(
            shape, precision, curve.attention_backward_share, curve.attention_backward_overhead
        )
        tensors = 5.0 * shape.heads * shape.queries + 4.0 * shape.groups * shape.keys
        traffic = shape.batch * shape.head_dim * tensors * (width / self._stream_rate())
        summed = shape.batch * shape.heads * shape.keys * shape.head_dim * (shape.heads > shape.groups)
        sums = summed * (GROUP_TENSORS * width / self._stream_rate())
        seconds = _smooth_max(5.0 * product, traffic) + sums + curve.kernel_seconds
        return self._corrected("attention_backward", precision, seconds, *attention_sizes(shape))

    def memory_seconds(self, bytes_moved: FloatArray) -> FloatArray:
        """Return the time of an element-wise kernel."""
        return self._corrected("elementwise", "", self._elementwise_seconds(bytes_moved), bytes_moved)

    def _elementwise_seconds(self, bytes_moved: FloatArray) -> FloatArray:
        rate = self._bandwidth() * self.curve.elementwise_share
        return bytes_moved * (1 / rate) + self.curve.kernel_seconds

    def run_slowdown(self) -> float:
        """Return the factor by which kernels are slower in a run on many devices."""
        return self.curve.run_slowdown

    def launch_seconds(self) -> float:
        """Return the host's time to launch one kernel."""
        return self.curve.launch_seconds

    def host_copy_seconds(self, bytes_moved: FloatArray) -> FloatArray:
        """Return the time of a copy between device and host."""
        return bytes_moved * (1 / self.curve.host_bytes_per_second) + HOST_LATENCY

    def _corrected(self, kind: str, precision: str, seconds: FloatArray, *sizes: FloatArray) -> FloatArray:
        similar = SIMILAR_PRECISION.get(precision, precision)
        correction = self.corrections.get((kind, precision)) or self.corrections.get((kind, similar))
        return seconds if correction is None else seconds * correction(*sizes)

    def _score_product(self, shape: AttentionShape, precision: str, share: float, overhead: float) -> FloatArray:
        """Return the time of one matrix product over the unmasked scores, including the wait for the last block."""
        curve, compute_precision = self.curve, "bf16" if BYTES.get(precision, 2.0) < 2.0 else precision
        peak = self._peak(compute_precision) * (self._gemm_share(compute_precision) / curve.gemm_share)
        width = np.maximum(shape.head_dim, (shape.head_dim + curve.half_head) * (BLOCK / (BLOCK + curve.half_head)))
        share *= curve.attention_shares.get(shape.kernel, curve.attention_share) / curve.attention_share
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


def attention_sizes(shape: AttentionShape) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return the sizes on which corrections of attention kernels depend: sequences times heads, keys, head width."""
    return shape.batch * shape.heads, shape.keys, shape.head_dim


def cast_bytes(m: FloatArray, k: FloatArray, precision: str) -> FloatArray | None:
    """Return the memory traffic in bytes for casting A[m,k] from 16 bits (see `Roofline.gemm_seconds`).

    Returns None if no cast is needed.
    """
    operand_bytes = BYTES.get(precision, 2.0)
    return m * k * (2.0 + 2.0 * operand_bytes) if operand_bytes < 2.0 else None


def _smooth_max(first: FloatArray, second: FloatArray) -> FloatArray:
    """Return the 4-norm of two times.

    It is close to their maximum, but larger if they are similar, because the two activities overlap only partly.
    """
    first, second = first * first, second * second
    return np.sqrt(np.sqrt(first * first + second * second))


C = TypeVar("C", KernelCosts, CollectiveCosts)


class KernelCostStack(NamedTuple):
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


class CollectiveCostStack(NamedTuple):
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
    return stack._replace(slowdown=stack.slowdown * slowdown, launch_slowdown=stack.launch_slowdown * launches)


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

    `capacity`: the budget of one device in bytes, or None. `context_bytes`: the memory in use before the first tensor.
    `fragmentation`: the memory that the allocator reserves beyond tensors, as a share of the tensors.
    `workspace`: the bytes of the matrix library's workspace. `communicator`: those of each communicator's buffers, if
    not part of `context_bytes`. `further`: estimates, for each after the first, and each that reaches other hosts.
    """

    capacity: float | None
    context_bytes: float = 1.2e9
    fragmentation: float = 0.01
    workspace: float = 0.0
    communicator: float = 0.0
    further: tuple[float, float] = (0.0, 0.0)

    @classmethod
    def of(cls, group: NodeGroup, **figures: Any) -> PlainMemory:
        """Return the memory model of a node group.

        The capacity is the group's memory budget, or else the usable memory of its chip. `figures` set other fields.
        """
        fact = group.chip.usable_bytes or group.chip.memory_bytes
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
