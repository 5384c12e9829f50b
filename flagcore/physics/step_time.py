"""Time of a training step: layers from kernels and collectives, then the pipeline, then gradients and optimizer."""

from __future__ import annotations

import numpy as np

from flagcore.contracts import Costs
from flagcore.domain.space import FloatArray, IntArray
from flagcore.physics import transformer
from flagcore.physics.layer_time import Seconds, edge_time, layer_time
from flagcore.physics.layout import Layout, Training
from flagcore.physics.memory import split_parameters, stage_parameters
from flagcore.physics.pipeline import recomputed_share, stages

OWNED_BYTES, HELD_BYTES = 100.0, 6.0
"""Memory traffic of an optimizer step: bytes a parameter whose state the rank owns (Adam, norm, clipping, copies),
and bytes a parameter that it holds (gradients set to zero). Fitted to two of 25 measured ranks of megatron-core
0.16.1."""

ACCUMULATION_BYTES, FUSED_ACCUMULATION_BYTES = 12.0, 8.0
"""Memory traffic a parameter and micro-batch to add a weight's gradient to its fp32 buffer: the 16-bit gradient
written and read, the buffer read and written (2 + 2 + 4 + 4); fused: the buffer alone."""


def step_time(train: Training, layout: Layout, costs: Costs) -> dict[str, FloatArray]:
    """Return the seconds of each part of one step; they add up to the step. NaN where a cost is not known.

    Pipeline: m micro-batches on the slowest stage, and one pass over the other stages, which interleaving divides
    by v (Narayanan et al. 2021, arXiv 2104.04473, section 2.2). Sends between stages and the exchange of gradients
    hide behind nothing.
    """
    found = stages(train.model, layout)
    weights = [split_parameters(stage_parameters(train, layout, stage)) for stage in found]
    dense, experts = (np.maximum.reduce([pair[kind] for pair in weights]) for kind in (0, 1))

    again = recomputed_share(train.model, layout)
    head = edge_time(train, layout, costs)
    accumulation = FUSED_ACCUMULATION_BYTES if train.transformer_engine else ACCUMULATION_BYTES
    plain = layer_time(train, layout, costs, again, moe=False)
    routed = layer_time(train, layout, costs, again, moe=True) if train.model.num_moe_experts is not None else plain
    times = []
    for stage, (replicated, local) in zip(found, weights, strict=True):
        depths = stage.last * train.model.mtp_num_layers
        time = plain * stage.dense + routed * (stage.moe + depths) + head * stage.last
        buffers = costs.kernels.memory_seconds(accumulation * (replicated + local))
        times.append(time + Seconds(buffers, *(np.zeros_like(buffers),) * 3))
    worst = np.argmax(np.stack([time.total for time in times]), axis=0)
    slowest = Seconds(*(_choose(worst, times, part) for part in ("compute", "tensor", "context", "expert")))

    layers, m = train.model.num_layers, layout.microbatches
    leading = layers if train.model.num_moe_experts is None else train.model.moe_first_dense_layers
    one_pass = (plain * _same(m, leading) + routed * _same(m, layers - leading) + head).total
    others = np.where(layout.pipeline > 1, np.maximum(one_pass - slowest.total, 0.0), 0.0)
    boundary = costs.collectives.seconds(
        "send",
        transformer.layer_input_bytes(train, layout),
        _int(np.minimum(layout.pipeline, 2.0)),
        _int(layout.tensor * layout.context * layout.data),
    )
    owned = dense / layout.shards() + experts / layout.expert_shards()
    return {
        "compute_s": m * slowest.compute,
        "tp_comm_s": m * slowest.tensor,
        "cp_comm_s": m * slowest.context,
        "ep_comm_s": m * slowest.expert,
        "pp_bubble_s": others / layout.virtual,
        "pp_comm_s": 2.0 * (m * layout.virtual + layout.pipeline - 1.0) * boundary,
        "dp_comm_exposed_s": _gradients(train, layout, costs, dense, experts),
        "optimizer_s": costs.kernels.memory_seconds(OWNED_BYTES * owned + HELD_BYTES * (dense + experts)),
    }


def _gradients(train: Training, layout: Layout, costs: Costs, dense: FloatArray, experts: FloatArray) -> FloatArray:
    """Return the time to reduce gradients and, with a distributed optimizer, to gather weights.

    fp32 gradients are all-reduced, or reduce-scattered and the weights gathered (arXiv 1910.02054, section 7).
    Experts have their own group.
    """
    total: FloatArray = np.zeros_like(dense)
    groups = [(dense, layout.data * layout.context, layout.tensor)]
    if train.model.num_moe_experts is not None:
        groups.append((experts, layout.expert_replicas(), layout.expert * layout.expert_tensor))
    for params, ranks, stride in groups:
        where = (_int(ranks), _int(stride))
        reduced = costs.collectives.seconds("all_reduce", 4.0 * params, *where)
        scattered = costs.collectives.seconds("reduce_scatter", 4.0 * params, *where)
        scattered = scattered + costs.collectives.seconds("all_gather", train.value_bytes * params, *where)
        total = total + np.where(layout.sharded_optimizer > 0, scattered, reduced)
    return total


def _choose(worst: IntArray, times: list[Seconds], part: str) -> FloatArray:
    chosen: FloatArray = np.choose(worst, [getattr(time, part) for time in times])
    return chosen


def _same(array: FloatArray, value: float) -> FloatArray:
    return np.full_like(array, value)


def _int(array: FloatArray) -> IntArray:
    return array.astype(np.int64)
