"""Weights, gradients, main parameters and optimizer state, buffers of the engine, and what the optimizer's step adds.

Sources: megatron-core 0.16 (`param_and_grad_buffer.py`, `distrib_optimizer.py`, `optimizer.py`, `parallel_state.py`,
`schedules.py`, `token_dispatcher.py`), torch 2.11's AdamW, transformer-engine 2.10 (`get_dummy_wgrad`); ZeRO
(arXiv 1910.02054) with whole gradient buffers on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flagcore.domain.space import FloatArray
from flagcore.engines.megatron.memory.activations import gathered_tokens
from flagcore.engines.megatron.memory.modules import Sizes
from flagcore.engines.megatron.parallel.layout import ArrayRecord, Layout, Training
from flagcore.engines.megatron.parallel.parameters import EXPERT_PARTS, Parts, layer_parameters, padded_vocab
from flagcore.engines.megatron.parallel.pipeline import Stage, block_layers
from flagcore.physics.transformer import attended, projection_weights

LINEAR_PARTS = ("qkv_proj", "out_proj", "ffn", "experts", "shared_experts", "mtp")
"""Components whose products run in 8 or 4 bits if the precision requires it."""

QUANTISED_BYTES = {"fp8": 2.0, "mxfp8": 2.0 * (1 + 1 / 32), "nvfp4": 2.0 * (1 / 2 + 1 / 16)}
"""Bytes a weight of its narrow copies, one for each direction of a product, with the scales of their blocks of 32 or
16 (transformer-engine 2.9, `get_weight_workspace`; a chip whose fp8 products take both directions stores one)."""

BUCKET_MULTIPLE = 128
"""Megatron pads gradient buffers to a common multiple of this and of the ranks that share them."""


@dataclass(frozen=True, slots=True)
class State(ArrayRecord):
    """Bytes of some parameters on one rank."""

    weights: FloatArray
    gradients: FloatArray
    main_parameters: FloatArray
    optimizer: FloatArray

    @property
    def total(self) -> FloatArray:
        return self.weights + self.gradients + self.main_parameters + self.optimizer


def split_parameters(parts: Parts) -> tuple[FloatArray, FloatArray]:
    """Return the sums of the weights that all data-parallel ranks replicate, and of those of the experts."""
    dense = sum((value for name, value in parts.items() if name not in EXPERT_PARTS), np.zeros(()))
    experts = sum((parts[name] for name in EXPERT_PARTS if name in parts), np.zeros_like(dense))
    return dense, experts


def state(train: Training, layout: Layout, count: FloatArray, *, experts: bool, linear: FloatArray | float) -> State:
    """Return the bytes of `count` parameters, `linear` of which belong to linear layers.

    At 16 bits 2 + 4 + 12 / d with fp32 gradient buffers, over d ranks that share an optimizer; fp32 has no second copy
    of the weights: 4 + 4 + 8 / d. A precision-aware optimizer stores of a bf16 weight's main parameter only the
    half that the weight does not have. Fully sharded, weights and gradients are shared as well.
    """
    options = train.options
    shards = layout.expert_shards() if experts else layout.shards()
    replicas = layout.expert_replicas() if experts else layout.data * layout.context
    owners = replicas if options.fsdp else shards
    everywhere = replicas if options.fsdp else np.ones(())
    adam = options.exp_avg_bytes + options.exp_avg_sq_bytes
    trained = 0.0 if options.adapters else 1.0
    here = (1.0 - options.optimizer_offload_fraction) * trained
    if train.precision == "fp32":
        gradients = 4.0 * trained * count / everywhere
        return State(4.0 * count / everywhere, gradients, 0.0 * count, adam * here * count / owners)
    main: float = options.main_param_bytes
    if options.precision_aware_optimizer and train.precision != "fp16":
        main = min(main, 2.0)
    narrow = QUANTISED_BYTES.get(train.precision, 0.0)
    narrowed = (narrow > 0) & ((layout.sharded_optimizer > 0) | options.fsdp | (not options.assumed_fp8_gather))
    wide = np.where(narrowed, count - linear, count) if options.fp8_param_gather else count
    weights = 2.0 * wide + narrow * linear
    gradients = options.grad_bytes * trained * count
    return State(
        weights / everywhere, gradients / everywhere, main * here * count / owners, adam * here * count / owners
    )


def padding(layout: Layout, count: FloatArray, *, experts: bool) -> FloatArray:
    """Return the elements that fill a distributed optimizer's buffer up to a multiple of 128 and of its ranks."""
    ranks = (layout.expert_shards() if experts else layout.shards()).astype(np.int64)
    multiple = np.lcm(ranks, BUCKET_MULTIPLE)
    filled = np.ceil(count / multiple) * multiple - count
    return np.where(ranks > 1, filled, 0.0)


STEP_BYTES = 4.0
"""Bytes that torch's AdamW adds in its step for each parameter of a group: the root of the second moment in fp32, of
all weights of the group at once. Groups are weights without and with decay, of experts and of the rest."""


def workspaces(train: Training) -> float:
    """Return the number of matrix-library workspaces of a rank.

    torch has one for each thread that calls it, that of forward and that of backward; transformer-engine one more,
    and four for grouped products.
    """
    if not train.transformer_engine:
        return 2.0
    return 3.0 + 4.0 * (train.model.num_moe_experts is not None and train.options.grouped_gemm)


def buffers(train: Training, layout: Layout, stage: Stage, sizes: Sizes) -> FloatArray:
    """Return the bytes of buffers that stay.

    Angles of the rotary embedding in fp32, for each virtual stage or each layer of latent attention; the buffer into
    which megatron-core's own linear layers gather their input under sequence parallelism, as wide as the widest; and
    transformer-engine's stand-ins for gradients that its kernels add to the buffers themselves.
    """
    model = train.model
    latent = model.multi_latent_attention
    angles = 4.0 * train.sequence * ((model.qk_pos_emb_head_dim or 0) if latent else model.kv_channels)
    own = angles * (stage.layers + stage.mtp if latent else layout.virtual)
    if train.options.dropout:  # older engines learn positions, and have no stand-ins
        return sizes.gathered * np.ones(())
    if train.transformer_engine:
        joint = _joint(train, layout, stage, sizes, sizes.gathered * stage.last)
        return own + joint + _stand_ins(train, layout, stage)
    return own + _joint(train, layout, stage, sizes, sizes.gathered) + sizes.gathered * (stage.mtp > 0)


def _joint(train: Training, layout: Layout, stage: Stage, sizes: Sizes, gathered: FloatArray) -> FloatArray:
    """Return the buffer for gathered tokens, in which a dispatcher that gathers them for the experts does so too."""
    if train.model.num_moe_experts is None or train.options.dispatcher != "allgather":
        return gathered
    return np.maximum(gathered, gathered_tokens(layout, sizes) * (stage.moe + stage.mtp > 0))


def bytes_held_after_step(
    train: Training, layout: Layout, stage: Stage, sizes: Sizes, *, at_most: bool = False
) -> FloatArray:
    """Return the bytes that a step leaves to the next, which frees them before its own peak.

    The last input of each virtual stage and its gradient. Each layer with experts remembers its routing, and through
    its graph, where the layer or its experts were recomputed, their input and the gradient of it. `at_most` does not
    count how many layers are recomputed: all or none.
    """
    model, inputs = train.model, layout.virtual - (stage.index == 0)
    routing = np.zeros(())
    if model.num_moe_experts is not None:
        first = block_layers(layout, stage.index, train.options)
        block = np.clip(first * layout.virtual - stage.dense, 0.0, stage.moe)
        every = (layout.uniform > 0) | ((first > 0) & at_most)
        again = np.where(every, stage.moe, block)
        inputs = inputs + again - 0.5 * ((again > 0) & (stage.index > 0) & (stage.dense == 0))  # the stage's own input
        if "moe" in train.options.recompute_modules:
            inputs = inputs + (stage.moe + stage.mtp) * layout.selective
        uniform = np.where(layout.uniform > 0, 2.0, (first > 0) * 1.0) if at_most else 2.0 * (layout.uniform > 0)
        inputs = inputs + stage.mtp * uniform  # a depth's own input, too
        routing = (3.0 * model.num_moe_experts + 8.0 * model.moe_router_topk) * sizes.rows * (stage.moe + stage.mtp)
    left: FloatArray = 2.0 * sizes.hidden * inputs + routing
    return left


def unsharded(train: Training, layout: Layout, dense: State, experts: State) -> FloatArray:
    """Return the bytes of weights and gradients that are whole for a while where all ranks share them.

    Those of the layer at work, and those of the next, which is fetched at the same time (Megatron-FSDP; ZeRO-3): at
    most all that the other ranks hold of a stage, whose shares on this rank are given.
    """
    if not train.options.fsdp:
        return np.zeros(())
    kinds = (False,) if train.model.num_moe_experts is None else (False, True)
    layers = [sum(layer_parameters(train, layout, moe=moe).values(), np.zeros(())) for moe in kinds]
    table = padded_vocab(train.model, layout.tensor) / layout.tensor * train.model.hidden_size
    largest: FloatArray = np.maximum(np.max(np.stack(layers), axis=0), table)
    width = train.value_bytes + train.options.grad_bytes * (not train.options.adapters)
    elsewhere = (dense.weights + dense.gradients) * (layout.data * layout.context - 1.0)
    elsewhere = elsewhere + (experts.weights + experts.gradients) * (layout.expert_replicas() - 1.0)
    return np.minimum(2.0 * width * largest, elsewhere)


def step_bytes(train: Training, layout: Layout, dense: FloatArray, experts: FloatArray) -> FloatArray:
    """Return the bytes that the optimizer's step adds, from the weights that ranks replicate and those of the experts.

    Transformer-engine's Adam works in place. 16-bit gradient buffers are copied into fp32 first.
    """
    options, own, theirs = train.options, dense / layout.shards(), experts / layout.expert_shards()
    if options.adapters:
        return np.zeros_like(own)
    here = 1.0 - options.optimizer_offload_fraction
    copies = 0.0
    if train.precision != "fp32" and options.grad_bytes < 4 and not options.precision_aware_optimizer:
        copies = 4.0
    if train.transformer_engine:
        return copies * (own + theirs)
    largest = np.where(layout.expert > 1, np.maximum(own, theirs), own + theirs)
    return here * STEP_BYTES * largest + copies * (own + theirs)


def _stand_ins(train: Training, layout: Layout, stage: Stage) -> FloatArray:
    """Return one 16-bit tensor for each shape of weight on the stage, which all weights of that shape share."""
    model, tensor, h = train.model, layout.tensor, train.model.hidden_size
    up = 2.0 if model.gated_linear_unit else 1.0
    down, wide = projection_weights(model)
    weights = h * attended(model) / tensor + down + wide / tensor
    weights = weights + (1.0 + up) * h * model.ffn_hidden_size / tensor * (stage.dense > 0)
    if model.num_moe_experts is not None:
        expert = (model.moe_ffn_hidden_size or 0) / layout.expert_tensor
        shared = (model.moe_shared_expert_intermediate_size or 0) / tensor
        weights = weights + (1.0 + up) * h * (expert + shared * (shared != expert)) * (stage.moe > 0)
    weights = weights + stage.last * padded_vocab(model, tensor) / tensor * h
    return 2.0 * (weights + 2.0 * h * h / tensor * (stage.mtp > 0))
