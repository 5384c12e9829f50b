"""Time of one layer for one micro-batch: kernels and the collectives between them, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from flagcore.contracts import Costs
from flagcore.domain.space import FloatArray
from flagcore.physics.exchange import TensorExchange, context_exchange, expert_exchange
from flagcore.physics.layout import Layout, Training
from flagcore.physics.linear_time import Linear, linear
from flagcore.physics.transformer import widths

NORM_PASSES, NORM_BACKWARD_PASSES = 2.5, 6.0
"""Times that a norm of one kernel moves its tensor, forward and backward (gradient of its weight included)."""

ROTATION_PASSES = 9.0
"""The same for rotary embedding in torch operations (halves swapped, two products, a sum); one kernel takes 2."""


@dataclass(frozen=True, slots=True)
class Seconds:
    """Where the time of one pass goes: kernels, and collectives by what they belong to. `launches` counts kernels."""

    compute: FloatArray
    tensor: FloatArray
    context: FloatArray
    expert: FloatArray
    launches: FloatArray

    @property
    def total(self) -> FloatArray:
        """All of it."""
        return self.compute + self.tensor + self.context + self.expert

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(*(getattr(self, part.name) + getattr(other, part.name) for part in fields(self)))

    def __mul__(self, times: FloatArray | float) -> Seconds:
        return Seconds(*(getattr(self, part.name) * times for part in fields(self)))


@dataclass(frozen=True, slots=True)
class LayerTime:
    """Seconds of a layer's forward pass, of its backward pass to its input, and of its weights' gradients."""

    forward: Seconds
    backward: Seconds
    weight: FloatArray

    def __add__(self, other: LayerTime) -> LayerTime:
        return LayerTime(self.forward + other.forward, self.backward + other.backward, self.weight + other.weight)

    def __mul__(self, times: FloatArray | float) -> LayerTime:
        return LayerTime(self.forward * times, self.backward * times, self.weight * times)


@dataclass(frozen=True, slots=True)
class Block:
    """Half a layer, attention or FFN: its products, its element-wise kernels, and what recompute can repeat."""

    linears: Linear
    elementwise: FloatArray
    elementwise_backward: FloatArray
    again: FloatArray
"""Seconds of forward kernels that selective recompute repeats."""


def layer_time(train: Training, layout: Layout, costs: Costs, again: FloatArray, *, moe: bool) -> LayerTime:
    """Return the time of one layer; `again` is the share of layers that are recomputed whole.

    A recomputed layer repeats its forward pass with the collectives in it before its backward pass.
    """
    raise NotImplementedError
