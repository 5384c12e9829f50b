"""Kernel times from measurements: a roofline fitted to them, and what it left, learned over the sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from flagcore.contracts import AttentionShape
from flagcore.domain.space import FloatArray
from flagcore.physics.kernels.correction import Axis, Correction, LineCorrection
from flagcore.physics.kernels.curve import Curve
from flagcore.physics.kernels.fit import fit
from flagcore.physics.kernels.roofline import Roofline
from flagcore.physics.kernels.sheet import KernelSheet, Rows

GEMM_AXES = (
    Axis(first=0, last=18, steps=2, reach=2.0),
    Axis(first=4, last=18, steps=4, reach=0.5),
    Axis(first=4, last=18, steps=4, reach=0.5),
)
"""m, n, k. A library chooses other kernels for other n and k, so what one pair shows tells little of the next."""

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
"""Precisions whose kernels behave alike."""


@dataclass(frozen=True, slots=True)
class KernelTable:
    """Implements `KernelCosts`. What was not measured comes from the fitted roofline, scaled by the chip's peaks."""

    roofline: Roofline
    gemm: Mapping[str, Correction | None]
    attention: Mapping[str, Correction | None]
    attention_backward: Mapping[str, Correction | None]
    memory: LineCorrection | None

    @classmethod
    def of(cls, roofline: Roofline, sheet: KernelSheet) -> KernelTable:
        """Fit `roofline` to `sheet`, and learn what it leaves."""
        fitted = fit(roofline, sheet)
        gemm = {name: _learned_gemm(fitted, sheet, name) for name in sheet.precisions("gemm")}
        forward, backward = (
            {name: _learned_attention(fitted, sheet, kind, name) for name in sheet.precisions(kind)}
            for kind in ("attention", "attention_backward")
        )
        return cls(fitted, gemm, forward, backward, _learned_memory(fitted, sheet))

    @property
    def curve(self) -> Curve:
        """Return the fitted parameters."""
        return self.roofline.curve

    def gemm_seconds(self, m: FloatArray, n: FloatArray, k: FloatArray, precision: str) -> FloatArray:
        """Return the time of a matrix product."""
        seconds = self.roofline.gemm_seconds(m, n, k, precision)
        learned = _like(self.gemm, precision)
        return seconds if learned is None else seconds * learned(m, n, k)

    def attention_seconds(self, shape: AttentionShape, precision: str) -> FloatArray:
        """Return the time of causal attention forward."""
        seconds = self.roofline.attention_seconds(shape, precision)
        learned = _like(self.attention, precision)
        return seconds if learned is None else seconds * learned(*_attention_sizes(shape))

    def attention_backward_seconds(self, shape: AttentionShape, precision: str) -> FloatArray:
        """Return the time of its backward pass."""
        seconds = self.roofline.attention_backward_seconds(shape, precision)
        learned = _like(self.attention_backward, precision)
        return seconds if learned is None else seconds * learned(*_attention_sizes(shape))

    def memory_seconds(self, bytes_moved: FloatArray) -> FloatArray:
        """Return the time of an element-wise kernel."""
        seconds = self.roofline.memory_seconds(bytes_moved)
        return seconds if self.memory is None else seconds * self.memory(bytes_moved)

    def run_slowdown(self) -> float:
        """Return `IN_RUNS`: the kernels were measured alone."""
        return IN_RUNS

    def launch_seconds(self) -> float:
        """Return what the host needs to launch one kernel."""
        return self.roofline.launch_seconds()

    def host_copy_seconds(self, bytes_moved: FloatArray) -> FloatArray:
        """Return the time of a copy over the host link."""
        return self.roofline.host_copy_seconds(bytes_moved)


def _learned_gemm(roofline: Roofline, sheet: KernelSheet, precision: str) -> Correction | None:
    rows = sheet.rows("gemm", precision)
    m, n, k = rows.sizes.T
    return _learned(GEMM_AXES, rows, rows.sizes, roofline.gemm_seconds(m, n, k, precision))


def _learned_attention(roofline: Roofline, sheet: KernelSheet, name: str, precision: str) -> Correction | None:
    rows = sheet.rows(name, precision)
    shape = rows.attention_shape()
    model = roofline.attention_seconds if name == "attention" else roofline.attention_backward_seconds
    return _learned(ATTENTION_AXES, rows, np.stack(_attention_sizes(shape), axis=1), model(shape, precision))


def _attention_sizes(shape: AttentionShape) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return what `ATTENTION_AXES` are of."""
    return shape.batch * shape.heads, shape.keys, shape.head_dim


def _learned_memory(roofline: Roofline, sheet: KernelSheet) -> LineCorrection | None:
    rows = sheet.rows("elementwise").known
    if not rows.seconds.size:
        return None
    residuals = np.log(rows.seconds / roofline.memory_seconds(rows.sizes[:, 0]))
    return LineCorrection.learned(MEMORY_AXIS, rows.sizes[:, 0], residuals) if np.isfinite(residuals).all() else None


def _learned(axes: tuple[Axis, Axis, Axis], rows: Rows, sizes: FloatArray, modelled: FloatArray) -> Correction | None:
    """Learn from times that are the device's, and from bounds where the model is above them; None from nothing."""
    residuals = np.log(rows.seconds / modelled)
    known = np.isfinite(residuals) & (~rows.bound | (residuals < 0))
    return Correction.learned(axes, sizes[known], residuals[known]) if known.any() else None


def _like(learned: Mapping[str, Correction | None], precision: str) -> Correction | None:
    return learned.get(precision) or learned.get(LIKE.get(precision, precision))
