"""Measured kernels of a chip, and a roofline that is fitted to them.

A predicted time is the time of a fitted roofline, multiplied by a smooth correction factor. The factors are the ratios
of measured to modelled times, interpolated between the measured sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from math import prod
from typing import Any, NamedTuple

import numpy as np

from flagcore.contracts import AttentionShape
from flagcore.domain.chip import Chip, Fact, Source
from flagcore.domain.space import BoolArray, FloatArray, IntArray
from flagcore.physics.roofline import HOST_LATENCY, RUNS_AS, Curve, Roofline, attention_sizes

ATTENTION = tuple(size.name for size in fields(AttentionShape) if size.name != "kernel")

SIZES: Mapping[str, tuple[str, ...]] = {
    "gemm": ("m", "n", "k"),
    "attention": ATTENTION,
    "attention_backward": ATTENTION,
    "copy": ("bytes",),
    "elementwise": ("bytes",),
    "host_copy": ("bytes",),
    "launch": (),
}
"""The kinds of kernels in a sheet, and the names of their sizes, as in `flagcore.contracts.KernelCosts`. The size of
`copy` and `elementwise` is the total number of bytes read and written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A measured kernel.

    `name`: the kind of kernel, a key of SIZES.
    `sizes`: its sizes, in the order of SIZES.
    `bound`: whether `seconds` is only an upper bound, because the host was slower than the device.
    """

    name: str
    precision: str = ""
    sizes: tuple[float, ...]
    seconds: float
    bound: bool = False


class KernelArrays(NamedTuple):
    """The measured kernels of one kind and precision as arrays, with one row per kernel. Fields are as in `Kernel`."""

    sizes: FloatArray
    seconds: FloatArray
    bound: BoolArray

    def select(self, mask: BoolArray) -> KernelArrays:
        """Return the kernels that the boolean array `mask` selects."""
        return KernelArrays(self.sizes[mask], self.seconds[mask], self.bound[mask])

    @property
    def exact(self) -> KernelArrays:
        """The kernels with measured times, without those that have only an upper bound."""
        return self.select(~self.bound)

    def attention_shape(self) -> AttentionShape:
        """Return the sizes of these attention kernels, with one element per kernel."""
        return AttentionShape(kernel="", **dict(zip(ATTENTION, self.sizes.T, strict=True)))


class KernelSheet(NamedTuple):
    """The measured kernels of a chip."""

    kernels: tuple[Kernel, ...]

    def rows(self, name: str, precision: str = "") -> KernelArrays:
        """Return the kernels of one kind and precision."""
        kernels = [kernel for kernel in self.kernels if kernel.name == name and kernel.precision == precision]
        sizes = np.array([kernel.sizes for kernel in kernels], dtype=np.float64).reshape(len(kernels), len(SIZES[name]))
        seconds = np.array([kernel.seconds for kernel in kernels], dtype=np.float64)
        return KernelArrays(sizes, seconds, np.array([kernel.bound for kernel in kernels], dtype=bool))

    def precisions(self, name: str) -> tuple[str, ...]:
        """Return the precisions in which the kind of kernel `name` was measured."""
        return tuple(dict.fromkeys(kernel.precision for kernel in self.kernels if kernel.name == name))


SMALL_BYTES = 2.0**16
"""Element-wise kernels below this size, in bytes, take the minimum time of a kernel."""


def _with_missing_peaks(roofline: Roofline, sheet: KernelSheet) -> Chip:
    """Return the roofline's chip, with each unknown peak rate derived from the fastest measured kernel."""
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
    """Fit the parameters that depend on one kind of kernel each: minimum time, launch time, memory and host rates."""
    curve, fact = roofline.curve, roofline.chip.memory_bandwidth_bytes_per_second
    small, launches = sheet.rows("elementwise").exact, sheet.rows("launch").seconds
    if small.seconds.size and small.sizes.min() < SMALL_BYTES:
        curve = replace(curve, kernel_seconds=float(small.seconds[small.sizes[:, 0].argmin()]))
    changes: dict[str, Any] = {
        "host_bytes_per_second": _rate(sheet, "host_copy", HOST_LATENCY, curve.host_bytes_per_second)
    }
    if fact is not None:
        for field, kind in (("memory_share", "copy"), ("elementwise_share", "elementwise")):
            changes[field] = _rate(sheet, kind, curve.kernel_seconds, getattr(curve, field) * fact.value) / fact.value
    if launches.size:
        changes["launch_seconds"] = float(np.median(launches))
    return replace(roofline, curve=replace(curve, **changes))


def _rate(sheet: KernelSheet, name: str, startup: float, default: float) -> float:
    """Return the bytes per second of the kind of kernel `name`, with the time `startup` subtracted.

    Returns `default` if there are no measurements.
    """
    rows = _larger_half(sheet.rows(name).exact, lambda sizes: sizes[:, 0])
    long_rows = rows.select(rows.seconds > 2.0 * startup)
    rates = long_rows.sizes[:, 0] / (long_rows.seconds - startup)
    return float(np.median(rates)) if rates.size else default


def _fit_shares(roofline: Roofline, sheet: KernelSheet) -> Curve:
    """Return the roofline's curve with the shares of matrix products and attention fitted to the sheet."""
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
    """Return the median ratio of measured to modelled attention times in the first precision that was measured.

    Returns 1.0 if there are no measurements.
    """
    for precision in ("bf16", "fp16", "fp32"):
        rows = _larger_half(
            sheet.rows(name, precision).exact, lambda sizes: sizes[:, 0] * sizes[:, 1] * sizes[:, 3] * sizes[:, 4]
        )
        if rows.seconds.size:
            excess = float(np.median(rows.seconds / modelled(rows.attention_shape(), precision)))
            if excess > 0:  # false for NaN, if the peak of this precision is unknown
                return excess
    return 1.0


def _larger_half(rows: KernelArrays, size: Callable[[FloatArray], FloatArray]) -> KernelArrays:
    if not rows.seconds.size:
        return rows
    sizes = size(rows.sizes)
    return rows.select(sizes >= np.median(sizes))


NOISE = 0.03
"""The share of the residuals' variance that is attributed to noise and to the library's choice of kernels. Assumed."""

MANTISSA = 52


class GridAxis(NamedTuple):
    """An axis of a logarithmic grid over a size, with positions in octaves (log2 of the size).

    `first` and `last`: the range of the axis in octaves.
    `steps`: the number of nodes per octave.
    `reach`: the correlation length in octaves.
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
    """Correction factors on a grid over one or more sizes. They are linear between nodes and constant beyond the grid.

    Positions are computed by `octaves`, so that common sizes of models (3 x 2^j, 7 x 2^j) lie on nodes.
    """

    axes: tuple[GridAxis, ...]
    factors: FloatArray

    def __call__(self, *sizes: FloatArray) -> FloatArray:
        """Return the correction factors at the given sizes: one array per axis. The arrays broadcast."""
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
                return table.take(corner)
            low = interpolate(axis + 1, corner)
            result: FloatArray = low + shares[axis] * (interpolate(axis + 1, corner + strides[axis]) - low)
            return result

        return interpolate(0, start)


def learn_grid(axes: tuple[GridAxis, GridAxis, GridAxis], sizes: FloatArray, residuals: FloatArray) -> Correction:
    """Learn correction factors over three sizes from measured kernels.

    `sizes`: an array of shape (kernels, 3).
    `residuals`: the logarithm of measured over modelled time of each kernel.

    The method is simple kriging: a Gaussian process with mean 0 and a covariance that decays exponentially along each
    axis. Far from all measured sizes, the factor is therefore 1.
    """
    positions = np.stack([octaves(column) for column in sizes.T])
    pairs = list(zip(axes, positions, strict=True))
    first, second, third = (np.exp(-np.abs(axis.nodes[:, None] - column) / axis.reach) for axis, column in pairs)
    covariance = np.exp(-sum(np.abs(column[:, None] - column) / axis.reach for axis, column in pairs))
    weights = np.linalg.solve(covariance + NOISE * np.eye(len(residuals)), residuals)
    planes = (first[:, None, :] * second[None, :, :]).reshape(-1, len(residuals))
    logs = (planes * weights) @ third.T
    return Correction(axes, np.exp(logs).reshape(first.shape[0], second.shape[0], third.shape[0]))


def learn_line(axis: GridAxis, sizes: FloatArray, residuals: FloatArray) -> Correction:
    """Learn correction factors over one size from measured kernels.

    `sizes`: the size of each kernel.
    `residuals`: the logarithm of measured over modelled time of each kernel.

    The factor is a weighted mean in which the weights halve with every `reach` octaves of distance. Beyond the measured
    sizes it is constant.
    """
    nodes, positions = axis.nodes, octaves(sizes)
    nearest = np.clip(nodes, positions.min(), positions.max())
    weights = np.exp2(-np.abs(nearest[:, None] - positions) / axis.reach)
    return Correction((axis,), np.exp(weights @ residuals / weights.sum(axis=1)))


def octaves(sizes: FloatArray) -> FloatArray:
    """Return the positions of `sizes` on a logarithmic axis: log2 at powers of two, and linear between them."""
    bits = np.asarray(sizes, dtype=np.float64).view(np.int64)
    return bits.astype(np.float64) * (1.0 / (1 << MANTISSA)) - 1023.0


GEMM_AXES = (
    GridAxis(first=0, last=18, steps=2, reach=2.0),
    GridAxis(first=4, last=18, steps=4, reach=0.5),
    GridAxis(first=4, last=18, steps=4, reach=0.5),
)
"""The axes m, n and k of matrix products. The reach of n and k is short, because libraries choose kernels by them."""

ATTENTION_AXES = (
    GridAxis(first=0, last=12, steps=1, reach=2.0),
    GridAxis(first=4, last=18, steps=1, reach=2.0),
    GridAxis(first=4, last=9, steps=2, reach=1.0),
)
"""The axes of attention kernels: sequences times heads, keys, and the width of a head."""

MEMORY_AXIS = GridAxis(first=10, last=34, steps=2, reach=0.5)
"""The axis of element-wise kernels: bytes moved. The reach is short, because rates change at the sizes of caches."""

RUN_SLOWDOWN = 1.31
"""The ratio of kernel times in runs on many devices to times of kernels that run alone. It is an estimate. Published
runs on many devices took 1.39 times (median of 155) as long as predicted from kernels of a similar chip. That chip has
1.43 times the memory bandwidth, to which a factor of 1.06 is attributed."""


def with_measured(roofline: Roofline, sheet: KernelSheet) -> Roofline:
    """Return `roofline` fitted to the kernels in `sheet`, with corrections learned from the remaining errors.

    Each share of a peak rate is fitted to the median of the larger half of the kernels that depend on it. Unknown peaks
    of the chip are derived from its fastest kernels. `run_slowdown` is RUN_SLOWDOWN, because the kernels were measured
    alone.
    """
    roofline = replace(roofline, chip=_with_missing_peaks(roofline, sheet))
    fitted = replace(roofline, curve=_fit_shares(_fit_rates(roofline, sheet), sheet))
    corrections: dict[tuple[str, str], Correction] = {}
    for kind in ("gemm", "attention", "attention_backward", "elementwise"):
        for precision in sheet.precisions(kind):
            correction = _learn_correction(fitted, sheet, kind, precision)
            if correction is not None:
                corrections[kind, precision] = correction
    return replace(fitted, curve=replace(fitted.curve, run_slowdown=RUN_SLOWDOWN), corrections=corrections)


def _learn_correction(roofline: Roofline, sheet: KernelSheet, kind: str, precision: str) -> Correction | None:
    """Return the correction of one kind of kernel and precision, or None if there are no usable measurements.

    Upper bounds are usable only if they are below the modelled time.
    """
    rows = sheet.rows(kind, precision)
    if kind == "elementwise":
        moved_bytes, seconds = rows.exact.sizes[:, 0], rows.exact.seconds
        residuals = np.log(seconds / roofline.memory_seconds(moved_bytes))
        is_known = moved_bytes.size and np.isfinite(residuals).all()
        return learn_line(MEMORY_AXIS, moved_bytes, residuals) if is_known else None
    if kind == "gemm":
        m, n, k = rows.sizes.T
        axes, sizes, modelled = GEMM_AXES, rows.sizes, roofline.gemm_seconds(m, n, k, precision)
    else:
        shape = rows.attention_shape()
        model = roofline.attention_seconds if kind == "attention" else roofline.attention_backward_seconds
        axes, sizes, modelled = ATTENTION_AXES, np.stack(attention_sizes(shape), axis=1), model(shape, precision)
    residuals = np.log(rows.seconds / modelled)
    usable = np.isfinite(residuals) & (~rows.bound | (residuals < 0))
    return learn_grid(axes, sizes[usable], residuals[usable]) if usable.any() else None
