"""Kernel times from measurements: a fitted roofline, and its residuals interpolated over the sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from flagcore.contracts import AttentionShape
from flagcore.domain.space import FloatArray
from flagcore.physics.kernels.correction import Axis, Correction, learned, learned_line
from flagcore.physics.kernels.fit import fit
from flagcore.physics.kernels.roofline import Curve, Roofline
from flagcore.physics.kernels.sheet import KernelSheet

GEMM_AXES = (
    Axis(first=0, last=18, steps=2, reach=2.0),
    Axis(first=4, last=18, steps=4, reach=0.5),
    Axis(first=4, last=18, steps=4, reach=0.5),
)
"""m, n, k. A library chooses other kernels for other n and k, so one pair does not predict the next."""

ATTENTION_AXES = (
    Axis(first=0, last=12, steps=1, reach=2.0),
    Axis(first=4, last=18, steps=1, reach=2.0),
    Axis(first=4, last=9, steps=2, reach=1.0),
)
"""Sequences times heads, keys, width of a head."""

MEMORY_AXIS = Axis(first=10, last=34, steps=2, reach=0.5)
"""Bytes that an element-wise kernel moves: below the size of a cache, rates are others than above."""

IN_RUNS = 1.25
"""What kernels take in whole runs over what they take alone. Published runs on many devices took 1.33 times (median of
155) what the measured kernels of the same chip with 1.43 times the memory bandwidth predict; 1.06 of it is taken to be
the memory's. Estimated: no run was measured on the very chip whose kernels were."""

LIKE = {"fp16": "bf16", "bf16": "fp16"}
"""Precisions whose kernels behave similarly."""


@dataclass(frozen=True, slots=True)
class KernelTable:
    """Implements `KernelCosts`. What was not measured comes from the fitted roofline, scaled by the chip's peaks.

    `corrections` are those of each kind of kernel and precision; one that was not learned is missing.
    """

    roofline: Roofline
    corrections: Mapping[tuple[str, str], Correction]

    @classmethod
    def of(cls, roofline: Roofline, sheet: KernelSheet) -> KernelTable:
        """Fit `roofline` to `sheet`, and learn the residuals."""
        fitted = fit(roofline, sheet)
        corrections: dict[tuple[str, str], Correction] = {}
        for kind in ("gemm", "attention", "attention_backward", "elementwise"):
            for precision in sheet.precisions(kind):
                found = _learned(fitted, sheet, kind, precision)
                if found is not None:
                    corrections[kind, precision] = found
        return cls(fitted, corrections)

    @property
    def curve(self) -> Curve:
        """Return the fitted parameters."""
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
        """Return `IN_RUNS`: the kernels were measured alone."""
        return IN_RUNS

    def launch_seconds(self) -> float:
        return self.roofline.launch_seconds()

    def host_copy_seconds(self, bytes_moved: FloatArray) -> FloatArray:
        return self.roofline.host_copy_seconds(bytes_moved)

    def _corrected(self, kind: str, precision: str, seconds: FloatArray, *sizes: FloatArray) -> FloatArray:
        found = self.corrections.get((kind, precision)) or self.corrections.get((kind, LIKE.get(precision, precision)))
        return seconds if found is None else seconds * found(*sizes)


def _learned(roofline: Roofline, sheet: KernelSheet, kind: str, precision: str) -> Correction | None:
    """Learn from times that are the device's, and from bounds where the model is above them; None from nothing."""
    rows = sheet.rows(kind, precision)
    if kind == "elementwise":
        moved, seconds = rows.exact.sizes[:, 0], rows.exact.seconds
        residuals = np.log(seconds / roofline.memory_seconds(moved))
        return learned_line(MEMORY_AXIS, moved, residuals) if moved.size and np.isfinite(residuals).all() else None
    if kind == "gemm":
        m, n, k = rows.sizes.T
        axes, sizes, modelled = GEMM_AXES, rows.sizes, roofline.gemm_seconds(m, n, k, precision)
    else:
        shape = rows.attention_shape()
        model = roofline.attention_seconds if kind == "attention" else roofline.attention_backward_seconds
        axes, sizes, modelled = ATTENTION_AXES, np.stack(_attention_sizes(shape), axis=1), model(shape, precision)
    residuals = np.log(rows.seconds / modelled)
    usable = np.isfinite(residuals) & (~rows.bound | (residuals < 0))
    return learned(axes, sizes[usable], residuals[usable]) if usable.any() else None


def _attention_sizes(shape: AttentionShape) -> tuple[FloatArray, FloatArray, FloatArray]:
    return shape.batch * shape.heads, shape.keys, shape.head_dim
