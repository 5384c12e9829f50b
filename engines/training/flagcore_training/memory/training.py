"""Memory of one rank in training: the model states and activations of the stage that needs the most.

Sources of the states: megatron-core 0.16 to 0.20 (`param_and_grad_buffer.py`, `distrib_optimizer.py`, `optimizer.py`,
`layer_wise_optimizer.py`, `parallel_state.py`, `schedules.py`, `token_dispatcher.py`), torch 2.11's AdamW,
transformer-engine 2.9 to 2.20 (`fused_adam.py`, `get_dummy_wgrad`); ZeRO (arXiv 1910.02054) with unsharded gradient
buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from flagcore_models.layers import attention_of, dense_of, experts_of
from flagcore_models.mixers.attention import Attention
from flagcore_models.mixers.latent_attention import LatentAttention

from flagcore.contracts import Costs, MemoryModel, communicator_bytes
from flagcore.domain.model import Part
from flagcore.domain.space import FloatArray, IntArray
from flagcore_training.adapters import BASE_BYTES
from flagcore_training.layout import ArrayRecord, Layout, StageGroups, Training, pick
from flagcore_training.memory.activations import gathered_tokens
from flagcore_training.memory.modules import Sizes
from flagcore_training.memory.stored_activations import Kinds, activation_parts, stage_activations
from flagcore_training.mixes import Share
from flagcore_training.stages import (
    ADAPTER_PARTS,
    EXPERT_PARTS,
    Parts,
    Stage,
    depths_received,
    layer_parameters,
    padded_vocab,
    stage,
    stage_layer,
    stage_parameters,
    stages,
)
from flagcore_training.vision import tower_weights

LINEAR_PARTS = ("qkv_proj", "out_proj", "mixers", "ffn", "experts", "shared_experts", "mtp")
"""Components whose matrix products run in 8 or 4 bits if the precision is fp8, mxfp8 or nvfp4."""

QUANTISED_BYTES = {"fp8": 2.0, "mxfp8": 2.0 * (1 + 1 / 32), "nvfp4": 2.0 * (1 / 2 + 1 / 16)}
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


def frozen_state(train: Training, bytes_: State, count: FloatArray, linear: FloatArray | float) -> State:
    """Return the states of `count` frozen weights, of which `linear` are of linear layers, from those of trained ones.

    They have no gradients and no optimizer states.
    """
    weights, adapter = bytes_.weights, train.options.adapter
    if adapter and adapter.base:
        saved = 1.0 - BASE_BYTES[adapter.base] / train.value_bytes
        weights = weights * (1.0 - saved * linear / np.maximum(count, 1.0))
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
    owners = replicas if options.fsdp else shards
    fsdp_shards = replicas if options.fsdp else np.ones(())
    gradient_shards = shards if options.shard_gradients else fsdp_shards
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
        missing = ranks * _largest_matrix(train, layout, params, experts=experts) - _linear(params, experts=experts)
        padding_elements = np.maximum(padding_elements, missing)
    return np.where(ranks > 1, padding_elements, 0.0)


def _linear(params: Parts, *, experts: bool) -> FloatArray:
    """Return the number of weights of linear layers among the dense or the expert weights."""
    names = [name for name in LINEAR_PARTS if name in params and (name in EXPERT_PARTS) is experts]
    return sum((params[name] for name in names), np.zeros(()))


def _wide_parts(train: Training) -> tuple[str, ...]:
    """Return the components among `LINEAR_PARTS` that are in 16 bits in a job of fewer bits."""
    attention = ("qkv_proj", "out_proj") if "attention" in train.options.wide_modules else ()
    return (*attention, *["mtp"] * train.options.wide_mtp)


def _largest_matrix(train: Training, layout: Layout, params: Parts, *, experts: bool) -> FloatArray:
    """Return the number of elements of the largest matrix of a linear layer on a rank: dense, or of an expert."""
    hidden, network, attention = train.model.hidden_size, experts_of(train.model), attention_of(train.model)
    if experts:
        of_experts = max(each.inputs * each.outputs for each in network.routed(hidden)) if network else 0.0
        return of_experts / layout.expert_tensor * (params.get("experts", 0.0) > 0)
    width = attention.query_width + attention.key_width + attention.value_width
    if isinstance(attention, LatentAttention):
        width = attention.attended
    dense = dense_of(train.model)
    factor = hidden * (2.0 if dense.gated else 1.0)
    ffn = dense.width * (params.get("ffn", np.zeros(())) > 0)
    shared = network.shared if network else 0
    largest: FloatArray = np.maximum(factor * np.maximum(ffn, shared), hidden * width) / layout.tensor
    return largest


STEP_BYTES = 4.0
"""Bytes per parameter that torch's AdamW allocates in its step: the fp32 square roots of second moments.

It allocates them for all parameters of a group at once. The groups are parameters with and without weight decay, of
experts and of other layers. Counted in torch 2.11."""


def workspaces(train: Training) -> float:
    """Return the number of matrix-library workspaces of a rank.

    torch has one for the forward thread and one for the backward thread. Transformer-engine adds one, and four for
    grouped products.
    """
    if not train.transformer_engine:
        return 2.0
    return 3.0 + 4.0 * (experts_of(train.model) is not None and train.options.grouped_gemm)


def buffers(train: Training, layout: Layout, stage: Stage, sizes: Sizes) -> FloatArray:
    """Return the bytes of permanent buffers.

    These are fp32 angles of the rotary embedding, for each virtual stage or each layer of latent attention; the buffer
    into which megatron-core's own linear layers gather their input under sequence parallelism; and transformer-engine's
    placeholders for gradients that its kernels accumulate.
    """
    attention = attention_of(train.model)
    if isinstance(attention, LatentAttention):
        rotary_bytes = 4.0 * train.sequence * attention.rope_dim * (stage.layers + stage.mtp)
    else:
        rotary_bytes = 4.0 * train.sequence * attention.head_dim * layout.virtual
    if train.options.adapter and train.options.adapter.base:  # into which the weights of a product are converted
        largest = _largest_matrix(train, layout, {"ffn": stage.dense}, experts=False)
        rotary_bytes = rotary_bytes + train.value_bytes * largest
    if train.options.dropout:  # dropout implies an older engine, with learned positions and without placeholders
        return sizes.gathered * np.ones(())
    if train.transformer_engine:
        gather_buffer = _gather_buffer(train, layout, stage, sizes, sizes.gathered * stage.last)
        return (
            rotary_bytes
            + gather_buffer
            + (0.0 if train.options.adapter else _gradient_placeholders(train, layout, stage))
        )
    return rotary_bytes + _gather_buffer(train, layout, stage, sizes, sizes.gathered) + sizes.gathered * (stage.mtp > 0)


def _gather_buffer(train: Training, layout: Layout, stage: Stage, sizes: Sizes, gathered: FloatArray) -> FloatArray:
    """Return the bytes of the buffer for gathered tokens, which linear layers share with the allgather dispatcher."""
    if experts_of(train.model) is None or train.options.dispatcher != "allgather":
        return gathered
    return np.maximum(gathered, gathered_tokens(layout, sizes) * (stage.moe + stage.mtp > 0))


def bytes_held_after_step(
    train: Training, layout: Layout, stage: Stage, sizes: Sizes, *, at_most: bool = False
) -> FloatArray:
    """Return the bytes of activations that stay allocated after a step. The next step frees them before its own peak.

    These are the last input of each virtual stage with its gradient and, for each layer with experts, its routing. If
    the layer or its experts are recomputed, their input with its gradient is added. `at_most` assumes that all layers
    are recomputed if any layer is.
    """
    model, inputs = train.model, layout.virtual - (stage.index == 0) + depths_received(train.model, stage)
    routing, experts = np.zeros(()), experts_of(model)
    if experts is not None:
        block = np.clip(layout.block * layout.virtual - stage.dense, 0.0, stage.moe)
        recomputes_all = (layout.uniform > 0) | ((layout.block > 0) & at_most)
        layers = np.where(recomputes_all, stage.moe, block)
        # The first layer's input is already counted as the stage's input.
        inputs = inputs + layers - 0.5 * ((layers > 0) & (stage.index > 0) & (stage.dense == 0))
        if "moe" in train.options.recompute_modules:
            inputs = inputs + (stage.moe + stage.mtp) * layout.selective
        uniform = np.where(layout.uniform > 0, 2.0, (layout.block > 0) * 1.0) if at_most else 2.0 * (layout.uniform > 0)
        inputs = inputs + stage.mtp * uniform  # each MTP depth also holds its own input
        moe = stage.moe * stage_layer(model, stage, moe=True).share("experts") + stage.mtp
        routing = (3.0 * experts.count + 8.0 * experts.chosen) * sizes.rows * moe
    held_bytes: FloatArray = 2.0 * sizes.between * inputs + routing
    return held_bytes


def gathered_bytes(train: Training, layout: Layout, dense: State, experts: State) -> FloatArray:
    """Return the bytes of the weights and gradients that FSDP gathers temporarily.

    It gathers the current layer and prefetches the next one (Megatron-FSDP; ZeRO-3), so the result is at most all
    shards of the stage on the other ranks. `dense` and `experts` are the shards of this rank.
    """
    if not train.options.fsdp:
        return np.zeros(())
    kinds = (False,) if experts_of(train.model) is None else (False, True)
    layers = [sum(layer_parameters(train, layout, moe=moe).values(), np.zeros(())) for moe in kinds]
    table = padded_vocab(train.model, layout.tensor) / layout.tensor * train.model.hidden_size
    largest_layer: FloatArray = np.maximum(np.max(np.stack(layers), axis=0), table)
    adapter = train.options.adapter
    base = BASE_BYTES.get(adapter.base or "", train.value_bytes) if adapter else train.value_bytes
    width = base + train.options.grad_bytes * (adapter is None)
    other_shards = (dense.weights + dense.gradients) * (layout.data * layout.context - 1.0)
    other_shards = other_shards + (experts.weights + experts.gradients) * (layout.expert_replicas() - 1.0)
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


def _gradient_placeholders(train: Training, layout: Layout, stage: Stage) -> FloatArray:
    """Return the bytes of the placeholders for gradients: one 16-bit tensor for each distinct weight shape."""
    model, tensor, h = train.model, layout.tensor, train.model.hidden_size
    dense, experts = dense_of(model), experts_of(model)
    shares: dict[Part, Share] = {dense: stage.dense}
    for mixer, share in stage_layer(model, stage, moe=experts is not None).mixers:
        kind = replace(mixer, window=None) if isinstance(mixer, Attention) else mixer
        shares[kind] = shares.get(kind, 0.0) + share
    weights = np.zeros_like(tensor)
    for part, share in shares.items():
        products = sum(each.weights / (tensor if each.split else 1.0) for each in part.products(h))
        weights = weights + (products + part.other_weights / tensor) * (share > 0)
    if experts is not None:
        expert = sum(each.inputs * each.outputs for each in experts.routed(h)) / layout.expert_tensor
        shared = sum(each.weights for each in experts.always(h)) / tensor
        is_same = (experts.shared / tensor == experts.width / layout.expert_tensor) & (experts.expert_width(h) == h)
        weights = weights + (expert + shared * ~is_same) * (stage.moe > 0)
    weights = weights + stage.last * padded_vocab(model, tensor) / tensor * h
    return 2.0 * (weights + 2.0 * h * h / tensor * (stage.mtp > 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory(ArrayRecord):
    """Bytes of one stage of each candidate.

    `static` stays allocated between steps. `activation` is added to it at the peak of forward and backward. `peak` is
    the maximum during the step.
    """

    static: FloatArray
    activation: FloatArray
    peak: FloatArray
    worst_stage: IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class InUse(ArrayRecord):
    """Bytes in use on one stage of each candidate.

    `memory` is the bytes of tensors, `reserved` the bytes that the allocator reserves, `used` the bytes in use on the
    device, and `capacity` the device's memory (NaN: unknown).
    """

    memory: Memory
    reserved: FloatArray
    used: FloatArray
    capacity: FloatArray


def memory_in_use(
    train: Training, layout: Layout, costs: Costs, distinct_stages: Sequence[Stage] | None = None
) -> InUse:
    """Return the memory in use of the worst stage of each candidate. `distinct_stages` are `stages`, if known.

    The worst stage has the largest peak or, with several chip models, uses the largest share of its device's capacity.
    A stage with unknown capacity counts as full, so that no candidate is reported to fit by mistake. The peak is the
    maximum over forward and backward and the optimizer step.
    """
    placement = StageGroups.from_layout(layout, costs)
    if distinct_stages is None:
        distinct_stages = stages(train.model, layout, train.options, placement.starts)
    memories = stages_in_use(train, layout, costs, distinct_stages)
    if len(costs.groups) == 1:
        figures = np.stack([each.memory.peak for each in memories])
    else:
        share = np.stack([each.used for each in memories]) / np.stack([each.capacity for each in memories])
        figures = np.where(np.isnan(share), 1.0, share)
    return pick(np.argmax(figures, axis=0), memories)


def stages_in_use(train: Training, layout: Layout, costs: Costs, requested_stages: Sequence[Stage]) -> list[InUse]:
    """Return the memory in use of each stage in `requested_stages`, for all candidates."""
    placement, models = StageGroups.from_layout(layout, costs), [each.memory for each in costs.groups]
    workspaces = [np.array(model.workspace_bytes()) for model in models]
    estimates = [_Estimate.from_layout(train, each) for each in placement.layouts]
    memories = []
    for stage_ in requested_stages:
        of_groups = zip(models, estimates, workspaces, strict=True)
        found = [in_use(model, each.memory(stage_, size), layout) for model, each, size in of_groups]
        memories.append(placement.pick(stage_.index, found))
    return memories


def in_use(model: MemoryModel, memory: Memory, layout: Layout) -> InUse:
    """Return the memory in use on devices with the tensors in `memory`."""
    reserved, buffers, capacity = model.reserved_bytes(memory.peak), communicator_bytes(model), model.capacity_bytes()
    used = model.device_used_bytes(reserved)
    used = used + buffers * layout.communicators() if buffers else used
    return InUse(
        memory=memory, reserved=reserved, used=used, capacity=np.array(np.nan if capacity is None else capacity)
    )


def states_of(train: Training, layout: Layout, params: Parts) -> tuple[State, State]:
    """Return the model states of the dense weights and of the expert weights."""
    if train.options.adapter:
        return _with_frozen(train, layout, params)
    dense, experts = split_parameters(params)
    extra, of_matrices = padding(train, layout, params, experts=False), float(train.options.whole_matrices)
    linear = _linear(params, experts=False) + of_matrices * extra
    wide = sum((params[name] for name in _wide_parts(train) if name in params), np.zeros(()))
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
        own[index] + frozen_state(train, others[index], counts[index], _linear(base, experts=bool(index)))
        for index in range(2)
    )
    return dense, experts


def component_table(
    train: Training, layout: Layout, index: FloatArray, workspace_bytes: FloatArray | float = 0.0
) -> dict[str, dict[str, FloatArray]]:
    """Return the parameters and bytes of each component of stage `index` of each candidate.

    Activations add up to `Memory.activation`, all other bytes to `Memory.static`. Three additional components are
    `padding` (of gradient buffers), `buffers` (of the engine), and `backward` (the bytes of the peak above the stored
    tensors).
    """
    table_stage = stage(train.model, layout, index, train.options)
    estimate = _Estimate.from_layout(train, layout)
    params, parts = stage_parameters(train, layout, table_stage), estimate.parts(table_stage)
    zeros = np.zeros_like(layout.data)
    table: dict[str, dict[str, FloatArray]] = {}

    def add(name: str, count: FloatArray, bytes_: State, activation: FloatArray) -> None:
        figures = {
            "params": count,
            "weights_bytes": bytes_.weights,
            "gradients_bytes": bytes_.gradients,
            "main_params_bytes": bytes_.main_parameters,
            "optimizer_bytes": bytes_.optimizer,
            "activation_bytes": activation,
        }
        table[name] = {key: value + zeros for key, value in figures.items()}

    for name in dict.fromkeys((*params, *parts)):
        count = params.get(name, zeros)
        linear, wide = (count if name in names else 0.0 for names in (LINEAR_PARTS, _wide_parts(train)))
        bytes_ = state(train, layout, count, experts=name in EXPERT_PARTS, linear=linear, wide=wide)
        if train.options.adapter and name not in ADAPTER_PARTS:
            bytes_ = frozen_state(train, bytes_, count, linear)
        add(name, count, bytes_, parts.get(name, zeros))
    params = trained_parts(train, params)
    extras = [padding(train, layout, params, experts=experts) for experts in (False, True)]
    dense, routed = (
        state(train, layout, extra, experts=bool(experts), linear=float(train.options.whole_matrices) * extra)
        for experts, extra in enumerate(extras)
    )
    engine = estimate.engine_bytes(table_stage, workspace_bytes)
    engine = engine + estimate.held_after_step(table_stage)
    add("padding", zeros, dense + routed, zeros)
    add("buffers", zeros, State(engine, zeros, zeros, zeros), zeros)
    return table


@dataclass(frozen=True, slots=True)
class _Estimate:
    """The inputs that the memory estimates of all stages share.

    `selective` is an upper bound for the candidates `uniform`, which recompute every layer in full: the estimate with
    selective recompute instead, because full recompute must not be predicted to need more memory. It is None if there
    are no such candidates.
    """

    kinds: Kinds
    uniform: IntArray
    selective: _Estimate | None = None

    @classmethod
    def from_layout(cls, train: Training, layout: Layout) -> _Estimate:
        uniform = np.flatnonzero(layout.uniform == 1)
        estimate = cls(Kinds.from_layout(train, layout), uniform)
        modules = train.options.recompute_modules
        return replace(estimate, selective=estimate._with_selective(modules, uniform)) if uniform.size else estimate

    def _with_selective(self, modules: frozenset[str], rows: IntArray) -> _Estimate:
        """Return the estimate for the candidates `rows` if they only recompute `modules`, selectively."""
        train, layout, zeros = self.kinds.train, self.kinds.layout[rows], np.zeros(rows.shape)
        selective = np.maximum(layout.selective, layout.uniform == 1)
        train = replace(train, options=replace(train.options, recompute_modules=modules))
        layout = replace(layout, selective=selective, uniform=zeros, block=zeros)
        return _Estimate(Kinds.from_layout(train, layout), np.flatnonzero(zeros))

    def engine_bytes(self, stage_: Stage, workspace_bytes: FloatArray | float) -> FloatArray:
        train, layout = self.kinds.train, self.kinds.layout
        engine_buffers = buffers(train, layout, stage_, self.kinds.sizes)
        if train.tower is not None:  # its frozen weights, in 16 bits
            engine_buffers = engine_buffers + train.value_bytes * tower_weights(train.tower, layout)[1] * stage_.first
        return engine_buffers + workspaces(train) * workspace_bytes

    def held_after_step(self, stage_: Stage, *, at_most: bool = False) -> FloatArray:
        kinds = self.kinds
        return bytes_held_after_step(kinds.train, kinds.layout, stage_, kinds.sizes, at_most=at_most)

    def activation(self, stage_: Stage) -> FloatArray:
        activations = stage_activations(stage_, self.kinds)
        total = activations.stored + activations.above
        if self.selective is not None:
            less = self.selective.activation(stage_[self.uniform])
            total[self.uniform] = np.minimum(total[self.uniform], less)
        return total

    def parts(self, stage_: Stage) -> Parts:
        """Return the bytes of activations of a stage by component. `backward` is the peak above the stored bytes."""
        train, layout, activations = self.kinds.train, self.kinds.layout, stage_activations(stage_, self.kinds)
        states = states_of(train, layout, stage_parameters(train, layout, stage_))
        backward = self.activation(stage_) + gathered_bytes(train, layout, *states) - activations.stored
        return {**activation_parts(stage_, self.kinds, activations), "backward": backward}

    def memory(self, stage_: Stage, workspace_bytes: FloatArray | float) -> Memory:
        """Return the memory of one stage. `workspace_bytes` is the size of one workspace of the matrix library.

        The bytes that stay allocated after a step are still there during the optimizer step, and are freed before the
        next peak. More recompute leaves more bytes, but is never predicted to need more.
        """
        train, layout = self.kinds.train, self.kinds.layout
        params = stage_parameters(train, layout, stage_)
        states = states_of(train, layout, params)
        base = states[0].total + states[1].total + self.engine_bytes(stage_, workspace_bytes)
        static = base + self.held_after_step(stage_)
        step, gathered = (
            step_bytes(train, layout, *split_parameters(trained_parts(train, params))),
            gathered_bytes(train, layout, *states),
        )
        activation = self.activation(stage_) + gathered
        optimizer_peak = self.held_after_step(stage_, at_most=True) + step
        if self._may_hold_more():
            rows = np.flatnonzero(np.atleast_2d(optimizer_peak > activation).any(axis=0))
            least = self._peak_without_full(stage_, rows, step, gathered)
            optimizer_peak[..., rows] = np.minimum(optimizer_peak[..., rows], least)
        peak = base + np.maximum(activation, optimizer_peak)
        return Memory(static=static, activation=activation, peak=peak, worst_stage=stage_.index.astype(np.int64))

    def _may_hold_more(self) -> bool:
        """Return whether recompute may leave more bytes allocated after a step than less recompute would. This is the
        case in mixture-of-experts models, for full recompute and for recompute of the module `moe`."""
        options, layout = self.kinds.train.options, self.kinds.layout
        if experts_of(self.kinds.train.model) is None:
            return False
        recomputes_layers = np.any(layout.uniform + layout.block > 0)
        return bool(recomputes_layers or ("moe" in options.recompute_modules and layout.selective.any()))

    def _peak_without_full(self, stage_: Stage, rows: IntArray, step: FloatArray, gathered: FloatArray) -> FloatArray:
        """Return the peak bytes of a step with less recompute, for the candidates `rows`. It is the lower of two
        estimates: selective recompute with and without the module `moe`."""
        modules, stage_of_rows, peaks = self.kinds.train.options.recompute_modules, stage_[rows], []
        gathered = gathered if gathered.ndim == 0 else gathered[..., rows]
        for recomputed_modules in {modules - {"moe"}, modules}:
            other = self._with_selective(recomputed_modules, rows)
            optimizer_peak = other.held_after_step(stage_of_rows) + step[..., rows]
            peaks.append(np.maximum(optimizer_peak, other.activation(stage_of_rows) + gathered))
        least: FloatArray = np.minimum.reduce(peaks)
        return least
