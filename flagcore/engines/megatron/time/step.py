"""Time of a training step: layers make stages, stages a pipeline, then gradients and the optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from flagcore.contracts import Costs
from flagcore.domain.prediction import Passes
from flagcore.domain.space import FloatArray, IntArray
from flagcore.engines.megatron.memory.states import split_parameters
from flagcore.engines.megatron.memory.stored_activations import offloaded_bytes
from flagcore.engines.megatron.parallel.layout import ArrayRecord, Layout, Placement, Training, pick
from flagcore.engines.megatron.parallel.parameters import stage_parameters
from flagcore.engines.megatron.parallel.pipeline import Stage, stage, stages
from flagcore.engines.megatron.time.layer import embedding_time, head_time, layer_time
from flagcore.engines.megatron.time.optimizer import gradient_time, optimizer_time
from flagcore.engines.megatron.time.passes import Block, Seconds, StageTime
from flagcore.engines.megatron.time.pipeline import message_seconds, pipeline_time, sender_waits, together
from flagcore.engines.schedules.formulas import pipeline_seconds
from flagcore.physics.cost_stack import with_slowdown

ACCUMULATION_BYTES, FUSED_ACCUMULATION_BYTES = 12.0, 8.0
"""Memory traffic a parameter and micro-batch to add a weight's gradient to its fp32 buffer: the 16-bit gradient
written and read, the buffer read and written (2 + 2 + 4 + 4); fused: the buffer alone."""

LAG = 5.0
"""Between what fits the same sweep as the launches (3.1 to 3.9), and the ranks measured on another accelerator (8)."""

LAYER_COUNTS = (
    "tensor",
    "context",
    "micro_batch",
    "sequence_parallel",
    "expert",
    "expert_tensor",
    "pairing",
)
"""What the time of a layer depends on."""

SHORTEST = 1e-9
"""Seconds that a stage without any layer takes at least, so that its launches can be set against something."""

GRAPHED = {"": 1.0, "layer": 0.4, "iteration": 0.0}
"""Share of launches that the host still makes one by one, by what is launched as one graph."""


@dataclass(frozen=True, slots=True)
class Parts(ArrayRecord):
    """The blocks that stages are made of."""

    dense: Block
    moe: Block
    embedding: StageTime
    head: StageTime

    def __getitem__(self, rows: slice | IntArray) -> Parts:
        dense = self.dense[rows]
        moe = dense if self.moe is self.dense else self.moe[rows]
        return Parts(dense, moe, self.embedding[rows], self.head[rows])


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks of all candidates, worked out once for each combination of what they depend on.

    `few` are candidates with all combinations; `which` maps each candidate to its own. `parts` are the blocks of
    `few` on the devices of each node group.
    """

    few: Layout
    which: IntArray
    parts: tuple[Parts, ...]

    @classmethod
    def of(cls, train: Training, layout: Layout, costs: Costs) -> Blocks:
        first, which = layout.distinct(LAYER_COUNTS)
        few = layout[first]
        return cls(few, which, tuple(_parts(train, few, each) for each in costs.groups))

    def __getitem__(self, rows: slice | IntArray) -> Blocks:
        return replace(self, which=self.which[rows])

    def on(self, group: int) -> Parts:
        """Return the blocks of each candidate on the devices of a node group."""
        return self.parts[group][self.which]


def _parts(train: Training, layout: Layout, costs: Costs) -> Parts:
    dense = layer_time(train, layout, costs, moe=False)
    moe = layer_time(train, layout, costs, moe=True) if train.model.num_moe_experts is not None else dense
    ends = embedding_time(train, layout, costs), head_time(train, layout, costs)
    return Parts(dense, moe, *(StageTime(end.forward, end.backward, end.weight) for end in ends))


@dataclass(frozen=True, slots=True)
class _Silence:
    """`flagcore.contracts.CollectiveCosts` of a rank that waits for no other."""

    def seconds(self, kind: str, payload_bytes: FloatArray, ranks: IntArray, stride: IntArray) -> FloatArray:
        return np.zeros_like(payload_bytes)

    def compute_share(self, ranks: IntArray, stride: IntArray) -> FloatArray:
        return np.zeros(np.shape(ranks))


def step_time(train: Training, layout: Layout, costs: Costs, blocks: Blocks | None = None) -> dict[str, FloatArray]:
    """Return the seconds of each part of one step; they add up to the step. NaN where a cost is not known.

    `blocks` are those of the candidates `in_a_run`, if they are known.

    Each stage has the kernels and collectives of its own node group. Times of a step are those of the slowest stage.
    The rest of the pipeline's time is split into messages that this stage waits for, and bubble.
    """
    costs = in_a_run(costs)
    place, groups = Placement.of(layout, costs), costs.groups
    found = stages(train.model, layout, train.options, place.starts)
    params = [split_parameters(stage_parameters(train, layout, stage)) for stage in found]
    blocks = Blocks.of(train, layout, costs) if blocks is None else blocks
    times = _stage_times(train, layout, groups, blocks, place, found, params)
    slowest = pick(np.argmax(np.stack([time.busy for time in times]), axis=0), times)
    forward, backward = slowest.forward, slowest.backward

    m = layout.microbatches
    whole, message = pipeline_time(train, layout, costs, place, found, times)
    waiting = np.maximum(whole - m * slowest.busy, 0.0)
    hidden = (layout.virtual > 1) & train.options.overlap_p2p_comm
    messages = np.minimum(2.0 * message * np.where(hidden, layout.pipeline - 1.0, m * layout.virtual), waiting)
    most = [(each.collectives, _most(place, found, params, number)) for number, each in enumerate(groups)]
    steps = [
        place.pick(stage.index, [optimizer_time(train, layout, each, stage, have) for each in groups])
        for stage, have in zip(found, params, strict=True)
    ]
    return {
        "compute_s": m * (forward.compute + backward.compute + slowest.weight),
        "tp_comm_s": m * (forward.tensor + backward.tensor),
        "cp_comm_s": m * (forward.context + backward.context),
        "ep_comm_s": m * (forward.expert + backward.expert),
        "pp_bubble_s": waiting - messages,
        "pp_comm_s": messages,
        "dp_comm_exposed_s": gradient_time(train, layout, most, slowest),
        "optimizer_s": np.maximum.reduce(steps),
    }


def passes(train: Training, layout: Layout, costs: Costs) -> Passes | None:
    """Return the passes of the first candidate's pipeline.

    None where a cost is not known, or where node groups differ: messages between them take different times.
    """
    layout, costs = layout[slice(0, 1)], in_a_run(costs)
    if costs.further:
        return None
    place, count = Placement.of(layout, costs), int(layout.pipeline[0])
    found = [stage(train.model, layout, np.array([float(each)]), train.options) for each in range(count)]
    params = [split_parameters(stage_parameters(train, layout, each)) for each in found]
    times = _stage_times(train, layout, costs.groups, Blocks.of(train, layout, costs), place, found, params)
    forward = tuple(float(time.forward.total[0]) for time in times)
    backward = tuple(float(time.backward.total[0] + time.weight[0]) for time in times)
    send = float(message_seconds(train, layout, costs, place)[0]) if count > 1 else 0.0
    if not np.isfinite([*forward, *backward, send]).all():
        return None
    made = Passes(
        schedule=train.options.schedule or "interleaved",
        microbatches=int(layout.microbatches[0]),
        virtual=int(layout.virtual[0]),
        forward_s=forward,
        backward_s=backward,
        weight_s=tuple(float(time.weight[0]) for time in times),
        paired_s=tuple(float(each[0]) for each in together(train, times)),
        send_s=send,
        sender_waits=bool(sender_waits(train, layout)[0]),
        weight_share=train.weight_share,
    )
    return replace(made, predicted_s=pipeline_seconds(made))


def rank_time(train: Training, layout: Layout, costs: Costs, index: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return the seconds of a rank of pipeline stage `index`: forward and backward of a step, and the optimizer.

    Nothing is waited for: neither other ranks nor collectives.
    """
    alone = replace(costs, collectives=_Silence())
    found, parts = stage(train.model, layout, index, train.options), Blocks.of(train, layout, alone).on(0)
    dense, experts = split_parameters(stage_parameters(train, layout, found))
    time = _stage_time(train, layout, alone, parts, found, (dense, experts))
    compute = time.forward.compute + time.backward.compute + time.weight
    return layout.microbatches * compute, optimizer_time(train, layout, costs, found, (dense, experts))


def in_a_run(costs: Costs) -> Costs:
    """Return costs whose kernels are as long as in a run on many devices."""
    kernels = costs.kernels if costs.run_slowdown == 1.0 else with_slowdown(costs.kernels, costs.run_slowdown)
    return replace(costs, kernels=kernels, further={start: in_a_run(each) for start, each in costs.further.items()})


def _stage_times(
    train: Training,
    layout: Layout,
    groups: Sequence[Costs],
    blocks: Blocks,
    place: Placement,
    found: Sequence[Stage],
    params: Sequence[tuple[FloatArray, FloatArray]],
) -> list[StageTime]:
    """Return the times of some stages, each with the costs of the node group on which it lies."""
    made = [(each, blocks.on(number)) for number, each in enumerate(groups)]
    return [
        place.pick(each.index, [_stage_time(train, layout, *costs, each, have) for costs in made])
        for each, have in zip(found, params, strict=True)
    ]


def _stage_time(
    train: Training, layout: Layout, costs: Costs, parts: Parts, found: Stage, params: tuple[FloatArray, FloatArray]
) -> StageTime:
    """Return a stage's time of one micro-batch: at least that in which the host launches its kernels.

    A layer that is recomputed whole repeats its forward pass, collectives included, before its backward pass;
    selective recompute repeats the named modules of the others.
    """
    again = _recomputed(train, layout, found)
    selective = layout.selective * (1.0 - again)

    def layers(block: Block) -> StageTime:
        backward = block.backward
        for more, times in ((block.forward, again), (block.repeated, selective)):
            backward = backward + more * times if times.any() else backward
        return StageTime(block.forward, backward, block.weight)

    experts = train.model.num_moe_experts is not None
    routed, plain = found.moe + found.mtp * experts, found.dense + found.mtp * (not experts)
    total = layers(parts.dense) * plain
    for block, count in ((parts.embedding, found.first), (parts.head, found.last)):
        total = total + block * count if count.any() else total
    if experts and routed.any():
        total = total + layers(parts.moe) * routed
    accumulation = FUSED_ACCUMULATION_BYTES if train.transformer_engine else ACCUMULATION_BYTES
    weight = total.weight + costs.kernels.memory_seconds(accumulation * (params[0] + params[1]))
    if train.options.adapters:
        weight = np.zeros_like(weight)
    host = costs.kernels.launch_seconds() * GRAPHED[train.options.cuda_graph]
    lag = 1.0 if costs.synchronous else LAG
    forward = _launched(total.forward, total.forward, host, lag)
    backward = _launched(total.backward, total.backward + Seconds.of(weight), host, lag)
    forward = forward + Seconds.of(_offloading(train, layout, costs, found, forward.total))
    backward = backward + Seconds.of(_offloading(train, layout, costs, found, backward.total + weight))
    return StageTime(forward, backward, weight)


def _launched(seconds: Seconds, device: Seconds, host: float, lag: float) -> Seconds:
    """Return `seconds` with the time that the device waits for the host's launches.

    Some kernels of a pass are longer than their launches and some shorter, so the two times add up to more than the
    larger one: smoothly, by a norm of `lag`.
    """
    if not host:
        return seconds
    busy, launching = np.maximum(device.total, SHORTEST), seconds.launches * host
    ratio = launching / busy
    return seconds + Seconds.of(busy * ((1.0 + ratio**lag) ** (1.0 / lag) - 1.0))


def _recomputed(train: Training, layout: Layout, found: Stage) -> FloatArray:
    """Return the share of a stage's layers whose forward pass runs twice."""
    if train.options.recompute_stage_layers:
        table = np.array(train.options.recompute_stage_layers, dtype=np.float64)
        layers = table[np.minimum(found.index, len(table) - 1).astype(np.int64)]
        return np.minimum(layers / np.maximum(found.layers, 1.0), 1.0)
    block = np.minimum(layout.block / np.maximum(found.chunk, 1.0), 1.0)
    return np.where(layout.uniform > 0, 1.0, block)


def _offloading(train: Training, layout: Layout, costs: Costs, found: Stage, window: FloatArray) -> FloatArray:
    """Return the time that a pass of one micro-batch waits while activations travel to or from the host."""
    if not train.options.offload_modules:
        return np.zeros_like(window)
    return np.maximum(costs.kernels.host_copy_seconds(offloaded_bytes(train, layout, found)) - window, 0.0)


def _most(
    place: Placement, found: list[Stage], params: list[tuple[FloatArray, FloatArray]], group: int
) -> tuple[FloatArray, FloatArray]:
    """Return the most parameters of both kinds that a stage on a node group holds."""
    if place.starts:
        here = [place.group(stage.index) == group for stage in found]
        params = [(pair[0] * there, pair[1] * there) for pair, there in zip(params, here, strict=True)]
    return np.maximum.reduce([pair[0] for pair in params]), np.maximum.reduce([pair[1] for pair in params])
