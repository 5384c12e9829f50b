"""Time of a micro-batch on a stage of the pipeline, from the times of the model's parts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce
from operator import add

import numpy as np
from flagcore_models.layers import depth_layer, experts_of

from flagcore.contracts import Costs
from flagcore.domain.space import FloatArray, IntArray
from flagcore_training.kinds import layer_kinds
from flagcore_training.layout import WHOLE_STEP, ArrayRecord, Layout, Training, distinct
from flagcore_training.lengths import in_time, one_by_one
from flagcore_training.memory.stored_activations import offloaded_bytes
from flagcore_training.stages import Stage, StageGroups
from flagcore_training.time.layer import embedding_time, head_time, layer_time
from flagcore_training.time.passes import Block, Seconds, StageTime
from flagcore_training.time.vision import tower_block, tower_time
from flagcore_training.weights import layer_parameters, own_depths, own_share

ACCUMULATION_BYTES = {True: 8.0, False: 12.0}
"""Memory traffic in bytes per parameter and micro-batch to add a weight gradient to its fp32 buffer. Counted.

True is for fused products, which read and write the buffer (4 + 4) themselves. Otherwise a 16-bit gradient is also
written and read (2 + 2), after the product."""

LAUNCH_NORM = 5.0
"""Exponent in `launch_wait`. It is between the fit to the sweep of `layer.LAUNCHES` (3.1 to 3.9) and the fit to the
ranks measured on another accelerator (8)."""

WAITING_NORM = 2.0
"""As `LAUNCH_NORM`, where each MoE layer waits for its numbers of tokens on the host, so that no launches are queued
(megatron-core 0.16.1 `token_dispatcher.py`, cuda_sync_point), or the forward of attention for the lengths of sequences.
From a pair of published runs: 14% faster with graphs of router and dispatch (Megatron-MoE-ModelZoo, Qwen3-235B). Of the
other published runs, it brings 9 nearer, 5 farther."""

LAYER_COUNTS = ("tensor", "context", "micro_batch", "sequence_parallel", "expert", "expert_tensor", "overlap_kind")
"""Fields of a layout that determine the time of a layer."""

MIN_SECONDS = 1e-9
"""Minimum seconds of a stage. It avoids a division by zero for stages without layers."""

RECOMPUTED_LAYERS = ("uniform", "block")
"""Fields of a layout that `LAYER_COUNTS` lack if parts of layers are graphs, which full recompute excludes."""

DEPENDS_ON = (*LAYER_COUNTS, "virtual", "selective", *RECOMPUTED_LAYERS)
"""Fields of a layout that determine the seconds of its stages, apart from their numbers of layers."""


@dataclass(frozen=True, slots=True)
class Parts(ArrayRecord):
    """The times of a model's parts: a layer of each kind and, if the model has some, of a depth of multi-token
    prediction, and the ends.

    `weights` are the numbers of weights of these layers on a rank. The sums of gradients of kinds that are alone in
    their group are included. `tower` is the vision tower, without recompute; it is empty if there is none.
    """

    layers: tuple[Block, ...]
    weights: tuple[FloatArray, ...]
    embedding: StageTime
    head: StageTime
    tower: tuple[Block, ...] = ()


@dataclass(frozen=True, slots=True)
class Blocks:
    """The times of the model's parts for all candidates on each node group.

    They are computed once for each distinct combination of `LAYER_COUNTS`: `combinations` has one candidate per
    combination, `parts` the times of the parts for these candidates. `index` is the index of each candidate's
    combination.
    """

    combinations: tuple[Layout, ...]
    index: tuple[IntArray, ...]
    parts: tuple[Parts, ...]

    @classmethod
    def from_layout(cls, train: Training, layout: Layout, costs: Costs) -> Blocks:
        layouts = StageGroups.from_layout(layout, costs).layouts  # counts are integers before `in_time`
        names = (*LAYER_COUNTS, *RECOMPUTED_LAYERS[: 2 * bool(train.options.graphs)])
        distinct_rows = [distinct([getattr(each, name) for name in names]) for each in layouts]
        combinations = tuple(in_time(train, each[rows]) for each, (rows, _) in zip(layouts, distinct_rows, strict=True))
        parts = tuple(_parts(train, each, group) for each, group in zip(combinations, costs.groups, strict=True))
        return cls(combinations, tuple(index for _, index in distinct_rows), parts)

    def __getitem__(self, rows: slice | IntArray) -> Blocks:
        return replace(self, index=tuple(each[rows] for each in self.index))

    def on(self, group: int) -> Parts:
        """Return the times of the model's parts for each candidate on the devices of node group `group`."""
        return self.parts[group][self.index[group]]


def _parts(train: Training, layout: Layout, costs: Costs) -> Parts:
    described = [*layer_kinds(train.model).layers]
    layers = [layer_time(train, layout, costs, each) for each in described]
    if train.model.mtp_num_layers:
        depth, own = depth_layer(train.model), train.of_depths
        is_known = own is train and depth in described
        layers.append(layers[described.index(depth)] if is_known else layer_time(own, layout, costs, depth))
        described.append(depth)
    weights = [sum(layer_parameters(train, layout, each).values(), np.zeros(())) for each in described]
    for group in _groups(train):
        if len(layers[group]) == 1:
            layers[group] = [_with_sums(train, costs, layers[group][0], weights[group][0])]
    tower = () if train.tower is None else (tower_block(train, train.tower, layout, costs),)
    ends = embedding_time(train, layout, costs), head_time(train, layout, costs)
    embedding, head = (StageTime(end.forward, end.backward, end.weight) for end in ends)
    return Parts(tuple(layers), tuple(weights), embedding, head, tower)


def _groups(train: Training) -> tuple[slice, ...]:
    """Return the groups of the layers of `Parts`. A depth of multi-token prediction is one of its own."""
    kinds = layer_kinds(train.model)
    return (*kinds.groups, *[slice(len(kinds.layers), None)] * (train.model.mtp_num_layers > 0))


def _with_sums(
    train: Training, costs: Costs, block: Block, weights: FloatArray, number: FloatArray | float = 1.0
) -> Block:
    """Return the time of `number` layers with the sums of gradients of their `weights` in fused products.

    A fused product adds one tile to the gradients while it multiplies others, so both overlap in part: the 2-norm of
    their times in the mean layer.
    """
    if not _fused(train):
        return block
    traffic_s = costs.kernels.memory_seconds(ACCUMULATION_BYTES[True] * (weights / number))
    return replace(block, weight=np.hypot(block.weight / number, traffic_s) * number)


def _fused(train: Training) -> bool:
    """Return whether products add to the gradients' buffers. Recipes switch it off for FSDP (Megatron-Bridge
    `perf_recipes` @067f987d: gradient_accumulation_fusion)."""
    return train.transformer_engine and train.options.gradient_fusion and not train.options.fsdp


@dataclass(frozen=True, slots=True)
class Work(ArrayRecord):
    """The work of one micro-batch on a stage: of its layers, without recompute, and of the other parts of the model.

    It is proportional to the numbers of layers, ends and depths of a stage. `summed` is the number of weights whose
    gradients are added to their buffers by kernels of their own.
    """

    layers: Block
    ends: StageTime
    summed: FloatArray


def stage_work(train: Training, layout: Layout, costs: Costs, parts: Parts, stage: Stage, weights: FloatArray) -> Work:
    """Return the work of one micro-batch on a stage with this number of `weights` on a rank."""
    numbers, shares = stage.numbers, [own_share(train.model)] * len(stage.numbers)
    if train.model.mtp_num_layers:
        numbers, shares = (*numbers, stage.mtp), [*shares, own_depths(train.model)]
    found = []
    for group in _groups(train):
        blocks, counts = parts.layers[group], numbers[group]
        if not any(count.any() for count in counts):
            continue
        block = reduce(add, (each * count for each, count in zip(blocks, counts, strict=True)))
        if len(blocks) > 1:
            held = reduce(add, (each * count for each, count in zip(parts.weights[group], counts, strict=True)))
            block = _with_sums(train, costs, block, held, np.maximum(sum(counts), 1.0))
        found.append(block)
    layers = reduce(add, found or [parts.layers[0] * (0.0 * numbers[0])])
    ends = parts.embedding * stage.first
    if stage.last.any():
        ends = ends + parts.head * stage.last
    if train.tower is not None and stage.first.any():
        ends = ends + tower_time(train.tower, layout, *parts.tower) * stage.first
    for each, number, share in zip(parts.weights, numbers, shares, strict=True):
        if alone := share - (not _fused(train)):  # each run of a layer has its gradients
            weights = weights - alone * number * each
    return Work(layers, ends, weights)


def stage_time(
    train: Training, layout: Layout, costs: Costs, parts: Parts, stage: Stage, weights: FloatArray
) -> StageTime:
    """Return the time of one micro-batch on a stage with this number of `weights` on a rank.

    It includes waits for kernel launches and for copies of activations.
    """
    work = stage_work(train, layout, costs, parts, stage, weights)
    share = recomputed_share(recomputed_layers(layout), stage.layers)
    total = work.layers.recomputed(share, layout.selective) + work.ends
    weight = total.weight + summing_seconds(train, costs, work.summed)
    if train.options.adapter:
        weight = np.zeros_like(weight)
    forward, backward, (host, *lags) = total.forward, total.backward, host_of(train, costs)
    busy = (backward + Seconds.from_compute(weight)).total
    forward = forward + Seconds.from_compute(launch_wait(forward.total, forward.launches, host, lags[0]))
    backward = backward + Seconds.from_compute(launch_wait(busy, backward.launches, host, lags[1]))
    forward = forward + Seconds.from_compute(_offload_wait(train, layout, costs, stage, forward.total))
    backward = backward + Seconds.from_compute(_offload_wait(train, layout, costs, stage, backward.total + weight))
    return StageTime(forward, backward, weight)


def summing_seconds(train: Training, costs: Costs, weights: FloatArray) -> FloatArray:
    """Return the seconds to add the gradients of `weights` to their buffers, by kernels of their own."""
    return costs.kernels.memory_seconds(ACCUMULATION_BYTES[_fused(train)] * weights)


def recomputed_layers(layout: Layout) -> FloatArray:
    """Return the number of layers of a stage that are recomputed in full. Infinite for all."""
    return np.where(layout.uniform > 0, np.inf, layout.block * layout.virtual)


def recomputed_share(recomputed: FloatArray, layers: FloatArray) -> FloatArray:
    """Return which share of the `layers` of a stage are recomputed in full, if up to `recomputed` layers are."""
    share: FloatArray = np.minimum(recomputed / np.maximum(layers, 1.0), 1.0)
    return share


def host_of(train: Training, costs: Costs) -> tuple[float, float, float]:
    """Return the seconds that the host needs for one kernel launch, and the exponents of `launch_wait` for forward and
    backward. The lengths of sequences are read in forward only."""
    host = costs.kernels.launch_seconds() * (train.options.graphs != WHOLE_STEP)
    waits = experts_of(train.model) is not None and train.transformer_engine and not train.options.padded_experts
    backward = WAITING_NORM if waits else LAUNCH_NORM
    forward = WAITING_NORM if one_by_one(train) and not train.options.rope_fusion else backward
    return (host, 1.0, 1.0) if costs.synchronous else (host, forward, backward)


def launch_wait(
    device: FloatArray, launches: FloatArray, host: FloatArray | float, lag: FloatArray | float
) -> FloatArray:
    """Return the seconds that the device waits for the host during a pass of `launches` kernels.

    `device` is the device's own seconds, `host` the seconds of one launch. Some kernels are longer than their launches
    and others shorter, so a pass takes longer than the maximum of both times. Their `lag`-norm is a smooth
    approximation.
    """
    busy = np.maximum(device, MIN_SECONDS)
    ratio = launches * host / busy
    return busy * ((1.0 + ratio**lag) ** (1.0 / lag) - 1.0)


def _offload_wait(train: Training, layout: Layout, costs: Costs, stage: Stage, window: FloatArray) -> FloatArray:
    """Return the seconds that a pass of one micro-batch waits for copies of activations to or from the host. `window`
    is the time of the pass, which the copies overlap."""
    if not (train.options.offload_modules or train.options.offload_layers):
        return np.zeros_like(window)
    return np.maximum(costs.kernels.host_copy_seconds(offloaded_bytes(train, layout, stage)) - window, 0.0)
