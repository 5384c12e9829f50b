"""Smooth factors between measured and modelled times, learned from scattered sizes."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from flagcore.domain.space import FloatArray, IntArray

NOISE = 0.03
"""Share of a residual's variance that is taken for noise of the measurement or the library's choice of a kernel."""

MANTISSA = 52


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One size on a logarithmic grid: octaves `first` up to `last`, `steps` nodes each.

    A residual is worth 1/e of itself `reach` octaves away.
    """

    first: int
    last: int
    steps: int
    reach: float

    @property
    def nodes(self) -> FloatArray:
        """Return the places of the nodes, in octaves."""
        return np.arange(self.first * self.steps, self.last * self.steps + 1) / self.steps


@dataclass(frozen=True, slots=True)
class Correction:
    """Factors on a grid of one size or several, linear between the nodes, constant beyond them.

    Places are octaves with straight lines between powers of two, so that the usual sizes of models (3 x 2^j,
    7 x 2^j) lie on nodes.
    """

    axes: tuple[Axis, ...]
    factors: FloatArray

    def __call__(self, *sizes: FloatArray) -> FloatArray:
        """Return the factor at as many sizes as there are axes, 0 or more; they broadcast."""
        strides = [prod(self.factors.shape[place + 1 :]) for place in range(len(self.axes))]
        table, shares = self.factors.ravel(), []
        start: IntArray | int = 0
        for axis, size, stride in zip(self.axes, sizes, strides, strict=True):
            place = np.minimum(np.maximum(octaves(size), axis.first), axis.last - 1e-9) * axis.steps
            node = np.floor(place)
            shares.append(place - node)
            start = start + (node - axis.first * axis.steps).astype(np.int64) * stride

        def along(axis: int, corner: IntArray | int) -> FloatArray:
            if axis == len(shares):
                value: FloatArray = table.take(corner)
                return value
            low = along(axis + 1, corner)
            found: FloatArray = low + shares[axis] * (along(axis + 1, corner + strides[axis]) - low)
            return found

        return along(0, start)


def learned(axes: tuple[Axis, Axis, Axis], sizes: FloatArray, residuals: FloatArray) -> Correction:
    """Learn from `residuals` (log of measured over modelled, one per row) at `sizes` (rows of three).

    Simple kriging: a Gaussian process of mean 0 whose covariance falls exponentially along each axis. Near the
    points it repeats them but for noise; far away the factor is 1.
    """
    places = np.stack([octaves(column) for column in sizes.T])
    first, second, third = (
        np.exp(-np.abs(axis.nodes[:, None] - place) / axis.reach) for axis, place in zip(axes, places, strict=True)
    )
    covariance = np.exp(
        -sum(np.abs(place[:, None] - place) / axis.reach for axis, place in zip(axes, places, strict=True))
    )
    weights = np.linalg.solve(covariance + NOISE * np.eye(len(residuals)), residuals)
    planes = (first[:, None, :] * second[None, :, :]).reshape(-1, len(residuals))
    logs = (planes * weights) @ third.T
    return Correction(axes, np.exp(logs).reshape(first.shape[0], second.shape[0], third.shape[0]))


def learned_line(axis: Axis, sizes: FloatArray, residuals: FloatArray) -> Correction:
    """Learn over one size from `residuals` (log of measured over modelled) at `sizes`.

    A mean with weights that halve with each `reach` octaves of distance: kernels of one size differ by more than
    neighbouring sizes do. Beyond the measured sizes the factor of the outermost holds.
    """
    nodes, places = axis.nodes, octaves(sizes)
    nearest = np.clip(nodes, places.min(), places.max())
    weights = np.exp2(-np.abs(nearest[:, None] - places) / axis.reach)
    return Correction((axis,), np.exp(weights @ residuals / weights.sum(axis=1)))


def octaves(sizes: FloatArray) -> FloatArray:
    """Return log2 of `sizes` at powers of two, and straight lines between them: exponent and mantissa of a float."""
    bits = np.asarray(sizes, dtype=np.float64).view(np.int64)
    power: FloatArray = bits.astype(np.float64) * (1.0 / (1 << MANTISSA)) - 1023.0
    return power
