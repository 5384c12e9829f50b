"""Bytes of weights, gradients, main parameters, optimizer state, the engine's buffers, and the optimizer step.

Sources: megatron-core 0.16 (`param_and_grad_buffer.py`, `distrib_optimizer.py`, `optimizer.py`, `parallel_state.py`,
`schedules.py`, `token_dispatcher.py`), torch 2.11's AdamW, transformer-engine 2.10 (`get_dummy_wgrad`); ZeRO
(arXiv 1910.02054) with unsharded gradient buffers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flagcore.domain.space import FloatArray
from flagcore.engines.training.layout import ArrayRecord, Layout, Training
from flagcore.engines.training.memory.activations import gathered_tokens
from flagcore.engines.training.memory.modules import Sizes
from flagcore.engines.training.parameters import EXPERT_PARTS, Parts, layer_parameters, padded_vocab
from flagcore.engines.training.stages import Stage, block_layers, depths_received
from flagcore.engines.transformer import attended, projection_weights

LINEAR_PARTS = ("qkv_proj", "out_proj", "ffn", "experts", "shared_experts", "mtp")
"""Components whose matrix products run in 8 or 4 bits at such a precision."""

QUANTISED_BYTES = {"fp8": 2.0, "mxfp8": 2.0 * (1 + 1 / 32), "nvfp4": 2.0 * (1 / 2 + 1 / 16)}
"""Bytes per weight of the 8- or 4-bit copies: one for each direction of a product, with the scales of blocks of 32 or
16 (transformer-engine 2.9, `get_weight_workspace`; a chip whose fp8 products support both directions stores one)."""

BUCKET_MULTIPLE = 128
"""Megatron pads gradient buffers to a common multiple of this and of the ranks that share them
(megatron-core 0.16)."""


@dataclass(frozen=True, slots=True)
class State(ArrayRecord):
    """Bytes of a group of parameters on one rank."""

    weights: FloatArray
    gradients: FloatArray
    main_parameters: FloatArray
    optimizer: FloatArray

    @property
    def total(self) -> FloatArray:
        return self.weights + self.gradients + self.main_parameters + self.optimizer


def split_parameters(parts: Parts) -> tuple[FloatArray, FloatArray]:
    """Return the number of dense weights, which all data-parallel ranks replicate, and of expert weights."""
    dense = sum((value for name, value in parts.items() if name not in EXPERT_PARTS), np.zeros(()))
    experts = sum((parts[name] for name in EXPERT_PARTS if name in parts), np.zeros_like(dense))
    return dense, experts


def state(train: Training, layout: Layout, count: FloatArray, *, experts: bool, linear: FloatArray | float) -> State:
    """Return the bytes of `count` parameters, including `linear` parameters of linear layers.

    Over d ranks that shard the optimizer, a parameter needs 2 + 4 + 12 / d bytes at 16 bits with fp32 gradients, and
    4 + 4 + 8 / d at fp32, which has no main parameters. A precision-aware optimizer stores only the lower half of the
    main parameter of a bf16 weight. FSDP also shards weights and gradients.
    """
    options = train.options
    shards = layout.expert_shards() if experts else layout.shards()
    replicas = layout.expert_replicas() if experts else layout.data * layout.context
    owners = replicas if options.fsdp else shards
    fsdp_shards = replicas if options.fsdp else np.ones(())
    adam = options.exp_avg_bytes + options.exp_avg_sq_bytes
    is_trained = 0.0 if options.adapters else 1.0
    share = (1.0 - options.optimizer_offload_fraction) * is_trained
    if train.precision == "fp32":
        gradients = 4.0 * is_trained * count / fsdp_shards
        return State(4.0 * count / fsdp_shards, gradients, 0.0 * count, adam * share * count / owners)
    main: float = options.main_param_bytes
    if options.precision_aware_optimizer and train.precision != "fp16":
        main = min(main, 2.0)
    narrow_bytes = QUANTISED_BYTES.get(train.precision, 0.0)
    is_narrow = (narrow_bytes > 0) & ((layout.sharded_optimizer > 0) | options.fsdp | (not options.assumed_fp8_gather))
    wide_count = np.where(is_narrow, count - linear, count) if options.fp8_param_gather else count
    weights = 2.0 * wide_count + narrow_bytes * linear
    gradients = options.grad_bytes * is_trained * count
    optimizer = adam * share * count / owners
    return State(weights / fsdp_shards, gradients / fsdp_shards, main * share * count / owners, optimizer)


def padding(layout: Layout, count: FloatArray, *, experts: bool) -> FloatArray:
    """Return the elements that pad a distributed optimizer's buffer to a multiple of 128 and of its ranks."""
    ranks = (layout.expert_shards() if experts else layout.shards()).astype(np.int64)
    multiple = np.lcm(ranks, BUCKET_MULTIPLE)
    padding_elements = np.ceil(count / multiple) * multiple - count
    return np.where(ranks > 1, padding_elements, 0.0)


STEP_BYTES = 4.0
"""Bytes per parameter that torch's AdamW allocates in its step: the fp32 root of the second moment of all parameters
of a group. Groups are parameters with and without weight decay, of experts and of other layers. Counted in
torch 2.11."""


def workspaces(train: Training) -> float:
    """Return the number of matrix-library workspaces of a rank.

    torch has one for the thread of forward and one for that of backward; transformer-engine adds one, and four for
    grouped products.
    """
    if not train.transformer_engine:
        return 2.0
    return 3.0 + 4.0 * (train.model.num_moe_experts is not None and train.options.grouped_gemm)


def buffers(train: Training, layout: Layout, stage: Stage, sizes: Sizes) -> FloatArray:
    """Return the bytes of permanent buffers.

    They are fp32 angles of the rotary embedding, for each virtual stage or each layer of latent attention; the buffer
    into which megatron-core's own linear layers gather their input under sequence parallelism; and
    transformer-engine's placeholders for gradients that its kernels accumulate.
    """
    model = train.model
    is_latent = model.multi_latent_attention
    angle_bytes = 4.0 * train.sequence * ((model.qk_pos_emb_head_dim or 0) if is_latent else model.kv_channels)
    rotary_bytes = angle_bytes * (stage.layers + stage.mtp if is_latent else layout.virtual)
    if train.options.dropout:  # older engines have learned positions and no placeholders
        return sizes.gathered * np.ones(())
    if train.transformer_engine:
        gather_buffer = _gather_buffer(train, layout, stage, sizes, sizes.gathered * stage.last)
        return rotary_bytes + gather_buffer + _gradient_placeholders(train, layout, stage)
    return rotary_bytes + _gather_buffer(train, layout, stage, sizes, sizes.gathered) + sizes.gathered * (stage.mtp > 0)


def _gather_buffer(train: Training, layout: Layout, stage: Stage, sizes: Sizes, gathered: FloatArray) -> FloatArray:
    """Return the bytes of the buffer for gathered tokens, which the allgather dispatcher shares."""
    if train.model.num_moe_experts is None or train.options.dispatcher != "allgather":
        return gathered
    return np.maximum(gathered, gathered_tokens(layout, sizes) * (stage.moe + stage.mtp > 0))


def bytes_held_after_step(
    train: Training, layout: Layout, stage: Stage, sizes: Sizes, *, at_most: bool = False
) -> FloatArray:
    """Return the bytes that stay allocated after a step; the next step frees them before its own peak.

    They are the last input of each virtual stage with its gradient and, for each layer with experts, its routing and,
    if the layer or its experts are recomputed, their input with its gradient. `at_most` assumes that all layers are
    recomputed if any is.
    """
    model, inputs = train.model, layout.virtual - (stage.index == 0) + depths_received(train.model, stage)
    routing = np.zeros(())
    if model.num_moe_experts is not None:
        number = block_layers(layout, stage.index, train.options)
        block = np.clip(number * layout.virtual - stage.dense, 0.0, stage.moe)
        recomputes_all = (layout.uniform > 0) | ((number > 0) & at_most)
        layers = np.where(recomputes_all, stage.moe, block)
        inputs = inputs + layers - 0.5 * ((layers > 0) & (stage.index > 0) & (stage.dense == 0))  # the stage's input
        if "moe" in train.options.recompute_modules:
            inputs = inputs + (stage.moe + stage.mtp) * layout.selective
        uniform = np.where(layout.uniform > 0, 2.0, (number > 0) * 1.0) if at_most else 2.0 * (layout.uniform > 0)
        inputs = inputs + stage.mtp * uniform  # a depth's own input, too
        routing = (3.0 * model.num_moe_experts + 8.0 * model.moe_router_topk) * sizes.rows * (stage.moe + stage.mtp)
    held_bytes: FloatArray = 2.0 * sizes.hidden * inputs + routing
    return held_bytes


def gathered_bytes(train: Training, layout: Layout, dense: State, experts: State) -> FloatArray:
    """Return the bytes of the weights and gradients that FSDP gathers temporarily.

    They are those of the current layer and of the next one, which is prefetched (Megatron-FSDP; ZeRO-3), at most all
    shards of the stage on the other ranks. `dense` and `experts` are the shards of this rank.
    """
    if not train.options.fsdp:
        return np.zeros(())
    kinds = (False,) if train.model.num_moe_experts is None else (False, True)
    layers = [sum(layer_parameters(train, layout, moe=moe).values(), np.zeros(())) for moe in kinds]
    table = padded_vocab(train.model, layout.tensor) / layout.tensor * train.model.hidden_size
    largest_layer: FloatArray = np.maximum(np.max(np.stack(layers), axis=0), table)
    width = train.value_bytes + train.options.grad_bytes * (not train.options.adapters)
    other_shards = (dense.weights + dense.gradients) * (layout.data * layout.context - 1.0)
    other_shards = other_shards + (experts.weights + experts.gradients) * (layout.expert_replicas() - 1.0)
    return np.minimum(2.0 * width * largest_layer, other_shards)


def step_bytes(train: Training, layout: Layout, dense: FloatArray, experts: FloatArray) -> FloatArray:
    """Return the bytes that the optimizer step allocates, from the numbers of dense and of expert weights.

    Transformer-engine's Adam works in place. 16-bit gradients are copied to fp32 first.
    """
    options, dense_share, expert_share = train.options, dense / layout.shards(), experts / layout.expert_shards()
    if options.adapters:
        return np.zeros_like(dense_share)
    optimizer_share = 1.0 - options.optimizer_offload_fraction
    copies = 0.0
    if train.precision != "fp32" and options.grad_bytes < 4 and not options.precision_aware_optimizer:
        copies = 4.0
    if train.transformer_engine:
        return copies * (dense_share + expert_share)
    largest_group = np.where(layout.expert > 1, np.maximum(dense_share, expert_share), dense_share + expert_share)
    return optimizer_share * STEP_BYTES * largest_group + copies * (dense_share + expert_share)


def _gradient_placeholders(train: Training, layout: Layout, stage: Stage) -> FloatArray:
    """Return the bytes of the placeholders for gradients: one 16-bit tensor per distinct weight shape of the stage."""
    model, tensor, h = train.model, layout.tensor, train.model.hidden_size
    gate_factor = 2.0 if model.gated_linear_unit else 1.0
    compression, projection = projection_weights(model)
    weights = h * attended(model) / tensor + compression + projection / tensor
    weights = weights + (1.0 + gate_factor) * h * model.ffn_hidden_size / tensor * (stage.dense > 0)
    if model.num_moe_experts is not None:
        expert = (model.moe_ffn_hidden_size or 0) / layout.expert_tensor
        shared = (model.moe_shared_expert_intermediate_size or 0) / tensor
        weights = weights + (1.0 + gate_factor) * h * (expert + shared * (shared != expert)) * (stage.moe > 0)
    weights = weights + stage.last * padded_vocab(model, tensor) / tensor * h
    return 2.0 * (weights + 2.0 * h * h / tensor * (stage.mtp > 0))
