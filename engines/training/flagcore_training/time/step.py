"""Time of a training step from the times of stages, the pipeline, gradients and the optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from flagcore.contracts import Costs
from flagcore.domain.prediction import Passes
from flagcore.domain.space import FloatArray, IntArray
from flagcore.physics.roofline import with_slowdown
from flagcore_training.layout import ArrayRecord, Layout, Training, pick
from flagcore_training.lengths import in_time, slowest
from flagcore_training.memory.states import split_parameters, trained_parts
from flagcore_training.schedules import SCHEDULES
from flagcore_training.stages import Stage, StageGroups, stage, stages
from flagcore_training.time.optimizer import gradient_time, optimizer_time, reduction
from flagcore_training.time.passes import StageTime
from flagcore_training.time.pipeline import overlapped_passes, pipeline_time, sender_waits, sends
from flagcore_training.time.stage import Blocks, stage_time
from flagcore_training.weights import model_flops, stage_parameters


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
    wait = replica_wait(train, *given, time_s, plain=time_s, each_micro_batch=train.options.shares("gradients"))
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
    schedule = train.options.schedule or "interleaved"
    return Passes(
        schedule=schedule,
        microbatches=int(layout.microbatches[0]),
        virtual=int(layout.virtual[0]),
        forward_s=forward,
        backward_s=backward,
        weight_s=tuple(float(time.weight[0]) for time in times if SCHEDULES[schedule].splits_backward),
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
    dense, experts = split_parameters(params)
    time = stage_time(train, layout, single_costs, parts, rank_stage, dense + experts)
    compute, trained = time.forward.compute + time.backward.compute + time.weight, trained_parts(train, params)
    return layout.microbatches * compute, optimizer_time(train, layout, costs, rank_stage, split_parameters(trained))


RUN_LAUNCHES = 1.23
"""How much longer launches take in a run on many devices, which waits for the slowest host: 13.7 us in published runs
on H100, 11.1 us measured on a host with H200."""


def costs_in_run(costs: Costs) -> Costs:
    """Return the costs in a run on many devices, where kernels are slower than if they run alone."""
    slower = costs.run_slowdown
    kernels = costs.kernels if slower == 1.0 else with_slowdown(costs.kernels, slower, launches=RUN_LAUNCHES)
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
            time = stage_time(train, mesh, costs, parts, stage_, params[0] + params[1])
            optimizer_s = optimizer_time(train, mesh, costs, stage_, trained)
            times_by_group.append(_Timed(time, optimizer_s, *params, *trained))
        stage_times.append(placement.pick(stage_.index, times_by_group))
    return stage_times
