"""Smooth factors of measured over modelled times, learned from measurements at scattered sizes."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from flagcore.domain.space import FloatArray, IntArray

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
