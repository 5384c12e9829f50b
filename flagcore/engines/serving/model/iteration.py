"""Seconds of one forward iteration of an engine, for any batch of prompts and decoding sequences.

Products, small kernels and messages of an iteration depend on its tokens alone, so they are tabulated once a candidate
over a grid of tokens; attention adds a rate per cached token read and per pair of query and key.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flagcore.contracts import AttentionShape, Costs, KernelCosts
from flagcore.domain.space import FloatArray
from flagcore.engines.serving.model.work import Serving, Split
from flagcore.engines.transformer import attended, widths
from flagcore.physics.kernels.roofline import cast_bytes

NODES: FloatArray = np.array(
    [
        *(1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144),
        *(8192, 12288, 16384, 24576, 32768, 65536),
    ],
    dtype=np.float64,
)
"""Tokens for which iterations are tabulated; times are linear between them."""

LONG = 8192.0
"""Cached tokens of a sequence, and tokens of a prompt, at which the rates of attention are taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationCosts:
    """Seconds by candidate. Tables have one row per candidate and one column per node of `NODES`.

    `local` is what each attention rank does with its own tokens, `shared` what the experts do with those of all ranks,
    `sampled` the output head for sequences that get a token. `cached` is the time to read one cached token of one
    sequence, `pair` that of one query that attends to one key of a prompt, both in all layers. `fixed` is added to
    each iteration and `sequence` for each running sequence. An iteration of more than `captured` tokens takes `floor`
    at least, however little it computes. `messages` and `exchanged` are what of `local` and `shared` devices spend on
    each other.
    """

    local: FloatArray
    shared: FloatArray
    messages: FloatArray
    exchanged: FloatArray
    sampled: FloatArray
    cached: FloatArray
    pair: FloatArray
    fixed: FloatArray
    sequence: FloatArray
    floor: FloatArray
    captured: FloatArray


def at(table: FloatArray, tokens: FloatArray) -> FloatArray:
    """Interpolate a table at token counts, one per candidate; 0 tokens take 0 s."""
    tokens = np.minimum(tokens, NODES[-1])
    place = np.clip(np.searchsorted(NODES, tokens, side="right") - 1, 0, NODES.size - 2)
    rows = np.arange(table.shape[0])
    low, high = table[rows, place], table[rows, place + 1]
    share = (np.maximum(tokens, NODES[0]) - NODES[place]) / (NODES[place + 1] - NODES[place])
    return np.where(tokens > 0, low + share * (high - low), 0.0)


def iteration_costs(serving: Serving, split: Split, costs: Costs) -> IterationCosts:
    """Return the iteration costs of each candidate; NaN where the chip's facts do not allow an answer.

    All stages of a pipeline are counted: its batches are computed side by side, each token goes through all of them. A
    host that computes itself hides no launch.
    """
    model, kernels, over, column = serving.model, costs.kernels, serving.overheads, split.column
    tokens = np.minimum(NODES, column.pass_tokens)
    moe, reduce = float(serving.moe_layers), _reduce(serving, column, costs, tokens)
    attention = _projections(serving, column, kernels, tokens) + over.attention + reduce
    if model.multi_latent_attention:
        attention = attention + over.latent
    local, messages = model.num_layers * attention, model.num_layers * reduce
    if model.num_layers > moe:
        ffn = _ffn(serving, kernels, tokens, model.ffn_hidden_size / column.tensor)
        local = local + (model.num_layers - moe) * (ffn + over.ffn + reduce)
        messages = messages + (model.num_layers - moe) * reduce
    shared = exchanged = np.zeros_like(local)
    if moe:
        if model.moe_shared_expert_intermediate_size:
            width = model.moe_shared_expert_intermediate_size / column.tensor
            local = local + moe * _ffn(serving, kernels, tokens, width)
        exchanged = moe * exchange(serving, column, costs, tokens)
        shared = moe * experts(serving, column, kernels, tokens) + exchanged
        last = moe * np.where(column.data > 1.0, 0.0, reduce)
        local, messages = local + last, messages + last
    stages = _stages(serving, column, costs, tokens)
    local, messages = local + stages, messages + stages
    head = linear(kernels, tokens, float(model.hidden_size), model.vocab_size / column.tensor, serving, wide=True)
    passes = NODES / tokens
    cached, pair = _attention_rates(serving, split, kernels)
    launched = over.eager_kernels * model.num_layers + over.eager_experts * moe
    if model.multi_latent_attention:
        launched += over.eager_latent * model.num_layers
    rows, host = split.tensor.shape, launched * kernels.launch_seconds()
    eager = np.where(split.captured > 0.0, 0.0, host) if costs.synchronous else 0.0
    return IterationCosts(
        local=local * passes / column.cores,
        shared=shared * passes / column.cores,
        messages=messages * passes / column.cores,
        exchanged=exchanged * passes / column.cores,
        sampled=head / column.cores,
        cached=cached / split.cores,
        pair=pair / split.cores,
        fixed=np.full(rows, over.iteration) + eager,
        sequence=np.full(rows, over.sequence),
        floor=np.full(rows, 0.0 if costs.synchronous else host),
        captured=split.captured,
    )


def _projections(serving: Serving, split: Split, kernels: KernelCosts, tokens: FloatArray) -> FloatArray:
    """Return the products of one attention layer.

    Latent attention is absorbed (DeepSeek-V2, arXiv 2405.04434, section 2.1.2): queries are taken to the rank of the
    cache and values back from it, one product a head each, in 16 bits.
    """
    model, h = serving.model, float(serving.model.hidden_size)
    query, _, _ = widths(model)
    out = linear(kernels, tokens, attended(model) / split.tensor, h, serving, attention=True)
    if not model.multi_latent_attention:
        groups = np.maximum(model.num_query_groups / split.tensor, 1.0)
        outer = query / split.tensor + 2.0 * groups * model.kv_channels
        return out + linear(kernels, tokens, h, outer, serving, attention=True)
    rank, rope = float(model.kv_lora_rank or 0), float(model.qk_pos_emb_head_dim or 0)
    heads, inner = model.num_attention_heads / split.tensor, float(model.q_lora_rank or h)
    down = linear(kernels, tokens, h, (model.q_lora_rank or 0) + rank + rope, serving, attention=True)
    up = linear(kernels, tokens, inner, query / split.tensor, serving, attention=True)
    absorbed = linear(kernels, tokens, float(model.qk_head_dim or 0), heads * rank, serving, wide=True)
    values = linear(kernels, tokens, rank, heads * float(model.v_head_dim or 0), serving, wide=True)
    return out + down + up + absorbed + values


def _ffn(serving: Serving, kernels: KernelCosts, tokens: FloatArray, width: FloatArray) -> FloatArray:
    gates, h = 2.0 if serving.model.gated_linear_unit else 1.0, float(serving.model.hidden_size)
    first = linear(kernels, tokens, h, gates * width, serving)
    between = kernels.memory_seconds(tokens * (gates + 1.0) * width * 2.0)
    return first + between + linear(kernels, tokens, width, h, serving)


def _reduce(serving: Serving, split: Split, costs: Costs, tokens: FloatArray) -> FloatArray:
    """Return one all-reduce of the tokens' activations among tensor ranks.

    Engines have their own kernels for small messages among neighbours, which start faster than the library's.
    """
    over = serving.overheads
    ranks, stride = split.tensor.astype(np.int64), np.ones(split.tensor.shape, dtype=np.int64)
    payload = tokens * (2.0 * serving.model.hidden_size)
    whole = costs.collectives.seconds("all_reduce", payload, ranks, stride)
    empty = costs.collectives.seconds("all_reduce", np.ones_like(payload), ranks, stride)
    own = over.reduce + over.reduce_doubling * np.maximum(np.log2(split.tensor) - 1.0, 0.0)
    return np.where(split.tensor > 1.0, np.minimum(whole, np.maximum(whole - empty, 0.0) + own), 0.0)


def _stages(serving: Serving, split: Split, costs: Costs, tokens: FloatArray) -> FloatArray:
    ranks, stride = split.pipeline.astype(np.int64), (split.tensor * split.data).astype(np.int64)
    payload = tokens * (2.0 * serving.model.hidden_size)
    each = costs.collectives.seconds("send", payload, np.minimum(ranks, 2), stride)
    return np.where(split.pipeline > 1.0, (split.pipeline - 1.0) * each, 0.0)


def _attention_rates(serving: Serving, split: Split, kernels: KernelCosts) -> tuple[FloatArray, FloatArray]:
    """Return seconds per cached token that a decoding sequence reads, and per query and key of a prompt; all layers.

    Absorbed latent attention reads one latent for all heads, the larger part of it as key and as value.
    """
    model = serving.model
    heads = model.num_attention_heads / split.tensor
    if model.multi_latent_attention:
        rank, rope = float(model.kv_lora_rank or 0), float(model.qk_pos_emb_head_dim or 0)
        dim, groups = rank + 0.5 * rope, np.full_like(heads, (rank + rope) / (2.0 * rank + rope))
        prompt_dim, prompt_groups = 0.5 * ((model.qk_head_dim or 0) + rope + (model.v_head_dim or 0)), heads
    else:
        dim = prompt_dim = float(model.kv_channels)
        prompt_groups = groups = np.maximum(model.num_query_groups / split.tensor, 1.0)

    def seconds(batch: float, queries: float, keys: float, groups: FloatArray, dim: float) -> FloatArray:
        one = np.ones_like(heads)
        return kernels.attention_seconds(
            AttentionShape(
                batch=batch * one,
                heads=heads,
                groups=groups,
                queries=queries * one,
                keys=keys * one,
                head_dim=dim * one,
            ),
            serving.wide_precision,
        )

    more = seconds(64.0, 1.0, 2.0 * LONG, groups, dim) - seconds(64.0, 1.0, LONG, groups, dim)
    cached = more / (64.0 * LONG) * (split.cache_bytes / 2.0)
    pair = seconds(1.0, LONG, LONG, prompt_groups, prompt_dim) / (0.5 * LONG * LONG)
    return model.num_layers * cached, model.num_layers * pair


def linear(
    kernels: KernelCosts,
    tokens: FloatArray,
    inner: FloatArray | float,
    outer: FloatArray | float,
    serving: Serving,
    *,
    attention: bool = False,
    wide: bool = False,
) -> FloatArray:
    """Return the seconds of Y[tokens, outer] = X[tokens, inner] W[inner, outer].

    `attention` products may be in a wider precision than the others, `wide` ones are in 16 bits. Weights that only are
    stored narrower are read as such and computed in the wider format. Operands are cast by the small kernels before
    products, which the engine's overheads count: no cast of a product's own is counted.
    """
    one = np.ones_like(tokens)
    precision = serving.wide_precision if wide else serving.attention_precision if attention else serving.precision
    if serving.weight_bytes is None:
        seconds = kernels.gemm_seconds(tokens, outer * one, inner * one, precision)
        cast = cast_bytes(tokens, inner * one, precision)
        return seconds if cast is None else seconds - kernels.memory_seconds(cast)
    if wide:
        return kernels.gemm_seconds(tokens, outer * one, inner * one, serving.precision)
    whole, single = (kernels.gemm_seconds(rows, outer * one, inner * one, precision) for rows in (tokens, one))
    read = kernels.gemm_seconds(one, outer * one * (0.5 * serving.weight_bytes), inner * one, precision)
    return np.maximum(whole - single, 0.0) + read


TILE_ROWS = 8.0
"""Rows that a grouped product computes for an expert at the least."""


def touched(count: float, chosen: float, tokens: FloatArray) -> FloatArray:
    """Return how many distinct experts of `count` are chosen by `tokens` that choose `chosen` each, at random."""
    return count * (1.0 - (1.0 - chosen / count) ** tokens)


def experts(serving: Serving, split: Split, kernels: KernelCosts, tokens: FloatArray) -> FloatArray:
    """Return the time of the routed experts for `tokens` of all attention ranks together.

    The two products of all experts on a device are one kernel each: as long as their arithmetic, or as reading the
    weights of those that were chosen, whichever is larger. With groups of experts each is computed whole, else each
    device has a slice of all of them.
    """
    model, over, precision = serving.model, serving.overheads, serving.precision
    count, chosen, h = float(model.num_moe_experts or 1), float(model.moe_router_topk), float(model.hidden_size)
    gates = 2.0 if model.gated_linear_unit else 1.0
    width = (model.moe_ffn_hidden_size or 0) * split.expert / (split.tensor * split.data)
    here = touched(count, chosen, tokens * over.spread) / split.expert
    routed = tokens * chosen / split.expert
    rows, one = np.maximum(routed, here * TILE_ROWS), np.ones_like(tokens)
    time = np.zeros_like(tokens)
    for inner, outer in ((h, gates * width), (width, h)):
        work = linear(kernels, rows, inner, outer, serving) / over.grouped_work
        read = linear(kernels, one, inner, here * outer, serving) / over.grouped_share
        time = time + (work**3 + read**3) ** (1 / 3)
    moved = kernels.memory_seconds(routed * 2.0 * (2.0 * h + (gates + 1.0) * width))
    router = linear(kernels, tokens / split.data, h, count, serving, wide=True)
    small = over.experts.get(precision, max(over.experts.values(), default=0.0))
    return time + moved + router + small


def exchange(serving: Serving, split: Split, costs: Costs, tokens: FloatArray) -> FloatArray:
    """Return the collectives that exchange tokens between attention ranks and experts: a gather, then a scatter."""
    ranks = (split.tensor * split.data).astype(np.int64)
    stride = np.ones(ranks.shape, dtype=np.int64)
    payload = tokens * (2.0 * serving.model.hidden_size)
    time = costs.collectives.seconds("all_gather", payload, ranks, stride)
    time = time + costs.collectives.seconds("reduce_scatter", payload, ranks, stride)
    return np.where(split.data > 1.0, time, 0.0)
