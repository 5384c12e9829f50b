"""Time of an optimizer step, and of the collectives of gradients and weights before and after it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from flagcore_models.layers import attention_of, experts_of
from flagcore_models.mixers.latent_attention import LatentAttention

from flagcore.contracts import CollectiveCosts, Costs
from flagcore.domain.space import FloatArray, IntArray
from flagcore_training.adapters import base_bytes
from flagcore_training.kinds import layer_kinds
from flagcore_training.layout import WHOLE_STEP, Layout, Training
from flagcore_training.stages import Stage
from flagcore_training.time.passes import StageTime, as_integers

PARAMETER_BYTES = 5.0
"""Memory traffic of an optimizer step per parameter of a rank, in bytes: clearing its gradient, writing its weight.

Fitted to optimizer times of 25 ranks of megatron-core 0.16.1 on one accelerator with torch's fused AdamW."""

STATE_BYTES = {True: (38.0, 38.0), False: (92.0, 83.0)}
"""Memory traffic per parameter whose optimizer state is on a rank, without and with a distributed optimizer, in bytes.

True is for transformer-engine's kernels, whose values are estimates. The other values are fitted like
`PARAMETER_BYTES`. The traffic is for the norm and scale of gradients, Adam, and copies between formats."""

STATE_LAUNCHES, SHARDED_LAUNCHES = 1.8, 4.5
"""Kernels per tensor whose optimizer state is on a rank, without and with a distributed optimizer. Fitted like
`PARAMETER_BYTES`."""

STEP_LAUNCHES, EXPERT_STEP_LAUNCHES = 95.0, 380.0
"""Kernels of any optimizer step, and additional kernels of the experts' optimizer. Fitted like `PARAMETER_BYTES`."""


GARBAGE_SECONDS = 0.3
"""One collection of garbage, while devices wait: of the 430,000 objects of a process with torch 2.13, its compiler and
transformers 5.24, timed on a CPU (gc.collect). Megatron's own modules are not in it."""

HOST_ADAM_BYTES, HOST_BYTES_PER_SECOND = 28.0, 25e9
"""Adam on the host: memory traffic in bytes per parameter, and the memory bandwidth of one rank in bytes per second.

The traffic is counted: fp32 weight, gradient and two moments are read, three of them are written. The bandwidth is an
estimate: 200 GB/s of a socket, shared by 8 ranks."""


@dataclass(frozen=True, slots=True)
class AcrossGroups:
    """Costs of hierarchical collectives over replicas on several node groups.

    `here` is the number of replicas in this group, whose costs are `inside`. Values are reduced inside each group, then
    `between` the groups, where each rank sends its shard over its own port, and then gathered inside each group (FlagCX
    0c72129, `runner/c2c_algo.cc`). The group with the fewest replicas has the largest shards.
    """

    inside: CollectiveCosts
    between: CollectiveCosts
    here: FloatArray

    def seconds(self, kind: str, payload_bytes: FloatArray, ranks: IntArray, stride: IntArray) -> FloatArray:
        replicas_here = as_integers(self.here)
        groups, distance = -(-ranks // replicas_here), replicas_here * stride
        between_seconds = self.between.seconds(kind, payload_bytes / self.here, groups, distance)
        return self.inside.seconds(kind, payload_bytes, replicas_here, stride) + between_seconds

    def compute_share(self, ranks: IntArray, stride: IntArray) -> FloatArray:
        return self.inside.compute_share(ranks, stride)


def reduction(layout: Layout, costs: Costs) -> tuple[Layout, CollectiveCosts]:
    """Return the layout and the costs for the collectives of gradients.

    If each node group has whole replicas, the ranks of a replica are consecutive, so ranks that hold the same weights
    are TP x PP apart.
    """
    if not layout.here or costs.between is None:
        return layout, costs.collectives
    sizes_times_pipeline = {name: getattr(layout, name) * layout.pipeline for name in ("tensor", "expert_tensor")}
    ranks = layout.here[0] * layout.context
    return replace(layout, **sizes_times_pipeline), AcrossGroups(costs.collectives, costs.between, ranks)


def optimizer_time(
    train: Training, layout: Layout, costs: Costs, stage: Stage, params: tuple[FloatArray, FloatArray]
) -> FloatArray:
    """Return the seconds of the optimizer step of a stage. `params` are the stage's numbers of trained dense and expert
    parameters.

    Norms, Adam and copies cost memory traffic, and each tensor costs kernel launches. The collection of garbage after
    steps is included.
    """
    shards, expert_shards = layout.shards(), layout.expert_shards()
    attention, experts = attention_of(train.model), experts_of(train.model)
    layer_tensors = 6.0 + 2.0 * attention.qk_norm + 2.0 * isinstance(attention, LatentAttention)
    ends = 0.0 if train.options.adapter else stage.first + 2.0 * stage.last  # a layer has about as many adapters
    tensors = stage.layers * layer_tensors + ends
    expert_tensors = np.zeros_like(tensors)
    if experts is not None:
        expert_tensors = layer_kinds(train.model).with_experts(stage.numbers) * 2.0 * experts.count / layout.expert
    owned_count = params[0] / shards + params[1] / expert_shards
    is_sharded = layout.sharded_optimizer > 0
    device_count = (1.0 - train.options.optimizer_offload_fraction) * owned_count
    owned_bytes = np.where(is_sharded, *STATE_BYTES[train.transformer_engine][::-1])
    traffic = owned_bytes * device_count + PARAMETER_BYTES * (params[0] + params[1])
    host_count = train.options.optimizer_offload_fraction * owned_count
    transfer_s = np.zeros_like(host_count)
    if train.options.optimizer_offload_fraction:
        transfer_s = costs.kernels.host_copy_seconds((train.options.main_grad_bytes + train.value_bytes) * host_count)
        transfer_s = transfer_s + HOST_ADAM_BYTES * host_count / HOST_BYTES_PER_SECOND
    own_tensors = tensors / shards + expert_tensors / expert_shards
    launches = np.where(is_sharded, SHARDED_LAUNCHES, STATE_LAUNCHES) * own_tensors
    launches = launches + STEP_LAUNCHES + EXPERT_STEP_LAUNCHES * (experts is not None)
    host = costs.kernels.launch_seconds() * (train.options.graphs != WHOLE_STEP)
    garbage_s = GARBAGE_SECONDS / train.options.gc_interval if train.options.gc_interval else 0.0
    return costs.kernels.memory_seconds(traffic) + transfer_s + launches * host + garbage_s


def gradient_time(
    train: Training,
    layout: Layout,
    collectives: CollectiveCosts,
    params: Sequence[FloatArray],
    trained: Sequence[FloatArray],
    stage: StageTime,
) -> FloatArray:
    """Return the exposed seconds per step for gradient reduction and for gathering a distributed optimizer's weights.

    `params` are the largest numbers of dense and of expert parameters of a stage on a node group, `trained` those of
    them that are trained: only FSDP gathers the others. Gradients are all-reduced, or reduce-scattered with a gather of
    the weights (arXiv 1910.02054, section 7). Overlapped collectives hide behind the backward pass (gradients) or the
    forward pass (weights) of one micro-batch, and slow its kernels down by the share of compute that they use. FSDP
    gathers weights twice and scatters gradients for each micro-batch (section 7.2.2), overlapped with its kernels.
    """
    options = train.options
    # Of 8-bit formats, mxfp8 is gathered in 16 bits and quantised afterwards (megatron-core 0.16,
    # `reuse_grad_buf_for_mxfp8_param_ag`).
    weight_bytes = 1.0 if options.fp8_param_gather and train.precision != "mxfp8" else float(train.value_bytes)
    reduce_s, gather_s, scatter_s, share = (np.zeros_like(layout.data) for _ in range(4))
    kinds = [(layout.data * layout.context, layout.tensor)]
    if experts_of(train.model) is not None:
        kinds.append((layout.expert_replicas(), layout.expert * layout.expert_tensor))
    is_sharded = np.full_like(layout.data, options.shares("states")) if options.fsdp else layout.sharded_optimizer
    for index, (ranks, stride) in enumerate(kinds):
        ring = (as_integers(ranks), as_integers(stride))
        gradients, gathered = options.grad_bytes * trained[index], (params if options.fsdp else trained)[index]
        all_reduce_s = collectives.seconds("all_reduce", gradients, *ring)
        reduce_scatter_s = collectives.seconds("reduce_scatter", gradients, *ring)
        reduce_s = reduce_s + np.where(is_sharded, reduce_scatter_s, all_reduce_s)
        scatter_s = scatter_s + reduce_scatter_s
        base = base_bytes(options.adapter, weight_bytes, options.peft, experts=index > 0)
        weights = collectives.seconds("all_gather", (base if options.fsdp else weight_bytes) * gathered, *ring)
        gather_s = gather_s + weights * is_sharded
        share = np.maximum(share, collectives.compute_share(*ring))
    if options.shares("weights"):
        return layout.microbatches * _exposed(2.0 * gather_s + scatter_s, stage.busy, share)
    if options.shard_gradients or options.shares("gradients"):
        reduce_s = layout.microbatches * _exposed(scatter_s, stage.backward.total + stage.weight, share)
    elif options.overlap_grad_reduce:
        reduce_s = _exposed(reduce_s, stage.backward.total + stage.weight, share)
    if options.overlap_param_gather:
        gather_s = _exposed(gather_s, stage.forward.total, share)
    return reduce_s + gather_s


def _exposed(seconds: FloatArray, window: FloatArray, share: FloatArray) -> FloatArray:
    """Return the exposed time of a collective that overlaps `window` seconds of kernels, in seconds. It includes the
    slowdown of the kernels. `share` is the share of compute that the collective uses."""
    overlap = np.minimum(seconds, window)
    return seconds - overlap + share * overlap
