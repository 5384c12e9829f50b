"""Seconds of a micro-batch on a stage by its number of layers: the sum in `StageTime.busy`, of few figures a candidate.

Splits are compared by it many times; `flagcore.engines.megatron.time.step` works out every part of one.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np

from flagcore.contracts import Costs
from flagcore.domain.space import FloatArray, IntArray
from flagcore.engines.megatron.memory.states import split_parameters
from flagcore.engines.megatron.parallel.layout import ArrayRecord, Layout, Training
from flagcore.engines.megatron.parallel.parameters import stage_parameters
from flagcore.engines.megatron.parallel.pipeline import Part, Stage
from flagcore.engines.megatron.time.passes import Block, StageTime
from flagcore.engines.megatron.time.step import (
    ACCUMULATION_BYTES,
    FUSED_ACCUMULATION_BYTES,
    GRAPHED,
    LAG,
    LAYER_COUNTS,
    SHORTEST,
    Blocks,
)

DEPENDS_ON = (*LAYER_COUNTS, "pipeline", "virtual", "selective", "uniform", "block")
"""The counts of a candidate that the seconds of its stages depend on, besides their layers."""


@dataclass(frozen=True, slots=True)
class _Passes(ArrayRecord):
    """Seconds and launched kernels of a block forward, and backward with the gradients of its weights."""

    forward: FloatArray
    launches: FloatArray
    backward: FloatArray
    launched: FloatArray


@dataclass(frozen=True, slots=True)
class _Blocks(ArrayRecord):
    """A layer, with experts if the model has any, a leading dense layer, the embedding, and the head. `once` are the
    seconds of a stage besides, `recomputed` the layers of a stage whose forward pass is repeated, inf for all.
    """

    layer: _Passes
    leading: _Passes
    entry: _Passes
    head: _Passes
    once: FloatArray
    recomputed: FloatArray


@dataclass(frozen=True, slots=True)
class Pace:
    """The seconds of stages of each candidate. `host` is a launch, `depths` are those of multi-token prediction."""

    blocks: _Blocks
    host: float
    lag: float
    depths: float

    @classmethod
    def of(cls, train: Training, layout: Layout, costs: Costs, blocks: Blocks) -> Pace:
        """Return the pace of each candidate on the devices of `costs`; `blocks` are theirs. Nothing is offloaded."""
        none, depths = np.zeros_like(layout.data), float(train.model.mtp_num_layers)
        few, which, parts, experts = blocks.few, blocks.which, blocks.parts[0], train.model.num_moe_experts is not None
        dense, entry = _weights(train, few, dense=1.0), _weights(train, few, first=1.0)
        layer = _weights(train, few, layers=1.0) if experts else dense
        head = _weights(train, few, last=1.0, mtp=depths) - depths * layer  # its layers are counted as layers
        accumulation = FUSED_ACCUMULATION_BYTES if train.transformer_engine else ACCUMULATION_BYTES
        one, two = (costs.kernels.memory_seconds(accumulation * times * layer) for times in (8.0, 16.0))
        trained = 0.0 if train.options.adapters else 1.0

        def passes(block: Block | StageTime, weights: FloatArray) -> _Passes:
            gradients = trained * (block.weight + (two - one) * weights / (8.0 * layer))
            forward, backward = block.forward, block.backward
            return _Passes(forward.total, forward.launches, backward.total + gradients, backward.launches)

        def layers(block: Block, weights: FloatArray) -> _Passes:
            repeated = _Passes(none, none, block.repeated.total[which], block.repeated.launches[which])
            return passes(block, weights)[which] + repeated * layout.selective

        found = _Blocks(
            layer=layers(parts.moe if experts else parts.dense, layer),
            leading=layers(parts.dense, dense),
            entry=passes(parts.embedding, entry)[which],
            head=passes(parts.head, head)[which],
            once=trained * (2.0 * one - two)[which],
            recomputed=np.where(layout.uniform > 0, np.inf, layout.block * layout.virtual),
        )
        host = costs.kernels.launch_seconds() * GRAPHED[train.options.cuda_graph]
        return cls(found, host, 1.0 if costs.synchronous else LAG, depths)

    def __getitem__(self, rows: IntArray) -> Pace:
        return replace(self, blocks=self.blocks[rows])

    def seconds(self, layers: FloatArray, leading: int, *, first: bool = False, last: bool = False) -> FloatArray:
        """Return the seconds of one micro-batch on a stage with so many layers, `leading` of them dense."""
        blocks = self.blocks
        total = blocks.layer * (layers - leading + self.depths * last)
        if leading:
            total = total + blocks.leading * float(leading)
        share = np.minimum(blocks.recomputed / np.maximum(layers, 1.0), 1.0)
        backward, launched = total.backward + share * total.forward, total.launched + share * total.launches
        total = _Passes(total.forward, total.launches, backward + blocks.once, launched)
        if first:
            total = total + blocks.entry
        if last:
            total = total + blocks.head
        return self._launched(total.forward, total.launches) + self._launched(total.backward, total.launched)

    def _launched(self, device: FloatArray, launches: FloatArray) -> FloatArray:
        if not self.host:
            return device
        busy = np.maximum(device, SHORTEST)
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
    """Return the weights of a stage with these parts; `layers` are those with experts."""
    none = np.zeros_like(layout.data)
    held = Part(*(none + each for each in (first, last, last, dense + layers, dense, mtp)))
    parts: dict[str, FloatArray] = {each.name: getattr(held, each.name) for each in fields(held)}
    stage = Stage(**parts, index=none, chunk=none, in_flight=none, deferred=none, copies=1.0)
    return sum(split_parameters(stage_parameters(train, layout, stage)), none)
