"""Measured kernels of a chip, and kernel times from them.

The times are those of a fitted roofline, multiplied by smooth factors of measured over modelled times, which are
interpolated between the measured sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from math import prod
from typing import Any

import numpy as np

from flagcore.contracts import AttentionShape
from flagcore.domain.chip import Chip, Fact, Source
from flagcore.domain.space import BoolArray, FloatArray, IntArray
from flagcore.physics.roofline import HOST_LATENCY, RUNS_AS, Curve, Roofline

ATTENTION = tuple(size.name for size in fields(AttentionShape))

SIZES: Mapping[str, tuple[str, ...]] = {
    "gemm": ("m", "n", "k"),
    "attention": ATTENTION,
    "attention_backward": ATTENTION,
    "copy": ("bytes",),
    "elementwise": ("bytes",),
    "host_copy": ("bytes",),
    "launch": (),
}
"""The kinds of kernels of a sheet and their sizes, as in `flagcore.contracts.KernelCosts`. The size of `copy` and
`elementwise` is the total number of bytes read and written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A measured kernel, with `sizes` in the order of `SIZES`.

    If `bound` is true, the host was slower than the device, so `seconds` is an upper bound.
    """

    name: str
    precision: str = ""
    sizes: tuple[float, ...]
    seconds: float
    bound: bool = False


@dataclass(frozen=True, slots=True)
class Rows:
    """The kernels of one kind and precision: one row of `sizes` each, its time, and whether that is an upper bound."""

    sizes: FloatArray
    seconds: FloatArray
    bound: BoolArray

    def select(self, rows: BoolArray) -> Rows:
        """Return the rows that a mask selects."""
        return Rows(self.sizes[rows], self.seconds[rows], self.bound[rows])

    @property
    def exact(self) -> Rows:
        """The rows with measured times, without upper bounds."""
        return self.select(~self.bound)

    def attention_shape(self) -> AttentionShape:
        """Return the sizes of attention kernels, with one element per row."""
        return AttentionShape(**dict(zip(ATTENTION, self.sizes.T, strict=True)))


@dataclass(frozen=True, slots=True)
class KernelSheet:
    """Measured kernels by kind and precision."""

    kernels: tuple[Kernel, ...]

    def rows(self, name: str, precision: str = "") -> Rows:
        """Return the kernels of one kind and precision."""
        kernels = [kernel for kernel in self.kernels if kernel.name == name and kernel.precision == precision]
        sizes = np.array([kernel.sizes for kernel in kernels], dtype=np.float64).reshape(len(kernels), len(SIZES[name]))
        seconds = np.array([kernel.seconds for kernel in kernels], dtype=np.float64)
        return Rows(sizes, seconds, np.array([kernel.bound for kernel in kernels], dtype=bool))

    def precisions(self, name: str) -> tuple[str, ...]:
        """Return the precisions in which a kind of kernel was measured."""
        return tuple(dict.fromkeys(kernel.precision for kernel in self.kernels if kernel.name == name))


SMALL_BYTES = 2.0**16
"""Element-wise kernels below this size show the minimum time of a kernel."""


def fit(roofline: Roofline, sheet: KernelSheet) -> Roofline:
    """Return `roofline` with its shares of peak rates fitted to `sheet`. Unknown peaks are derived from `sheet`.

    Each share is fitted to the median of the larger half of the kernels that depend on it.
    """
    roofline = replace(roofline, chip=_with_missing_peaks(roofline, sheet))
    return replace(roofline, curve=_fit_shares(_fit_rates(roofline, sheet), sheet))


def _with_missing_peaks(roofline: Roofline, sheet: KernelSheet) -> Chip:
    chip, curve = roofline.chip, roofline.curve
    source = Source(kind="measured", detail="fastest kernel of a sheet over the share that such kernels reach")
    copies = sheet.rows("copy").exact
    if chip.memory_bandwidth_bytes_per_second is None and copies.seconds.size:
        best = float((copies.sizes[:, 0] / copies.seconds).max()) / curve.memory_share
        chip = replace(chip, memory_bandwidth_bytes_per_second=Fact(value=best, source=source))
    peaks = dict(chip.dense_flops_per_second)
    for precision in sheet.precisions("gemm"):
        rows = sheet.rows("gemm", precision).exact
        if RUNS_AS.get(precision, precision) not in peaks and rows.seconds.size:
            best = float((2.0 * rows.sizes.prod(axis=1) / rows.seconds).max()) / curve.gemm_share
            peaks[RUNS_AS.get(precision, precision)] = Fact(value=best, source=source)
    return replace(chip, dense_flops_per_second=peaks)


def _fit_rates(roofline: Roofline, sheet: KernelSheet) -> Roofline:
    """Fit the parameters that are read from one kind of kernel: minimum time, launches, memory and host rates."""
    curve, fact = roofline.curve, roofline.chip.memory_bandwidth_bytes_per_second
    small, launches = sheet.rows("elementwise").exact, sheet.rows("launch").seconds
    if small.seconds.size and small.sizes.min() < SMALL_BYTES:
        curve = replace(curve, kernel_seconds=float(small.seconds[small.sizes[:, 0].argmin()]))
    changes: dict[str, Any] = {
        "host_bytes_per_second": _rate(sheet, "host_copy", HOST_LATENCY, curve.host_bytes_per_second)
    }
    if fact is not None:
        for field, kind in (("memory_share", "copy"), ("elementwise_share", "elementwise")):
            rate = _rate(sheet, kind, curve.kernel_seconds, getattr(curve, field) * fact.value)
            changes[field] = rate / fact.value
    if launches.size:
        changes["launch_seconds"] = float(np.median(launches))
    return replace(roofline, curve=replace(curve, **changes))


def _rate(sheet: KernelSheet, name: str, startup: float, default: float) -> float:
    """Return the bytes per second of a kind of kernel without its start-up time."""
    rows = _larger_half(sheet.rows(name).exact, lambda sizes: sizes[:, 0])
    long_rows = rows.select(rows.seconds > 2.0 * startup)
    return (
        float(np.median(long_rows.sizes[:, 0] / (long_rows.seconds - startup))) if long_rows.seconds.size else default
    )


def _fit_shares(roofline: Roofline, sheet: KernelSheet) -> Curve:
    curve = roofline.curve
    shares = dict(curve.gemm_shares)
    for precision in sheet.precisions("gemm"):
        rows = _larger_half(sheet.rows("gemm", precision).exact, lambda sizes: sizes.prod(axis=1))
        if rows.seconds.size:
            m, n, k = rows.sizes.T
            excess = rows.seconds / roofline.gemm_seconds(m, n, k, precision)
            shares[precision] = shares.get(precision, curve.gemm_share) / float(np.median(excess))
    default_share = next((shares[name] for name in ("bf16", "fp16", "fp32") if name in shares), curve.gemm_share)
    curve = replace(curve, gemm_shares=shares, gemm_share=default_share)
    roofline = replace(roofline, curve=curve)
    forward = _excess(sheet, "attention", roofline.attention_seconds)
    backward = _excess(sheet, "attention_backward", roofline.attention_backward_seconds)
    return replace(
        curve,
        attention_share=curve.attention_share / forward,
        attention_backward_share=curve.attention_backward_share / backward,
    )


def _excess(sheet: KernelSheet, name: str, modelled: Callable[[AttentionShape, str], FloatArray]) -> float:
    """Return the median ratio of measured to modelled attention times in the first precision that was measured."""
    for precision in ("bf16", "fp16", "fp32"):
        rows = _larger_half(
            sheet.rows(name, precision).exact, lambda sizes: sizes[:, 0] * sizes[:, 1] * sizes[:, 3] * sizes[:, 4]
        )
        excess = (
            float(np.median(rows.seconds / modelled(rows.attention_shape(), precision))) if len(rows.seconds) else 0
        )
        if excess > 0:  # false for NaN: the peak of the precision is unknown
            return excess
    return 1.0


def _larger_half(rows: Rows, size: Callable[[FloatArray], FloatArray]) -> Rows:
    if not rows.seconds.size:
        return rows
    sizes = size(rows.sizes)
    return rows.select(sizes >= np.median(sizes))


NOISE = 0.03
"""The share of a residual's variance that is attributed to noise and to the library's choice of a kernel. Assumed."""

MANTISSA = 52


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """An axis of a logarithmic grid, from the octave `first` to `last` with `steps` nodes per octave.

    `reach` is the correlation length in octaves.
    """

    first: int
    last: int
    steps: int
    reach: float

    @property
    def nodes(self) -> FloatArray:
        """The positions of the nodes in octaves."""
        return np.arange(self.first * self.steps, self.last * self.steps + 1) / self.steps


@dataclass(frozen=True, slots=True)
class Correction:
    """Factors on a grid over one or more sizes, linear between the nodes, constant beyond them.

    Positions are the values of `octaves`, so that common sizes of models (3 x 2^j, 7 x 2^j) are at nodes.
    """

    axes: tuple[Axis, ...]
    factors: FloatArray

    def __call__(self, *sizes: FloatArray) -> FloatArray:
        """Return the factors at some sizes, one array per axis; they broadcast."""
        strides = [prod(self.factors.shape[index + 1 :]) for index in range(len(self.axes))]
        table, shares = self.factors.ravel(), []
        start: IntArray | int = 0
        for axis, size, stride in zip(self.axes, sizes, strides, strict=True):
            position = np.minimum(np.maximum(octaves(size), axis.first), axis.last - 1e-9) * axis.steps
            node = np.floor(position)
            shares.append(position - node)
            start = start + (node - axis.first * axis.steps).astype(np.int64) * stride

        def interpolate(axis: int, corner: IntArray | int) -> FloatArray:
            if axis == len(shares):
                value: FloatArray = table.take(corner)
                return value
            low = interpolate(axis + 1, corner)
            result: FloatArray = low + shares[axis] * (interpolate(axis + 1, corner + strides[axis]) - low)
            return result

        return interpolate(0, start)


def learn_grid(axes: tuple[Axis, Axis, Axis], sizes: FloatArray, residuals: FloatArray) -> Correction:
    """Learn a correction of three sizes from `residuals`, the log of measured over modelled, at the rows of `sizes`.

    The method is simple kriging: a Gaussian process with mean 0 and a covariance that decays exponentially along each
    axis. Far from the measured sizes the factor is 1.
    """
    positions = np.stack([octaves(column) for column in sizes.T])
    pairs = list(zip(axes, positions, strict=True))
    first, second, third = (np.exp(-np.abs(axis.nodes[:, None] - column) / axis.reach) for axis, column in pairs)
    covariance = np.exp(-sum(np.abs(column[:, None] - column) / axis.reach for axis, column in pairs))
    weights = np.linalg.solve(covariance + NOISE * np.eye(len(residuals)), residuals)
    planes = (first[:, None, :] * second[None, :, :]).reshape(-1, len(residuals))
    logs = (planes * weights) @ third.T
    return Correction(axes, np.exp(logs).reshape(first.shape[0], second.shape[0], third.shape[0]))


def learn_line(axis: Axis, sizes: FloatArray, residuals: FloatArray) -> Correction:
    """Learn a correction of one size from `residuals`, the log of measured over modelled, at `sizes`.

    The result is a weighted mean whose weights halve with every `reach` octaves of distance. Beyond the measured sizes
    it is constant.
    """
    nodes, positions = axis.nodes, octaves(sizes)
    nearest = np.clip(nodes, positions.min(), positions.max())
    weights = np.exp2(-np.abs(nearest[:, None] - positions) / axis.reach)
    return Correction((axis,), np.exp(weights @ residuals / weights.sum(axis=1)))


def octaves(sizes: FloatArray) -> FloatArray:
    """Return log2 of `sizes`, interpolated linearly between powers of two."""
    bits = np.asarray(sizes, dtype=np.float64).view(np.int64)
    power: FloatArray = bits.astype(np.float64) * (1.0 / (1 << MANTISSA)) - 1023.0
    return power


GEMM_AXES = (
    Axis(first=0, last=18, steps=2, reach=2.0),
    Axis(first=4, last=18, steps=4, reach=0.5),
    Axis(first=4, last=18, steps=4, reach=0.5),
)
"""m, n and k. The reach of n and k is short, because libraries choose kernels by n and k."""

ATTENTION_AXES = (
    Axis(first=0, last=12, steps=1, reach=2.0),
    Axis(first=4, last=18, steps=1, reach=2.0),
    Axis(first=4, last=9, steps=2, reach=1.0),
)
"""Sequences times heads, keys, and the width of a head."""

MEMORY_AXIS = Axis(first=10, last=34, steps=2, reach=0.5)
"""The bytes that an element-wise kernel moves. The reach is short, because rates change at the sizes of caches."""

RUN_SLOWDOWN = 1.25
"""The ratio of kernel times in complete runs to times of kernels alone. It is an estimate: published runs on many
devices took 1.33 times (median of 155) the time predicted from kernels of a similar chip with 1.43 times the memory
bandwidth, and a factor of 1.06 is attributed to the bandwidth."""

SIMILAR_PRECISION = {"fp16": "bf16", "bf16": "fp16"}
"""Precisions with similar kernels."""


@dataclass(frozen=True, slots=True)
class KernelTable:
    """Kernel costs from a fitted roofline, with `corrections` by kind of kernel and precision.

    Implements `flagcore.contracts.KernelCosts`. Kernels that were not measured have no correction.
    """

    roofline: Roofline
    corrections: Mapping[tuple[str, str], Correction]

    @classmethod
    def from_sheet(cls, roofline: Roofline, sheet: KernelSheet) -> KernelTable:
        """Fit `roofline` to `sheet`, and learn corrections from the residuals."""
        fitted = fit(roofline, sheet)
        corrections: dict[tuple[str, str], Correction] = {}
        for kind in ("gemm", "attention", "attention_backward", "elementwise"):
            for precision in sheet.precisions(kind):
                correction = _learn_correction(fitted, sheet, kind, precision)
                if correction is not None:
                    corrections[kind, precision] = correction
        return cls(fitted, corrections)

    @property
    def curve(self) -> Curve:
        """The fitted parameters."""
        return self.roofline.curve

    def gemm_seconds(self, m: FloatArray, n: FloatArray, k: FloatArray, precision: str) -> FloatArray:
        return self._corrected("gemm", precision, self.roofline.gemm_seconds(m, n, k, precision), m, n, k)

    def attention_seconds(self, shape: AttentionShape, precision: str) -> FloatArray:
        seconds = self.roofline.attention_seconds(shape, precision)
        return self._corrected("attention", precision, seconds, *_attention_sizes(shape))

    def attention_backward_seconds(self, shape: AttentionShape, precision: str) -> FloatArray:
        seconds = self.roofline.attention_backward_seconds(shape, precision)
        return self._corrected("attention_backward", precision, seconds, *_attention_sizes(shape))

    def memory_seconds(self, bytes_moved: FloatArray) -> FloatArray:
        return self._corrected("elementwise", "", self.roofline.memory_seconds(bytes_moved), bytes_moved)

    def run_slowdown(self) -> float:
        """Return `RUN_SLOWDOWN`, since the kernels were measured alone."""
        return RUN_SLOWDOWN

    def launch_seconds(self) -> float:
        return self.roofline.launch_seconds()

    def host_copy_seconds(self, bytes_moved: FloatArray) -> FloatArray:
        return self.roofline.host_copy_seconds(bytes_moved)

    def _corrected(self, kind: str, precision: str, seconds: FloatArray, *sizes: FloatArray) -> FloatArray:
        similar = SIMILAR_PRECISION.get(precision, precision)
        correction = self.corrections.get((kind, precision)) or self.corrections.get((kind, similar))
        return seconds if correction is None else seconds * correction(*sizes)


def _learn_correction(roofline: Roofline, sheet: KernelSheet, kind: str, precision: str) -> Correction | None:
    """Learn from measured times, and from upper bounds that are below the model; None if there are none."""
    rows = sheet.rows(kind, precision)
    if kind == "elementwise":
        moved_bytes, seconds = rows.exact.sizes[:, 0], rows.exact.seconds
        residuals = np.log(seconds / roofline.memory_seconds(moved_bytes))
        return (
            learn_line(MEMORY_AXIS, moved_bytes, residuals)
            if moved_bytes.size and np.isfinite(residuals).all()
            else None
        )
    if kind == "gemm":
        m, n, k = rows.sizes.T
        axes, sizes, modelled = GEMM_AXES, rows.sizes, roofline.gemm_seconds(m, n, k, precision)
    else:
        shape = rows.attention_shape()
        model = roofline.attention_seconds if kind == "attention" else roofline.attention_backward_seconds
        axes, sizes, modelled = ATTENTION_AXES, np.stack(_attention_sizes(shape), axis=1), model(shape, precision)
    residuals = np.log(rows.seconds / modelled)
    usable = np.isfinite(residuals) & (~rows.bound | (residuals < 0))
    return learn_grid(axes, sizes[usable], residuals[usable]) if usable.any() else None


def _attention_sizes(shape: AttentionShape) -> tuple[FloatArray, FloatArray, FloatArray]:
    return shape.batch * shape.heads, shape.keys, shape.head_dim
