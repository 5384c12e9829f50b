"""Parameters and saved activations of one transformer layer on one rank, by component.

Sources: the parameters are those of megatron-core 0.16's own modules, checked against its counts; the saved
tensors follow Korthikanti et al. 2022 (arXiv 2205.05198), counted anew for gated layers without dropout
by recording what autograd keeps of megatron-core's local layers.
"""

from __future__ import annotations

import numpy as np

from flagcore.domain.model import Model
from flagcore.domain.space import FloatArray
from flagcore.physics.layout import Layout, Training

Parts = dict[str, FloatArray]
"""One array a component, one element a candidate."""

VOCAB_MULTIPLE = 128
"""Megatron-LM's `make_vocab_size_divisible_by`."""

EXPERT_PARTS = ("experts",)
"""Components whose weights are replicated over the expert-data-parallel group."""


def padded_vocab(model: Model, tensor: FloatArray) -> FloatArray:
    """Return the vocabulary padded to a multiple of 128 times the tensor-parallel size, as Megatron-LM does."""
    multiple = VOCAB_MULTIPLE * tensor
    return np.ceil(model.vocab_size / multiple) * multiple


def widths(model: Model) -> tuple[int, int, int]:
    """Return the total width over heads of queries, of keys and of values."""
    heads = model.num_attention_heads
    if model.multi_latent_attention:
        query = heads * ((model.qk_head_dim or 0) + (model.qk_pos_emb_head_dim or 0))
        return query, query, heads * (model.v_head_dim or 0)
    groups = model.num_query_groups * model.kv_channels
    return heads * model.kv_channels, groups, groups


def layer_parameters(train: Training, layout: Layout, *, moe: bool) -> Parts:
    """Return the weights of one layer that a rank holds.

    Source: megatron-core 0.16 (`attention.py`, `multi_latent_attention.py`, `mlp.py`, `moe/`).
    """
    model, tensor = train.model, layout.tensor
    h, (query, key, value) = model.hidden_size, widths(model)
    matrices = 3 if model.gated_linear_unit else 2
    norms = 2 * h
    if model.multi_latent_attention:
        q_rank, kv_rank, rope = model.q_lora_rank or 0, model.kv_lora_rank or 0, model.qk_pos_emb_head_dim or 0
        down = h * (q_rank + kv_rank + rope) / (np.ones_like(tensor) if train.transformer_engine else tensor)
        heads = model.num_attention_heads * ((model.qk_head_dim or 0) + (model.v_head_dim or 0))
        qkv = down + ((q_rank or h) * query + kv_rank * heads) / tensor
        norms += (q_rank + kv_rank) * model.qk_layernorm
    else:
        qkv = (h + model.add_qkv_bias) * (query + key + value) / tensor
        norms += 2 * model.kv_channels * model.qk_layernorm
    parts = {"qkv_proj": qkv, "out_proj": h * _attended(model) / tensor, "norms": np.full_like(tensor, norms)}
    if not moe:
        return {**parts, "ffn": matrices * h * model.ffn_hidden_size / tensor}
    experts = model.num_moe_experts or 0
    parts["router"] = np.full_like(tensor, h * experts)
    each = matrices * h * (model.moe_ffn_hidden_size or 0)
    parts["experts"] = each * experts / (layout.expert * layout.expert_tensor)
    if model.moe_shared_expert_intermediate_size:
        parts["shared_experts"] = matrices * h * model.moe_shared_expert_intermediate_size / tensor
    return parts


def edge_parameters(train: Training, layout: Layout, *, first: FloatArray, last: FloatArray) -> Parts:
    """Return embedding, final norm and output head of a stage; `first` and `last` are 1 where the stage is that one.

    With more than one stage a tied head is a second copy of the embedding on the last stage, and so is the
    embedding of multi-token prediction. Source: megatron-core 0.16 `gpt_model.py`.
    """
    model = train.model
    table = padded_vocab(model, layout.tensor) * model.hidden_size / layout.tensor
    alone = first * last
    head = last if model.untie_embeddings_and_output_weights else last - alone
    copies = first + (last - alone if model.mtp_num_layers and model.untie_embeddings_and_output_weights else 0.0)
    return {"embedding": table * copies, "output_head": table * head, "norms": model.hidden_size * last}


def mtp_parameters(train: Training, layout: Layout) -> Parts:
    """Return the weights of all multi-token-prediction depths, experts apart. Source: megatron-core 0.16."""
    model, depths = train.model, train.model.mtp_num_layers
    layer = layer_parameters(train, layout, moe=model.num_moe_experts is not None)
    own = 2 * model.hidden_size**2 / layout.tensor + 3 * model.hidden_size
    dense = sum((count for name, count in layer.items() if name not in EXPERT_PARTS), own)
    return {"mtp": depths * dense, "experts": depths * layer.get("experts", np.zeros_like(dense))}


def layer_saved_bytes(train: Training, layout: Layout, *, moe: bool) -> Parts:
    """Return the bytes that one layer keeps of one micro-batch for its backward pass.

    Per token, in units of one value: the inputs of two norms and two projections (4 h); queries and keys after
    rotation, before it where it is not fused (values are a view of the joint projection) and before their norms;
    the attention output; of the FFN the gate and up outputs, and each further tensor of an activation that is not
    one kernel. An attention
    core that is not fused keeps 5 bytes a score at 16 bits (arXiv 2205.05198, equation 1); a
    fused one keeps 4 bytes a row (log-sum-exp, Dao 2023, arXiv 2307.08691).
    """
    model, unit = train.model, float(train.value_bytes)
    h, (query, key, value) = model.hidden_size, widths(model)
    tokens, rows = layout.tokens(train.sequence), layout.token_rows(train.sequence)
    local = tokens / layout.tensor
    parts = {"norms": 2 * unit * h * rows, "qkv_proj": unit * h * rows, "out_proj": unit * _attended(model) * local}
    if model.multi_latent_attention:
        q_rank, kv_rank = model.q_lora_rank or 0, model.kv_lora_rank or 0
        latent = 2 * (q_rank + kv_rank) + (model.qk_pos_emb_head_dim or 0)
        up = model.num_attention_heads * (model.qk_head_dim or 0)
        parts["qkv_proj"] = parts["qkv_proj"] + unit * latent * tokens
        core = unit * (2 * query + key + up + value) * local
    else:
        kept = 1 + (not train.transformer_engine) + model.qk_layernorm
        core = unit * (kept * (query + key) + value) * local
    parts["core_attention"] = core + kept_scores(train, layout) * (1 - layout.selective)
    if not moe:
        parts["ffn"] = unit * (h * rows + _activation_tensors(train) * model.ffn_hidden_size * local)
        return parts
    parts["router"] = (unit * h + ROUTER_BYTES * (model.num_moe_experts or 0)) * rows
    copies = layout.expert_tokens(model, train.sequence)
    weighted = _activation_tensors(train) + (0 if train.fused_activation else 1)
    parts["experts"] = unit * copies * (h + weighted * (model.moe_ffn_hidden_size or 0) / layout.expert_tensor)
    if model.moe_shared_expert_intermediate_size:
        shared = _activation_tensors(train) * model.moe_shared_expert_intermediate_size
        parts["shared_experts"] = unit * shared * local
    return parts


ROUTER_BYTES = 12
"""Bytes a token and expert: logits, scores and probabilities in fp32. Counted in megatron-core's local layers."""


def kept_scores(train: Training, layout: Layout) -> FloatArray:
    """Return the bytes that the attention core of one layer keeps besides its inputs and output."""
    rows = layout.tokens(train.sequence) * train.model.num_attention_heads / layout.tensor
    if train.flash:
        return 4.0 * rows
    return 2.5 * train.value_bytes * rows * train.sequence


def layer_input_bytes(train: Training, layout: Layout) -> FloatArray:
    """Return the bytes of the tensor between two layers: what recompute keeps, and what pipeline stages send."""
    return train.value_bytes * train.model.hidden_size * layout.token_rows(train.sequence)


def logits_bytes(train: Training, layout: Layout) -> FloatArray:
    """Return the bytes of the fp32 softmax that the loss of one micro-batch keeps. Source: megatron-core 0.16."""
    return 4.0 * padded_vocab(train.model, layout.tensor) / layout.tensor * layout.tokens(train.sequence)


def model_flops(train: Training) -> float:
    """Return the flops of one step that the model needs, forward and backward, nothing computed twice.

    Source: `num_floating_point_operations` of Megatron-LM core_v0.16 (6 flops a weight and token, causal half of
    the attention scores, no router).
    """
    model = train.model
    h, (query, key, value) = model.hidden_size, widths(model)
    ratio = 3 if model.gated_linear_unit else 2
    if model.multi_latent_attention:
        q_rank, kv_rank, rope = model.q_lora_rank or 0, model.kv_lora_rank or 0, model.qk_pos_emb_head_dim or 0
        projections = h * (q_rank + kv_rank + rope) + (q_rank or h) * query
        projections += kv_rank * model.num_attention_heads * ((model.qk_head_dim or 0) + (model.v_head_dim or 0))
    else:
        projections = h * (query + key + value)
    attention = projections + _attended(model) * h + train.sequence / 2 * (query + _attended(model))
    dense = ratio * h * model.ffn_hidden_size
    active = model.moe_router_topk * (model.moe_ffn_hidden_size or 0) + (model.moe_shared_expert_intermediate_size or 0)
    sparse = ratio * h * active
    dense_layers = model.num_layers if model.num_moe_experts is None else model.moe_first_dense_layers
    depths = model.mtp_num_layers
    layers = model.num_layers * attention + dense_layers * dense + (model.num_layers - dense_layers) * sparse
    mtp = depths * (attention + (dense if model.num_moe_experts is None else sparse) + 2 * h * h + 3 * h)
    return 6.0 * train.global_batch * train.sequence * (layers + mtp + h * model.vocab_size * (1 + depths))


def _attended(model: Model) -> int:
    """Return the total width of the attention output."""
    return widths(model)[2] if model.multi_latent_attention else widths(model)[0]


def _activation_tensors(train: Training) -> int:
    """Return how many tensors of the FFN's width a layer keeps: 2 (1) projections, then what the activation adds."""
    if train.model.gated_linear_unit:
        return 3 if train.fused_activation else 5
    return 2
