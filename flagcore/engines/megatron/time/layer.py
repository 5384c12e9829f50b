"""Time of one layer for one micro-batch, dense or with experts: kernels and collectives, forward and backward."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from flagcore.contracts import AttentionShape, Costs
from flagcore.domain.space import BoolArray, FloatArray
from flagcore.engines.megatron.parallel.layout import Layout, Training
from flagcore.engines.megatron.parallel.parameters import padded_vocab
from flagcore.engines.megatron.time.exchange import TensorExchange, context_exchange, expert_exchange
from flagcore.engines.megatron.time.passes import (
    Block,
    Linear,
    Seconds,
    activation_seconds,
    linear,
    norm_seconds,
)
from flagcore.physics.transformer import latent_widths, widths

LAUNCHES = {True: (50.0, 27.0), False: (103.0, 55.0)}
"""Kernels that the host launches forward for attention, and for an FFN, each with norm and residual sum: with
transformer-engine's layers, and with megatron-core's own. Backward, twice as many. Fitted to step times that did not
depend on sizes: one published sweep, and four measured ranks."""

REPEATED_LAUNCHES = 0.35
"""Kernels that one repeated module of attention costs, as a share of all of attention's. Fitted like `LAUNCHES`."""

ROTATION = {True: (2.0, 2.0), False: (70.0, 35.0)}
"""Times that queries and keys are moved for rotary embedding and the layout of a fused core, forward and backward: as
one kernel, and in torch operations (halves cut, swapped and joined, products in place, copies)."""


def layer_time(train: Training, layout: Layout, costs: Costs, *, moe: bool) -> Block:
    """Return the time of one layer without recompute; `repeated` is what selective recompute would add."""
    exchange = TensorExchange.of(train, layout, costs)
    second = moe_block(train, layout, costs, exchange) if moe else ffn_block(train, layout, costs, exchange)
    return attention_block(train, layout, costs, exchange) + second


def attention_block(train: Training, layout: Layout, costs: Costs, exchange: TensorExchange) -> Block:
    """Return norm, projections, attention core and residual sum."""
    kernels, unit = costs.kernels, float(train.value_bytes)
    query, key, _ = (width * layout.tokens(train.sequence) / layout.tensor for width in widths(train.model))
    entry, latent, out = _projections(train, layout, costs)
    products = entry + latent + out
    norm, norm_back, residual = _norm_and_residual(train, layout, costs)
    turned = unit * (query + key)
    rotation, rotation_back = (kernels.memory_seconds(times * turned) for times in ROTATION[train.transformer_engine])
    if train.model.qk_layernorm:
        extra, extra_back = norm_seconds(kernels, turned)
        rotation, rotation_back = rotation + extra, rotation_back + extra_back
    core, core_back = _core(train, layout, costs)
    ring = context_exchange(train, layout, costs)
    hides = train.options.cp_comm == "p2p"
    ring_forward = np.maximum(ring - core, 0.0) if hides else ring
    ring_back = np.maximum(2.0 * ring - core_back, 0.0) if hides else ring
    element = norm + rotation + residual
    element_back = norm_back + rotation_back + residual
    launches = np.full_like(layout.tensor, LAUNCHES[train.transformer_engine][0])
    forward = Seconds.of(
        products.forward + core + element, tensor=exchange.forward, context=ring_forward, launches=launches
    )
    backward = Seconds.of(
        products.input_gradient + core_back + element_back,
        tensor=exchange.backward(entry),
        context=ring_back,
        launches=2.0 * launches,
    )
    repeats = {"core_attn": core, "layernorm": norm, "mla_up_proj": latent.forward + rotation}
    chosen = [repeats[name] for name in train.options.recompute_modules if name in repeats]
    again = sum(chosen, np.zeros_like(core))
    repeated = Seconds.of(again, launches=launches * (REPEATED_LAUNCHES * len(chosen)))
    return Block(forward, backward, products.weight_gradient, repeated)


def ffn_block(train: Training, layout: Layout, costs: Costs, exchange: TensorExchange) -> Block:
    """Return norm, both products, activation function and residual sum of a dense layer's FFN."""
    tokens, width = layout.tokens(train.sequence), train.model.ffn_hidden_size / layout.tensor
    up, down = _ffn_products(train, costs, tokens, width)
    products = up + down
    norm, norm_back, residual = _norm_and_residual(train, layout, costs)
    activation, activation_back = activation_seconds(train, costs.kernels, train.value_bytes * width * tokens)
    launches = np.full_like(tokens, LAUNCHES[train.transformer_engine][1])
    forward = Seconds.of(products.forward + norm + activation + residual, tensor=exchange.forward, launches=launches)
    gradients = products.input_gradient + norm_back + activation_back + residual
    backward = Seconds.of(gradients, tensor=exchange.backward(up), launches=2.0 * launches)
    modules, repeated = train.options.recompute_modules, Seconds.of(np.zeros_like(tokens))
    if "layernorm" in modules:
        repeated = repeated + Seconds.of(norm)
    if "mlp" in modules:
        repeated = repeated + Seconds.of(products.forward + activation, tensor=exchange.forward, launches=launches)
    return Block(forward, backward, products.weight_gradient, repeated)


def head_time(train: Training, layout: Layout, costs: Costs) -> Block:
    """Return final norm, output head and loss, once for the model and once for each depth of multi-token prediction.

    The head runs in 16 bits in every format of the layers. Logits are written in 16 and in 32 bits, read
    by maximum and sum, and turned into their gradient (megatron-core 0.16 `cross_entropy.py`); a fused loss moves them
    half as often.
    """
    model, kernels, unit = train.model, costs.kernels, float(train.value_bytes)
    tokens, rows = layout.tokens(train.sequence), layout.token_rows(train.sequence)
    vocab = padded_vocab(model, layout.tensor) / layout.tensor
    product = linear(kernels, tokens, model.hidden_size, vocab, _wide(train.precision))
    norm, norm_back = norm_seconds(kernels, unit * model.hidden_size * rows)
    moved = (8.0 if train.options.cross_entropy_fusion else 16.0) * vocab * tokens
    loss, loss_back = kernels.memory_seconds(moved), kernels.memory_seconds(0.5 * moved)
    exchange = TensorExchange.of(train, layout, costs)
    launches = np.full_like(tokens, 20.0)
    enter = exchange.gather * layout.sequence_parallel
    forward = Seconds.of(product.forward + norm + loss, tensor=enter, launches=launches)
    gradients = product.input_gradient + norm_back + loss_back
    backward = Seconds.of(gradients, tensor=exchange.backward(product), launches=launches)
    once = Block(forward, backward, product.weight_gradient, Seconds.of(np.zeros_like(tokens)))
    return once * (1.0 + model.mtp_num_layers)


def embedding_time(train: Training, layout: Layout, costs: Costs) -> Block:
    """Return the look-up of a micro-batch's tokens and its gradient, which is added row by row."""
    tokens, moved = layout.tokens(train.sequence), train.value_bytes * train.model.hidden_size
    exchange = TensorExchange.of(train, layout, costs)
    none, launches = np.zeros_like(tokens), np.full_like(tokens, 6.0)
    leave = np.where(layout.sequence_parallel > 0, exchange.scatter, exchange.reduce)
    forward = Seconds.of(costs.kernels.memory_seconds(2.0 * moved * tokens), tensor=leave, launches=launches)
    backward = Seconds.of(none, tensor=exchange.gather * layout.sequence_parallel, launches=launches)
    return Block(forward, backward, costs.kernels.memory_seconds(3.0 * moved * tokens), Seconds.of(none))


def _norm_and_residual(train: Training, layout: Layout, costs: Costs) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return the norm before a block, forward and backward, and the residual sum behind it."""
    kernels, unit = costs.kernels, float(train.value_bytes)
    h, rows = train.model.hidden_size, layout.token_rows(train.sequence)
    return *norm_seconds(kernels, unit * h * rows), kernels.memory_seconds(unit * 3.0 * h * rows)


def _ffn_products(train: Training, costs: Costs, tokens: FloatArray, width: FloatArray) -> tuple[Linear, Linear]:
    """Return both products of an FFN whose ranks have `width` of its inner width."""
    h, up = train.model.hidden_size, 2.0 if train.model.gated_linear_unit else 1.0
    return (
        linear(costs.kernels, tokens, h, up * width, train.precision),
        linear(costs.kernels, tokens, width, h, train.precision),
    )


def _projections(train: Training, layout: Layout, costs: Costs) -> tuple[Linear, Linear, Linear]:
    """Return the products that enter attention, those that widen latent attention, and the one that leaves."""
    model, tokens, kernels = train.model, layout.tokens(train.sequence), costs.kernels
    h, (query, key, value), split = model.hidden_size, widths(model), layout.tensor
    if not model.multi_latent_attention:
        entry = linear(kernels, tokens, h, (query + key + value) / split, train.precision)
        return entry, entry * 0.0, linear(kernels, tokens, query / split, h, train.precision)
    q_rank, kv_rank, rope = latent_widths(model)
    heads = model.num_attention_heads * ((model.qk_head_dim or 0) + (model.v_head_dim or 0))
    down = linear(kernels, layout.token_rows(train.sequence), h, float(q_rank + kv_rank + rope), train.precision)
    up = linear(kernels, tokens, float(kv_rank), heads / split, train.precision)
    queries = linear(kernels, tokens, float(q_rank or h), query / split, train.precision)
    out = linear(kernels, tokens, value / split, h, train.precision)
    return (down, up + queries, out) if q_rank else (down + queries, up, out)


def _core(train: Training, layout: Layout, costs: Costs) -> tuple[FloatArray, FloatArray]:
    """Return the attention core forward and backward.

    Unfused, it computes all scores (twice a causal kernel's) and moves them seven times forward (written by the
    product, read and written by masked softmax and by dropout with its mask, read by the second product) and 9.5 times
    backward.
    """
    model, length = train.model, float(train.sequence)
    heads = model.num_attention_heads / layout.tensor
    groups = np.maximum(model.num_query_groups / layout.tensor, 1.0)
    query, _, value = widths(model)
    size = (query + value) / 2 / model.num_attention_heads if model.multi_latent_attention else model.kv_channels
    if model.multi_latent_attention:
        groups = heads
    precision = _wide(train.precision)
    whole, width = np.full_like(heads, length), np.full_like(heads, size)
    if train.flash:
        shape = AttentionShape(
            batch=layout.micro_batch, heads=heads, groups=groups, queries=whole, keys=whole, head_dim=width
        )
        return _fused_core(train, layout, costs, shape, precision)
    scores = train.value_bytes * layout.micro_batch * heads * length**2 / layout.context
    rows = layout.micro_batch * heads * length / layout.context
    product = costs.kernels.gemm_seconds(rows, whole, width, precision)
    product = product + costs.kernels.gemm_seconds(rows, width, whole, precision)
    moved, moved_back = costs.kernels.memory_seconds(7.0 * scores), costs.kernels.memory_seconds(9.5 * scores)
    return product + moved, 2.0 * product + moved_back


def _fused_core(
    train: Training, layout: Layout, costs: Costs, whole: AttentionShape, precision: str
) -> tuple[FloatArray, FloatArray]:
    """Return fused attention of the sequences `whole`, split over context-parallel ranks, forward and backward.

    Each rank has a piece from the front and one from the back, so that all do the same share of the scores. In a ring,
    the outputs of each further step are rescaled and summed, and so are gradients (arXiv 2310.01889).
    """
    kernels, context = costs.kernels, layout.context
    ring = (context - 1.0) * (train.options.cp_comm == "p2p")
    output = train.value_bytes * whole.batch * whole.heads * whole.queries / context * whole.head_dim
    merged = ring * kernels.memory_seconds(3.0 * output)
    forward = kernels.attention_seconds(whole, precision) / context + merged
    return forward, kernels.attention_backward_seconds(whole, precision) / context + 2.0 * merged


def _wide(precision: str) -> str:
    """Return the format of parts that are never computed in 8 or 4 bits: attention, router and head."""
    return precision if precision in ("fp32", "fp16", "bf16") else "bf16"


MOE_LAUNCHES = {True: (70.0, 25.0, 10.0), False: (150.0, 33.0, 20.0)}
"""Kernels that the host launches forward for router, permutation and dispatch; for one expert (for all of them, where
their products are grouped); and for the shared experts: with transformer-engine's layers, and with megatron-core's own
(fitted to 13 measured ranks with 2 to 64 experts each). Backward, twice as many."""


def moe_block(train: Training, layout: Layout, costs: Costs, exchange: TensorExchange) -> Block:
    """Return norm, router, dispatch, experts, combine, shared experts and residual sum.

    The busiest expert rank has `expert_imbalance` times the mean of token copies, and the others wait for it. Each
    local expert has its own products. With `overlap_expert_comm` the exchange of one micro-batch hides behind the
    layer of another.
    """
    model, kernels, options, unit = train.model, costs.kernels, train.options, float(train.value_bytes)
    h, rows, number = model.hidden_size, layout.token_rows(train.sequence), model.num_moe_experts or 1
    copies = layout.expert_tokens(model, train.sequence) * options.expert_imbalance
    local, width = number / layout.expert, (model.moe_ffn_hidden_size or 0) / layout.expert_tensor
    up, down = _ffn_products(train, costs, copies / local, width)
    experts = (up + down) * local
    activation, activation_back = activation_seconds(train, kernels, train.value_bytes * width * copies)
    router = linear(kernels, rows, h, float(number), _wide(train.precision))
    norm, norm_back, residual = _norm_and_residual(train, layout, costs)
    permute = kernels.memory_seconds(unit * 2.0 * h * copies)
    grouped = options.grouped_gemm and train.transformer_engine
    router_launches, expert_launches, _ = MOE_LAUNCHES[train.transformer_engine]
    launches = np.full_like(rows, router_launches) + expert_launches * (1.0 if grouped else local)
    exchanges = 2.0 * expert_exchange(train, layout, costs) * options.expert_imbalance

    element = norm + 2.0 * permute + residual + activation
    forward = Seconds.of(experts.forward + router.forward + element, expert=exchanges, launches=launches)
    gradients = experts.input_gradient + router.input_gradient + norm_back + 3.0 * permute + activation_back + residual
    backward = Seconds.of(gradients, expert=exchanges, launches=2.0 * launches)
    repeated = Seconds.of(np.zeros_like(norm))
    if "layernorm" in options.recompute_modules:
        repeated = repeated + Seconds.of(norm)
    if "moe" in options.recompute_modules:
        repeated = repeated + forward
    elif "moe_act" in options.recompute_modules:
        repeated = repeated + Seconds.of(activation)
    block = Block(forward, backward, experts.weight_gradient + router.weight_gradient, repeated)
    if model.moe_shared_expert_intermediate_size:
        block = block + _shared(train, layout, costs, exchange)
    return _hidden(block, layout.pairs(model)) if options.overlap_expert_comm else block


def _shared(train: Training, layout: Layout, costs: Costs, exchange: TensorExchange) -> Block:
    tokens, width = (
        layout.tokens(train.sequence),
        (train.model.moe_shared_expert_intermediate_size or 0) / layout.tensor,
    )
    up, down = _ffn_products(train, costs, tokens, width)
    products = up + down
    activation, back = activation_seconds(train, costs.kernels, train.value_bytes * width * tokens)
    launches = np.full_like(tokens, MOE_LAUNCHES[train.transformer_engine][2])
    forward = Seconds.of(products.forward + activation, tensor=exchange.forward, launches=launches)
    waits = exchange.backward(up)
    backward = Seconds.of(products.input_gradient + back, tensor=waits, launches=2.0 * launches)
    again = train.options.recompute_modules & {"shared_experts", "moe"}
    return Block(forward, backward, products.weight_gradient, forward if again else Seconds.of(np.zeros_like(tokens)))


def _hidden(block: Block, overlap: BoolArray) -> Block:
    """Return a block whose exchange hides, where it may, behind its own amount of kernels, as those of another
    micro-batch.
    """

    def behind(seconds: Seconds, kernels: FloatArray) -> Seconds:
        return replace(seconds, expert=np.maximum(seconds.expert - overlap * kernels, 0.0))

    forward = behind(block.forward, block.forward.compute)
    return replace(block, forward=forward, backward=behind(block.backward, block.backward.compute + block.weight))
