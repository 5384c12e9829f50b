"""Memory of an engine on a device: weights, activations, graphs, and the KV cache in the rest of the budget."""

from dataclasses import dataclass, replace

import numpy as np
from flagcore_models.shapes import (
    attended,
    cached_layers,
    cached_widths,
    layer_embeddings,
    own_key_width,
    projection_weights,
    widths,
)

from flagcore.contracts import Costs, communicator_bytes
from flagcore.domain.model import Model
from flagcore.domain.space import FloatArray
from flagcore.physics.roofline import BYTES
from flagcore_serving.model.adapters import adapter_bytes
from flagcore_serving.model.speculation import drafts
from flagcore_serving.model.vision import tower_bytes
from flagcore_serving.model.work import Serving
from flagcore_serving.space.settings import Settings
from flagcore_serving.space.weights import ATTENTION, DENSE, SHARED, connections

GRAPH_BYTES = 12e6
"""Bytes of captured graphs per layer, an estimate: start-up logs report 0.4 to 1 GiB for 32 to 80 layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingMemory:
    """Memory of one device in bytes, by candidate.

    - `weights`: without `adapters`, the slots for them.
    - `cache`: size of the KV cache, negative if the budget is too small.
    - `token`: bytes per cached token, averaged over a request of mean length.
    - `longest_token`: bytes per cached token, averaged over the longest request.
    - `cache_tokens`: tokens that the cache of one instance can hold, over all its attention ranks.
    - `sequences`: maximum number of sequences of an attention rank whose states fit, if they are set aside.
    """

    weights: FloatArray
    adapters: FloatArray
    activations: FloatArray
    graphs: FloatArray
    cache: FloatArray
    token: FloatArray
    longest_token: FloatArray
    cache_tokens: FloatArray
    sequences: FloatArray


def serving_memory(serving: Serving, settings: Settings, costs: Costs) -> ServingMemory:
    """Return the memory of one device of each candidate.

    The cache has its fixed size, if one is set. Otherwise it is the engine's share of memory, minus weights,
    activations, graphs, driver and libraries. If `settings.on_device` is below 1, some layers with their cache,
    and the embedding tables, are in the memory of the host.
    """
    model, overheads, batched_tokens = serving.model, serving.overheads, settings.max_batched_tokens.astype(np.float64)
    weights = weight_bytes(serving, settings) - offloaded_bytes(serving, settings)
    alone = replace(settings, pipeline=np.ones_like(settings.pipeline))  # drafts are on the last pipeline stage
    for rows, draft, own_tables in drafts(serving, settings):
        shared = (1.0 - own_tables) * table_bytes(draft.model, alone)
        weights = weights + np.where(rows, weight_bytes(draft, alone) - shared, 0.0)
    adapters = np.zeros(weights.shape)
    if settings.adapter_rank.any():
        adapters = settings.adapter_slots * adapter_bytes(serving, settings)
    running = settings.max_running.astype(np.float64)
    activations = activation_bytes(model, settings, np.minimum(batched_tokens, settings.pass_tokens), running)
    if model.vision is not None:
        tower, peak = tower_bytes(model.vision, settings.tower_shares, batched_tokens)
        tower, peak = tower / settings.cores, peak / settings.cores
        weights = np.where(settings.encodes, tower, weights + tower)
        activations = np.where(settings.encodes, peak, np.maximum(activations, peak))
    graphs = np.where(settings.graph_tokens > 0, GRAPH_BYTES * model.num_layers / settings.pipeline, 0.0)
    graphs = np.where(np.isnan(settings.graph_bytes), graphs, settings.graph_bytes)
    budget = np.full(weights.shape, np.inf)
    if (capacity := costs.memory.capacity_bytes()) is not None:
        driver = costs.memory.device_used_bytes(np.zeros(1)) + settings.communicators * communicator_bytes(costs.memory)
        budget = settings.memory_fraction * capacity - (0.0 if overheads.activations_beside else driver)
    other = 0.0 if overheads.activations_beside else activations + graphs
    cache = np.where(np.isnan(settings.cache_bytes), budget - weights - adapters - other, settings.cache_bytes)
    kept = {"frees_windows": overheads.frees_windows, "indexes_all": overheads.indexes_all}
    token = token_bytes(model, settings, serving.tokens, **kept)
    longest = settings.context_len.astype(np.float64)
    longest_token = token_bytes(model, settings, longest, batched_tokens, **kept)
    for rows, draft, _ in drafts(serving, settings):
        token = token + np.where(rows, token_bytes(draft.model, alone, serving.tokens, **kept), 0.0)
        longest_token = longest_token + np.where(rows, token_bytes(draft.model, alone, longest, **kept), 0.0)
    state = _state_bytes(model, settings, recurrent=True)
    aside = (settings.state_share > 0.0) & (state > 0.0)
    tokens = np.maximum(serving.tokens, 1.0)
    token = np.where(aside, token - state / tokens, token)
    longest_token = np.where(aside, longest_token - state / np.maximum(longest, 1.0), longest_token)
    slots = np.where(aside, settings.state_share, 1.0) * cache / np.where(aside, state, 1.0)
    sequences = np.where(aside, np.maximum(np.floor(slots / settings.state_slots), 0.0), np.inf)
    cache = np.where(aside, (1.0 - settings.state_share) * cache, cache)
    cache_tokens = cache / token * settings.data
    share = np.minimum(settings.on_device * (model.num_layers + 1) / model.num_layers, 1.0)
    layers = np.maximum(weights - table_bytes(model, settings), 0.0) * share
    weights = np.where(settings.on_device < 1.0, layers, weights)
    weights = weights - _on_host(serving, settings) * expert_bytes(serving, settings) / settings.cores
    cache, token, longest_token = cache * share, token * share, longest_token * share
    return ServingMemory(
        weights=weights,
        adapters=adapters,
        activations=activations,
        graphs=graphs,
        cache=cache,
        token=token,
        longest_token=longest_token,
        cache_tokens=cache_tokens,
        sequences=sequences,
    )


def weight_bytes(serving: Serving, settings: Settings) -> FloatArray:
    """Return the bytes of the weights on the fullest device.

    Matrices are split over the tensor ranks, experts over all ranks of a stage. Embedding, head, router
    and hyper-connections have 16 bits. The fullest pipeline stage holds its share of the layers, rounded up, and either
    the embedding or the head.
    """
    serving = replace(serving, model=serving.model.once)
    model, h = serving.model, float(serving.model.hidden_size)
    stored_bytes = serving.weight_bytes
    width = BYTES.get(serving.precision, 2.0) if stored_bytes is None else stored_bytes
    attention_width = BYTES.get(serving.attention_precision, 2.0) if stored_bytes is None else stored_bytes
    attention_width = 2.0 if ATTENTION in serving.wide else attention_width
    dense_width, shared_width = (2.0 if part in serving.wide else width for part in (DENSE, SHARED))
    gates, moe = 3.0 if model.gated_linear_unit else 2.0, float(serving.moe_layers)
    kinds = (each.attention_layers * attention_weights(each, settings.tensor) for each in model.by_attention)
    total = sum(kinds, np.zeros_like(settings.tensor, dtype=np.float64)) * attention_width
    for mixer, number in model.other_mixers.items():
        split, whole = mixer.weights(model.hidden_size)
        total = total + number * (split / settings.tensor + whole) * attention_width
    total = total + serving.dense_layers * gates * h * model.ffn_hidden_size / settings.tensor * dense_width
    if moe:
        count = model.num_moe_experts or 0
        shared = gates * h * (model.moe_shared_expert_intermediate_size or 0) / settings.tensor
        latent = 2.0 * h * (model.moe_latent_size or 0)
        routed = expert_bytes(serving, settings)
        total = total + moe * (routed + (shared + latent) * shared_width + 2.0 * h * count)
    total = total + 2.0 * connections(model) * model.residual_weights
    stage_share = np.ceil(model.num_layers / settings.pipeline) / model.num_layers
    return total * stage_share / settings.cores + table_bytes(model, settings)


def expert_bytes(serving: Serving, settings: Settings) -> FloatArray:
    """Return the bytes of the routed experts of one layer on a rank."""
    model, gates = serving.model, 3.0 if serving.model.gated_linear_unit else 2.0
    width = BYTES.get(serving.precision, 2.0) if serving.weight_bytes is None else serving.weight_bytes
    weights = gates * model.expert_hidden_size * (model.moe_ffn_hidden_size or 0) * (model.num_moe_experts or 0)
    return np.asarray(weights / (settings.tensor * settings.data) * width)


def _on_host(serving: Serving, settings: Settings) -> FloatArray:
    """Return the layers of the fullest pipeline stage, the last one, whose experts are in the memory of the host."""
    return np.maximum(settings.experts_on_host - serving.moe_layers * (1.0 - 1.0 / settings.pipeline), 0.0)


def offloaded_bytes(serving: Serving, settings: Settings) -> FloatArray:
    """Return the bytes of a device's weights that are in the memory of the host: at most those of its layers."""
    layers = weight_bytes(serving, settings) - table_bytes(serving.model, settings)
    return np.minimum(settings.offloaded, layers)


def table_bytes(model: Model, settings: Settings) -> FloatArray:
    """Return the bytes of the 16-bit embedding and output head on the fullest device."""
    tables = np.where(settings.pipeline > 1, 1.0, 1.0 + model.untie_embeddings_and_output_weights)
    rank_bytes: FloatArray = tables * 2.0 * model.vocab_size * float(model.hidden_size) / settings.tensor
    return (rank_bytes + 2.0 * layer_embeddings(model) / settings.tensor) / settings.cores


def attention_weights(model: Model, tensor: FloatArray) -> FloatArray:
    """Return the number of weights of one attention layer on a device. Each tensor rank has at least one KV head."""
    h, (query, _, _) = float(model.hidden_size), widths(model)
    if model.multi_latent_attention:
        compression, projection = projection_weights(model)
        split = (projection + attended(model) * h) / tensor
        if model.indexer:
            split = split + model.indexer.weights(model.hidden_size, model.q_lora_rank or model.hidden_size)
        return compression + split
    groups = np.maximum(model.num_query_groups / tensor, 1.0) * own_key_width(model)
    queries = (1 + model.attention_output_gate) * query
    index = model.indexer.weights(model.hidden_size, model.hidden_size) if model.indexer else 0
    weights: FloatArray = h * ((queries + attended(model)) / tensor + groups) + index
    return weights


def token_bytes(
    model: Model,
    settings: Settings,
    tokens: FloatArray | float = 1.0,
    computed: FloatArray | float = 0.0,
    *,
    frees_windows: bool = True,
    indexes_all: bool = False,
) -> FloatArray:
    """Return the bytes per cached token on a device, averaged over a sequence of `tokens` tokens.

    `computed`: prompt tokens of one iteration, which a sliding window holds in addition. The latent vector is
    replicated on the tensor ranks that do not share a cache. The states of other mixers are divided among the tokens of
    the sequence. `frees_windows`, `indexes_all`: see `Overheads`.
    """
    stage_layers = np.ceil(model.num_layers / settings.pipeline)
    total = stage_layers * 0.0
    key_bytes = [each.indexer.token_bytes for each in model.by_attention if each.indexer]
    for each in model.by_attention:
        share = cached_layers(each, tokens, computed, frees_windows=frees_windows) / model.num_layers
        layers = stage_layers * share * settings.cache_element_bytes / (settings.cores * settings.sharing)
        if model.multi_latent_attention:
            total = total + layers * float((model.kv_lora_rank or 0) + (model.qk_pos_emb_head_dim or 0))
        else:
            total = total + layers * np.maximum(each.num_query_groups / settings.tensor, 1.0) * cached_widths(each)
        if each.indexer:
            indexed = stage_layers * (each.attention_layers / model.num_layers)
            own = max(key_bytes) if indexes_all else each.indexer.token_bytes
            total = total + indexed * own / settings.cores
    return total + _mixer_bytes(model, settings, stage_layers, tokens)


def _mixer_bytes(
    model: Model, settings: Settings, stage_layers: FloatArray, tokens: FloatArray | float
) -> FloatArray | float:
    """Return the bytes per token of the caches and states of mixers on a device."""
    total = _state_bytes(model, settings) / np.maximum(tokens, 1.0)
    for mixer, number in model.other_mixers.items():
        element = settings.cache_element_bytes / settings.cores
        total = total + stage_layers * (number / model.num_layers) * mixer.token_bytes(1.0) * element
    return total


def _state_bytes(model: Model, settings: Settings, *, recurrent: bool = False) -> FloatArray:
    """Return the bytes of a sequence's states on a device, over all layers, or only of those that are recurrent."""
    layers = np.ceil(model.num_layers / settings.pipeline) / model.num_layers
    mixers = model.other_mixers.items()
    total = sum((number * each.state_bytes for each, number in mixers if each.recurrent or not recurrent), 0.0)
    return layers * total / settings.tensor / settings.cores


def activation_bytes(model: Model, settings: Settings, batched_tokens: FloatArray, running: FloatArray) -> FloatArray:
    """Return the peak bytes of activations in an iteration.

    The peak is the residual, the norm and the widest layer in 16 bits, or the logits in 16 and 32 bits if these take
    more.
    """
    gates, h = 2.0 if model.gated_linear_unit else 1.0, float(model.hidden_size)
    if model.num_moe_experts is None:
        inner = (gates + 1.0) * model.ffn_hidden_size / settings.tensor
    else:
        width = (model.moe_ffn_hidden_size or 0) * settings.expert / (settings.tensor * settings.data)
        inner = model.moe_router_topk / settings.expert * ((gates + 1.0) * width + 2.0 * model.expert_hidden_size)
    layer = batched_tokens * 2.0 * (3.0 * h + inner)
    logits = np.minimum(running, batched_tokens) * model.vocab_size * (2.0 / settings.tensor + 4.0)
    return np.maximum(layer, logits) / settings.cores
