"""Time of a training step: layers make stages, stages a pipeline, then gradients and the optimizer."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from flagcore.contracts import Costs
from flagcore.domain.space import FloatArray, IntArray
from flagcore.physics import transformer
from flagcore.physics.exchange import integers
from flagcore.physics.layer_time import embedding_time, head_time, layer_time
from flagcore.physics.layout import Layout, Training
from flagcore.physics.memory import split_parameters, stage_parameters
from flagcore.physics.passes import Block, Seconds, quiet
from flagcore.physics.pipeline import Stage, stage, stages

HELD_BYTES = 5.0
"""Memory traffic of an optimizer step for each parameter that a rank holds: its gradient set to zero, its weight."""

OWNED_BYTES = {True: (38.0, 38.0), False: (97.0, 88.0)}
"""The same for each parameter whose state it owns, without and with a distributed optimizer: the gradients' norm and
scale, Adam, and copies between formats; with transformer-engine's fused kernels, and with torch's."""

OWNED_LAUNCHES, SHARDED_LAUNCHES = 1.8, 4.5
"""Kernels for each tensor whose state a rank owns; a distributed optimizer copies each by itself."""

STEP_LAUNCHES, EXPERT_STEP_LAUNCHES = 95.0, 380.0
"""Kernels of a step whatever its size, and those that the optimizer of the experts adds. All were fitted to
the optimizer's time on 25 ranks of megatron-core 0.16.1 on one accelerator, torch's fused AdamW."""

ACCUMULATION_BYTES, FUSED_ACCUMULATION_BYTES = 12.0, 8.0
"""Memory traffic a parameter and micro-batch to add a weight's gradient to its fp32 buffer: the 16-bit gradient
written and read, the buffer read and written (2 + 2 + 4 + 4); fused: the buffer alone."""

LAG = 5.0
"""Between what fits the same sweep as the launches (3.1 to 3.9), and the ranks measured on another accelerator (8)."""

GRAPHED = {"": 1.0, "layer": 0.4, "iteration": 0.0}
"""Share of launches that the host still makes one by one, by what is launched as one graph."""


@dataclass(frozen=True, slots=True)
class StageTime:
    """Seconds of one micro-batch through one pipeline stage: forward, backward to its input, weights' gradients."""

    forward: Seconds
    backward: Seconds
    weight: FloatArray

    @property
    def busy(self) -> FloatArray:
        """All of it."""
        return self.forward.total + self.backward.total + self.weight


@dataclass(frozen=True, slots=True)
class Parts:
    """The blocks that stages are made of."""

    dense: Block
    moe: Block
    embedding: Block
    head: Block


@dataclass(frozen=True, slots=True)
class _Silence:
    """`flagcore.contracts.CollectiveCosts` of a rank that waits for nobody."""

    def seconds(self, kind: str, payload_bytes: FloatArray, ranks: IntArray, stride: IntArray) -> FloatArray:
        """Return no time."""
        return np.zeros_like(payload_bytes)

    def compute_taken(self, ranks: IntArray, stride: IntArray) -> FloatArray:
        """Return no share."""
        return np.zeros(np.shape(ranks))


def step_time(train: Training, layout: Layout, costs: Costs) -> dict[str, FloatArray]:
    """Return the seconds of each part of one step; they add up to the step. NaN where a cost is not known.

    Pipeline: m micro-batches on the slowest stage, and one pass over the other stages, which interleaving divides
    by v (Narayanan et al. 2021, arXiv 2104.04473, section 2.2).
    """
    found, parts = stages(train.model, layout), _parts(train, layout, costs)
    weights = [split_parameters(stage_parameters(train, layout, stage)) for stage in found]
    dense, experts = (np.maximum.reduce([pair[kind] for pair in weights]) for kind in (0, 1))
    times = [_stage_time(train, layout, costs, parts, each, held) for each, held in zip(found, weights, strict=True)]
    worst = np.argmax(np.stack([time.busy for time in times]), axis=0)
    forward, backward = (_chosen(worst, [getattr(time, side) for time in times]) for side in ("forward", "backward"))
    weight = np.choose(worst, [time.weight for time in times])
    slowest = StageTime(forward, backward, weight)

    m = layout.microbatches
    others = np.where(layout.pipeline > 1, np.maximum(_one_pass(train, layout, costs, parts) - slowest.busy, 0.0), 0.0)
    boundary = costs.collectives.seconds(
        "send",
        transformer.layer_input_bytes(train, layout),
        integers(np.minimum(layout.pipeline, 2.0)),
        integers(layout.tensor * layout.context * layout.data),
    )
    return {
        "compute_s": m * (forward.compute + backward.compute + weight),
        "tp_comm_s": m * (forward.tensor + backward.tensor),
        "cp_comm_s": m * (forward.context + backward.context),
        "ep_comm_s": m * (forward.expert + backward.expert),
        "pp_bubble_s": others / layout.virtual,
        "pp_comm_s": _messages(train, layout) * boundary,
        "dp_comm_exposed_s": _gradients(train, layout, costs, (dense, experts), slowest),
        "optimizer_s": np.max(
            [optimizer_time(train, layout, costs, *each) for each in zip(found, weights, strict=True)], axis=0
        ),
    }


def rank_time(train: Training, layout: Layout, costs: Costs, index: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return the seconds of a rank of pipeline stage `index`: forward and backward of a step, and the optimizer.

    Nothing is waited for: neither other ranks nor collectives.
    """
    alone = replace(costs, collectives=_Silence())
    found, parts = stage(train.model, layout, index), _parts(train, layout, alone)
    dense, experts = split_parameters(stage_parameters(train, layout, found))
    time = _stage_time(train, layout, alone, parts, found, (dense, experts))
    compute = time.forward.compute + time.backward.compute + time.weight
    return layout.microbatches * compute, optimizer_time(train, layout, costs, found, (dense, experts))


def optimizer_time(
    train: Training, layout: Layout, costs: Costs, found: Stage, held: tuple[FloatArray, FloatArray]
) -> FloatArray:
    """Return the optimizer's step of a stage that holds so many parameters that all ranks replicate, and of experts.

    Norms, Adam and copies of what a rank owns move memory; each tensor costs the host some launches.
    """
    model, shards, expert_shards = train.model, layout.shards(), layout.expert_shards()
    each = 6.0 + 2.0 * model.qk_layernorm + 2.0 * model.multi_latent_attention
    tensors = found.layers * each + found.first + 2.0 * found.last
    local = found.moe * 2.0 * (model.num_moe_experts or 0) / layout.expert
    owned = held[0] / shards + held[1] / expert_shards
    sharded = layout.sharded_optimizer > 0
    moved = np.where(sharded, *OWNED_BYTES[train.transformer_engine][::-1]) * owned + HELD_BYTES * (held[0] + held[1])
    launches = np.where(sharded, SHARDED_LAUNCHES, OWNED_LAUNCHES) * (tensors / shards + local / expert_shards)
    launches = launches + STEP_LAUNCHES + EXPERT_STEP_LAUNCHES * (model.num_moe_experts is not None)
    graphed = 0.0 if train.options.cuda_graph == "iteration" else 1.0
    return costs.kernels.memory_seconds(moved) + launches * costs.kernels.launch_seconds() * graphed


def _parts(train: Training, layout: Layout, costs: Costs) -> Parts:
    dense = layer_time(train, layout, costs, moe=False)
    moe = layer_time(train, layout, costs, moe=True) if train.model.num_moe_experts is not None else dense
    return Parts(dense, moe, embedding_time(train, layout, costs), head_time(train, layout, costs))


def _stage_time(
    train: Training,
    layout: Layout,
    costs: Costs,
    parts: Parts,
    found: Stage,
    held: tuple[FloatArray, FloatArray],
) -> StageTime:
    """Return a stage's time of one micro-batch: at least that in which the host launches its kernels.

    A layer that is recomputed whole repeats its forward pass, collectives included, before its backward pass;
    selective recompute repeats the named modules of the others.
    """
    again = _recomputed(layout, found)
    kept = layout.selective * (1.0 - again)

    def layers(block: Block) -> Block:
        backward = block.backward + block.forward * again + block.repeated * kept
        return Block(block.forward, backward, block.weight, block.repeated)

    depths = found.last * train.model.mtp_num_layers
    routed = found.moe + (depths if train.model.num_moe_experts is not None else 0.0)
    plain = found.dense + (depths if train.model.num_moe_experts is None else 0.0)
    total = layers(parts.dense) * plain + parts.embedding * found.first + parts.head * found.last
    if train.model.num_moe_experts is not None:
        total = total + layers(parts.moe) * routed
    accumulation = FUSED_ACCUMULATION_BYTES if train.transformer_engine else ACCUMULATION_BYTES
    weight = total.weight + costs.kernels.memory_seconds(accumulation * (held[0] + held[1]))
    host = costs.kernels.launch_seconds() * GRAPHED[train.options.cuda_graph]
    forward = _launched(total.forward, total.forward, host)
    backward = _launched(total.backward, total.backward + quiet(weight), host)
    return StageTime(forward, backward, weight)


def _launched(seconds: Seconds, device: Seconds, host: float) -> Seconds:
    """Return `seconds` with the time that the device waits for the host's launches.

    Some kernels of a pass are longer than their launches and some shorter, so the two times add up to more than the
    larger one: smoothly, by a norm of `LAG`.
    """
    if not host:
        return seconds
    busy, launching = device.total, seconds.launches * host
    ratio = launching / busy
    return seconds + quiet(busy * ((1.0 + ratio**LAG) ** (1.0 / LAG) - 1.0))


def _recomputed(layout: Layout, found: Stage) -> FloatArray:
    """Return the share of a stage's layers whose forward pass runs twice."""
    block = np.minimum(layout.block / np.maximum(found.chunk, 1.0), 1.0)
    return np.where(layout.uniform > 0, 1.0, block)


def _one_pass(train: Training, layout: Layout, costs: Costs, parts: Parts) -> FloatArray:
    """Return one micro-batch's time through all stages."""
    whole = np.zeros_like(layout.data)
    model = train.model
    leading = model.num_layers if model.num_moe_experts is None else model.moe_first_dense_layers
    one = Stage(
        index=whole,
        first=whole + 1.0,
        last=whole + 1.0,
        dense=whole + leading,
        moe=whole + (model.num_layers - leading),
        chunk=np.ceil(model.num_layers / (layout.pipeline * layout.virtual)),
        in_flight=whole,
    )
    return _stage_time(train, layout, costs, parts, one, (whole, whole)).busy


def _messages(train: Training, layout: Layout) -> FloatArray:
    """Return how many messages between stages a step waits for, one after another.

    1F1B sends one way and receives the other at a time, twice a micro-batch (megatron-core 0.16 `schedules.py`);
    with virtual stages messages travel behind other chunks' work, but for the first and last of a step.
    """
    fill = layout.pipeline - 1.0
    steady = layout.microbatches * layout.virtual
    hidden = (layout.virtual > 1) & train.options.overlap_p2p_comm
    return 2.0 * (fill + np.where(hidden, 0.0, steady))


def _gradients(
    train: Training, layout: Layout, costs: Costs, params: tuple[FloatArray, FloatArray], slowest: StageTime
) -> FloatArray:
    """Return the time to reduce gradients and, with a distributed optimizer, to gather weights.

    Gradients are all-reduced, or reduce-scattered and the weights gathered (arXiv 1910.02054, section 7).
    Experts have their own group. What overlaps hides behind the backward pass (gradients) and forward pass (weights)
    of one micro-batch.
    """
    options = train.options
    reduced, gathered = np.zeros_like(params[0]), np.zeros_like(params[0])
    groups = [(params[0], layout.data * layout.context, layout.tensor)]
    if train.model.num_moe_experts is not None:
        groups.append((params[1], layout.expert_replicas(), layout.expert * layout.expert_tensor))
    for held, ranks, stride in groups:
        where = (integers(ranks), integers(stride))
        whole = costs.collectives.seconds("all_reduce", options.grad_bytes * held, *where)
        scattered = costs.collectives.seconds("reduce_scatter", options.grad_bytes * held, *where)
        reduced = reduced + np.where(layout.sharded_optimizer > 0, scattered, whole)
        weights = costs.collectives.seconds("all_gather", train.value_bytes * held, *where)
        gathered = gathered + weights * layout.sharded_optimizer
    if options.overlap_grad_reduce:
        reduced = np.maximum(reduced - slowest.backward.total - slowest.weight, 0.0)
    if options.overlap_param_gather:
        gathered = np.maximum(gathered - slowest.forward.total, 0.0)
    return reduced + gathered


def _chosen(worst: IntArray, times: list[Seconds]) -> Seconds:
    names = ("compute", "tensor", "context", "expert", "launches")
    return Seconds(*(np.choose(worst, [getattr(time, name) for time in times]) for name in names))
