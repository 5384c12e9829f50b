"""Time of a micro-batch on a stage of the pipeline, from the times of the model's parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from typing import Any, Generic, TypeVar

import numpy as np
from flagcore_models.layers import depth_of, experts_of

from flagcore.contracts import Costs
from flagcore.domain.space import FloatArray, IntArray
from flagcore_training.kinds import layer_kinds
from flagcore_training.layout import WHOLE_STEP, ArrayRecord, LayerLayout, Layout, StageLayout, Training, distinct
from flagcore_training.lengths import in_time, one_by_one
from flagcore_training.memory.states import split_parameters
from flagcore_training.memory.stored_activations import offloaded_bytes
from flagcore_training.stages import Stage, StageGroups
from flagcore_training.time.layer import embedding_time, head_time, layer_time, tower_block
from flagcore_training.time.passes import Block, Seconds, StageTime, Total
from flagcore_training.vision import tower_repeats
from flagcore_training.weights import layer_parameters, own_share, stage_parameters

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

MIN_SECONDS = 1e-9
"""Minimum seconds of a stage. It avoids a division by zero for stages without layers."""


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

    They are computed once for each distinct `LayerLayout`: `combinations` has one candidate per combination of its
    fields, `parts` the times of the parts for these candidates. `index` is the index of each candidate's combination.
    """

    combinations: tuple[LayerLayout, ...]
    index: tuple[IntArray, ...]
    parts: tuple[Parts, ...]

    @classmethod
    def from_layout(cls, train: Training, layout: Layout, costs: Costs) -> Blocks:
        layouts = StageGroups.from_layout(layout, costs).layouts  # counts are integers before `in_time`
        narrow = [LayerLayout.of(train, each) for each in layouts]
        distinct_rows = [distinct(each.columns) for each in narrow]
        combinations = tuple(in_time(train, each[rows]) for each, (rows, _) in zip(narrow, distinct_rows, strict=True))
        parts = tuple(_parts(train, each, group) for each, group in zip(combinations, costs.groups, strict=True))
        return cls(combinations, tuple(index for _, index in distinct_rows), parts)

    def __getitem__(self, rows: slice | IntArray) -> Blocks:
        return replace(self, index=tuple(each[rows] for each in self.index))

    def on(self, group: int) -> Parts:
        """Return the times of the model's parts for each candidate on the devices of node group `group`."""
        return self.parts[group][self.index[group]]


def _parts(train: Training, layout: LayerLayout, costs: Costs) -> Parts:
    described = [*layer_kinds(train.model).layers]
    layers = [layer_time(train, layout, costs, each) for each in described]
    if train.model.mtp_num_layers:
        depth, own = depth_of(train.model).layer, train.of_depths
        is_known = own is train and depth in described
        layers.append(layers[described.index(depth)] if is_known else layer_time(own, layout, costs, depth))
        described.append(depth)
    weights = [sum(layer_parameters(train, layout, each).values(), np.zeros(())) for each in described]
    for group in _groups(train):
        if len(layers[group]) == 1:
            layers[group] = [_with_sums(train, costs, layers[group][0], weights[group][0])]
    tower = () if train.tower is None else (tower_block(train, train.tower, layout, costs),)
    ends = embedding_time(train, layout, costs), head_time(train, layout, costs)
    return Parts(tuple(layers), tuple(weights), *ends, tower)


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
class Host(ArrayRecord):
    """The seconds that the host needs for one kernel launch, and the exponents of `launch_wait` for both passes."""

    launch_s: FloatArray | float
    forward: FloatArray | float
    backward: FloatArray | float

    @classmethod
    def of(cls, train: Training, costs: Costs) -> Host:
        """Return the host of the devices with these costs. It reads the lengths of sequences in forward only."""
        launch_s = costs.kernels.launch_seconds() * (train.options.graphs != WHOLE_STEP)
        waits = experts_of(train.model) is not None and train.transformer_engine and not train.options.padded_experts
        backward = WAITING_NORM if waits else LAUNCH_NORM
        forward = WAITING_NORM if one_by_one(train) and not train.options.rope_fusion else backward
        return cls(launch_s, 1.0, 1.0) if costs.synchronous else cls(launch_s, forward, backward)


S = TypeVar("S", Seconds, Total)
V = TypeVar("V", bound=ArrayRecord)


@dataclass(frozen=True, slots=True)
class Work(ArrayRecord, Generic[S]):
    """The work of one micro-batch on a stage, without waits: it is proportional to its layers, ends and depths.

    `backward` includes selective recompute. `again` is what full recompute of all layers adds to it instead.
    """

    forward: S
    backward: S
    weight: FloatArray
    again: S

    def passes(self, share: FloatArray, host: Host) -> tuple[S, S]:
        """Return the forward and the backward pass with waits for kernel launches, if a `share` of the layers is
        recomputed in full. Weight gradients are not included, but are computed beside the launches of backward."""
        forward, backward = self.forward, self.backward
        if share.any():
            backward = backward + self.again * share
        busy, launch_s = backward.total + self.weight, host.launch_s
        forward = forward.plus(launch_wait(forward.total, forward.launches, launch_s, host.forward))
        return forward, backward.plus(launch_wait(busy, backward.launches, launch_s, host.backward))

    def busy(self, share: FloatArray, host: Host) -> FloatArray:
        """Return the seconds of both passes, with weight gradients."""
        forward, backward = self.passes(share, host)
        return forward.total + (backward.total + self.weight)


def work_of(layers: Block, selective: FloatArray, ends: StageTime | None = None) -> Work[Seconds]:
    """Return the work of layers, selectively recomputed where `selective` is 1, and of the ends of a model."""
    forward, backward, weight, again = layers.forward, layers.backward, layers.weight, layers.forward
    if selective.any():
        repeated = layers.repeated * selective
        backward, again = backward + repeated, again + repeated * -1.0
    if ends is not None:
        forward, backward, weight = forward + ends.forward, backward + ends.backward, weight + ends.weight
    return Work(forward, backward, weight, again)


def stage_work(
    train: Training, costs: Costs, parts: Parts, stage: Stage, weights: FloatArray, selective: FloatArray
) -> tuple[Work[Seconds], FloatArray]:
    """Return the work on a stage with this number of `weights` on a rank, without a vision tower, and the number of
    weights whose gradients are added to their buffers by kernels of their own."""
    numbers, shares = stage.numbers, [own_share(train.model)] * len(stage.numbers)
    if train.model.mtp_num_layers:
        numbers, shares = (*numbers, stage.mtp), [*shares, depth_of(train.model).own]
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
    for each, number, share in zip(parts.weights, numbers, shares, strict=True):
        if alone := share - (not _fused(train)):  # each run of a layer has its gradients
            weights = weights - alone * number * each
    work = work_of(layers, selective, ends)
    return (replace(work, weight=np.zeros_like(work.weight)) if train.options.adapter else work), weights


def stage_time(
    train: Training, layout: Layout, costs: Costs, parts: Parts, stage: Stage, weights: FloatArray
) -> StageTime:
    """Return the time of one micro-batch on a stage with this number of `weights` on a rank.

    It includes waits for kernel launches and for copies of activations.
    """
    work, summed = stage_work(train, costs, parts, stage, weights, layout.selective)
    if train.tower is not None and stage.first.any():
        work = work + _tower_work(train, layout, *parts.tower) * stage.first
    work = replace(work, weight=work.weight + summing_seconds(train, costs, summed))
    forward, backward = work.passes(recomputed_share(recomputed_layers(layout), stage.layers), Host.of(train, costs))
    if train.options.offload_modules or train.options.offload_layers:
        forward = forward.plus(_offload_wait(train, layout, costs, stage, forward.total))
        backward = backward.plus(_offload_wait(train, layout, costs, stage, backward.total + work.weight))
    return StageTime(forward, backward, work.weight)


def _tower_work(train: Training, layout: Layout | StageLayout, tower: Block) -> Work[Seconds]:
    """Return the work of the vision tower, with its recompute."""
    assert train.tower is not None
    work = work_of(tower, layout.selective)
    backward = work.backward + work.again * tower_repeats(train.tower, layout)
    return Work(work.forward, backward, work.weight * (train.options.adapter is None), work.again * 0.0)


@dataclass(frozen=True, slots=True)
class WorkTable:
    """The work of each part of a model, which searches for splits of layers add up.

    `parts` is `stage_work` of five stages with one part alone: a mean layer after the leading dense ones, a leading
    one, the first end, the last one, and all depths. Its columns are combinations, then those with selective recompute,
    if any. `once_s` are the seconds that each stage takes once. For each candidate, `place` is its column, `layer` its
    first part, `tower` a vision tower's work, `recomputed` the layers recomputed in full. Offload is not included.
    """

    parts: Work[Total]
    once_s: FloatArray
    place: IntArray
    layer: Work[Total]
    tower: tuple[Work[Total], ...]
    recomputed: FloatArray
    host: Host

    @classmethod
    def from_blocks(
        cls, train: Training, layout: StageLayout, costs: Costs, blocks: Blocks, group: int = 0
    ) -> WorkTable:
        """Return the table of each candidate on the devices of node group `group`, whose costs are `costs`."""
        few, place, blocks_of = blocks.combinations[group], blocks.index[group], blocks.parts[group]
        stages, selective = _stages_of_parts(train), layout.selective > 0.0
        dense, experts = split_parameters(stage_parameters(train, few, stages))
        # Kernels that add up gradients have a fixed time, and one for each weight.
        per_layer = (dense + experts)[0]
        one, two = (summing_seconds(train, costs, times * per_layer) for times in (8.0, 16.0))
        kinds = []
        for each in (0.0, 1.0)[: 1 + bool(selective.any())]:
            work, summed = stage_work(train, costs, blocks_of, stages, dense + experts, np.full_like(few.tensor, each))
            work = replace(work, weight=work.weight + (two - one) * summed / (8.0 * per_layer))
            kinds.append(_summed(work))
        tower = tuple(_summed(_tower_work(train, layout, each[place])) for each in blocks_of.tower)
        parts, once_s = _mapped(lambda *each: np.hstack(each), *kinds), np.tile(2.0 * one - two, len(kinds))
        place = place + len(few.tensor) * selective
        layer = _mapped(lambda each: each[0].take(place), parts)
        return cls(parts, once_s, place, layer, tower, recomputed_layers(layout), Host.of(train, costs))

    def __getitem__(self, rows: IntArray) -> WorkTable:
        tower, layer = tuple(each[rows] for each in self.tower), self.layer[rows]
        return replace(self, place=self.place[rows], layer=layer, tower=tower, recomputed=self.recomputed[rows])

    def stage(
        self, leading: FloatArray | int = 0, *, first: bool = False, mtp: bool = False, last: bool = False
    ) -> LayersWork:
        """Return the work of a stage with `leading` dense layers and these ends of the model, by number of layers."""
        ends = [number for number, is_here in ((2, first), (3, last), (4, mtp)) if is_here]
        fixed = _mapped(lambda each: each[ends].sum(axis=0), self.parts)
        fixed = _mapped(lambda each: each.take(self.place), replace(fixed, weight=fixed.weight + self.once_s))
        if np.any(leading):
            more = _mapped(lambda each: (each[1] - each[0]).take(self.place), self.parts)
            fixed = fixed + more * np.float64(leading)
        return LayersWork(self.layer, reduce(add, self.tower * first, fixed), self.recomputed, self.host)


@dataclass(frozen=True, slots=True)
class LayersWork(ArrayRecord):
    """The work of a stage of each candidate, or of several stages: (stages, candidates), by number of layers.

    `fixed` is the work of the ends of the model, of multi-token prediction, and of the difference of leading dense
    layers to other layers.
    """

    layer: Work[Total]
    fixed: Work[Total]
    recomputed: FloatArray
    host: Host

    @classmethod
    def of_stages(cls, stages: Sequence[LayersWork]) -> LayersWork:
        """Return the work of several stages. Arrays that all stages share are not repeated."""
        return _mapped(_stacked, *stages)

    def seconds(self, layers: FloatArray) -> FloatArray:
        """Return the seconds of one micro-batch on stages with `layers` layers, equal to `StageTime.busy`."""
        return (self.layer * layers + self.fixed).busy(recomputed_share(self.recomputed, layers), self.host)


def _summed(work: Work[Seconds]) -> Work[Total]:
    """Return work whose seconds are not divided by kind."""
    return Work(Total.of(work.forward), Total.of(work.backward), work.weight, Total.of(work.again))


def _stages_of_parts(train: Training) -> Stage:
    """Return five stages, each with one part of the model, in the order of `WorkTable`: fields of shape (5, 1)."""
    layer, leading, first, last, mtp = np.eye(5)[:, :, None]
    zeros, layers = np.zeros_like(first), layer + leading
    ends = {"first": first, "last": last, "final_norm": last, "mtp": mtp * train.model.mtp_num_layers}
    sizes = {"layers": layers, "leading": leading, "numbers": layer_kinds(train.model).mean(layers, leading)}
    return Stage(**ends, **sizes, index=zeros, chunk=layers, in_flight=zeros, deferred=zeros, copies=zeros + 1.0)


def _mapped(function: Callable[..., Any], *values: V) -> V:
    """Return a record of what `function` returns for the arrays in each field of `values`, which are records."""
    fields = zip(*(each.columns for each in values), strict=True)
    found = (_mapped(function, *each) if isinstance(each[0], ArrayRecord) else function(*each) for each in fields)
    return type(values[0])(*found)


def _stacked(*values: Any) -> Any:
    """Return the values of several stages as one: arrays of the shape (stages or 1, candidates or 1)."""
    if all(each is values[0] for each in values):
        return values[0]
    return np.stack(np.broadcast_arrays(*map(np.atleast_1d, values)))


def summing_seconds(train: Training, costs: Costs, weights: FloatArray) -> FloatArray:
    """Return the seconds to add the gradients of `weights` to their buffers, by kernels of their own. Frozen weights
    have none."""
    seconds = costs.kernels.memory_seconds(ACCUMULATION_BYTES[_fused(train)] * weights)
    return np.zeros_like(seconds) if train.options.adapter else seconds


def recomputed_layers(layout: Layout | StageLayout) -> FloatArray:
    """Return the number of layers of a stage that are recomputed in full. Infinite for all."""
    return np.where(layout.uniform > 0, np.inf, layout.block * layout.virtual)


def recomputed_share(recomputed: FloatArray, layers: FloatArray) -> FloatArray:
    """Return which share of the `layers` of a stage are recomputed in full, if up to `recomputed` layers are."""
    share: FloatArray = np.minimum(recomputed / np.maximum(layers, 1.0), 1.0)
    return share


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
    return np.maximum(costs.kernels.host_copy_seconds(offloaded_bytes(train, layout, stage)) - window, 0.0)
