"""Modules of layers and of the model's ends: what they store of a micro-batch, and need at their worst moments.

Counted op by op in megatron-core 0.16's layers, `gpt_model.py`, `tensor_parallel/cross_entropy.py` and
`multi_token_prediction.py`, and read from what transformer-engine 2.9 saves (`linear.py`,
`layernorm_linear.py`, `dot_product_attention`); with dropout and without a gate as in Korthikanti et al. 2022
(arXiv 2205.05198). Tokens are spread evenly over experts, times `Options.expert_imbalance`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flagcore.domain.space import BoolArray, FloatArray
from flagcore.engines.megatron.memory.modules import Module, Sizes
from flagcore.engines.megatron.parallel.layout import Layout, Training
from flagcore.engines.megatron.parallel.parameters import padded_vocab
from flagcore.engines.transformer import attended, latent_widths, widths

DROPPED = 2.5
"""Tensors of the attention scores' size, in units of a 16-bit value, that softmax and dropout store: the probabilities,
the same after dropout, and its mask of one byte (arXiv 2205.05198, equation 1)."""


def attention(train: Training, layout: Layout, sizes: Sizes) -> list[Module]:
    """Return norm, projection, core and output projection of self-attention."""
    model, unit, local = train.model, sizes.unit, sizes.local
    h, total, out = model.hidden_size, sum(widths(model)), attended(model)
    enter = _latent(train, layout, sizes) if model.multi_latent_attention else {}
    heads = _latent_heads(train, layout, sizes) if model.multi_latent_attention else _grouped(train, layout, sizes)
    enter["qkv_linear"] = sizes.linear * h * sizes.rows
    gathered = sizes.gathered * train.transformer_engine
    into = unit * local * total + sizes.whole + sizes.scattered + gathered + sizes.weight * h * total / layout.tensor
    context = unit * local * out
    quantised = local * out * sizes.linear * (train.precision == "fp8")
    leave = sizes.gathered + context + sizes.weight * h * out / layout.tensor
    core = {
        "qkv": heads,
        "context": context * (1.0 + _keeps_core(train, layout)),
        "scores": stored_scores(train, layout),
    }
    return [
        norm("attn_norm", sizes),
        Module("qkv_proj", enter, sizes.hidden + into),
        Module("core_attention", core, sizes.hidden + context + _core_work(train, layout, sizes)),
        Module("out_proj", {"attn_proj": quantised + _mask(train, sizes)}, sizes.hidden + leave),
    ]


def norm(name: str, sizes: Sizes) -> Module:
    """Return a norm before a block: it stores its input and one fp32 number per token."""
    return Module("norms", {name: sizes.hidden + 4.0 * sizes.rows}, 2.0 * sizes.hidden)


def ffn(train: Training, layout: Layout, sizes: Sizes) -> list[Module]:
    """Return norm and FFN of a dense layer."""
    first, last, work = dense_products(train, sizes, train.model.ffn_hidden_size / layout.tensor)
    entry = sizes.linear * train.model.hidden_size * sizes.rows
    tensors = {"mlp_input": entry, "mlp_first": first, "mlp_act": last, "mlp_mask": _mask(train, sizes)}
    return [norm("mlp_norm", sizes), Module("ffn", tensors, sizes.hidden + work)]


def dense_products(train: Training, sizes: Sizes, width: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return the bytes that an FFN of `width` on tensor-parallel ranks stores before and after its activation function,
    and what its backward needs in addition to the gradient of its output.
    """
    first, last, moments = products(train, sizes, sizes.tokens, width)
    enter = sizes.whole + sizes.scattered + sizes.gathered * train.transformer_engine
    work = np.maximum(moments[0] + sizes.gathered, np.maximum(moments[1], moments[2] + enter))
    return first, last, work


def products(
    train: Training, sizes: Sizes, tokens: FloatArray, width: FloatArray, *, weighted: bool = False
) -> tuple[FloatArray, FloatArray, tuple[FloatArray, FloatArray, FloatArray]]:
    """Return the bytes that the two products of an FFN store before and after its activation function, and three
    moments of its backward: second product, activation function, first product.

    Each moment is what is allocated, less what the later ones have freed, without the gradients of the FFN's input and
    output. `weighted` multiplies each token's row with a number, as experts do. An activation function of several
    kernels stores silu of the gate, the other half, and its product with them.
    """
    h, up = train.model.hidden_size, 2.0 if train.model.gated_linear_unit else 1.0
    wide, extra = sizes.unit * tokens * width, np.zeros(())
    first = up * wide
    if train.model.gated_linear_unit and not train.fused_activation:
        first, extra = (5.0 if weighted else 4.0) * wide, wide
    last = sizes.linear / sizes.unit * wide
    weight = sizes.weight * width * h
    return first, last, (wide + weight, (1.0 + up) * wide + extra - last, up * (wide + weight) - first - last)


def stored_scores(train: Training, layout: Layout) -> FloatArray:
    """Return the bytes that the attention core stores in addition to its inputs and output.

    A fused core stores one fp32 number per row (log-sum-exp; Dao 2023, arXiv 2307.08691), one that is not fused the
    probabilities, and with dropout `DROPPED` as much.
    """
    rows = layout.tokens(train.sequence) * train.model.num_attention_heads / layout.tensor
    if train.flash:
        return 4.0 * rows
    return train.value_bytes * rows * train.sequence * (DROPPED if train.options.dropout else 1.0)


def _grouped(train: Training, layout: Layout, sizes: Sizes) -> FloatArray:
    """Return the stored queries, keys and values of multi-head or grouped-query attention.

    megatron-core's own layers rotate queries and keys into new tensors with cosine and sine of each position for
    both, and hold the joint projection because values are a view of it. Transformer-engine copies the
    values and frees the projection. Norms of queries and keys store their inputs.
    """
    model, unit, local = train.model, sizes.unit, sizes.local
    query, key, value = (unit * width * local for width in widths(model))
    grouped, normed = model.num_query_groups < model.num_attention_heads, model.qk_layernorm
    norms = 4.0 * local * (model.num_attention_heads + model.num_query_groups) * normed
    if train.transformer_engine:
        return query + key + value + norms + normed * (query + key)
    angles = 4.0 * unit * train.sequence / layout.context * model.kv_channels
    before = query * (normed & grouped & (layout.tensor < model.num_query_groups))
    plain = 2.0 * (query + key) + value + norms + before + angles
    if not train.gathered_keys:
        return plain
    gathered = query + 2.0 * (query if grouped else key) * layout.context
    return np.where(layout.context > 1, gathered + normed * (query + key + value) + norms + before + angles, plain)


def _latent(train: Training, layout: Layout, sizes: Sizes) -> dict[str, FloatArray]:
    """Return the bytes stored by the projections of latent attention: compressed queries and keys before and after
    their norms.

    In megatron-core's own layers the compressed queries stay as they were gathered over tensor-parallel ranks.
    """
    model, unit, rows = train.model, sizes.unit, sizes.rows
    q_rank, kv_rank, rope = latent_widths(model)
    normed = sizes.linear * rows * (q_rank + kv_rank) + 4.0 * rows * (1 + (q_rank > 0))
    if train.transformer_engine:
        return {"latent": normed + unit * rows * (q_rank + kv_rank + rope)}
    split = layout.sequence_parallel * (layout.tensor > 1)
    return {"latent": normed + unit * (sizes.tokens * q_rank + rows * kv_rank + (1.0 - split) * rows * rope)}


def _latent_heads(train: Training, layout: Layout, sizes: Sizes) -> FloatArray:
    """Return the stored queries, keys and values of latent attention, of all heads, each once."""
    angles = 4.0 * sizes.unit * train.sequence / layout.context * (train.model.qk_pos_emb_head_dim or 0)
    return sizes.unit * sizes.local * sum(widths(train.model)) + angles * (not train.transformer_engine)


def _keeps_core(train: Training, layout: Layout) -> FloatArray:
    """Return whether context parallelism stores the core's output as it was before it went back to its ranks.

    It does with heads assigned to the ranks and with keys gathered, and does not in a ring (transformer-engine 2.9
    `context_parallel.py`).
    """
    apart: FloatArray = (layout.context > 1).astype(np.float64)
    return apart * (train.transformer_engine and train.options.cp_comm != "p2p")


def _core_work(train: Training, layout: Layout, sizes: Sizes) -> FloatArray:
    """Return the bytes of the attention core's backward in addition to the gradient of its output.

    Gradients of queries, keys and values; a fused kernel's fp32 sum of the queries' gradients, and gradients of keys
    and values for each query head where heads share them; two pairs of buffers for other ranks' keys and values and
    for their gradients under context parallelism; gradients of probabilities and scores without a fused kernel.
    """
    query, key, value = (width * sizes.local for width in widths(train.model))
    gradients = sizes.unit * (query + key + value)
    if not train.flash:
        rows = layout.tokens(train.sequence) * train.model.num_attention_heads / layout.tensor
        return gradients + 2.0 * train.value_bytes * rows * train.sequence
    shared = 2.0 * sizes.unit * query * (widths(train.model)[0] != widths(train.model)[1])
    ring = 4.0 * sizes.unit * (key + value) * (layout.context > 1)
    return gradients + 4.0 * query + shared + ring


def _mask(train: Training, sizes: Sizes) -> FloatArray:
    """Return the mask of the dropout behind a block, a byte an element."""
    return sizes.hidden / sizes.unit * train.options.dropout


MAP_BYTES, CHOICE_BYTES = 4.0, 22.0
"""Bytes that routing stores of each token: for an expert a 16-bit probability and two flags, for a choice its place,
and its probability before and after the tokens are sorted."""


def mixture(train: Training, layout: Layout, sizes: Sizes) -> list[Module]:
    """Return norm, router, shared experts and routed experts of one layer."""
    model = train.model
    routing = (MAP_BYTES * (model.num_moe_experts or 0) + CHOICE_BYTES * model.moe_router_topk) * sizes.rows
    entry = sizes.unit * model.hidden_size * sizes.rows
    modules = [norm("mlp_norm", sizes), Module("router", {"mlp_input": entry, "routing": routing}, 3.0 * sizes.hidden)]
    if shared := model.moe_shared_expert_intermediate_size:
        first, last, work = dense_products(train, sizes, shared / layout.tensor)
        tensors = {"shared_first": first, "shared_act": last}
        modules.append(Module("shared_experts", tensors, 2.0 * sizes.hidden + work))
    return [*modules, routed(train, layout, sizes)]


def routed(train: Training, layout: Layout, sizes: Sizes) -> Module:
    """Return the routed experts of one rank with the way of their tokens there and back."""
    model, options = train.model, train.options
    h, load = model.hidden_size, options.expert_imbalance
    own = np.maximum((model.num_moe_experts or 0) / layout.expert, 1.0)
    batched = options.grouped_gemm and train.transformer_engine
    number = np.ones_like(own) if batched else own
    copies = layout.expert_tokens(model, train.sequence) * load
    width = (model.moe_ffn_hidden_size or 0) / layout.expert_tensor
    first, last, moments = products(train, sizes, copies / number, width, weighted=True)
    sent = sizes.unit * h * model.moe_router_topk * sizes.rows * load
    every = sizes.unit * h * copies
    last_gradient = every * (number > 1.0)  # of the output: allocated until all experts are done; a single one frees it
    each = np.maximum(moments[1], moments[2] + every / number) + last_gradient
    several, apart = own > 1, layout.expert_tensor > 1
    if options.dispatcher == "allgather":
        everywhere = gathered_tokens(layout, sizes)
        enter = every + everywhere
        forward = every + np.maximum(every * several, np.maximum(everywhere, sizes.hidden))
    else:
        enter = np.maximum(2.0 * sent, np.maximum((sent + every) * apart, 2.0 * every * several))
        forward = _dispatch(layout, sent, every, several, apart)
    backward = sizes.hidden + np.maximum(enter, np.maximum(every + moments[0], each))
    held = (layout.pipeline > 1) * 1.0 + (model.moe_shared_expert_intermediate_size is not None)
    forward = forward + sizes.hidden * held  # a gradient that the pipeline still holds, the shared experts' output
    tensors = {"expert_fc1": sizes.linear * h * copies, "moe_first": first * number, "moe_act": last * number}
    return Module("experts", tensors, np.maximum(forward, backward))


def gathered_tokens(layout: Layout, sizes: Sizes) -> FloatArray:
    """Return the bytes of the tokens of all ranks that share a layer's experts, where they are gathered."""
    ranks = layout.expert * layout.expert_tensor
    return np.where(ranks > 1, ranks * sizes.hidden, 0.0)


def _dispatch(layout: Layout, sent: FloatArray, every: FloatArray, several: BoolArray, apart: BoolArray) -> FloatArray:
    """Return the bytes in transit to the experts and back, except the experts' input, when their output goes back.

    The tokens sorted by expert, what came in from other expert ranks, the experts' output, and the same in the
    order of the tokens or summed over ranks; a step that a layout does not have is no tensor.
    """
    away = layout.expert > 1
    permuted = sent * (away | several | apart)
    received = sent * (away & (several | apart))
    back: FloatArray = np.where(several, every + sent * apart, sent * (away | apart))
    return permuted + received + every + back


def embedding(train: Training, layout: Layout, sizes: Sizes) -> Module:
    """Return the embedding: it stores token numbers alone, and the gradient of its weights is as wide as they."""
    table = sizes.unit * padded_vocab(train.model, layout.tensor) / layout.tensor * train.model.hidden_size
    return Module("embedding", {"tokens": 8.0 * sizes.tokens}, sizes.hidden + sizes.gathered + table)


def head(train: Training, layout: Layout, sizes: Sizes) -> list[Module]:
    """Return final norm and output head with its loss.

    The loss stores fp32 probabilities, and also has 16-bit logits at its peak; in backward the 16-bit gradient
    replaces them while the gradients of input and weight are computed. A fused loss works in the
    logits themselves. The logits of the last depth of multi-token prediction are still there.
    """
    logits = _logits(train, layout, sizes)
    tensors = {"head_input": sizes.unit * train.model.hidden_size * sizes.rows, "logits": logits.stored}
    earlier = logits.plain * (train.model.mtp_num_layers > 0)
    return [
        norm("final_norm", sizes),
        Module("output_head", tensors, np.maximum(logits.forward + earlier, logits.backward)),
    ]


def depths(
    train: Training, layout: Layout, sizes: Sizes, stored: FloatArray, above: FloatArray, layers: FloatArray
) -> list[Module]:
    """Return multi-token prediction: per depth one more layer, which stores `stored` and needs `above`, and a loss.

    Besides, a depth stores an embedding of all tokens, two norms' inputs and their outputs side by side, its output
    before and after a norm, and a copy of that. Uniform recompute stores inputs alone, and
    also has an output where the stage's other `layers` and depths spare as much.
    """
    number = train.model.mtp_num_layers
    if not number:
        return []
    full = layout.uniform > 0
    one = stored + 6.0 * sizes.hidden + 12.0 * sizes.rows + sizes.gathered - sizes.scattered
    spared = 3.0 * sizes.hidden
    logits = _logits(train, layout, sizes)
    gradients = number * sizes.hidden  # of all depths' outputs, side by side
    others = (number - 1.0) * (one - spared) + layers * (stored - sizes.hidden)
    output = np.clip(others, 0.0, sizes.hidden)
    work = gradients + np.where(full, one - spared + above + output, above)
    return [
        Module("mtp", {"mtp": number * np.where(full, spared, one)}, work),
        Module("mtp", {"mtp_logits": number * logits.stored}, np.maximum(logits.forward, logits.backward)),
    ]


@dataclass(frozen=True, slots=True)
class _Logits:
    """Bytes of one loss: computed logits, stored logits, and the worst moments of forward and backward above them."""

    plain: FloatArray
    stored: FloatArray
    forward: FloatArray
    backward: FloatArray


def _logits(train: Training, layout: Layout, sizes: Sizes) -> _Logits:
    vocab = padded_vocab(train.model, layout.tensor) / layout.tensor
    plain = sizes.unit * vocab * sizes.tokens
    products = sizes.whole + sizes.scattered + sizes.weight * vocab * train.model.hidden_size
    if train.options.cross_entropy_fusion and train.transformer_engine:
        return _Logits(plain, plain, np.zeros_like(plain), products)
    wide = 4.0 * vocab * sizes.tokens
    half = plain * (train.value_bytes == 2)
    return _Logits(plain, wide, half, np.maximum(half, products + plain - wide))
