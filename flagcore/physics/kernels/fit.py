"""Fits the parameters of a roofline to measured kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from flagcore.contracts import AttentionShape
from flagcore.domain.chip import Chip, Fact, Source
from flagcore.domain.space import FloatArray
from flagcore.physics.kernels.roofline import HOST_LATENCY, RUNS_AS, Curve, Roofline
from flagcore.physics.kernels.sheet import KernelSheet, Rows

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
