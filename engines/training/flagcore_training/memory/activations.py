"""Bytes of activations of a model's modules (layers, embedding, head) for one micro-batch: stored, and at their peaks.

Sources: the operators of the layers of megatron-core 0.16 to 0.20, `gpt_model.py`, `tensor_parallel/cross_entropy.py`
and `multi_token_prediction.py`; the tensors that transformer-engine 2.9 to 2.20 saves (`linear.py`,
`layernorm_linear.py`, `grouped_linear.py`, `dot_product_attention`), with the defaults of its switches; for dropout
and layers without a gate Korthikanti et al. 2022 (arXiv 2205.05198). The busiest expert rank processes
`Layout.busiest` times the mean number of tokens.
"""

from typing import NamedTuple

import numpy as np
from flagcore_models.layers import depth_of, head_of
from flagcore_models.mixers.attention import Attention
from flagcore_models.mixers.latent_attention import LatentAttention
from flagcore_models.networks.experts import Experts

from flagcore.domain.model import Mixer, Network
from flagcore.domain.space import BoolArray, FloatArray
from flagcore_training.layout import Layout, Training
from flagcore_training.memory.modules import Module, Sizes
from flagcore_training.weights import padded_vocab, table_sizes

DROPOUT_FACTOR = 2.5
"""Bytes per attention score that softmax and dropout store, as a multiple of a 16-bit value.

They are the probabilities before and after dropout, and a mask of one byte (arXiv 2205.05198, equation 1)."""


def attention(train: Training, layout: Layout, sizes: Sizes, mixer: Attention) -> list[Module]:
    """Return the modules of self-attention: norm, QKV projection, attention core, and output projection."""
    unit, local, h, output_width = sizes.unit, sizes.local, train.model.hidden_size, mixer.attended
    width = mixer.query_width + mixer.key_width + mixer.value_width
    tensors: dict[str, FloatArray] = {}
    if isinstance(mixer, LatentAttention):
        tensors = _latent_projections(train, sizes, layout, mixer)
        heads = _latent_heads(train, layout, sizes, mixer)
    else:
        heads = _standard_heads(train, layout, sizes, mixer)
    if mixer.gate:  # the gate, and the output before it
        heads = heads + unit * local * (mixer.query_width + output_width)
        width += mixer.query_width
    tensors["qkv_linear"] = sizes.linear * h * sizes.rows
    gathered = sizes.gathered * train.transformer_engine
    work = unit * local * width + sizes.whole + sizes.scattered + gathered + sizes.weight * h * width / layout.tensor
    context = unit * local * output_width
    stores_copy = train.transformer_engine and train.options.stores_core_copy
    quantised_input = local * output_width * sizes.linear * (train.precision == "fp8")
    output_work = sizes.gathered + context + sizes.weight * h * output_width / layout.tensor
    core = {
        "qkv": heads,
        "context": context * np.where(stores_copy & (layout.context > 1), 2.0, 1.0),
        "scores": stored_scores(train, layout, mixer),
    }
    return [
        norm("attn_norm", sizes),
        Module("qkv_proj", tensors, sizes.hidden + work),
        Module("core_attention", core, sizes.hidden + context + _core_work(train, layout, sizes, mixer)),
        Module("out_proj", {"attn_proj": quantised_input + _dropout_mask(train, sizes)}, sizes.hidden + output_work),
    ]


def mixer(train: Training, layout: Layout, sizes: Sizes, mixer: Mixer) -> list[Module]:
    """Return the modules of a layer with another mixer than attention: its norm, and all its kernels.

    Backward holds the gradients of what its kernels stored, and the gradient of its input.
    """
    outputs, described = sizes.unit * sizes.local * mixer.saved, mixer.products(train.model.hidden_size)
    # compressed queries' projection, before and after its norm
    queries = sizes.unit * sizes.local * 2.0 * sum(each.outputs for each in described if each.name == "queries")
    inputs = sizes.linear * train.model.hidden_size * sizes.rows
    work = sizes.hidden + outputs + sizes.whole + sizes.scattered + sizes.gathered * train.transformer_engine
    work = work + sizes.weight * max(each.weights for each in described) / layout.tensor
    tensors = {"mixer_linear": inputs, "mixer": outputs - queries, "qkv": queries}
    return [norm("attn_norm", sizes), Module("mixers", tensors, work)]


def norm(name: str, sizes: Sizes) -> Module:
    """Return the norm before a block. It stores its input and one fp32 number per token, and a hyper-connection all
    residual streams."""
    streams = sizes.between * np.any(sizes.between > sizes.hidden)
    return Module("norms", {name: sizes.hidden + 4.0 * sizes.rows + streams}, 2.0 * sizes.hidden)


def ffn(train: Training, layout: Layout, sizes: Sizes, network: Network) -> list[Module]:
    """Return the modules of a dense layer's FFN, with the norm before it."""
    first, last, work = dense_products(train, sizes, network, network.width / layout.tensor)
    input_bytes = sizes.linear * train.model.hidden_size * sizes.rows
    tensors = {"mlp_input": input_bytes, "mlp_first": first, "mlp_act": last, "mlp_mask": _dropout_mask(train, sizes)}
    return [norm("mlp_norm", sizes), Module("ffn", tensors, sizes.hidden + work)]


def dense_products(
    train: Training, sizes: Sizes, network: Network, width: FloatArray
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return the bytes that an FFN stores before its activation function, the bytes after it, and its workspace.

    `width` is the inner width of the FFN. The workspace is the bytes that its backward needs, besides the gradient of
    its output.
    """
    first, last, moments = products(train, sizes, sizes.tokens, width, network.gated, train.model.hidden_size)
    input_copies = sizes.whole + sizes.scattered + sizes.gathered * train.transformer_engine
    work = np.maximum(moments[0] + sizes.gathered, np.maximum(moments[1], moments[2] + input_copies))
    return first, last, work


def products(
    train: Training,
    sizes: Sizes,
    tokens: FloatArray,
    width: FloatArray,
    gated: bool,
    outer: float,
    *,
    is_weighted: bool = False,
) -> tuple[FloatArray, FloatArray, tuple[FloatArray, FloatArray, FloatArray]]:
    """Return the bytes that an FFN stores before and after its activation function, and the peaks of its backward.

    The three peaks are during the backward of the second product, of the activation function, and of the first product,
    in bytes above those stored before the backward, without the gradients of the FFN's input and output. With
    `is_weighted`, each token's row is multiplied by a number, as in experts. An unfused gated activation function
    stores the silu of the gate, the other half, and their product.
    """
    factor = 2.0 if gated else 1.0
    size, gate = sizes.unit * tokens * width, np.zeros(())
    first = factor * size
    if gated and not train.fused_activation:
        first, gate = (5.0 if is_weighted else 4.0) * size, size
    last = sizes.linear / sizes.unit * size
    weight = sizes.weight * width * outer
    return first, last, (size + weight, (1.0 + factor) * size + gate - last, factor * (size + weight) - first - last)


def stored_scores(train: Training, layout: Layout, mixer: Attention) -> FloatArray:
    """Return the bytes that the attention core stores in addition to its inputs and output.

    A fused core stores one fp32 number per row (log-sum-exp; Dao 2023, arXiv 2307.08691). An unfused core stores the
    attention probabilities or, with dropout, `DROPOUT_FACTOR` times as many bytes.
    """
    rows = layout.tokens(train.sequence) * mixer.num_heads / layout.tensor
    if mixer.indexer and not train.options.sparse_kernels:  # scores in 32 bits, and in 16 for the values
        return (4.0 + train.value_bytes) * rows * train.sequence
    if train.flash:
        return 4.0 * rows
    return train.value_bytes * rows * train.sequence * (DROPOUT_FACTOR if train.options.dropout else 1.0)


def _standard_heads(train: Training, layout: Layout, sizes: Sizes, mixer: Attention) -> FloatArray:
    """Return the bytes of stored queries, keys and values of multi-head or grouped-query attention.

    megatron-core's own layers store rotated copies of queries and keys, the cosine and sine of each position for both,
    and the joint projection, because the values are a view of it. Transformer-engine copies the values and frees the
    projection. Norms of queries and keys store their inputs.
    """
    unit, local = sizes.unit, sizes.local
    query, key, value = (unit * width * local for width in (mixer.query_width, mixer.key_width, mixer.value_width))
    is_grouped, has_norm = mixer.groups < mixer.num_heads, mixer.qk_norm
    norms = 4.0 * local * (mixer.num_heads + mixer.groups) * has_norm
    if train.transformer_engine:
        return query + key + value + norms + has_norm * (query + key)
    tables = 4.0 * unit * train.sequence / layout.context * mixer.head_dim
    queries = query * (has_norm & is_grouped & (layout.tensor < mixer.groups))
    total = 2.0 * (query + key) + value + norms + queries + tables
    if not train.gathered_keys:
        return total
    copies = query + 2.0 * (query if is_grouped else key) * layout.context
    return np.where(layout.context > 1, copies + has_norm * (query + key + value) + norms + queries + tables, total)


def _latent_projections(train: Training, sizes: Sizes, layout: Layout, mixer: LatentAttention) -> dict[str, FloatArray]:
    """Return the bytes that the down-projections of latent attention store, by tensor.

    These are the compressed queries and keys before and after their norms. megatron-core's own layers keep the
    compressed queries gathered over the tensor-parallel ranks.
    """
    unit, rows = sizes.unit, sizes.rows
    q_rank, kv_rank, rope = mixer.query_rank, mixer.latent_rank, mixer.rope_dim
    norm_bytes = sizes.linear * rows * (q_rank + kv_rank) + 4.0 * rows * (1 + (q_rank > 0))
    if train.transformer_engine:
        return {"latent": norm_bytes + unit * rows * (q_rank + kv_rank + rope)}
    is_split = layout.sequence_parallel * (layout.tensor > 1)
    return {"latent": norm_bytes + unit * (sizes.tokens * q_rank + rows * kv_rank + (1.0 - is_split) * rows * rope)}


def _latent_heads(train: Training, layout: Layout, sizes: Sizes, mixer: LatentAttention) -> FloatArray:
    """Return the bytes of stored queries, keys and values of latent attention."""
    rotary_tables = 4.0 * sizes.unit * train.sequence / layout.context * mixer.rope_dim
    width = mixer.query_width + mixer.key_width + mixer.value_width
    return sizes.unit * sizes.local * width + rotary_tables * (not train.transformer_engine)


def _core_work(train: Training, layout: Layout, sizes: Sizes, mixer: Attention) -> FloatArray:
    """Return the bytes that the attention core's backward needs in addition to the gradient of its output.

    All cores need the gradients of queries, keys and values. A fused core adds an fp32 sum of the queries' gradients
    and, if query heads share keys and values, their gradients for each query head. Under context parallelism it also
    adds two pairs of buffers for other ranks' keys, values and their gradients. An unfused core adds the gradients of
    probabilities and scores.
    """
    widths = mixer.query_width, mixer.key_width, mixer.value_width
    query, key, value = (width * sizes.local for width in widths)
    gradients = sizes.unit * (query + key + value)
    if not train.flash:
        rows = layout.tokens(train.sequence) * mixer.num_heads / layout.tensor
        return gradients + 2.0 * train.value_bytes * rows * train.sequence
    shared_gradients = 2.0 * sizes.unit * query * (mixer.query_width != mixer.key_width)
    context_buffers = 4.0 * sizes.unit * (key + value) * (layout.context > 1)
    return gradients + 4.0 * query + shared_gradients + context_buffers


def _dropout_mask(train: Training, sizes: Sizes) -> FloatArray:
    """Return the bytes of the dropout mask after a block, one per element."""
    return sizes.hidden / sizes.unit * train.options.dropout


MAP_BYTES, CHOICE_BYTES = 4.0, 22.0
"""Bytes that routing stores per token: for each expert, and for each chosen expert.

For each expert: a 16-bit probability and two flags. For each chosen expert: the index and the probability before and
after sorting. Both were counted in the source."""


def mixture(train: Training, layout: Layout, sizes: Sizes, network: Experts) -> list[Module]:
    """Return the modules of an MoE layer: norm, router, shared experts and routed experts."""
    routing = (MAP_BYTES * network.count + CHOICE_BYTES * network.chosen) * sizes.rows
    inputs = sizes.unit * (train.model.hidden_size + network.latent) * sizes.rows
    router = Module("router", {"mlp_input": inputs, "routing": routing}, 3.0 * sizes.hidden)
    modules = [norm("mlp_norm", sizes), router]
    if network.shared:
        first, last, work = dense_products(train, sizes, network, network.shared / layout.tensor)
        tensors = {"shared_first": first, "shared_act": last}
        modules.append(Module("shared_experts", tensors, 2.0 * sizes.hidden + work))
    return [*modules, routed(train, layout, sizes, network)]


def routed(train: Training, layout: Layout, sizes: Sizes, network: Experts) -> Module:
    """Return the routed experts of one rank, including the dispatch of their tokens and the return of their outputs."""
    options, h = train.options, network.expert_width(train.model.hidden_size)
    load, local_experts = layout.busiest(options, network.count), np.maximum(network.count / layout.expert, 1.0)
    is_grouped = options.grouped_gemm and train.transformer_engine
    groups = np.ones_like(local_experts) if is_grouped else local_experts
    copies = layout.expert_tokens(network.chosen, train.sequence) * load
    width = network.width / layout.expert_tensor
    first, last, moments = products(train, sizes, copies / groups, width, network.gated, h, is_weighted=True)
    traffic = sizes.unit * h * network.chosen * sizes.rows * load
    inputs = sizes.unit * h * copies
    # several experts hold the gradient of their output until all are done; a single expert frees it
    last_gradient = inputs * (groups > 1.0)
    expert_backward = np.maximum(moments[1], moments[2] + inputs / groups) + last_gradient
    has_many, is_split = local_experts > 1, layout.expert_tensor > 1
    if options.dispatcher == "allgather":
        gathered_bytes = gathered_tokens(layout, sizes)
        dispatch = inputs + gathered_bytes
        forward = inputs + np.maximum(inputs * has_many, np.maximum(gathered_bytes, sizes.hidden))
    else:
        dispatch = np.maximum(2.0 * traffic, np.maximum((traffic + inputs) * is_split, 2.0 * inputs * has_many))
        forward = _dispatch_bytes(layout, traffic, inputs, has_many, is_split)
    backward = sizes.hidden + np.maximum(dispatch, np.maximum(inputs + moments[0], expert_backward))
    held_tensors = (layout.pipeline > 1) * 1.0 + (network.shared > 0)
    # the pipeline still references a gradient, and the shared experts their output
    forward = forward + sizes.hidden * held_tensors
    tensors = {"expert_fc1": sizes.linear * h * copies, "moe_first": first * groups, "moe_act": last * groups}
    return Module("experts", tensors, np.maximum(forward, backward))


def gathered_tokens(layout: Layout, sizes: Sizes) -> FloatArray:
    """Return the bytes of the tokens gathered from all ranks that share a layer's experts."""
    ranks = layout.expert * layout.expert_tensor
    return np.where(ranks > 1, ranks * sizes.hidden, 0.0)


def _dispatch_bytes(
    layout: Layout, traffic: FloatArray, inputs: FloatArray, has_many: BoolArray, is_split: BoolArray
) -> FloatArray:
    """Return the bytes of the tensors of token dispatch and combine while the experts' output is sent back.

    They are the tokens sorted by expert, the tokens received from other ranks, the experts' output, and the output
    reordered or summed over ranks, but not the experts' input. A step that a layout does not need adds nothing.
    """
    has_other_ranks = layout.expert > 1
    permuted = traffic * (has_other_ranks | has_many | is_split)
    received = traffic * (has_other_ranks & (has_many | is_split))
    returned: FloatArray = np.where(has_many, inputs + traffic * is_split, traffic * (has_other_ranks | is_split))
    return permuted + received + inputs + returned


def embedding(train: Training, layout: Layout, sizes: Sizes) -> Module:
    """Return the embedding. It stores only token ids; the gradient of its table has the data type of the weights."""
    table = sizes.unit * table_sizes(train, layout.tensor)[0] * (train.options.adapter is None)
    return Module("embedding", {"tokens": 8.0 * sizes.tokens}, sizes.hidden + sizes.gathered + table)


def head(train: Training, layout: Layout, sizes: Sizes) -> list[Module]:
    """Return the final norm and the output head with its loss.

    The loss stores fp32 probabilities. At its peak, the 16-bit logits are allocated as well. In backward the 16-bit
    gradient replaces them while the gradients of input and weight are computed. megatron-core's own fused loss stores
    as much (`fused_cross_entropy.py`, core_v0.16 to 0.20), but its backward, compiled by torch, changes a copy of the
    probabilities (`copied_loss`; inductor of torch 2.13). transformer-engine's works in place on the logits before
    release 2.19, which copies them first: one more tensor of logits at the peak of forward, not included. Until the
    loss is done, autograd keeps the result of a soft cap's tanh (Megatron-Bridge @067f987d `gemma/modeling_gemma4.py`).
    Unless they were freed, the logits of the last depth of multi-token prediction are still allocated.
    """
    logits = _logits(train, layout, sizes)
    is_trained = train.options.adapter is None
    tensors = {"head_input": is_trained * sizes.unit * train.model.hidden_size * sizes.rows, "logits": logits.stored}
    mtp_logits = logits.computed * (train.model.mtp_num_layers > 0 and not train.options.frees_mtp_logits)
    peak = np.maximum(logits.forward + mtp_logits, logits.backward)
    return [norm("final_norm", sizes), Module("output_head", tensors, peak)]


def depths(
    train: Training, layout: Layout, sizes: Sizes, layer_stored: FloatArray, layer_peak: FloatArray, layers: FloatArray
) -> list[Module]:
    """Return the modules of multi-token prediction: one layer and one loss per depth.

    The layer stores `layer_stored` bytes and needs `layer_peak` more at its peak. A depth also stores what
    `Depth.saved` lists and an embedding of all tokens. Uniform recompute stores only the inputs of depths. The output
    of a depth counts at most as many bytes as the other `layers` and depths of the stage save.
    """
    depth_count = train.model.mtp_num_layers
    if not depth_count:
        return []
    is_uniform = layout.uniform > 0
    saved = depth_of(train.model).saved / train.model.hidden_size * sizes.hidden
    depth_bytes = layer_stored + saved + 12.0 * sizes.rows + sizes.gathered - sizes.scattered
    input_bytes = 3.0 * sizes.hidden
    logits = _logits(train, layout, sizes)
    gradients = depth_count * sizes.hidden  # gradients of the concatenated outputs of all depths
    saved_by_others = (depth_count - 1.0) * (depth_bytes - input_bytes) + layers * (layer_stored - sizes.hidden)
    output = np.clip(saved_by_others, 0.0, sizes.hidden)
    work = gradients + np.where(is_uniform, depth_bytes - input_bytes + layer_peak + output, layer_peak)
    return [
        Module("mtp", {"mtp": depth_count * np.where(is_uniform, input_bytes, depth_bytes)}, work),
        Module("mtp", {"mtp_logits": depth_count * logits.stored}, np.maximum(logits.forward, logits.backward)),
    ]


class _Logits(NamedTuple):
    """Bytes of the logits of one loss: computed, stored, and the peaks of forward and backward above `stored`."""

    computed: FloatArray
    stored: FloatArray
    forward: FloatArray
    backward: FloatArray


def _logits(train: Training, layout: Layout, sizes: Sizes) -> _Logits:
    vocab = padded_vocab(train.model, layout.tensor) / layout.tensor
    logits = sizes.unit * vocab * sizes.tokens
    capped = logits * (head_of(train.model).cap_bytes > 0)
    gradient_work = sizes.whole + sizes.scattered + sizes.weight * table_sizes(train, layout.tensor)[1] - capped
    if train.options.in_place_loss and train.transformer_engine:
        return _Logits(logits, logits + capped, np.zeros_like(logits), gradient_work)
    fp32_logits = 4.0 * vocab * sizes.tokens
    half_logits, work = logits * (train.value_bytes == 2), gradient_work + logits - fp32_logits
    backward = np.maximum(half_logits + fp32_logits * train.options.copied_loss, work)
    return _Logits(logits, fp32_logits + capped, half_logits, backward)
