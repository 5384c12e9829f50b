"""Time of one layer, and of embedding and head, for one micro-batch: kernels and the collectives between them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flagcore.contracts import Costs
from flagcore.domain.space import FloatArray, IntArray
from flagcore.physics.layout import Layout, Training
from flagcore.physics.transformer import layer_input_bytes, padded_vocab, widths

BACKWARD = 2.0
"""Backward of a matrix product is two of the same size, and element-wise kernels go the same way."""

KERNELS = 110.0
"""Kernels that the host launches for one layer forward (backward: twice as many). Fitted to the step times of small
layers that did not depend on their size, in one published sweep of 1,440 runs."""

EXPERT_KERNELS = 75.0
"""The same for each local expert where experts run one by one. Fitted to 4 measured ranks with 16 to 32 experts."""

ATTENTION_BACKWARD = 3.0
"""Backward of fused attention over forward: 5 products to 2 (Dao 2023, arXiv 2307.08691), each a little slower;
the median of 60 shapes on one accelerator."""


@dataclass(frozen=True, slots=True)
class Seconds:
    """Where the time of one micro-batch goes: kernels, and collectives by what they belong to."""

    compute: FloatArray
    tensor: FloatArray
    context: FloatArray
    expert: FloatArray

    @property
    def total(self) -> FloatArray:
        """All of it."""
        return self.compute + self.tensor + self.context + self.expert

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(
            self.compute + other.compute,
            self.tensor + other.tensor,
            self.context + other.context,
            self.expert + other.expert,
        )

    def __mul__(self, times: FloatArray) -> Seconds:
        return Seconds(self.compute * times, self.tensor * times, self.context * times, self.expert * times)


def layer_time(train: Training, layout: Layout, costs: Costs, again: FloatArray, *, moe: bool) -> Seconds:
    """Return forward, recomputed forward and backward of one layer; `again` is the share of layers recomputed.

    A layer takes at least the time in which the host launches its kernels (a kernel that moves nothing, each).
    Volumes: tensor parallel two all-reduces forward and two backward, with sequence parallel an all-gather and
    reduce-scatter in place of each and one more gather of each saved input (Korthikanti et al. 2022, arXiv
    2205.05198); context parallel keys and values once forward, twice backward (arXiv 2310.01889).
    """
    core = _attention(train, layout, costs)
    forward = _attention_linears(train, layout, costs) + (
        _experts(train, layout, costs) if moe else _ffn(train, layout, costs, train.model.ffn_hidden_size)
    )
    forward = forward + _elementwise(train, layout, costs, moe=moe)
    core_times = 1.0 + again + layout.selective * (1.0 - np.minimum(again, 1.0))
    busy = forward * (1.0 + again + BACKWARD) + core * (core_times + ATTENTION_BACKWARD)
    kernels = _like(busy, KERNELS)
    if moe and not train.transformer_engine:
        kernels = kernels + EXPERT_KERNELS * (train.model.num_moe_experts or 0) / layout.expert
    launches = costs.kernels.memory_seconds(np.zeros_like(busy)) * kernels * (1.0 + again + BACKWARD)
    compute = np.maximum(busy, launches)
    shared = bool(train.model.moe_shared_expert_intermediate_size)
    pairs = 2.0 if not moe or shared else 1.0
    tensor = _tensor_pair(train, layout, costs) * pairs * (2.0 + again)
    tensor = tensor + _gather(train, layout, costs) * pairs * layout.sequence_parallel
    context = _ring(train, layout, costs) * (3.0 + again)
    expert = _dispatch(train, layout, costs) * 2.0 * (2.0 + again) if moe else np.zeros_like(compute)
    return Seconds(compute, tensor, context, expert)


def edge_time(train: Training, layout: Layout, costs: Costs) -> Seconds:
    """Return forward and backward of the output head with its loss, multi-token prediction included.

    The embedding is a look-up; its time is left out.
    """
    model, tokens = train.model, layout.tokens(train.sequence)
    vocab = padded_vocab(model, layout.tensor) / layout.tensor
    product = costs.kernels.gemm_seconds(tokens, vocab, _like(tokens, model.hidden_size), train.precision)
    loss = costs.kernels.memory_seconds((2.0 * train.value_bytes + 16.0) * tokens * vocab)
    compute = (product * (1.0 + BACKWARD) + loss) * (1.0 + model.mtp_num_layers)
    zero = np.zeros_like(compute)
    return Seconds(compute, _tensor_pair(train, layout, costs) * 2.0, zero, zero)


def _attention_linears(train: Training, layout: Layout, costs: Costs) -> FloatArray:
    model, tokens = train.model, layout.tokens(train.sequence)
    h, (query, key, value) = model.hidden_size, widths(model)

    def linear(inner: float, outer: FloatArray) -> FloatArray:
        return costs.kernels.gemm_seconds(tokens, outer, _like(tokens, inner), train.precision)

    split = layout.tensor
    if not model.multi_latent_attention:
        out = costs.kernels.gemm_seconds(tokens, _like(tokens, h), query / split, train.precision)
        return linear(h, (query + key + value) / split) + out
    q_rank, kv_rank, rope = model.q_lora_rank or 0, model.kv_lora_rank or 0, model.qk_pos_emb_head_dim or 0
    heads = model.num_attention_heads * ((model.qk_head_dim or 0) + (model.v_head_dim or 0))
    out = costs.kernels.gemm_seconds(tokens, _like(tokens, h), value / split, train.precision)
    down = linear(h, _like(tokens, q_rank + kv_rank + rope))
    return down + linear(q_rank or h, query / split) + linear(kv_rank, heads / split) + out


def _attention(train: Training, layout: Layout, costs: Costs) -> FloatArray:
    """Return the attention core forward. Unfused, it computes all scores and moves them five times.

    The five: written by the product, read and written by the masked softmax, read by the second product, and
    dropout's share.
    """
    model = train.model
    heads, length = model.num_attention_heads / layout.tensor, _like(layout.tensor, train.sequence)
    query, _, value = widths(model)
    width = query if not model.multi_latent_attention else (query + value) / 2
    size = _like(layout.tensor, width / model.num_attention_heads)
    fused = costs.kernels.attention_seconds(layout.micro_batch, heads, length, size, train.precision)
    if train.flash:
        return fused / layout.context
    scores = layout.micro_batch * heads * float(train.sequence) ** 2 / layout.context
    return 2.0 * fused / layout.context + costs.kernels.memory_seconds(5.0 * train.value_bytes * scores)


def _ffn(train: Training, layout: Layout, costs: Costs, width: int) -> FloatArray:
    tokens, h = layout.tokens(train.sequence), _like(layout.tensor, train.model.hidden_size)
    return _two_products(train, costs, tokens, h, width / layout.tensor)


def _experts(train: Training, layout: Layout, costs: Costs) -> FloatArray:
    """Return the products of routed and shared experts; each local expert is a product of its own."""
    model, h = train.model, _like(layout.tensor, train.model.hidden_size)
    local = (model.num_moe_experts or 1) / layout.expert
    each = layout.expert_tokens(model, train.sequence) / local
    width = (model.moe_ffn_hidden_size or 0) / layout.expert_tensor
    time = local * _two_products(train, costs, each, h, width)
    if model.moe_shared_expert_intermediate_size:
        time = time + _ffn(train, layout, costs, model.moe_shared_expert_intermediate_size)
    return time


def _two_products(train: Training, costs: Costs, tokens: FloatArray, h: FloatArray, width: FloatArray) -> FloatArray:
    up = 2.0 if train.model.gated_linear_unit else 1.0
    first = costs.kernels.gemm_seconds(tokens, up * width, h, train.precision)
    return first + costs.kernels.gemm_seconds(tokens, h, width, train.precision)


def _elementwise(train: Training, layout: Layout, costs: Costs, *, moe: bool) -> FloatArray:
    """Return norms and residual sums (each reads and writes its tensors), rotation, and activation functions."""
    model, unit = train.model, float(train.value_bytes)
    local, rows = layout.tokens(train.sequence) / layout.tensor, layout.token_rows(train.sequence)
    time = costs.kernels.memory_seconds(unit * 10.0 * model.hidden_size * rows)
    query, key, _ = widths(model)
    time = time + costs.kernels.memory_seconds(
        unit * (2.0 if train.transformer_engine else 8.0) * (query + key) * local
    )
    passes = (3.0 if model.gated_linear_unit else 2.0) + (0.0 if train.fused_activation else 4.0)
    if not moe:
        return time + costs.kernels.memory_seconds(unit * passes * model.ffn_hidden_size * local)
    copies = layout.expert_tokens(model, train.sequence)
    width = passes * (model.moe_ffn_hidden_size or 0) / layout.expert_tensor + 8.0 * model.hidden_size
    shared = passes * (model.moe_shared_expert_intermediate_size or 0) * local
    return time + costs.kernels.memory_seconds(unit * (width * copies + shared))


def _tensor_pair(train: Training, layout: Layout, costs: Costs) -> FloatArray:
    """Return what one block costs in one direction: an all-reduce, or an all-gather and a reduce-scatter."""
    payload = train.value_bytes * train.model.hidden_size * layout.tokens(train.sequence)
    return costs.collectives.seconds("all_reduce", payload, _int(layout.tensor), _ones(layout.tensor))


def _gather(train: Training, layout: Layout, costs: Costs) -> FloatArray:
    payload = train.value_bytes * train.model.hidden_size * layout.tokens(train.sequence)
    return costs.collectives.seconds("all_gather", payload, _int(layout.tensor), _ones(layout.tensor))


def _ring(train: Training, layout: Layout, costs: Costs) -> FloatArray:
    """Return one passage of all keys and values round the context-parallel ranks."""
    _, key, value = widths(train.model)
    payload = train.value_bytes * (key + value) / layout.tensor * layout.micro_batch * train.sequence
    return costs.collectives.seconds("all_gather", payload, _int(layout.context), _int(layout.tensor))


def _dispatch(train: Training, layout: Layout, costs: Costs) -> FloatArray:
    """Return one exchange of token copies among experts: an all-to-all, then a gather over the expert's split."""
    copies = train.model.moe_router_topk * layer_input_bytes(train, layout)
    exchange = costs.collectives.seconds("all_to_all", copies, _int(layout.expert), _int(layout.expert_tensor))
    return exchange + costs.collectives.seconds(
        "all_gather", copies * layout.expert_tensor, _int(layout.expert_tensor), _ones(layout.tensor)
    )


def _like(array: FloatArray, value: float) -> FloatArray:
    return np.full_like(array, value)


def _int(array: FloatArray) -> IntArray:
    return array.astype(np.int64)


def _ones(array: FloatArray) -> IntArray:
    return np.ones(array.shape, dtype=np.int64)
