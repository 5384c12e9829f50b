"""Seconds of a pass through a part of the model by category, linear layers and element-wise kernels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flagcore.contracts import KernelCosts
from flagcore.domain.space import FloatArray
from flagcore.engines.megatron.parallel.layout import ArrayRecord, Training

ACTIVATION_PASSES = {
    (True, True): (3.0, 5.0),
    (True, False): (2.0, 3.0),
    (False, True): (8.0, 24.0),
    (False, False): (5.0, 12.0),
}
"""Times that an activation function moves one tensor of the FFN's width, forward and backward, by whether it is one
kernel and by whether it is gated. In torch operations: fitted to 12 measured ranks (gated; 10
and 32 where nothing is fused), the other by proportion."""


@dataclass(frozen=True, slots=True)
class Seconds(ArrayRecord):
    """Kernels, and the collectives that kernels wait for, by what they belong to. `launches` counts kernels."""

    compute: FloatArray
    tensor: FloatArray
    context: FloatArray
    expert: FloatArray
    launches: FloatArray

    @classmethod
    def of(cls, compute: FloatArray, **others: FloatArray) -> Seconds:
        """Return seconds of kernels and of `others`; what is not given is 0."""
        none = np.zeros_like(compute)
        parts = {"tensor": none, "context": none, "expert": none, "launches": none, **others}
        return cls(compute, **parts)

    @property
    def total(self) -> FloatArray:
        return self.compute + self.tensor + self.context + self.expert


@dataclass(frozen=True, slots=True)
class Block(ArrayRecord):
    """A part of a model: forward, backward to its input, the gradients of its weights (kernels alone).

    `repeated` is what selective recompute adds to the backward pass.
    """

    forward: Seconds
    backward: Seconds
    weight: FloatArray
    repeated: Seconds


@dataclass(frozen=True, slots=True)
class StageTime(ArrayRecord):
    """Seconds of one micro-batch through one pipeline stage: forward, backward to its input, weights' gradients."""

    forward: Seconds
    backward: Seconds
    weight: FloatArray

    @property
    def busy(self) -> FloatArray:
        return self.forward.total + self.backward.total + self.weight


def norm_seconds(kernels: KernelCosts, tensor_bytes: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return a norm forward (its tensor moved 2.5 times) and backward (5 times, the gradient of its weight included).

    Measured on one accelerator at sizes that fill it: 2.3 to 3.3 and 6.3 to 7.5.
    """
    return kernels.memory_seconds(2.5 * tensor_bytes), kernels.memory_seconds(5.0 * tensor_bytes)


def activation_seconds(
    train: Training, kernels: KernelCosts, tensor_bytes: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Return an FFN's activation function forward and backward; `tensor_bytes` is one tensor of the FFN's width.

    One kernel reads gate and value and writes their product (3), and reads three to write two backward (5).
    """
    forward, backward = ACTIVATION_PASSES[train.transformer_engine, train.model.gated_linear_unit]
    return kernels.memory_seconds(forward * tensor_bytes), kernels.memory_seconds(backward * tensor_bytes)


@dataclass(frozen=True, slots=True)
class Linear(ArrayRecord):
    """Seconds of a linear layer's three products: output, gradient of the input, gradient of the weight."""

    forward: FloatArray
    input_gradient: FloatArray
    weight_gradient: FloatArray


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
