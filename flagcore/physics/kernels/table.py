"""Kernel times from measurements: a fitted roofline and the interpolated residuals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from flagcore.contracts import AttentionShape
from flagcore.domain.space import FloatArray
from flagcore.physics.kernels.correction import Axis, Correction, learn_grid, learn_line
from flagcore.physics.kernels.fit import fit
from flagcore.physics.kernels.roofline import Curve, Roofline
from flagcore.physics.kernels.sheet import KernelSheet

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
    def of(cls, roofline: Roofline, sheet: KernelSheet) -> KernelTable:
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
        moved, seconds = rows.exact.sizes[:, 0], rows.exact.seconds
        residuals = np.log(seconds / roofline.memory_seconds(moved))
        return learn_line(MEMORY_AXIS, moved, residuals) if moved.size and np.isfinite(residuals).all() else None
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
