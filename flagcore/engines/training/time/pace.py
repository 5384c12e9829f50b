"""A fast estimate of the seconds of a micro-batch on a stage by its number of layers, equal to `StageTime.busy`.

The search for splits calls it many times; `flagcore.engines.training.time.step` computes every part of a step.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np

from flagcore.contracts import Costs
from flagcore.domain.space import FloatArray, IntArray
from flagcore.engines.training.layout import ArrayRecord, Layout, Training
from flagcore.engines.training.memory.states import split_parameters
from flagcore.engines.training.parameters import stage_parameters
from flagcore.engines.training.stages import Part, Stage
from flagcore.engines.training.time.passes import Block, StageTime
from flagcore.engines.training.time.step import (
    ACCUMULATION_BYTES,
    FUSED_ACCUMULATION_BYTES,
    LAUNCH_NORM,
    LAUNCH_SHARE,
    LAYER_COUNTS,
    MIN_SECONDS,
    Blocks,
)

DEPENDS_ON = (*LAYER_COUNTS, "pipeline", "virtual", "selective", "uniform", "block")
"""Fields of a layout that determine the seconds of its stages, except their numbers of layers."""


@dataclass(frozen=True, slots=True)
class _Passes(ArrayRecord):
    """Seconds and kernel launches of a block's forward, and of its backward with weight gradients."""

    forward: FloatArray
    launches: FloatArray
    backward: FloatArray
    backward_launches: FloatArray


@dataclass(frozen=True, slots=True)
class _Blocks(ArrayRecord):
    """Passes through a layer (an MoE layer if the model has any), a leading dense layer, embedding, head, and
    multi-token prediction without its layers.

    `once_s` is added once per stage in seconds. `recomputed_layers` is the number of layers of a stage that are
    recomputed in full, inf for all.
    """

    layer: _Passes
    leading_layer: _Passes
    embedding: _Passes
    head: _Passes
    mtp: _Passes
    once_s: FloatArray
    recomputed_layers: FloatArray


@dataclass(frozen=True, slots=True)
class Pace:
    """Computes the seconds of stages of each candidate. `host` is the seconds of a launch, `depths` the MTP layers."""

    blocks: _Blocks
    host: FloatArray | float
    lag: FloatArray | float
    depths: float

    @classmethod
    def from_blocks(cls, train: Training, layout: Layout, costs: Costs, blocks: Blocks, group: int = 0) -> Pace:
        """Return the estimate of each candidate on the devices of node group `group`, which have these `costs`, without
        offload of activations.
        """
        zeros, depths = np.zeros_like(layout.data), float(train.model.mtp_num_layers)
        rows, index, parts = blocks.combinations[group], blocks.index[group], blocks.parts[group]
        has_experts = train.model.num_moe_experts is not None
        dense_weights, embedding = _weights(train, rows, dense=1.0), _weights(train, rows, first=1.0)
        layer_weights = _weights(train, rows, layers=1.0) if has_experts else dense_weights
        head_weights = _weights(train, rows, last=1.0)
        mtp_weights = _weights(train, rows, mtp=depths) - depths * layer_weights
        accumulation = FUSED_ACCUMULATION_BYTES if train.transformer_engine else ACCUMULATION_BYTES
        one_pass, two_passes = (
            costs.kernels.memory_seconds(accumulation * times * layer_weights) for times in (8.0, 16.0)
        )
        is_trained = 0.0 if train.options.adapters else 1.0

        def gradients(weights: FloatArray) -> FloatArray:
            return is_trained * (two_passes - one_pass) * weights / (8.0 * layer_weights)

        def passes(block: Block | StageTime, weights: FloatArray) -> _Passes:
            backward_s = block.backward.total + is_trained * block.weight + gradients(weights)
            return _Passes(block.forward.total, block.forward.launches, backward_s, block.backward.launches)

        def layers(block: Block, weights: FloatArray) -> _Passes:
            repeated = _Passes(zeros, zeros, block.repeated.total[index], block.repeated.launches[index])
            return passes(block, weights)[index] + repeated * layout.selective

        passes_by_block = _Blocks(
            layer=layers(parts.moe if has_experts else parts.dense, layer_weights),
            leading_layer=layers(parts.dense, dense_weights),
            embedding=passes(parts.embedding, embedding)[index],
            head=passes(parts.head, head_weights)[index],
            mtp=_Passes(zeros, zeros, gradients(mtp_weights)[index], zeros),
            once_s=is_trained * (2.0 * one_pass - two_passes)[index],
            recomputed_layers=np.where(layout.uniform > 0, np.inf, layout.block * layout.virtual),
        )
        host = costs.kernels.launch_seconds() * LAUNCH_SHARE[train.options.cuda_graph]
        return cls(passes_by_block, host, 1.0 if costs.synchronous else LAUNCH_NORM, depths)

    def __getitem__(self, rows: IntArray) -> Pace:
        host, lag = (each[rows] if isinstance(each, np.ndarray) else each for each in (self.host, self.lag))
        return replace(self, blocks=self.blocks[rows], host=host, lag=lag)

    def seconds(
        self,
        layers: FloatArray,
        leading: FloatArray | int,
        *,
        first: bool = False,
        mtp: bool = False,
        last: bool = False,
    ) -> FloatArray:
        """Return the seconds of one micro-batch on a stage with `layers` layers, including `leading` dense layers."""
        blocks = self.blocks
        total = blocks.layer * (layers - leading + self.depths * mtp)
        if np.any(leading):
            total = total + blocks.leading_layer * np.float64(leading)
        share = np.minimum(blocks.recomputed_layers / np.maximum(layers, 1.0), 1.0)
        backward = total.backward + share * total.forward + blocks.once_s
        backward_launches = total.backward_launches + share * total.launches
        total = _Passes(total.forward, total.launches, backward, backward_launches)
        if first:
            total = total + blocks.embedding
        if last:
            total = total + blocks.head
        if mtp and self.depths:
            total = total + blocks.mtp
        forward = self._with_launches(total.forward, total.launches)
        return forward + self._with_launches(total.backward, total.backward_launches)

    def _with_launches(self, device: FloatArray, launches: FloatArray) -> FloatArray:
        if not np.any(self.host):
            return device
        busy = np.maximum(device, MIN_SECONDS)
        ratio = launches * self.host / busy
        return device + busy * ((1.0 + ratio**self.lag) ** (1.0 / self.lag) - 1.0)


def _weights(
    train: Training,
    layout: Layout,
    *,
    dense: float = 0.0,
    layers: float = 0.0,
    first: float = 0.0,
    last: float = 0.0,
    mtp: float = 0.0,
) -> FloatArray:
    """Return the number of weights of a stage with these parts; `layers` is the number of MoE layers."""
    zeros = np.zeros_like(layout.data)
    part = Part(*(zeros + each for each in (first, last, last, dense + layers, dense, mtp)))
    parts: dict[str, FloatArray] = {each.name: getattr(part, each.name) for each in fields(part)}
    stage = Stage(**parts, index=zeros, chunk=zeros, in_flight=zeros, deferred=zeros, copies=zeros + 1.0)
    return sum(split_parameters(stage_parameters(train, layout, stage)), zeros)
