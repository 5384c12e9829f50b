"""Seconds of a pass through a part of the model, of linear layers, and of element-wise kernels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flagcore.contracts import KernelCosts
from flagcore.domain.space import FloatArray
from flagcore.engines.training.layout import ArrayRecord, Training

ACTIVATION_PASSES = {
    (True, True): (3.0, 5.0),
    (True, False): (2.0, 3.0),
    (False, True): (8.0, 24.0),
    (False, False): (5.0, 12.0),
}
"""Memory passes of an activation function over one tensor of the FFN's width, forward and backward, by whether it is
one kernel and whether it is gated. The values for one kernel are counted. Those for several kernels are fitted to 12
measured ranks (gated; 10 and 32 without any fusion); those without a gate are proportional."""


@dataclass(frozen=True, slots=True)
class Seconds(ArrayRecord):
    """Seconds of kernels and of exposed collectives by kind of parallelism. `launches` is the number of kernels."""

    compute: FloatArray
    tensor: FloatArray
    context: FloatArray
    expert: FloatArray
    launches: FloatArray

    @classmethod
    def from_compute(cls, compute: FloatArray, **others: FloatArray) -> Seconds:
        """Return seconds of kernels and of `others`; missing fields are 0."""
        zeros = np.zeros_like(compute)
        parts = {"tensor": zeros, "context": zeros, "expert": zeros, "launches": zeros, **others}
        return cls(compute, **parts)

    @property
    def total(self) -> FloatArray:
        return self.compute + self.tensor + self.context + self.expert


@dataclass(frozen=True, slots=True)
class Block(ArrayRecord):
    """Seconds of a part of the model: forward, backward to its input, and kernels of the weight gradients.

    `repeated` is added to the backward pass by selective recompute.
    """

    forward: Seconds
    backward: Seconds
    weight: FloatArray
    repeated: Seconds


@dataclass(frozen=True, slots=True)
class StageTime(ArrayRecord):
    """Seconds of one micro-batch on one pipeline stage: forward, backward to its input, weight gradients."""

    forward: Seconds
    backward: Seconds
    weight: FloatArray

    @property
    def busy(self) -> FloatArray:
        return self.forward.total + self.backward.total + self.weight


def norm_seconds(kernels: KernelCosts, tensor_bytes: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return the seconds of a norm: forward (2.5 passes over its tensor) and backward (5 passes).

    On one accelerator, 2.3 to 3.3 and 6.3 to 7.5 passes were measured at sizes that fill it.
    """
    return kernels.memory_seconds(2.5 * tensor_bytes), kernels.memory_seconds(5.0 * tensor_bytes)


def activation_seconds(
    train: Training, kernels: KernelCosts, tensor_bytes: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Return the seconds of an FFN's activation function, forward and backward.

    `tensor_bytes` is the size of one tensor of the FFN's width. A single kernel reads two tensors and writes one, and
    backward reads three and writes two.
    """
    forward, backward = ACTIVATION_PASSES[train.transformer_engine, train.model.gated_linear_unit]
    return kernels.memory_seconds(forward * tensor_bytes), kernels.memory_seconds(backward * tensor_bytes)


@dataclass(frozen=True, slots=True)
class Linear(ArrayRecord):
    """Seconds of a linear layer's three products: output, input gradient, weight gradient."""

    forward: FloatArray
    input_gradient: FloatArray
    weight_gradient: FloatArray


def linear(
    kernels: KernelCosts, tokens: FloatArray, inputs: FloatArray | float, outputs: FloatArray | float, precision: str
) -> Linear:
    """Return the seconds of the linear layer Y[tokens, outputs] = X[tokens, inputs] W[inputs, outputs]."""
    width_in, width_out = np.broadcast_to(inputs, tokens.shape), np.broadcast_to(outputs, tokens.shape)
    return Linear(
        kernels.gemm_seconds(tokens, width_out, width_in, precision),
        kernels.gemm_seconds(tokens, width_in, width_out, precision),
        kernels.gemm_seconds(width_out, width_in, tokens, precision),
    )
