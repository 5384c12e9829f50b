"""Time of an optimizer step, and of the exchange of gradients and weights around it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import numpy as np

from flagcore.contracts import CollectiveCosts, Costs
from flagcore.domain.space import FloatArray, IntArray
from flagcore.engines.megatron.parallel.layout import Layout, Training
from flagcore.engines.megatron.parallel.pipeline import Stage
from flagcore.engines.megatron.time.exchange import integers
from flagcore.engines.megatron.time.passes import StageTime

HELD_BYTES = 5.0
"""Memory traffic of an optimizer step for each parameter that a rank holds: its gradient set to zero, its weight."""

OWNED_BYTES = {True: (38.0, 38.0), False: (92.0, 83.0)}
"""The same for each parameter whose state it owns, without and with a distributed optimizer: the gradients' norm and
scale, Adam, and copies between formats; with transformer-engine's fused kernels, and with torch's."""

OWNED_LAUNCHES, SHARDED_LAUNCHES = 1.8, 4.5
"""Kernels for each tensor whose state a rank owns; a distributed optimizer copies each by itself."""

STEP_LAUNCHES, EXPERT_STEP_LAUNCHES = 95.0, 380.0
"""Kernels of a step of any size, and those that the optimizer of the experts adds. All were fitted to
the optimizer's time on 25 ranks of megatron-core 0.16.1 on one accelerator, torch's fused AdamW."""


HOST_ADAM_BYTES, HOST_BYTES_PER_SECOND = 28.0, 25e9
"""Adam on the host: bytes moved a parameter (fp32 weight, gradient and two moments read, three written), and what one
rank's share of the processors moves per second. The rate is an estimate: 200 GB/s of a socket over 8 ranks."""


def optimizer_time(
    train: Training, layout: Layout, costs: Costs, found: Stage, params: tuple[FloatArray, FloatArray]
) -> FloatArray:
    """Return the seconds of the optimizer's step of a stage.

    `params` are its parameters that all ranks replicate, and those of experts.
    Norms, Adam and copies of what a rank owns move memory; each tensor costs the host some launches.
    """
    if train.options.adapters:
        return np.full_like(params[0], STEP_LAUNCHES * costs.kernels.launch_seconds())
    model, shards, expert_shards = train.model, layout.shards(), layout.expert_shards()
    each = 6.0 + 2.0 * model.qk_layernorm + 2.0 * model.multi_latent_attention
    tensors = found.layers * each + found.first + 2.0 * found.last
    local = found.moe * 2.0 * (model.num_moe_experts or 0) / layout.expert
    owned = params[0] / shards + params[1] / expert_shards
    sharded = layout.sharded_optimizer > 0
    here = (1.0 - train.options.optimizer_offload_fraction) * owned
    owned_bytes = np.where(sharded, *OWNED_BYTES[train.transformer_engine][::-1])
    moved = owned_bytes * here + HELD_BYTES * (params[0] + params[1])
    away = train.options.optimizer_offload_fraction * owned
    transfer_s = np.zeros_like(away)
    if train.options.optimizer_offload_fraction:
        transfer_s = costs.kernels.host_copy_seconds((train.options.main_grad_bytes + train.value_bytes) * away)
        transfer_s = transfer_s + HOST_ADAM_BYTES * away / HOST_BYTES_PER_SECOND
    launches = np.where(sharded, SHARDED_LAUNCHES, OWNED_LAUNCHES) * (tensors / shards + local / expert_shards)
    launches = launches + STEP_LAUNCHES + EXPERT_STEP_LAUNCHES * (model.num_moe_experts is not None)
    graphed = 0.0 if train.options.cuda_graph == "iteration" else 1.0
    return costs.kernels.memory_seconds(moved) + transfer_s + launches * costs.kernels.launch_seconds() * graphed


def gradient_time(
    train: Training,
    layout: Layout,
    groups: Sequence[tuple[CollectiveCosts, tuple[FloatArray, FloatArray]]],
    stage: StageTime,
) -> FloatArray:
    """Return the time that a step waits to reduce gradients and, with a distributed optimizer, to gather weights.

    Each of `groups` has its collectives and the most that a stage on it holds of the parameters that all ranks
    replicate, and of those of experts, which have their own group; the slowest node group decides. Gradients are
    all-reduced, or reduce-scattered and the weights gathered (arXiv 1910.02054, section 7). What overlaps hides
    behind the backward pass (gradients) or forward pass (weights) of one micro-batch, and slows the kernels there down
    by the share of compute that it takes. Fully sharded weights are gathered twice, and gradients scattered, for each
    micro-batch (arXiv 1910.02054, section 7.2.2), behind its kernels.
    """
    options = train.options
    if options.adapters:
        return np.zeros_like(layout.data)
    reduced, gathered, scattered_all, share = (np.zeros_like(layout.data) for _ in range(4))
    kinds = [(layout.data * layout.context, layout.tensor)]
    if train.model.num_moe_experts is not None:
        kinds.append((layout.expert_replicas(), layout.expert * layout.expert_tensor))
    for place, (ranks, stride) in enumerate(kinds):
        where = (integers(ranks), integers(stride))
        held = [(costs, params[place]) for costs, params in groups]
        whole = _longest(held, "all_reduce", options.grad_bytes, where)
        scattered = _longest(held, "reduce_scatter", options.grad_bytes, where)
        reduced = reduced + np.where(layout.sharded_optimizer > 0, scattered, whole)
        scattered_all = scattered_all + scattered
        weights = _longest(held, "all_gather", _gathered_bytes(train), where)
        gathered = gathered + weights * np.maximum(layout.sharded_optimizer, float(options.fsdp))
        share = reduce(np.maximum, [share, *(costs.compute_share(*where) for costs, _ in groups)])
    if options.fsdp:
        return layout.microbatches * _behind(2.0 * gathered + scattered_all, stage.busy, share)
    if options.overlap_grad_reduce:
        reduced = _behind(reduced, stage.backward.total + stage.weight, share)
    if options.overlap_param_gather:
        gathered = _behind(gathered, stage.forward.total, share)
    return reduced + gathered


def _longest(
    held: Sequence[tuple[CollectiveCosts, FloatArray]], kind: str, each: float, where: tuple[IntArray, IntArray]
) -> FloatArray:
    return reduce(np.maximum, (costs.seconds(kind, each * params, *where) for costs, params in held))


def _behind(seconds: FloatArray, window: FloatArray, share: FloatArray) -> FloatArray:
    """Return the exposed time of a collective that overlaps kernels, including their slowdown."""
    hidden = np.minimum(seconds, window)
    return seconds - hidden + share * hidden


def _gathered_bytes(train: Training) -> float:
    """Return the bytes of a weight when it is gathered: one if it is stored in fp8, else those of an activation.

    mxfp8 is quantised after a gather in 16 bits, once for each direction of a product (megatron-core 0.16,
    `reuse_grad_buf_for_mxfp8_param_ag`).
    """
    return 1.0 if train.options.fp8_param_gather and train.precision != "mxfp8" else float(train.value_bytes)
