"""Memory of the model states of a rank: weights, gradients, main parameters and optimizer states.

Sources: megatron-core 0.16 to 0.20 (`param_and_grad_buffer.py`, `distrib_optimizer.py`, `optimizer.py`,
`layer_wise_optimizer.py`), torch 2.11's AdamW, transformer-engine 2.9 to 2.20 (`fused_adam.py`); ZeRO (arXiv
1910.02054) with unsharded gradient buffers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from flagcore_models.layers import depth_of, experts_of, product_counts

from flagcore.domain.space import FloatArray
from flagcore_training.adapters import base_bytes
from flagcore_training.kinds import layer_kinds
from flagcore_training.layout import ArrayRecord, Layout, Training
from flagcore_training.weights import ADAPTER_PARTS, EXPERT_PARTS, Parts, layer_parameters, table_sizes

LINEAR_PARTS = ("qkv_proj", "out_proj", "mixers", "ffn", "experts", "shared_experts", "mtp")
"""Components whose matrix products run in 8 or 4 bits if the precision is fp8, mxfp8, nvfp4 or mxfp4."""

QUANTISED_BYTES = {"fp8": 2.0, "mxfp8": 2.0 + 2 / 32, "nvfp4": 1.0 + 2 / 16, "mxfp4": 1.0 + 2 / 32}
"""Bytes per weight of its 8- or 4-bit copies, including the scales of blocks of 32 or 16 elements.

There is one copy for each direction of a product (transformer-engine 2.9 to 2.20, `module/base.py`). A chip whose fp8
products support both directions stores only one."""

BUCKET_MULTIPLE = 128
"""Megatron pads gradient buffers to a common multiple of this and of the number of ranks that share them.

Source: megatron-core 0.16 to 0.20, whose `param_layout.py` has the same multiple."""


@dataclass(frozen=True, slots=True)
class State(ArrayRecord):
    """Bytes of the model states of a group of parameters on one rank."""

    weights: FloatArray
    gradients: FloatArray
    main_parameters: FloatArray
    optimizer: FloatArray

    @property
    def total(self) -> FloatArray:
        return self.weights + self.gradients + self.main_parameters + self.optimizer


def split_parameters(parts: Parts) -> tuple[FloatArray, FloatArray]:
    """Return the number of dense weights, which all data-parallel ranks replicate, and the number of expert weights."""
    dense = sum((value for name, value in parts.items() if name not in EXPERT_PARTS), np.zeros(()))
    experts = sum((parts[name] for name in EXPERT_PARTS if name in parts), np.zeros_like(dense))
    return dense, experts


def trained_parts(train: Training, params: Parts) -> Parts:
    """Return the components that are trained: all of them, or the adapters."""
    return {name: params[name] for name in params if train.options.adapter is None or name in ADAPTER_PARTS}


def frozen_state(
    train: Training, bytes_: State, count: FloatArray, linear: FloatArray | float, *, experts: bool
) -> State:
    """Return the states of `count` frozen weights, of which `linear` are of linear layers, from those of trained ones.

    They have no gradients and no optimizer states.
    """
    unit, options = float(train.value_bytes), train.options
    saved = 1.0 - base_bytes(options.adapter, unit, options.peft, experts=experts) / unit
    linear = np.where(saved < 0.0, count, linear)  # all weights are in fp32
    weights = bytes_.weights * (1.0 - saved * linear / np.maximum(count, 1.0))
    return State(weights, *[np.zeros_like(weights)] * 3)


def state(
    train: Training,
    layout: Layout,
    count: FloatArray,
    *,
    experts: bool,
    linear: FloatArray | float,
    wide: FloatArray | float = 0.0,
) -> State:
    """Return the memory of the states of `count` parameters, of which `linear` are weights of linear layers.

    `wide`: those of linear layers in 16 bits in a job of fewer bits, besides layers that are in 16 bits as a whole.

    With d ranks that shard the optimizer, a 16-bit parameter with fp32 gradients needs 2 + 4 + 12 / d bytes. An fp32
    parameter needs 4 + 4 + 8 / d, because it has no main parameter. A precision-aware optimizer stores only the lower
    half of the main parameter of a bf16 weight. FSDP also shards weights and gradients. Without a second moment, a
    parameter needs 4 / d bytes less.
    """
    options = train.options
    shards = layout.expert_shards() if experts else layout.shards()
    replicas = layout.expert_replicas() if experts else layout.data * layout.context
    owners = replicas if options.shares("states") else np.ones(()) if options.fsdp else shards
    fsdp_shards = replicas if options.shares("weights") else np.ones(())
    gradient_shards = shards if options.shard_gradients else replicas if options.shares("gradients") else np.ones(())
    second: FloatArray | float = 1.0 - linear / np.maximum(count, 1.0) if options.second_moments == "others" else 0.0
    adam = options.exp_avg_bytes + options.exp_avg_sq_bytes * (1 if options.second_moments == "all" else second)
    share = 1.0 - options.optimizer_offload_fraction
    if train.precision == "fp32":
        gradients = 4.0 * count / gradient_shards
        return State(4.0 * count / fsdp_shards, gradients, 0.0 * count, adam * share * count / owners)
    main: float = options.main_param_bytes
    if options.precision_aware_optimizer and train.precision != "fp16":
        main = min(main, 2.0)
    narrow_bytes = QUANTISED_BYTES.get(train.precision, 0.0)
    is_narrow = (narrow_bytes > 0) & ((layout.sharded_optimizer > 0) | options.fsdp | (not options.assumed_fp8_gather))
    narrow = (1.0 - train.wide_share) * (linear - wide)
    wide_count = np.where(is_narrow, count - narrow, count) if options.fp8_param_gather else count
    weights = 2.0 * wide_count + narrow_bytes * narrow
    gradients = options.grad_bytes * count
    optimizer = adam * share * count / owners
    return State(weights / fsdp_shards, gradients / gradient_shards, main * share * count / owners, optimizer)


def padding(train: Training, layout: Layout, params: Parts, *, experts: bool) -> FloatArray:
    """Return the number of padding elements in a distributed optimizer's buffers of dense or of expert weights.

    The size of a buffer is a multiple of 128 and of the number of its ranks. If matrices are not sharded, all ranks
    have as many elements as the rank with most, which has at least the mean, and at least the largest matrix. This is a
    lower bound: `layer_wise_optimizer.py` of core_v0.18 to 0.20 gives an 8B model on 4 to 256 ranks as many elements if
    it has one bucket, and 8% to 19% more if gradients overlap, at one size twice as many; a 70B model with 8 tensor
    ranks needs up to 1.76 times as many at 128 ranks.
    """
    count = split_parameters(params)[experts]
    ranks = (layout.expert_shards() if experts else layout.shards()).astype(np.int64)
    multiple = np.lcm(ranks, BUCKET_MULTIPLE)
    padding_elements = np.ceil(count / multiple) * multiple - count
    if train.options.whole_matrices:
        missing = ranks * largest_matrix(train, layout, params, experts=experts) - _linear(params, experts=experts)
        padding_elements = np.maximum(padding_elements, missing)
    return np.where(ranks > 1, padding_elements, 0.0)


def _linear(params: Parts, *, experts: bool) -> FloatArray:
    """Return the number of weights of linear layers among the dense or the expert weights."""
    names = [name for name in LINEAR_PARTS if name in params and (name in EXPERT_PARTS) is experts]
    return sum((params[name] for name in names), np.zeros(()))


def wide_parts(train: Training) -> tuple[str, ...]:
    """Return the components among `LINEAR_PARTS` that are in 16 bits in a job of fewer bits."""
    attention = ("qkv_proj", "out_proj") if "attention" in train.options.wide_modules else ()
    return (*attention, *["mtp"] * train.options.wide_mtp)


def largest_matrix(train: Training, layout: Layout, params: Parts, *, experts: bool) -> FloatArray:
    """Return the number of elements of the largest matrix of a linear layer on a rank: dense, or of an expert.

    Components of which `params` has no weights do not count. Linear layers that a product joins are one matrix, unless
    each rank has them whole (megatron-core 0.16 `MLASelfAttention`).
    """
    model, ranks = train.model, layout.expert_tensor if experts else layout.tensor
    largest = np.zeros_like(ranks)
    for each in (*product_counts(model), *depth_of(model).products(model.hidden_size)):
        if each.component in LINEAR_PARTS and (each.component in EXPERT_PARTS) is experts and each.component in params:
            outputs = each.outer(ranks) if each.split else max(layer.width for layer in each.layers)
            largest = np.maximum(largest, each.inner(ranks) * outputs * (params[each.component] > 0))
    return largest


STEP_BYTES = 4.0
"""Bytes per parameter that torch's AdamW allocates in its step: the fp32 square roots of second moments.

It allocates them for all parameters of a group at once. The groups are parameters with and without weight decay, of
experts and of other layers. Counted in torch 2.11."""


def gathered_bytes(train: Training, layout: Layout, dense: State, experts: State) -> FloatArray:
    """Return the bytes of the weights and gradients that FSDP gathers temporarily.

    It gathers the current layer and prefetches the next one (Megatron-FSDP; ZeRO-3), so the result is at most all
    shards of the stage on the other ranks. `dense` and `experts` are the shards of this rank.
    """
    if not train.options.fsdp:
        return np.zeros(())
    layers = [sum(layer_parameters(train, layout, each).values()) for each in layer_kinds(train.model).layers]
    table = table_sizes(train, layout.tensor)[0]
    largest_layer: FloatArray = np.maximum(np.max(np.stack(layers), axis=0), table)
    base = base_bytes(train.options.adapter, train.value_bytes, train.options.peft)
    weights, gradients = (float(train.options.shares(each)) for each in ("weights", "gradients"))
    width = weights * base + gradients * train.options.grad_bytes * (train.options.adapter is None)
    replicas = ((dense, layout.data * layout.context), (experts, layout.expert_replicas()))
    own = [(weights * each.weights + gradients * each.gradients) * (ranks - 1.0) for each, ranks in replicas]
    other_shards = own[0] + own[1]
    return np.minimum(2.0 * width * largest_layer, other_shards)


def step_bytes(train: Training, layout: Layout, dense: FloatArray, experts: FloatArray) -> FloatArray:
    """Return the bytes that the optimizer step allocates, for `dense` dense weights and `experts` expert weights.

    Transformer-engine's Adam works in place. 16-bit gradients are copied to fp32 first.
    """
    options, dense_share, expert_share = train.options, dense / layout.shards(), experts / layout.expert_shards()
    optimizer_share = 1.0 - options.optimizer_offload_fraction
    copies = 0.0
    if train.precision != "fp32" and options.grad_bytes < 4 and not options.precision_aware_optimizer:
        copies = 4.0
    if train.transformer_engine or options.fused_adam:
        return copies * (dense_share + expert_share)
    largest_group = np.where(layout.expert > 1, np.maximum(dense_share, expert_share), dense_share + expert_share)
    return optimizer_share * STEP_BYTES * largest_group + copies * (dense_share + expert_share)


def states_of(train: Training, layout: Layout, params: Parts) -> tuple[State, State]:
    """Return the model states of the dense weights and of the expert weights."""
    if train.options.adapter:
        return _with_frozen(train, layout, params)
    dense, experts = split_parameters(params)
    extra, of_matrices = padding(train, layout, params, experts=False), float(train.options.whole_matrices)
    linear = _linear(params, experts=False) + of_matrices * extra
    wide = sum((params[name] for name in wide_parts(train) if name in params), np.zeros(()))
    total = state(train, layout, dense + extra, experts=False, linear=linear, wide=wide)
    if experts_of(train.model) is None:
        none = np.zeros(())
        return total, State(none, none, none, none)
    extra = padding(train, layout, params, experts=True)
    linear = experts + of_matrices * extra
    return total, state(train, layout, experts + extra, experts=True, linear=linear)


def _with_frozen(train: Training, layout: Layout, params: Parts) -> tuple[State, State]:
    """Return the states of adapters and of the frozen weights beside them: of dense weights, and of experts."""
    base = {name: params[name] for name in params if name not in ADAPTER_PARTS}
    plain = replace(train, options=replace(train.options, adapter=None))
    own, others = (states_of(plain, layout, parts) for parts in (trained_parts(train, params), base))
    counts = split_parameters(base)
    dense, experts = (
        own[index] + frozen_state(train, others[index], counts[index], _linear(base, experts=each), experts=each)
        for index, each in enumerate((False, True))
    )
    return dense, experts
