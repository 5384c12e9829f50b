"""Time of a training step from the times of layers, stages, the pipeline, gradients and the optimizer.

`Pace` computes the same seconds of a stage faster, for the search for splits of layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from typing import Any

import numpy as np
from flagcore_models.layers import experts_of

from flagcore.contracts import Costs
from flagcore.domain.prediction import Passes
from flagcore.domain.space import FloatArray, IntArray
from flagcore.physics.roofline import with_slowdown
from flagcore_training.layout import ArrayRecord, Layout, StageGroups, Training, distinct, pick
from flagcore_training.lengths import in_time, one_by_one, slowest
from flagcore_training.memory.stored_activations import offloaded_bytes
from flagcore_training.memory.training import split_parameters, trained_parts
from flagcore_training.mixes import MeanLayer, layer_kinds, mean_layer
from flagcore_training.stages import (
    Stage,
    depth_mean,
    edge_parameters,
    layer_parameters,
    mean_parameters,
    model_flops,
    mtp_parameters,
    own_share,
    stage,
    stage_parameters,
    stage_shares,
    stages,
)
from flagcore_training.time.layer import embedding_time, head_time, layer_time
from flagcore_training.time.optimizer import gradient_time, optimizer_time, reduction
from flagcore_training.time.passes import Block, Seconds, StageTime
from flagcore_training.time.pipeline import overlapped_passes, pipeline_time, sender_waits, sends
from flagcore_training.time.vision import tower_block, tower_time

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

LAUNCH_SHARE = {"": 1.0, "layer": 0.4, "iteration": 0.0}
"""Share of kernels that the host still launches one by one, by the part of a step that one graph launches. An
estimate."""


@dataclass(frozen=True, slots=True)
class Parts(ArrayRecord):
    """The times of a model's parts: a dense layer, an MoE layer, the layer of multi-token prediction, and the ends.

    `tower` is the vision tower, without recompute; None if there is none. `kinds` are the layers of each kind
    (`mixes`), without the sums of gradients, in a model whose stages differ in them.
    """

    dense: Block
    moe: Block
    mtp: Block
    embedding: StageTime
    head: StageTime
    tower: Block | None = None
    kinds: tuple[Block, ...] = ()

    def __getitem__(self, rows: slice | IntArray) -> Parts:
        dense = self.dense[rows]
        moe = dense if self.moe is self.dense else self.moe[rows]
        mtp = moe if self.mtp is self.moe else self.mtp[rows]
        tower = None if self.tower is None else self.tower[rows]
        kinds = tuple(each[rows] for each in self.kinds)
        return Parts(dense, moe, mtp, self.embedding[rows], self.head[rows], tower, kinds)


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
        distinct_rows = [distinct([getattr(each, name) for name in LAYER_COUNTS]) for each in layouts]
        combinations = tuple(in_time(train, each[rows]) for each, (rows, _) in zip(layouts, distinct_rows, strict=True))
        parts = tuple(_parts(train, each, group) for each, group in zip(combinations, costs.groups, strict=True))
        return cls(combinations, tuple(index for _, index in distinct_rows), parts)

    def __getitem__(self, rows: slice | IntArray) -> Blocks:
        return replace(self, index=tuple(each[rows] for each in self.index))

    def on(self, group: int) -> Parts:
        """Return the times of the model's parts for each candidate on the devices of node group `group`."""
        return self.parts[group][self.index[group]]


def _parts(train: Training, layout: Layout, costs: Costs) -> Parts:
    dense = _layer_block(train, layout, costs, moe=False)
    moe = _layer_block(train, layout, costs, moe=True) if experts_of(train.model) is not None else dense
    own, mtp = train.of_depths, moe
    if train.model.mtp_num_layers and not (own is train and train.has_plain_depths):
        mean = depth_mean(train.model)
        weights = _total(mean_parameters(own, layout, mean))
        mtp = _with_sums(own, costs, layer_time(own, layout, costs, mean), weights)
    ends = embedding_time(train, layout, costs), head_time(train, layout, costs)
    tower = None if train.tower is None else tower_block(train, train.tower, layout, costs)
    embedding, head = (StageTime(end.forward, end.backward, end.weight) for end in ends)
    found = layer_kinds(train.model)
    kinds = tuple(
        layer_time(train, layout, costs, MeanLayer.of_parts([(each, 1.0)])) for each in (found.parts if found else ())
    )
    return Parts(dense, moe, mtp, embedding, head, tower, kinds)


def _layer_block(train: Training, layout: Layout, costs: Costs, *, moe: bool) -> Block:
    """Return the time of a layer. A fused product adds one tile to the gradients while it multiplies others, so both
    overlap in part: the 2-norm of their times."""
    block = layer_time(train, layout, costs, mean_layer(train.model, experts=moe))
    return _with_sums(train, costs, block, _layer_weights(train, layout, moe=moe))


def _with_sums(train: Training, costs: Costs, block: Block, weights: FloatArray) -> Block:
    if not _fused(train):
        return block
    traffic_s = costs.kernels.memory_seconds(ACCUMULATION_BYTES[True] * weights)
    return replace(block, weight=np.hypot(block.weight, traffic_s))


def _fused(train: Training) -> bool:
    """Return whether products add to the gradients' buffers. Recipes switch it off for FSDP (Megatron-Bridge
    `perf_recipes` @067f987d: gradient_accumulation_fusion)."""
    return train.transformer_engine and train.options.gradient_fusion and not train.options.fsdp


def _layer_weights(train: Training, layout: Layout, *, moe: bool, stage: Stage | None = None) -> FloatArray:
    return _total(layer_parameters(train, layout, moe=moe, stage=stage))


def _stage_block(train: Training, layout: Layout, costs: Costs, parts: Parts, stage: Stage, *, moe: bool) -> Block:
    """Return the time of the mean layer of a stage, without or with experts."""
    if not stage.mix:
        return parts.moe if moe else parts.dense
    shares = stage_shares(train.model, stage, moe=moe)
    block = reduce(add, (each * share for each, share in zip(parts.kinds, shares, strict=True)))
    return _with_sums(train, costs, block, _layer_weights(train, layout, moe=moe, stage=stage))


@dataclass(frozen=True, slots=True)
class _NoCollectives:
    """Costs of collectives for a single rank: they take no time."""

    def seconds(self, kind: str, payload_bytes: FloatArray, ranks: IntArray, stride: IntArray) -> FloatArray:
        return np.zeros_like(payload_bytes)

    def compute_share(self, ranks: IntArray, stride: IntArray) -> FloatArray:
        return np.zeros(np.shape(ranks))


def step_time(
    train: Training,
    layout: Layout,
    costs: Costs,
    blocks: Blocks | None = None,
    distinct_stages: Sequence[Stage] | None = None,
) -> dict[str, FloatArray]:
    """Return the step time in seconds, divided into parts whose sum is the step time. NaN if a cost is unknown.

    `blocks` are the blocks of the candidates at `costs_in_run(costs)`, and `distinct_stages` their `stages`, if already
    computed. The parts are those of the slowest stage, with the costs of its node group. The rest of the pipeline's
    time is split into exposed messages and bubble.
    """
    given, costs = (layout, costs), costs_in_run(costs)
    placement, groups = StageGroups.from_layout(layout, costs), costs.groups
    if distinct_stages is None:
        distinct_stages = stages(train.model, layout, train.options, placement.starts)
    blocks = Blocks.from_layout(train, layout, costs) if blocks is None else blocks
    layout = in_time(train, layout)
    placement = StageGroups.from_layout(layout, costs)
    timed = _timed(train, groups, blocks, placement, distinct_stages)
    times = [each.time for each in timed]
    slowest = pick(np.argmax(np.stack([time.busy for time in times]), axis=0), times)
    forward, backward, m = slowest.forward, slowest.backward, layout.microbatches
    ordered = _in_replica(layout)
    in_replica = StageGroups.from_layout(ordered, costs)
    pipeline_s, message = pipeline_time(train, ordered, costs, in_replica, distinct_stages, times)
    idle = np.maximum(pipeline_s - m * slowest.busy, 0.0)
    waits = sender_waits(train, layout, distinct_stages[-1])
    messages = np.minimum(2.0 * message * np.where(waits > 0, m * layout.virtual, layout.pipeline - 1.0), idle)
    time_s = {
        "compute_s": m * (forward.compute + backward.compute + slowest.weight),
        "tp_comm_s": m * (forward.tensor + backward.tensor),
        "cp_comm_s": m * (forward.context + backward.context),
        "ep_comm_s": m * (forward.expert + backward.expert),
        "pp_bubble_s": idle - messages,
        "pp_comm_s": messages,
        "dp_comm_exposed_s": np.zeros_like(m),
        "optimizer_s": np.maximum.reduce([each.optimizer_s for each in timed]),
    }
    wait = replica_wait(train, *given, time_s, plain=time_s, each_micro_batch=train.options.fsdp)
    longest = 1.0 + wait / on_replica(time_s)
    gradients_s = []
    for number, (mesh, group) in enumerate(zip(placement.layouts, groups, strict=True)):
        # Of the stages on this node group, use the largest numbers of parameters.
        members = [placement.group(each.index) == number if placement.starts else True for each in distinct_stages]
        counts = [
            np.maximum.reduce([getattr(each, name) * member for each, member in zip(timed, members, strict=True)])
            for name in ("dense", "experts", "trained", "trained_experts")
        ]
        gradients_s.append(gradient_time(train, *reduction(mesh, group), counts[:2], counts[2:], slowest * longest))
    time_s["dp_comm_exposed_s"] = np.maximum.reduce(gradients_s) + wait
    return time_s


REPLICA_PARTS = ("compute_s", "tp_comm_s", "cp_comm_s", "ep_comm_s")
"""The parts of a step that take longer on a replica with more or longer samples."""


def replica_wait(
    train: Training,
    layout: Layout,
    costs: Costs,
    time_s: Mapping[str, FloatArray],
    *,
    plain: Mapping[str, FloatArray] | None = None,
    each_micro_batch: bool,
) -> FloatArray:
    """Return the seconds of a step in which replicas wait for the one with the longest samples (see `slowest`).

    None takes longer than with samples of the whole sequence. `time_s`: the parts of the step. `plain`: those of
    `step_time`, if already computed. What overlaps with passes does so with the longer ones of that replica.
    """
    if train.lengths is None:
        return np.zeros_like(layout.data)
    per_token, half = (model_flops(replace(train, sequence=each, lengths=None)) / each for each in (2048, 1024))
    per_square = (per_token - half) / 1024
    square_share = per_square / (half - 1024 * per_square)
    more = slowest(train, layout, square_share, each_micro_batch=each_micro_batch) - 1.0
    plain = plain or step_time(train, layout, costs)
    whole = on_replica(step_time(replace(train, lengths=None), layout, costs))
    return np.clip(whole - on_replica(plain), 0.0, more * on_replica(time_s))


def on_replica(time_s: Mapping[str, FloatArray]) -> FloatArray:
    """Return the seconds of a step in which a replica computes, and exchanges messages with no other replica."""
    return np.asarray(sum((time_s[name] for name in REPLICA_PARTS), np.zeros(())))


def passes(train: Training, layout: Layout, costs: Costs) -> Passes | None:
    """Return the passes of the first candidate's pipeline. Returns None if a cost is unknown.

    If a stage's messages take longer than usual, because it is at a border between node groups, its passes include the
    longer wait.
    """
    layout, costs = layout[slice(0, 1)], costs_in_run(costs)
    placement, count = StageGroups.from_layout(layout, costs), int(layout.pipeline[0])
    all_stages = [stage(train.model, layout, np.array([float(each)]), train.options) for each in range(count)]
    timed = _timed(train, costs.groups, Blocks.from_layout(train, layout, costs), placement, all_stages)
    times = [each.time for each in timed]
    ordered = _in_replica(in_time(train, layout))
    messages, waits, sends_s, _ = sends(train, ordered, costs, placement, all_stages[-1])
    delays = messages.send_delays(count, np.zeros(1, dtype=np.int64), layout, placement)
    longer = waits[0] * (np.zeros((2, count)) if delays is None else np.stack(delays)[:, :, 0])
    forward = tuple(float(time.forward.total[0] + more) for time, more in zip(times, longer[0], strict=True))
    backward = tuple(
        float(time.backward.total[0] + time.weight[0] + more) for time, more in zip(times, longer[1], strict=True)
    )
    send = float(sends_s[0]) if count > 1 else 0.0
    if not np.isfinite([*forward, *backward, send]).all():
        return None
    return Passes(
        schedule=train.options.schedule or "interleaved",
        microbatches=int(layout.microbatches[0]),
        virtual=int(layout.virtual[0]),
        forward_s=forward,
        backward_s=backward,
        weight_s=tuple(float(time.weight[0]) for time in times),
        paired_s=tuple(float(each[0]) for each in overlapped_passes(train, times)),
        send_s=send,
        sender_waits=bool(waits[0]),
        weight_share=train.weight_share,
        groups=tuple(int(placement.group(each.index)[0]) for each in all_stages),
        layers=tuple(int(each.layers[0]) for each in all_stages),
        predicted_s=float(pipeline_time(train, ordered, costs, placement, all_stages, times)[0][0]),
    )


def _in_replica(layout: Layout) -> Layout:
    """Return the layout for messages between stages: only the ranks of one replica if these are consecutive."""
    return replace(layout, data=np.ones_like(layout.data)) if layout.here else layout


def rank_time(train: Training, layout: Layout, costs: Costs, index: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return the seconds per step in which a rank of stage `index` works: forward and backward, and the optimizer.

    Collectives and waits for other ranks are not included.
    """
    single_costs = replace(costs, collectives=_NoCollectives())
    rank_stage = stage(train.model, layout, index, train.options)
    parts, params = Blocks.from_layout(train, layout, single_costs).on(0), stage_parameters(train, layout, rank_stage)
    time = _stage_time(train, layout, single_costs, parts, rank_stage, split_parameters(params))
    compute, trained = time.forward.compute + time.backward.compute + time.weight, trained_parts(train, params)
    return layout.microbatches * compute, optimizer_time(train, layout, costs, rank_stage, split_parameters(trained))


def costs_in_run(costs: Costs) -> Costs:
    """Return the costs in a run on many devices, where kernels are slower than if they run alone."""
    kernels = costs.kernels if costs.run_slowdown == 1.0 else with_slowdown(costs.kernels, costs.run_slowdown)
    return replace(costs, kernels=kernels, further={start: costs_in_run(each) for start, each in costs.further.items()})


@dataclass(frozen=True, slots=True)
class _Timed(ArrayRecord):
    """A stage's time per micro-batch, its optimizer step time, and its numbers of dense and of expert parameters: all,
    and those that are trained."""

    time: StageTime
    optimizer_s: FloatArray
    dense: FloatArray
    experts: FloatArray
    trained: FloatArray
    trained_experts: FloatArray


def _timed(
    train: Training, groups: Sequence[Costs], blocks: Blocks, placement: StageGroups, all_stages: Sequence[Stage]
) -> list[_Timed]:
    """Return the times of each stage, with the layout and the costs of the stage's node group."""
    pairs = enumerate(zip(placement.layouts, groups, strict=True))
    meshes = [(mesh, costs, blocks.on(number)) for number, (mesh, costs) in pairs]
    stage_times = []
    for stage_ in all_stages:
        times_by_group = []
        for mesh, costs, parts in meshes:
            found = stage_parameters(train, mesh, stage_)
            params, trained = split_parameters(found), split_parameters(trained_parts(train, found))
            time = _stage_time(train, mesh, costs, parts, stage_, params)
            optimizer_s = optimizer_time(train, mesh, costs, stage_, trained)
            times_by_group.append(_Timed(time, optimizer_s, *params, *trained))
        stage_times.append(placement.pick(stage_.index, times_by_group))
    return stage_times


def _stage_time(
    train: Training, layout: Layout, costs: Costs, parts: Parts, stage: Stage, params: tuple[FloatArray, FloatArray]
) -> StageTime:
    """Return the time of one micro-batch on a stage, including waits for kernel launches.

    Full recompute repeats the forward pass of a layer with its collectives before the backward pass. Selective
    recompute repeats the named modules of the other layers.
    """
    block_share = np.minimum(layout.block / np.maximum(stage.chunk, 1.0), 1.0)
    full_share = np.where(layout.uniform > 0, 1.0, block_share)
    selective = layout.selective * (1.0 - full_share)

    def layers(block: Block) -> StageTime:
        backward = block.backward
        for extra, times in ((block.forward, full_share), (block.repeated, selective)):
            backward = backward + extra * times if times.any() else backward
        return StageTime(block.forward, backward, block.weight)

    experts = experts_of(train.model) is not None
    depths = stage.mtp * (parts.mtp is parts.moe)  # those that are like other layers
    routed, plain = stage.moe + depths * experts, stage.dense + depths * (not experts)
    total = layers(_stage_block(train, layout, costs, parts, stage, moe=False)) * plain
    for block, count in ((parts.embedding, stage.first), (parts.head, stage.last)):
        total = total + block * count if count.any() else total
    if experts and routed.any():
        total = total + layers(_stage_block(train, layout, costs, parts, stage, moe=True)) * routed
    if parts.mtp is not parts.moe and stage.mtp.any():
        total = total + layers(parts.mtp) * stage.mtp
    if train.tower is not None and parts.tower is not None and stage.first.any():
        total = total + tower_time(train.tower, layout, parts.tower) * stage.first
    added = params[0] + params[1]
    if alone := own_share(train.model) - (not _fused(train)):  # each run of a layer has its gradients
        added = added - alone * plain * _layer_weights(train, layout, moe=False, stage=stage)
        added = added - (alone * routed * _layer_weights(train, layout, moe=True, stage=stage) if experts else 0.0)
    weight = total.weight + costs.kernels.memory_seconds(ACCUMULATION_BYTES[_fused(train)] * added)
    if train.options.adapter:
        weight = np.zeros_like(weight)
    forward, backward, (host, *lags) = total.forward, total.backward, host_of(train, layout, costs)
    busy = (backward + Seconds.from_compute(weight)).total
    forward = forward + Seconds.from_compute(launch_wait(forward.total, forward.launches, host, lags[0]))
    backward = backward + Seconds.from_compute(launch_wait(busy, backward.launches, host, lags[1]))
    forward = forward + Seconds.from_compute(_offload_wait(train, layout, costs, stage, forward.total))
    backward = backward + Seconds.from_compute(_offload_wait(train, layout, costs, stage, backward.total + weight))
    return StageTime(forward, backward, weight)


def host_of(train: Training, layout: Layout, costs: Costs) -> tuple[FloatArray | float, float, float]:
    """Return the seconds that the host needs for one kernel launch, and the exponents of `launch_wait` for forward and
    backward.

    Graphs of layers exclude full recompute. The lengths of sequences are read in forward only.
    """
    host: FloatArray | float = costs.kernels.launch_seconds()
    if train.options.cuda_graph == "layer":
        host = np.where(layout.uniform + layout.block > 0.0, host, host * LAUNCH_SHARE["layer"])
    else:
        host *= LAUNCH_SHARE[train.options.cuda_graph]
    backward = WAITING_NORM if experts_of(train.model) is not None and train.transformer_engine else LAUNCH_NORM
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
    if not np.any(host):
        return np.zeros_like(device)
    busy = np.maximum(device, MIN_SECONDS)
    ratio = launches * host / busy
    return busy * ((1.0 + ratio**lag) ** (1.0 / lag) - 1.0)


def _offload_wait(train: Training, layout: Layout, costs: Costs, stage: Stage, window: FloatArray) -> FloatArray:
    """Return the seconds that a pass of one micro-batch waits for copies of activations to or from the host. `window`
    is the time of the pass, which the copies overlap."""
    if not (train.options.offload_modules or train.options.offload_layers):
        return np.zeros_like(window)
    return np.maximum(costs.kernels.host_copy_seconds(offloaded_bytes(train, layout, stage)) - window, 0.0)


DEPENDS_ON = (*LAYER_COUNTS, "virtual", "selective", "uniform", "block")
"""Fields of a layout that determine the seconds of its stages, apart from their numbers of layers."""


@dataclass(frozen=True, slots=True)
class _Passes(ArrayRecord):
    """The seconds and the kernel launches of a block's forward, and of its backward including weight gradients."""

    forward: FloatArray
    launches: FloatArray
    backward: FloatArray
    backward_launches: FloatArray


@dataclass(frozen=True, slots=True)
class _Blocks(ArrayRecord):
    """The seconds and the kernel launches of the passes through each part of a model.

    `layer` is an MoE layer if the model has any, `leading_layer` a leading dense layer, and `mtp` multi-token
    prediction beyond its layers, which count as `layer`. `once_s` is added once per stage, in seconds.
    `recomputed_layers` is the number of layers of a stage that are recomputed in full, inf for all.
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
    """A fast function from a stage's number of layers to its seconds per micro-batch, equal to `StageTime.busy`.

    The search for splits calls it thousands of times. `host` and the `lag` of forward and backward are from `host_of`,
    `depths` is the number of MTP layers.
    """

    blocks: _Blocks
    host: FloatArray | float
    forward_lag: FloatArray | float
    lag: FloatArray | float
    depths: float

    @classmethod
    def from_blocks(cls, train: Training, layout: Layout, costs: Costs, blocks: Blocks, group: int = 0) -> Pace:
        """Return the `Pace` of each candidate on the devices of node group `group`, whose costs are `costs`.

        Offload of activations is not included.
        """
        zeros, depths = np.zeros_like(layout.data), float(train.model.mtp_num_layers)
        rows, index, parts = blocks.combinations[group], blocks.index[group], blocks.parts[group]
        has_experts = experts_of(train.model) is not None
        one, none = np.ones_like(rows.data), np.zeros_like(rows.data)
        dense_weights = _layer_weights(train, rows, moe=False)
        layer_weights = _layer_weights(train, rows, moe=True) if has_experts else dense_weights
        embedding = _total(edge_parameters(train, rows, first=one, last=none))
        head_weights = _total(edge_parameters(train, rows, first=none, last=one))
        mtp_weights = none
        if depths:
            copy = _total(edge_parameters(train, rows, first=none, last=none, mtp=one))
            mtp_weights = copy + _total(mtp_parameters(train, rows)) - depths * layer_weights
        accumulation = ACCUMULATION_BYTES[_fused(train)]
        one_pass, two_passes = (
            costs.kernels.memory_seconds(accumulation * times * layer_weights) for times in (8.0, 16.0)
        )
        is_trained = 0.0 if train.options.adapter else 1.0

        def gradients(weights: FloatArray) -> FloatArray:
            return is_trained * (two_passes - one_pass) * weights / (8.0 * layer_weights)

        def passes(block: Block | StageTime, weights: FloatArray) -> _Passes:
            backward_s = block.backward.total + is_trained * block.weight + gradients(weights)
            return _Passes(block.forward.total, block.forward.launches, backward_s, block.backward.launches)

        def layers(block: Block, weights: FloatArray) -> _Passes:
            weights = none if _fused(train) else weights
            repeated = _Passes(zeros, zeros, block.repeated.total[index], block.repeated.launches[index])
            return passes(block, weights)[index] + repeated * layout.selective

        layer = layers(parts.moe if has_experts else parts.dense, layer_weights)
        mtp = _Passes(zeros, zeros, gradients(mtp_weights)[index], zeros)
        if parts.mtp is not parts.moe:
            mtp = mtp + (layers(parts.mtp, layer_weights) + layer * -1.0) * depths
        entry = passes(parts.embedding, embedding)[index]
        if train.tower is not None and parts.tower is not None:
            tower = tower_time(train.tower, layout, parts.tower[index])
            backward_s = tower.backward.total + is_trained * tower.weight
            entry = entry + _Passes(tower.forward.total, tower.forward.launches, backward_s, tower.backward.launches)
        passes_by_block = _Blocks(
            layer=layer,
            leading_layer=layers(parts.dense, dense_weights),
            embedding=entry,
            head=passes(parts.head, head_weights)[index],
            mtp=mtp,
            once_s=is_trained * (2.0 * one_pass - two_passes)[index],
            recomputed_layers=np.where(layout.uniform > 0, np.inf, layout.block * layout.virtual),
        )
        return cls(passes_by_block, *host_of(train, layout, costs), depths)

    def __getitem__(self, rows: IntArray) -> Pace:
        every = self.host, self.forward_lag, self.lag
        host, forward, backward = (each[rows] if isinstance(each, np.ndarray) else each for each in every)
        return replace(self, blocks=self.blocks[rows], host=host, forward_lag=forward, lag=backward)

    def on_stage(
        self, leading: FloatArray | int = 0, *, first: bool = False, mtp: bool = False, last: bool = False
    ) -> StagePace:
        """Return the pace of a stage with `leading` dense layers and these ends of the model."""
        blocks, none = self.blocks, _Passes(_NONE, _NONE, _NONE, _NONE)
        dense = blocks.leading_layer * np.float64(leading) if np.any(leading) else none
        ends = [blocks.embedding] * first + [blocks.head] * last + [blocks.mtp] * bool(mtp and self.depths)
        fixed = sum(ends[1:], ends[0]) if ends else none
        others = np.asarray(self.depths * mtp - leading), blocks.once_s, blocks.recomputed_layers
        return StagePace(blocks.layer, dense, fixed, *others, self.host, self.forward_lag, self.lag)

    def seconds(self, layers: FloatArray, leading: FloatArray | int, **ends: bool) -> FloatArray:
        """Return the seconds of one micro-batch on a stage with `layers` layers, as `on_stage` describes it."""
        return self.on_stage(leading, **ends).seconds(layers)


_NONE = np.zeros(1)


@dataclass(frozen=True, slots=True)
class StagePace:
    """The `Pace` of one stage of each candidate, or of several stages: (stages, candidates).

    `dense` are the leading dense layers, `ends` the parts of the model at its ends, and `others` is the number of
    layers beside those of the stage that are like `layer`.
    """

    layer: _Passes
    dense: _Passes
    ends: _Passes
    others: FloatArray
    once_s: FloatArray
    recomputed_layers: FloatArray
    host: FloatArray | float
    forward_lag: FloatArray | float
    lag: FloatArray | float

    @classmethod
    def of_stages(cls, stages: Sequence[StagePace]) -> StagePace:
        """Return the pace of several stages. Arrays that all stages share are not repeated."""
        return cls(*(_stacked([getattr(each, name) for each in stages]) for name in cls.__dataclass_fields__))

    def __getitem__(self, rows: IntArray) -> StagePace:
        return StagePace(*(_of_candidates(getattr(self, name), rows) for name in self.__dataclass_fields__))

    def seconds(self, layers: FloatArray) -> FloatArray:
        """Return the seconds of one micro-batch on stages with `layers` layers."""
        total = self.layer * (layers + self.others) + self.dense
        share = np.minimum(self.recomputed_layers / np.maximum(layers, 1.0), 1.0)
        backward = total.backward + share * total.forward + self.once_s
        backward_launches = total.backward_launches + share * total.launches
        total = _Passes(total.forward, total.launches, backward, backward_launches) + self.ends
        forward = total.forward + launch_wait(total.forward, total.launches, self.host, self.forward_lag)
        waits = launch_wait(total.backward, total.backward_launches, self.host, self.lag)
        return forward + (total.backward + waits)


def _stacked(values: Sequence[Any]) -> Any:
    """Return the values of several stages as one: arrays of the shape (stages or 1, candidates or 1)."""
    first = values[0]
    if isinstance(first, _Passes):
        names = _Passes.__dataclass_fields__
        return _Passes(*(_stacked([getattr(each, name) for each in values]) for name in names))
    if all(each is first for each in values):
        return first
    return np.stack(np.broadcast_arrays(*map(np.atleast_1d, values)))


def _of_candidates(values: Any, rows: IntArray) -> Any:
    """Return the columns `rows` of arrays whose last axis is the candidates, unless all candidates share a value."""
    if isinstance(values, _Passes):
        return _Passes(*(_of_candidates(getattr(values, name), rows) for name in _Passes.__dataclass_fields__))
    return values.take(rows, -1) if isinstance(values, np.ndarray) and values.ndim and values.shape[-1] > 1 else values


def _total(parts: Mapping[str, FloatArray]) -> FloatArray:
    return sum(parts.values(), np.zeros(()))
