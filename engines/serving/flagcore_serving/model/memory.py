"""Memory of an engine on a device: weights, activations, graphs, and the KV cache in the rest of the budget."""

from dataclasses import dataclass, replace

import numpy as np
from flagcore_models.formats import HEAD
from flagcore_models.layers import (
    attention_counts,
    connections,
    dense_of,
    embedding_of,
    head_of,
    layer_embeddings,
    mixer_counts,
    other_weights,
    product_counts,
    streams_of,
    without_repeats,
)
from flagcore_models.mixers.attention import Attention
from flagcore_models.mixers.compressed_attention import CompressedAttention
from flagcore_models.mixers.latent_attention import EXPANSION

from flagcore.contracts import Costs, communicator_bytes
from flagcore.domain.model import Model, Product
from flagcore.domain.space import FloatArray
from flagcore_serving.model.adapters import adapter_bytes
from flagcore_serving.model.speculation import drafts
from flagcore_serving.model.vision import tower_bytes
from flagcore_serving.model.work import Serving
from flagcore_serving.space.settings import GRAPH_BYTES, Settings
from flagcore_serving.space.weights import ATTENTION, DENSE, EXPERTS, SHARED


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingMemory:
    """Memory of one device in bytes, by candidate.

    - `weights`: without `adapters`, the slots for them.
    - `states`: those of mixers, if they are set aside.
    - `cache`: size of the KV cache, negative if the budget is too small.
    - `token`: bytes per cached token, averaged over a request of mean length.
    - `longest_token`: bytes per cached token, averaged over the longest request.
    - `cache_tokens`: tokens that the cache of one instance can hold, over all its attention ranks, each sequence with
      `sequence_tokens` in addition, the size of what it has whatever its length. `admission_tokens`: those that must
      also be free for its prompt to be admitted.
    - `longest_tokens`: the same in sequences of the whole context: what engines print.
    - `sequences`: maximum number of sequences of an attention rank whose states, or windows, fit if they have a part.
    """

    weights: FloatArray
    adapters: FloatArray
    activations: FloatArray
    graphs: FloatArray
    states: FloatArray
    cache: FloatArray
    token: FloatArray
    longest_token: FloatArray
    cache_tokens: FloatArray
    longest_tokens: FloatArray
    sequence_tokens: FloatArray
    admission_tokens: FloatArray
    sequences: FloatArray


def serving_memory(serving: Serving, settings: Settings, costs: Costs) -> ServingMemory:
    """Return the memory of one device of each candidate.

    The cache is the engine's share of memory, minus weights, activations, graphs, driver and libraries, or
    `settings.rest_share` of what these leave free. A fixed size replaces it, or limits it if a share is set, too. If
    `settings.on_device` is below 1, some layers with their cache, and the embedding tables, are in the memory of the
    host. Of a part for states, running sequences have those of drafted tokens, and what these leave is cache (sglang
    0.5.19 `mem_cache/kv_cache_configurator.py`, _handle_max_mamba_cache).
    """
    model, overheads, batched_tokens = serving.model, serving.overheads, settings.max_batched_tokens.astype(np.float64)
    weights = weight_bytes(serving, settings) - offloaded_bytes(serving, settings)
    alone = replace(settings, pipeline=np.ones_like(settings.pipeline))  # drafts are on the last pipeline stage
    held = np.zeros_like(weights)
    for rows, draft, own_tables in drafts(serving, settings):
        shared = (1.0 - own_tables) * table_bytes(draft, alone)
        own = np.where(rows, weight_bytes(draft, alone) - shared, 0.0)
        weights = weights + own
        held = held + np.where(settings.drafts_held < 0, -own, shared * rows * settings.drafts_held)
    has_adapters = settings.adapter_rank.any()
    adapters = settings.adapter_slots * adapter_bytes(serving, settings) if has_adapters else 0.0 * weights
    running = settings.max_running.astype(np.float64)
    activations = activation_bytes(serving, settings, np.minimum(batched_tokens, settings.pass_tokens), running)
    if model.vision is not None:
        tower, peak = np.array(tower_bytes(model.vision, settings.tower_shares, batched_tokens)) / settings.cores
        weights = np.where(settings.encodes, tower, weights + tower)
        activations = np.where(settings.encodes, peak, np.maximum(activations, peak))
    graphs = np.where(settings.graph_tokens > 0, GRAPH_BYTES * model.num_layers / settings.pipeline, 0.0)
    graphs = graphs + settings.workspace_bytes
    budget = free = np.full(weights.shape, np.inf)
    if (capacity := costs.memory.capacity_bytes()) is not None:
        driver = costs.memory.device_used_bytes(np.zeros(1)) + settings.communicators * communicator_bytes(costs.memory)
        beside = settings.memory_fraction if overheads.activations_beside else 1.0  # a share of what is free before
        outside = overheads.outside + settings.communicators * overheads.outside_of_group
        held = held + beside * np.minimum(driver, outside)
        budget, free = settings.memory_fraction * capacity - held, capacity - driver + 0.0 * weights
    other = 0.0 if overheads.activations_beside else activations + graphs
    on_host = _on_host(serving, settings) * expert_bytes(serving, settings) / settings.cores
    rest = settings.rest_share * (free - weights + on_host - adapters - activations - graphs)
    left = budget - weights + on_host - adapters - other
    cache = np.where(np.isnan(settings.rest_share), left, rest) - settings.request_bytes
    cache = np.where(np.isnan(settings.cache_bytes), cache, np.fmin(cache, settings.cache_bytes))
    kept = {name: getattr(overheads, name) for name in ("frees_windows", "indexes_all", "caches_reused")}
    tokens, sequence = np.maximum(serving.tokens, 1.0), settings.sequence_bytes
    token = token_bytes(model, settings, serving.tokens, **kept)
    token = np.where(np.isnan(settings.token_bytes), token, settings.token_bytes + sequence / tokens)
    longest = settings.context_len.astype(np.float64)
    longest_token = token_bytes(model, settings, longest, batched_tokens, **kept)
    longest_token = np.where(np.isnan(settings.longest_bytes), longest_token, settings.longest_bytes / longest)
    cells = np.where(
        settings.block_bytes > 0.0, 0.0, np.nan_to_num(settings.cache_bytes / settings.token_bytes)
    )  # slots
    for rows, draft, _ in drafts(serving, settings):
        own, at_most = (rows * token_bytes(draft.model, alone, each, **kept) for each in (serving.tokens, longest))
        cache, token, longest_token = cache + cells * own, token + own, longest_token + at_most
    state = _state_bytes(model, settings, recurrent=True)
    aside = (settings.state_share > 0.0) & (state > 0.0) & ~np.isinf(cache)  # a cache without limit has no parts
    token = np.where(aside, token - state / tokens, token)
    longest_token = np.where(aside, longest_token - state / np.maximum(longest, 1.0), longest_token)
    states = settings.state_share * np.where(aside, np.maximum(cache, 0.0), 0.0)
    each, verified = np.where(aside, state, 1.0), np.where(settings.drafted > 0, 1.0 + settings.drafted, 0.0)
    slots = (states / each - verified - (verified > 0.0)) / (1.0 + verified / settings.state_slots)
    sequences = np.where(aside, np.maximum(np.floor(slots / settings.state_slots), 0.0), np.inf)
    used = np.floor(slots) + 1.0 + verified * (np.minimum(running, sequences) + 1.0)
    states = np.where(aside & (verified > 0.0), np.minimum(each * used, states), states)
    cache = cache - states
    limits = (settings.window_kept > 0.0) & (settings.window_share > 0.0)
    piece = np.where(serving.prompt > batched_tokens, 0.5 * batched_tokens, serving.prompt)  # the last one, on average
    free_tokens = np.where(limits, np.maximum(cache, 0.0), 0.0) / token
    windows = np.floor(settings.window_share * free_tokens / (piece + settings.window_kept))
    sequences = np.where(limits, np.minimum(sequences, windows), sequences)
    block = np.where(settings.block_bytes > 0.0, settings.block_bytes, 1.0)
    whole = np.where(settings.block_bytes > 0.0, np.floor(cache / block) * block, cache) * settings.data
    growing = token - sequence / tokens
    share = np.minimum(settings.on_device * (model.num_layers + 1) / model.num_layers, 1.0)
    layers = np.maximum(weights - table_bytes(serving, settings), 0.0) * share
    weights = np.where(settings.on_device < 1.0, layers, weights)
    weights = weights - on_host
    longest_tokens = whole / longest_token
    cache, token, longest_token = cache * share, token * share, longest_token * share
    return ServingMemory(
        weights=weights,
        adapters=adapters,
        activations=activations,
        graphs=graphs,
        states=states,
        cache=cache,
        token=token,
        longest_token=longest_token,
        cache_tokens=(whole - settings.block_bytes * settings.data) / growing,  # vLLM's null block holds nothing
        longest_tokens=longest_tokens,
        sequence_tokens=sequence / growing,
        admission_tokens=settings.admission_bytes / growing,
        sequences=sequences,
    )


def weight_bytes(serving: Serving, settings: Settings) -> FloatArray:
    """Return the bytes of the weights on the fullest device.

    Embedding, head, router and hyper-connections have 16 bits. The fullest pipeline stage holds its share of the
    layers, rounded up, and either the embedding or the head.
    """
    model = without_repeats(serving.model)
    total = other_weights(model) / settings.tensor * serving.bytes_of(ATTENTION)
    for product, number in product_counts(model).items():
        stored = serving.bytes_of(product.group) * (_padding(serving, settings) if product.group == EXPERTS else 1.0)
        if product.name == EXPANSION and serving.bytes_of(product.group) < serving.overheads.copied_below:
            stored = stored + 2.0
        total = total + number * stored * weights_on_rank(product, settings)
    if streams := streams_of(model):
        total = total + 2.0 * connections(model) * streams.norm_weights
    stage_share = np.ceil(model.num_layers / settings.pipeline) / model.num_layers
    return total * stage_share / settings.cores + table_bytes(serving, settings)


def weights_on_rank(product: Product, settings: Settings) -> FloatArray:
    """Return the number of weights of all copies of a product on a rank. All ranks of a stage divide routed experts."""
    divides = {EXPERTS: settings.data, DENSE: settings.network_ranks, SHARED: settings.network_ranks}
    ranks = settings.tensor * divides.get(product.group, 1.0)
    return np.asarray(product.copies * product.inner(ranks) * product.outer(ranks))


def expert_bytes(serving: Serving, settings: Settings) -> FloatArray:
    """Return the bytes of the routed experts of one layer on a rank."""
    products = serving.experts.routed(serving.model.hidden_size) if serving.experts else ()
    weights = sum((weights_on_rank(each, settings) for each in products), np.zeros(settings.tensor.shape))
    return weights * serving.bytes_of(EXPERTS) * _padding(serving, settings)


def _padding(serving: Serving, settings: Settings) -> FloatArray | float:
    """Return the size of experts with padded rows and slices, and copies of scales, by that of their weights."""
    pads, experts, hidden = serving.overheads.pads_mxfp4, serving.experts, serving.model.hidden_size
    is_stored = dict(serving.model.unread).get("quantization_config.quant_method") == "mxfp4"
    if not (pads and experts and is_stored and serving.bytes_of(EXPERTS) < 1.0):
        return 1.0
    rows, columns, scales = pads.get(serving.architecture, pads["other"])
    width = experts.width * settings.expert / (settings.tensor * settings.data)
    each: FloatArray = np.ceil(hidden / rows) * rows * np.ceil(width / columns) * columns / (hidden * width)
    return each * (16.0 + scales) / 17.0


def _on_host(serving: Serving, settings: Settings) -> FloatArray:
    """Return the layers of the fullest pipeline stage, the last one, whose experts are in the memory of the host."""
    return np.maximum(settings.experts_on_host - serving.moe_layers * (1.0 - 1.0 / settings.pipeline), 0.0)


def offloaded_bytes(serving: Serving, settings: Settings) -> FloatArray:
    """Return the bytes of a device's weights that are in the memory of the host: at most those of its layers."""
    if not (settings.offloaded.any() or settings.prefetched.any()):
        return np.zeros(settings.offloaded.shape)
    layers = weight_bytes(serving, settings) - table_bytes(serving, settings)
    return np.minimum(settings.offloaded + settings.prefetched * layers, layers)


def table_bytes(serving: Serving, settings: Settings) -> FloatArray:
    """Return the bytes of the embedding and output head on the fullest device."""
    model, head = serving.model, serving.head_bytes
    own_head = (not head_of(model).tied and head is None) / settings.head_ranks
    tables = np.where(settings.pipeline > 1, 1.0, 1.0 + own_head)
    (table,) = embedding_of(model).products(model.hidden_size)
    rank_bytes: FloatArray = tables * (2.0 if head is None else head) * table.weights / settings.tensor
    if HEAD in serving.parts and model.untie_embeddings_and_output_weights:
        whole, narrow = 2.0 * table.weights / settings.tensor, serving.bytes_of(HEAD) * table.weights / settings.tensor
        rank_bytes = np.where(settings.pipeline > 1, rank_bytes, whole + narrow / settings.head_ranks)
    own = sum(each.weights for each in layer_embeddings(model))
    return (rank_bytes + 2.0 * own / settings.tensor) / settings.cores


def token_bytes(
    model: Model,
    settings: Settings,
    tokens: FloatArray | float = 1.0,
    computed: FloatArray | float = 0.0,
    *,
    frees_windows: bool = True,
    indexes_all: bool = False,
    caches_reused: bool = False,
) -> FloatArray:
    """Return the bytes per cached token on a device, averaged over a sequence of `tokens` tokens.

    `computed`: prompt tokens of one iteration, which a sliding window holds in addition. The latent vector is
    replicated on the tensor ranks that do not share a cache. The states of other mixers are divided among the tokens of
    the sequence. The last three arguments: see `Overheads`. If windows have memory of their own, a token has
    bytes in both parts, and more if sequences fill that of the windows first.
    """
    stage_layers = np.ceil(model.num_layers / settings.pipeline)
    largest = max((each.index_bytes for each in attention_counts(model)), default=0.0)
    total, fills, pooled = 0.0 * stage_layers, np.ones_like(stage_layers), settings.window_share
    for mixer, number in mixer_counts(model).items():
        size, index = mixer.token_bytes(1.0) * settings.cache_element_bytes, 0.0
        if isinstance(mixer, Attention):
            share = mixer.cached(tokens, computed, frees_windows=frees_windows)
            if mixer.window is not None and pooled.any():
                held = mixer.cached(tokens) / np.where(pooled > 0.0, pooled, np.inf)
                share, fills = np.where(pooled > 0.0, pooled, share), np.maximum(fills, held)
            cached = mixer if mixer.projections or not caches_reused else replace(mixer, projections=2)
            size = share * cached.cached_on(settings.tensor) * settings.cache_element_bytes / settings.sharing
            index = largest if indexes_all and mixer.indexer else mixer.index_bytes
        total = total + stage_layers * (number / model.num_layers) * (size + index) / settings.cores
    return _state_bytes(model, settings) / np.maximum(tokens, 1.0) + fills * total


def _state_bytes(model: Model, settings: Settings, *, recurrent: bool = False) -> FloatArray:
    """Return the bytes of a sequence's states on a device, over all layers, or only of those that are recurrent."""
    layers = np.ceil(model.num_layers / settings.pipeline) / model.num_layers
    mixers = mixer_counts(model).items()
    total = sum((number * each.state_bytes for each, number in mixers if each.recurrent or not recurrent), 0.0)
    return layers * total / settings.tensor / settings.cores


def activation_bytes(
    serving: Serving, settings: Settings, batched_tokens: FloatArray, running: FloatArray
) -> FloatArray:
    """Return the peak bytes of activations in an iteration.

    The peak is the residual, the norm and the widest layer in 16 bits, or the logits in 16 bits with their copies if
    these take more. Without attention DP, a rank has rows for all chosen experts of all tokens, also if it holds only
    some of these (vLLM 0.32 `layers/fused_moe/modular_kernel.py`). Compressed attention has its queries, which kernels
    pad to 64 heads, its outputs and residual streams (vLLM 0.32 `models/deepseek_v4/attention.py`).
    """
    model, experts = serving.model, serving.experts
    hidden, tensor, expert = model.hidden_size, settings.tensor, settings.expert
    if experts is None:
        up, down = dense_of(model).products(hidden)
        inner = up.outer(tensor) + down.inner(tensor)
    else:
        up, down = experts.routed(hidden)
        ranks = tensor * settings.data / expert
        inner = (
            experts.chosen
            / np.where(settings.data > 1.0, expert, 1.0)
            * (up.outer(ranks) + down.inner(ranks) + 2.0 * up.inputs)
        )
    for mixer in mixer_counts(model):
        if isinstance(mixer, CompressedAttention):
            heads = mixer.num_heads / tensor
            own = (heads + 2.0 * np.maximum(heads, 64.0)) * mixer.head_dim
            inner = np.maximum(inner, own + model.residual_streams * hidden)
    layer = batched_tokens * 2.0 * (3.0 * hidden + inner)
    logits = np.minimum(running, batched_tokens) * head_of(model).logits * (2.0 / tensor + settings.logit_bytes)
    return np.maximum(layer, logits) / settings.cores
