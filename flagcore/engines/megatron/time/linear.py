"""Time of one linear layer: its product forward, and the two of its backward pass."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flagcore.contracts import KernelCosts
from flagcore.domain.space import FloatArray


@dataclass(frozen=True, slots=True)
class Linear:
    """Seconds of a linear layer's three products: output, gradient of the input, gradient of the weight."""

    forward: FloatArray
    input_gradient: FloatArray
    weight_gradient: FloatArray

    @classmethod
    def none(cls, like: FloatArray) -> Linear:
        """Return a layer that is not there."""
        zero = np.zeros_like(like)
        return cls(zero, zero, zero)

    def __add__(self, other: Linear) -> Linear:
        return Linear(
            self.forward + other.forward,
            self.input_gradient + other.input_gradient,
            self.weight_gradient + other.weight_gradient,
        )

    def __mul__(self, times: FloatArray | float) -> Linear:
        return Linear(self.forward * times, self.input_gradient * times, self.weight_gradient * times)


def linear(
    kernels: KernelCosts, tokens: FloatArray, inner: FloatArray | float, outer: FloatArray | float, precision: str
) -> Linear:
    """Return the three products of Y[tokens, outer] = X[tokens, inner] W[inner, outer]."""
    width_in, width_out = np.broadcast_to(inner, tokens.shape), np.broadcast_to(outer, tokens.shape)
    return Linear(
        kernels.gemm_seconds(tokens, width_out, width_in, precision),
        kernels.gemm_seconds(tokens, width_in, width_out, precision),
        kernels.gemm_seconds(width_out, width_in, tokens, precision),
    )
