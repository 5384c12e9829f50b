"""Parameters of a transformer on one rank by component, and the flops of a step.

A test compares the counts with modules that megatron-core 0.16 builds.
"""

from __future__ import annotations

import numpy as np

from flagcore.domain.model import Model
from flagcore.domain.space import FloatArray
from flagcore.engines.training.layout import Layout, Training
from flagcore.engines.training.stages import Stage
from flagcore.engines.transformer import attended, latent_widths, projection_weights, widths

Parts = dict[str, FloatArray]
"""One array per component, one element per candidate."""

VOCAB_MULTIPLE = 128
"""The default of Megatron-LM's `make_vocab_size_divisible_by`."""

EXPERT_PARTS = ("experts",)
"""Components whose weights are replicated over the expert-data-parallel group."""


def padded_vocab(model: Model, tensor: FloatArray) -> FloatArray:
    """Return the vocabulary padded to a multiple of 128 times the tensor-parallel size, as Megatron-LM does."""
    multiple = VOCAB_MULTIPLE * tensor
    return np.ceil(model.vocab_size / multiple) * multiple


def layer_parameters(train: Training, layout: Layout, *, moe: bool) -> Parts:
    """Return the number of weights of one layer on one rank, by component.

    Source: megatron-core 0.16 (`attention.py`, `multi_latent_attention.py`, `mlp.py`, `moe/`).
    """
    model, tensor = train.model, layout.tensor
    h, matrices = model.hidden_size, 3 if model.gated_linear_unit else 2
    norms = 2 * h
    compression, projection = projection_weights(model)
    if model.multi_latent_attention:
        qkv = compression / (np.ones_like(tensor) if train.transformer_engine else tensor) + projection / tensor
        norms += sum(latent_widths(model)[:2]) * model.qk_layernorm
    else:
        qkv = (projection + model.add_qkv_bias * sum(widths(model))) / tensor
        norms += 2 * model.kv_channels * model.qk_layernorm
    parts = {"qkv_proj": qkv, "out_proj": h * attended(model) / tensor, "norms": np.full_like(tensor, norms)}
    if not moe:
        return {**parts, "ffn": matrices * h * model.ffn_hidden_size / tensor}
    experts = model.num_moe_experts or 0
    parts["router"] = np.full_like(tensor, h * experts)
    expert_weights = matrices * h * (model.moe_ffn_hidden_size or 0)
    parts["experts"] = expert_weights * experts / (layout.expert * layout.expert_tensor)
    if model.moe_shared_expert_intermediate_size:
        parts["shared_experts"] = matrices * h * model.moe_shared_expert_intermediate_size / tensor
    return parts


def edge_parameters(
    train: Training,
    layout: Layout,
    *,
    first: FloatArray,
    last: FloatArray,
    norm: FloatArray | None = None,
    mtp: FloatArray | float = 0.0,
) -> Parts:
    """Return the weights of embedding, final norm and output head of a stage.

    `first` and `last` are 1 for the first and last stage, `norm` and `mtp` for a stage with the final norm (None: the
    last stage) and with multi-token prediction. With several stages a tied head and multi-token prediction have their
    own copies of the embedding. Source: megatron-core 0.16 `gpt_model.py`, `transformer_block.py`.
    """
    model = train.model
    table = padded_vocab(model, layout.tensor) * model.hidden_size / layout.tensor
    is_only_stage = first * last
    head = last if model.untie_embeddings_and_output_weights else last - is_only_stage
    copies = np.maximum(first, mtp)
    norms = model.hidden_size * (last if norm is None else norm)
    return {"embedding": table * copies, "output_head": table * head, "norms": norms}


def mtp_parameters(train: Training, layout: Layout) -> Parts:
    """Return the weights of all depths of multi-token prediction, experts separately. Source: megatron-core 0.16."""
    model, depths = train.model, train.model.mtp_num_layers
    layer = layer_parameters(train, layout, moe=model.num_moe_experts is not None)
    extra_weights = 2 * model.hidden_size**2 / layout.tensor + 3 * model.hidden_size
    dense = sum((count for name, count in layer.items() if name not in EXPERT_PARTS), extra_weights)
    return {"mtp": depths * dense, "experts": depths * layer.get("experts", np.zeros_like(dense))}


def stage_parameters(train: Training, layout: Layout, stage: Stage) -> Parts:
    """Return the number of weights of one stage on one rank, by component."""
    model = train.model
    parts = edge_parameters(
        train, layout, first=stage.first, last=stage.last, mtp=(stage.mtp > 0).astype(np.float64), norm=stage.final_norm
    )
    add_parts(parts, layer_parameters(train, layout, moe=False), stage.dense * stage.copies)
    if model.num_moe_experts is not None:
        add_parts(parts, layer_parameters(train, layout, moe=True), stage.moe * stage.copies)
    if model.mtp_num_layers:
        add_parts(parts, mtp_parameters(train, layout), stage.mtp / model.mtp_num_layers)
    return parts


def layer_input_bytes(train: Training, layout: Layout) -> FloatArray:
    """Return the bytes of the tensor between two layers, which full recompute stores and pipeline stages send."""
    return train.value_bytes * train.model.hidden_size * layout.token_rows(train.sequence)


def model_flops(train: Training) -> float:
    """Return the flops of forward and backward of one step without recompute.

    Source: `num_floating_point_operations` of Megatron-LM core_v0.16 (6 flops per weight and token, causal half of the
    attention scores, no router). With adapters the frozen weights have no gradients (4 flops), and the adapters are
    not counted.
    """
    model = train.model
    h, matrices = model.hidden_size, 3 if model.gated_linear_unit else 2
    scores = (model.num_layers + model.mtp_num_layers) * train.sequence / 2 * (widths(model)[0] + attended(model))
    attention = sum(projection_weights(model)) + attended(model) * h
    ffn = matrices * h * model.ffn_hidden_size
    active = model.moe_router_topk * (model.moe_ffn_hidden_size or 0) + (model.moe_shared_expert_intermediate_size or 0)
    moe = matrices * h * active
    dense_layers = model.num_layers if model.num_moe_experts is None else model.moe_first_dense_layers
    depths = model.mtp_num_layers
    layers = model.num_layers * attention + dense_layers * ffn + (model.num_layers - dense_layers) * moe
    mtp = depths * (attention + (ffn if model.num_moe_experts is None else moe) + 2 * h * h + 3 * h)
    weights = layers + mtp + h * model.vocab_size * (1 + depths)
    flops_per_weight = 4.0 if train.options.adapters else 6.0
    return train.global_batch * train.sequence * (flops_per_weight * weights + 6.0 * scores)


def add_parts(total: Parts, parts: Parts, factor: FloatArray | float = 1.0) -> None:
    """Add each component of `parts`, multiplied by `factor`, to `total` in place."""
    for name, value in parts.items():
        total[name] = total[name] + value * factor if name in total else value * factor
