"""Iteration times of an engine, for batches of prompts and decoding sequences.

The times of matrix products, small kernels and messages depend only on the number of tokens, so each candidate has a
table over a grid of token counts. Attention adds a time per cached token that is read, and per query-key pair.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import numpy as np
from flagcore_models.shapes import attended, own_key_width, paired_layers, read_layers, widths

from flagcore.contracts import AttentionShape, Costs, KernelCosts
from flagcore.domain.model import Mixer
from flagcore.domain.space import BoolArray, FloatArray
from flagcore.physics.roofline import cast_bytes
from flagcore_serving.model.adapters import adapter_launches, adapter_seconds, head_pair, pairs_of
from flagcore_serving.model.memory import expert_bytes, offloaded_bytes
from flagcore_serving.model.work import HOST_MEMORY_RATE, Serving, SparseKernel, distinct_experts
from flagcore_serving.space.settings import Settings
from flagcore_serving.space.weights import ATTENTION, connections, parameters

NODES: FloatArray = np.array(
    [
        *(1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144),
        *(8192, 12288, 16384, 24576, 32768, 65536),
    ],
    dtype=np.float64,
)
"""The grid of token counts of the tables. Times between them are interpolated linearly."""

REFERENCE_TOKENS = 8192.0
"""The length of a sequence or a prompt, in tokens, for which attention rates are computed. A choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationCosts:
    """The times of the parts of an iteration in seconds, for each candidate.

    Tables with one row per candidate and one column per element of `NODES`:

    - `local`: work of an attention rank on its own tokens.
    - `shared`: work of the experts on the tokens of all ranks.
    - `messages`, `exchanged`: the communication that `local` and `shared` include.
    - `summed`: what `shared` takes longer for prompts.
    - `sampled`: the output head and messages about a shared cache, for sequences that get a token.

    Arrays with one element per candidate:

    - `cached`, `pair`: seconds per cached token of a sequence and per query-key pair of a prompt, over all layers.
    - `fixed`, `sequence`: seconds added per iteration and per running sequence, multiplied by `crowding`.
    - `floor`: minimum seconds of an iteration of more than `captured` tokens, multiplied by `crowding`.
    - `decode_floor`, `mixed_floor`: the same for other iterations, without prompts and with prompts.
    - `drafts`, `draft_heads`: tables of the seconds of a pass of the draft through its layers and through its head.
    - `draft_cached`: as `cached`, of a pass of the draft.
    - `captured`: the largest iteration that runs as a captured graph, in tokens.
    - `crowding`: as in `Settings`.
    """

    local: FloatArray
    shared: FloatArray
    messages: FloatArray
    exchanged: FloatArray
    summed: FloatArray
    sampled: FloatArray
    cached: FloatArray
    pair: FloatArray
    fixed: FloatArray
    sequence: FloatArray
    floor: FloatArray
    decode_floor: FloatArray
    mixed_floor: FloatArray
    captured: FloatArray
    crowding: FloatArray
    drafts: FloatArray
    draft_heads: FloatArray
    draft_cached: FloatArray

    def bytes_of(self, row: int) -> bytes:
        """Return all times of a candidate, to compare candidates."""
        return b"".join(getattr(self, each.name)[row].tobytes() for each in fields(self))


def interpolate(table: FloatArray, tokens: FloatArray) -> FloatArray:
    """Return each candidate's row of `table`, interpolated at its number of tokens. 0 tokens take 0 s."""
    tokens = np.minimum(tokens, NODES[-1])
    index = np.clip(np.searchsorted(NODES, tokens, side="right") - 1, 0, NODES.size - 2)
    row_indices = np.arange(table.shape[0])
    low, high = table[row_indices, index], table[row_indices, index + 1]
    share = (np.maximum(tokens, NODES[0]) - NODES[index]) / (NODES[index + 1] - NODES[index])
    return np.where(tokens > 0, low + share * (high - low), 0.0)


def iteration_costs(serving: Serving, settings: Settings, costs: Costs) -> IterationCosts:
    """Return the iteration costs of each candidate, NaN if facts about the chip are missing.

    Costs are sums over all pipeline stages, because each token passes all of them, as if all were as slow as the
    slowest. If the device is the CPU itself, kernel launches do not overlap with compute.
    """
    model, kernels, overheads, column = serving.model, costs.kernels, serving.overheads, settings.column
    tokens = np.minimum(NODES, column.pass_tokens)
    moe, reduce = float(serving.moe_layers), _reduce(serving, column, costs, tokens)
    local = np.zeros_like(tokens)
    for each in model.by_attention:
        attention = _projections(replace(serving, model=each), column, kernels, tokens) + overheads.attention + reduce
        if model.multi_latent_attention:
            attention = attention + overheads.latent
        if each.indexer:
            attention = attention + _last_blocks(replace(serving, model=each), column, tokens)
            attention = attention + (overheads.indexer if each.indexer.heads else 0.0)
        local = local + each.attention_layers * attention
    if width := float(model.layer_embedding_size):
        h, layers = float(model.hidden_size), float(model.num_layers)
        products = linear(kernels, tokens, h, width, serving) + linear(kernels, tokens, width, h, serving)
        local = local + layers * products + linear(kernels, tokens, h, layers * width, serving)
    if (streams := float(model.residual_streams)) > 1.0:  # each rank mixes all of them (arXiv 2512.24880)
        moved = 2.0 * ((4.0 * streams - 1.0) * tokens * float(model.hidden_size) + model.residual_weights)
        local = local + connections(model) * kernels.memory_seconds(moved)
    messages = sum(model.mixers.values()) * reduce
    for mixer, number in model.other_mixers.items():
        local = local + number * (_mixer(mixer, serving, column, kernels, tokens) + overheads.attention + reduce)
    if dense := float(serving.dense_layers):
        ffn = _ffn(serving, kernels, tokens, model.ffn_hidden_size / column.tensor)
        local = local + dense * (ffn + overheads.ffn + reduce)
        messages = messages + dense * reduce
    shared = exchanged = summed = np.zeros_like(local)
    if moe:
        if model.moe_shared_expert_intermediate_size:
            shared_width = model.moe_shared_expert_intermediate_size / column.tensor
            local = local + moe * _ffn(serving, kernels, tokens, shared_width)
        if model.moe_latent_size:
            latent, h = float(model.moe_latent_size), float(model.hidden_size)
            local = local + moe * (
                linear(kernels, tokens, h, latent, serving) + linear(kernels, tokens, latent, h, serving)
            )
        busiest = imbalance(serving, column)
        exchanged = moe * exchange(serving, column, costs, tokens) * busiest
        if overheads.sums_prompts:
            summed = moe * _summed(serving, column, costs, tokens)
        on_host, computed = column.experts_on_host, experts(serving, column, kernels, tokens)
        shared = (moe - on_host) * computed * busiest + exchanged
        if on_host.any():
            shared = shared + on_host * _host_experts(serving, column, kernels, tokens, computed)
        moe_reduce = moe * np.where(column.data > 1.0, 0.0, reduce)
        local, messages = local + moe_reduce, messages + moe_reduce
    stages = _stages(serving, column, costs, tokens)
    local, messages = local + stages, messages + stages
    local = local + column.pipeline * _from_host(serving, column, tokens)
    if serving.adapters.number:
        local = local + adapter_seconds(serving, column, costs, tokens, pairs_of(serving, column))
    head = linear(kernels, tokens, float(model.hidden_size), model.vocab_size / column.tensor, serving, wide=True)
    if serving.adapters.number:
        head = head + adapter_seconds(serving, column, costs, tokens, head_pair(serving, column))
    passes = NODES / tokens
    cached, pair = _attention_rates(serving, settings, kernels)
    pace, expert_pace = _paces(serving, settings)
    local = local * pace[:, None]
    shared, exchanged, summed = (each * expert_pace[:, None] for each in (shared, exchanged, summed))
    cached, pair, head = cached * pace, pair * pace, head * column.pipeline
    if (settings.sharing > 1.0).any():
        head = head + model.attention_layers * _shared_cache(serving, column, costs, tokens)
    if settings.overlaps.any():
        overlapped = _overlapped(serving, shared, exchanged, local, cached[:, None], column)
        shared = np.where(column.overlaps, overlapped, shared)
    launches = overheads.eager_kernels * model.num_layers + overheads.eager_experts * moe
    if model.multi_latent_attention:
        launches += overheads.eager_latent * model.num_layers
    launched = launches + adapter_launches(serving, settings, costs)
    host = launched * (overheads.launch or kernels.launch_seconds()) * settings.crowding
    eager_s = np.where(settings.graph_tokens > 0, 0.0, host) if costs.synchronous else 0.0
    pieces = (overheads.layer * model.num_layers + overheads.expert_layer * moe) * settings.crowding
    whole = np.where(np.isnan(settings.whole), overheads.whole, settings.whole)
    return IterationCosts(
        local=local * passes / column.cores,
        shared=shared * passes / column.cores,
        messages=messages * passes / column.cores,
        exchanged=exchanged * passes / column.cores,
        summed=summed * passes / column.cores,
        sampled=head / column.cores,
        cached=cached / settings.cores,
        pair=pair / settings.cores,
        fixed=overheads.iteration * settings.crowding + eager_s,
        sequence=overheads.sequence * settings.crowding,
        floor=np.zeros_like(host) if costs.synchronous else host,
        decode_floor=np.where(whole > 0.0, 0.0, pieces),
        mixed_floor=pieces,
        captured=settings.captured(overheads.captures),
        crowding=settings.crowding,
        **dict.fromkeys(("drafts", "draft_heads"), np.zeros_like(local)),
        draft_cached=np.zeros_like(cached),
    )


def _paces(serving: Serving, settings: Settings) -> tuple[FloatArray, FloatArray]:
    """Return the layers of the slowest pipeline stage relative to the mean, and its layers with experts.

    Engines split layers evenly, and give remaining layers to middle stages (`get_pp_indices` in vLLM's
    `distributed/utils.py`). Dense layers before those with experts are in the first stage. The last stage also computes
    the output head.
    """
    layers, moe, stages = float(serving.model.num_layers), serving.moe_layers, settings.pipeline
    most = np.ceil(layers / stages)
    if serving.model.moe_first_dense_layers and moe:
        most = np.where(stages == 2.0, np.maximum(np.floor(layers / 2.0), np.ceil(moe / 2.0)), most)
    staged = stages > 1.0
    return np.where(staged, most * stages / layers, 1.0), np.where(staged, most * stages / max(moe, 1), 1.0)


EXPOSED = 0.5
"""Share of the shorter of two overlapped times that still adds to an iteration. With this value, two-batch overlap
gains about a third, as LMSYS published. Chosen with points on two accelerators (benchmarks/LOG.md)."""


def _overlapped(
    serving: Serving,
    shared: FloatArray,
    exchanged: FloatArray,
    local: FloatArray,
    cached: FloatArray,
    settings: Settings,
) -> FloatArray:
    """Return the table `shared` if a batch is divided into two halves: one computes while the other exchanges tokens.

    The compute time, including attention to the cache, overlaps the exchange time. A half takes the longer time plus a
    share of the shorter one. The time that is already in `local` and `cached` is subtracted.
    """

    def computing(tokens: FloatArray) -> FloatArray:
        return at_counts(local, tokens / settings.data) + reading * tokens / settings.data

    reading = cached * (0.5 * (serving.prompt + serving.tokens))
    half = NODES / 2.0
    experts_half, exchanged_half = at_counts(shared - exchanged, half), at_counts(exchanged, half)
    computed = computing(half) + experts_half
    longer, shorter = np.maximum(computed, exchanged_half), np.minimum(computed, exchanged_half)
    return 2.0 * (longer + EXPOSED * shorter) - computing(NODES)


def at_counts(table: FloatArray, tokens: FloatArray) -> FloatArray:
    """Return each candidate's row of `table`, interpolated at several numbers of tokens."""
    tokens = np.broadcast_to(tokens, table.shape)
    return np.array([np.interp(counts, NODES, row) for counts, row in zip(tokens, table, strict=True)])


def _projections(serving: Serving, settings: Settings, kernels: KernelCosts, tokens: FloatArray) -> FloatArray:
    """Return the time of the matrix products of one attention layer, in seconds.

    Latent attention is computed in its absorbed form (DeepSeek-V2, arXiv 2405.04434, section 2.1.2): one 16-bit product
    per head projects queries to the rank of the cache, and another one projects values back.
    """
    model, h = serving.model, float(serving.model.hidden_size)
    query, _, _ = widths(model)
    output = linear(kernels, tokens, attended(model) / settings.tensor, h, serving, attention=True)
    if not model.multi_latent_attention:
        groups = np.maximum(model.num_query_groups / settings.tensor, 1.0)
        width = (1 + model.attention_output_gate) * query / settings.tensor + groups * own_key_width(model)
        if index := model.indexer:
            width = width + index.heads * (index.head_dim + 1) + index.head_dim
        return output + linear(kernels, tokens, h, width, serving, attention=True)
    rank, rope = float(model.kv_lora_rank or 0), float(model.qk_pos_emb_head_dim or 0)
    heads, inner = model.num_attention_heads / settings.tensor, float(model.q_lora_rank or h)
    down = linear(kernels, tokens, h, (model.q_lora_rank or 0) + rank + rope, serving, attention=True)
    up = linear(kernels, tokens, inner, query / settings.tensor, serving, attention=True)
    absorbed = linear(kernels, tokens, float(model.qk_head_dim or 0), heads * rank, serving, wide=True)
    values = linear(kernels, tokens, rank, heads * float(model.v_head_dim or 0), serving, wide=True)
    if index := model.indexer:
        up = up + linear(kernels, tokens, inner, index.heads * index.head_dim, serving, attention=True)
        down = down + linear(kernels, tokens, h, index.head_dim + index.heads, serving, attention=True)
    return output + down + up + absorbed + values


def _mixer(mixer: Mixer, serving: Serving, settings: Settings, kernels: KernelCosts, tokens: FloatArray) -> FloatArray:
    """Return the time of a layer with another mixer than attention, in seconds: matrix products, and memory traffic of
    other kernels.
    """
    products = np.zeros_like(tokens)
    for each in mixer.products(serving.model.hidden_size):
        inner = each.inputs / (settings.tensor if each.split == "inputs" else 1.0)
        outer = each.outputs / (settings.tensor if each.split == "outputs" else 1.0)
        products = products + linear(kernels, tokens, inner, outer, serving, attention=True)
    return products + kernels.memory_seconds(tokens * (2.0 * mixer.moved) / settings.tensor)


def _ffn(serving: Serving, kernels: KernelCosts, tokens: FloatArray, width: FloatArray) -> FloatArray:
    gates, h = 2.0 if serving.model.gated_linear_unit else 1.0, float(serving.model.hidden_size)
    first = linear(kernels, tokens, h, gates * width, serving)
    activation = kernels.memory_seconds(tokens * (gates + 1.0) * width * 2.0)
    return first + activation + linear(kernels, tokens, width, h, serving)


def _reduce(serving: Serving, settings: Settings, costs: Costs, tokens: FloatArray) -> FloatArray:
    """Return the time of one all-reduce of the activations of `tokens` among the tensor ranks, in seconds.

    For small messages, engines have their own kernels, which have a lower latency than the communication library. vLLM
    and SGLang use them only for ranks on linked devices, and on a bus (PCIe) for two ranks (`custom_all_reduce.py`).
    """
    overheads = serving.overheads
    ranks, stride = settings.tensor.astype(np.int64), np.ones(settings.tensor.shape, dtype=np.int64)
    payload = tokens * (2.0 * serving.model.hidden_size)
    library = costs.collectives.seconds("all_reduce", payload, ranks, stride)
    library_latency = costs.collectives.seconds("all_reduce", np.ones_like(payload), ranks, stride)
    kernel_latency = overheads.reduce + overheads.reduce_doubling * np.maximum(np.log2(settings.tensor) - 1.0, 0.0)
    most = 2.0 if serving.on_bus else float(serving.link_domain)
    own = np.where(settings.tensor > most, library_latency, kernel_latency)
    return np.where(settings.tensor > 1.0, np.minimum(library, np.maximum(library - library_latency, 0.0) + own), 0.0)


def _shared_cache(serving: Serving, settings: Settings, costs: Costs, tokens: FloatArray) -> FloatArray:
    """Return the seconds that one layer takes to exchange queries and results of `tokens` sequences between the ranks
    that share their cache: each rank gathers the queries of all heads, and the partial results are reduce-scattered
    (vLLM 0.11 `v1/attention/backends/mla/common.py`).
    """
    model, ranks = serving.model, settings.sharing.astype(np.int64)
    heads, stride = model.num_attention_heads / settings.tensor * settings.sharing, np.ones_like(ranks)
    result = float(model.kv_lora_rank or 0) if model.multi_latent_attention else float(model.kv_channels)
    query = result + float(model.qk_pos_emb_head_dim or 0) if model.multi_latent_attention else result
    sums = costs.collectives.seconds("all_gather", tokens * heads * 4.0, ranks, stride)
    gathered = costs.collectives.seconds("all_gather", tokens * heads * query * 2.0, ranks, stride)
    return sums + gathered + costs.collectives.seconds("reduce_scatter", tokens * heads * result * 2.0, ranks, stride)


HOST_SHARE = 0.8
"""Share of the rate of a host's link that reading weights reaches: about 50 of the 64 GB/s of PCIe 5.0 x16. An
estimate."""


def _from_host(serving: Serving, settings: Settings, tokens: FloatArray) -> FloatArray:
    """Return the seconds in which a pass reads the weights in the memory of the host, of experts only the chosen ones.

    Source: zero-copy access of vLLM 0.33 (`config/offload.py`); dense and expert weights are offloaded alike.
    """
    model, read = serving.model, np.ones_like(tokens)
    if count := float(model.num_moe_experts or 0):
        gates = 3.0 if model.gated_linear_unit else 2.0
        routed = serving.moe_layers * gates * model.expert_hidden_size * (model.moe_ffn_hidden_size or 0) * count
        share = min(routed / parameters(model), 1.0)
        chosen = distinct_experts(count, float(model.moe_router_topk), tokens) / count
        read = 1.0 - share + share * chosen
    return read * offloaded_bytes(serving, settings) / (HOST_SHARE * serving.host_rate)


def _host_experts(
    serving: Serving, settings: Settings, kernels: KernelCosts, tokens: FloatArray, computed: FloatArray
) -> FloatArray:
    """Return the seconds of one layer's routed experts in the memory of the host. `computed`: seconds on the devices.

    Cores of the host compute few tokens, as fast as they read the weights of the chosen experts. With more tokens,
    these weights are copied to the devices in each pass (`Overheads.copied_from`).
    """
    model, ranks = serving.model, settings.tensor * settings.data
    count = float(model.num_moe_experts or 1)
    chosen = distinct_experts(count, float(model.moe_router_topk), tokens) / count
    read = chosen * expert_bytes(serving, settings)
    activations = kernels.host_copy_seconds(tokens * (4.0 * model.hidden_size))
    by_cores = read * ranks / HOST_MEMORY_RATE + 2.0 * activations
    by_devices = read / (HOST_SHARE * serving.host_rate) + computed
    return np.where(tokens < serving.overheads.copied_from, by_cores, by_devices)


def _stages(serving: Serving, settings: Settings, costs: Costs, tokens: FloatArray) -> FloatArray:
    ranks, stride = settings.pipeline.astype(np.int64), (settings.tensor * settings.data).astype(np.int64)
    payload = tokens * (2.0 * serving.model.hidden_size)
    each = costs.collectives.seconds("send", payload, np.minimum(ranks, 2), stride)
    return np.where(settings.pipeline > 1.0, (settings.pipeline - 1.0) * (each + serving.overheads.handover), 0.0)


def _attention_rates(serving: Serving, settings: Settings, kernels: KernelCosts) -> tuple[FloatArray, FloatArray]:
    """Return the seconds per cached token of a decoding sequence, and per query-key pair of a prompt, over all layers.
    Absorbed latent attention reads one latent vector for all heads. Most of the vector is both key and value."""
    model, zeros = serving.model, np.zeros(settings.tensor.shape)
    cached, pair = zeros, zeros
    for kind in model.by_attention:
        added = _rates_of_attention(replace(serving, model=kind), settings, kernels)
        cached, pair = cached + added[0], pair + added[1]
    for mixer, number in model.other_mixers.items():  # each new token reads and writes the states of its sequence
        states_s = kernels.memory_seconds(64.0 * 2.0 * mixer.state_bytes / settings.tensor) / 64.0
        cached = cached + number * states_s / serving.tokens
        if token_bytes := mixer.token_bytes(1.0) * mixer.read(serving.tokens):
            read = 64.0 * token_bytes * settings.cache_element_bytes
            cached = cached + number * kernels.memory_seconds(read) / 64.0 / serving.tokens
    return cached, pair


def _rates_of_attention(serving: Serving, settings: Settings, kernels: KernelCosts) -> tuple[FloatArray, FloatArray]:
    """Return the rates of `_attention_rates` of the layers with attention, which all have the sizes of the model."""
    model = serving.model
    heads = model.num_attention_heads / settings.tensor
    if model.multi_latent_attention:
        rank, rope = float(model.kv_lora_rank or 0), float(model.qk_pos_emb_head_dim or 0)
        dim, groups = rank + 0.5 * rope, np.full_like(heads, (rank + rope) / (2.0 * rank + rope))
        prompt_dim, prompt_groups = 0.5 * ((model.qk_head_dim or 0) + rope + (model.v_head_dim or 0)), heads
    else:
        dim = prompt_dim = 0.5 * (model.kv_channels + (model.v_head_dim or model.kv_channels))
        prompt_groups = groups = np.maximum(model.num_query_groups / settings.tensor, 1.0)

    def seconds(
        batch: float, queries: float, keys: float, groups: FloatArray, dim: float, heads: FloatArray = heads
    ) -> FloatArray:
        ones = np.ones_like(heads)
        sizes = {"batch": batch * ones, "queries": queries * ones, "keys": keys * ones, "head_dim": dim * ones}
        shape = AttentionShape(heads=heads, groups=groups, kernel="", **sizes)
        return kernels.attention_seconds(shape, serving.wide_precision)

    all_heads = heads * settings.sharing
    difference = seconds(64.0, 1.0, 2.0 * REFERENCE_TOKENS, groups, dim, all_heads) - seconds(
        64.0, 1.0, REFERENCE_TOKENS, groups, dim, all_heads
    )
    cached = difference / (64.0 * REFERENCE_TOKENS) * (settings.cache_element_bytes / 2.0) / settings.sharing
    pair = seconds(1.0, REFERENCE_TOKENS, REFERENCE_TOKENS, prompt_groups, prompt_dim) / (
        0.5 * REFERENCE_TOKENS * REFERENCE_TOKENS
    )
    cached, pair = read_layers(model, serving.tokens) * cached, paired_layers(model, serving.prompt) * pair
    if model.indexer:
        cached, pair = _rates_of_selected(serving, settings, cached, pair)
    if (index := model.indexer) and index.heads:  # it computes only scores, in 8 bits: a quarter of the time
        keys_s = kernels.memory_seconds(64.0 * REFERENCE_TOKENS * index.token_bytes * np.ones_like(heads))
        cached = cached + model.attention_layers * keys_s / (64.0 * REFERENCE_TOKENS)
        count = np.full_like(heads, index.heads)
        scores = seconds(1.0, REFERENCE_TOKENS, REFERENCE_TOKENS, np.ones_like(heads), index.head_dim, count)
        pair = pair + model.attention_layers * 0.25 * scores / (0.5 * REFERENCE_TOKENS * REFERENCE_TOKENS)
    return cached, pair


def _rates_of_selected(
    serving: Serving, settings: Settings, cached: FloatArray, pair: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Return the rates of `_attention_rates` if the engine has kernels of its own for selected tokens, else the given
    ones. Such a kernel computes latent attention in its absorbed form, for prompts, too."""
    model, context = serving.model, 0.5 * (serving.prompt + serving.tokens)
    layers, top_k = float(model.attention_layers), float(model.indexer.top_k) if model.indexer else 0.0
    for kernel, applies, _, seconds in _sparse_kernels(serving, settings):
        if kernel.answers:
            selected = min(top_k, context) if kernel.skips else top_k
            cached = np.where(applies, layers * seconds * selected / context, cached)
        if kernel.prompts and not (serving.overheads.dense_prompts and serving.prompt <= top_k):
            part = min(top_k / serving.prompt, 1.0)
            selected = 0.5 * part * (2.0 - part) * serving.prompt if kernel.skips else top_k
            pair = np.where(applies, layers * seconds * selected * 2.0 / serving.prompt, pair)
    return cached, pair


def _last_blocks(serving: Serving, settings: Settings, tokens: FloatArray) -> FloatArray:
    """Return the seconds that the blocks of a layer's last answers take beyond their even share of all units: the rest
    of a block while most units have none, else half of a block, as a mean over numbers of blocks."""
    top_k, wait = float(serving.model.indexer.top_k) if serving.model.indexer else 0.0, np.zeros_like(tokens)
    for kernel, applies, blocks, seconds in _sparse_kernels(serving, settings):
        if kernel.answers:
            selected = min(top_k, 0.5 * (serving.prompt + serving.tokens)) if kernel.skips else top_k
            share = np.maximum(1.0 - tokens * blocks / kernel.units, 0.5) if kernel.units else 0.0
            wait = np.where(applies, share * seconds * selected * kernel.units / blocks, wait)
    return wait


def _sparse_kernels(
    serving: Serving, settings: Settings
) -> Iterator[tuple[SparseKernel, BoolArray, FloatArray, FloatArray]]:
    """Yield each kernel for sparse attention on this chip, the last one first: for which candidates it applies, and on
    a rank its blocks of heads, and the seconds of a token and a selected token."""
    model = serving.model
    if not model.multi_latent_attention:
        return
    heads = model.num_attention_heads / settings.tensor * settings.sharing
    width = 2.0 * (model.kv_lora_rank or 0) + (model.qk_pos_emb_head_dim or 0)
    for kernel in reversed(serving.overheads.sparse):
        if kernel.architecture == serving.architecture and np.isfinite(serving.peak):
            blocks = np.ceil(heads / kernel.heads)
            applies = (settings.cache_element_bytes == kernel.cache) & (heads >= kernel.least)
            yield kernel, applies, blocks, blocks * kernel.heads * 2.0 * width / (kernel.rate * serving.peak)


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
    """Return the time of the matrix product Y[tokens, outer] = X[tokens, inner] W[inner, outer], in seconds.

    Products of `attention` may have a wider precision than others, and `wide` products have 16 bits. Weights in a
    storage format are read in this format and multiplied in a wider one. The engine's overheads already include the
    casts of operands, so the time of casts is subtracted from the product, but for the latency of separate kernels.
    """
    ones = np.ones_like(tokens)
    precision = serving.wide_precision if wide else serving.attention_precision if attention else serving.precision
    if serving.weight_bytes is None:
        seconds = kernels.gemm_seconds(tokens, outer * ones, inner * ones, precision)
        cast = cast_bytes(tokens, inner * ones, precision)
        latency = kernels.memory_seconds(ones) if precision in serving.overheads.casts else 0.0
        return seconds if cast is None else seconds - kernels.memory_seconds(cast) + latency
    if wide or (attention and ATTENTION in serving.wide):
        return kernels.gemm_seconds(tokens, outer * ones, inner * ones, serving.precision)
    all_rows, single_row = (
        kernels.gemm_seconds(row_count, outer * ones, inner * ones, precision) for row_count in (tokens, ones)
    )
    read = kernels.gemm_seconds(ones, outer * ones * (0.5 * serving.weight_bytes), inner * ones, precision)
    return np.maximum(all_rows - single_row, 0.0) + read


TILE_ROWS = 8.0
"""Minimum number of rows of an expert in a grouped product, an estimate."""


def experts(serving: Serving, settings: Settings, kernels: KernelCosts, tokens: FloatArray) -> FloatArray:
    """Return the time of one layer's routed experts in seconds. `tokens`: the tokens of all attention ranks.

    Each of the two products of all experts on a device is one kernel, bound by its arithmetic or by reading the weights
    of the chosen experts. With expert parallelism a device holds whole experts, otherwise a slice of every expert.
    """
    model, overheads, precision = serving.model, serving.overheads, serving.precision
    count, chosen, h = float(model.num_moe_experts or 1), float(model.moe_router_topk), float(model.expert_hidden_size)
    gates = 2.0 if model.gated_linear_unit else 1.0
    width = (model.moe_ffn_hidden_size or 0) * settings.expert / (settings.tensor * settings.data)
    stored = 1.0 + settings.copies / count
    local_experts = distinct_experts(count, chosen, tokens * overheads.spread) * stored / settings.expert
    routed = tokens * chosen / settings.expert
    padded_tokens, one = np.maximum(routed, local_experts * TILE_ROWS), np.ones_like(tokens)
    time = np.zeros_like(tokens)
    for inner, outer in ((h, gates * width), (width, h)):
        work = linear(kernels, padded_tokens, inner, outer, serving) / overheads.grouped_work
        read = linear(kernels, one, inner, local_experts * outer, serving) / overheads.grouped_share
        time = time + (work**3 + read**3) ** (1 / 3)
    time = time / np.where((settings.data > 1.0) & ~settings.exchanges, overheads.exchanged_share, 1.0)
    traffic = kernels.memory_seconds(routed * 2.0 * (2.0 * h + (gates + 1.0) * width))
    router = linear(kernels, tokens / settings.data, float(model.hidden_size), count, serving, wide=True)
    small_kernels = overheads.experts.get(precision, max(overheads.experts.values(), default=0.0))
    whole = np.where((settings.expert > 1.0) & (settings.data == 1.0), overheads.whole_experts.get(precision, 0.0), 0.0)
    return time + traffic + router + small_kernels + whole


LOW_LATENCY_TOKENS = 256.0
"""Tokens of a rank up to which engines use kernels that send each token directly, without forwarding on a host: the
limit that DeepEP recommends (deepseek-ai/DeepEP docs/legacy.md @0297fc80)."""

EXCHANGE_LATENCY = 20e-6
"""Seconds of a message besides the time of its bytes. With 41 GB/s, it gives the times of DeepEP's low-latency kernels
for 128 tokens on 16 to 256 devices within 8% (deepseek-ai/DeepEP docs/legacy.md @0297fc80)."""

BALANCED, SKEW, SKEW_POWER = 1.18, 9.0, 1.4
"""The busiest rank's share of work relative to the mean: `BALANCED` if copies of experts balance the work, as LMSYS
measured (lmsys.org, 2025-05-05, large-scale EP). Without copies, it is 1 + `SKEW` / (experts of a rank) ** `SKEW_POWER`
times as much, which gives the gains of 1.49 and 2.54 that they measured with 8 and 3.6 experts of a rank."""


def imbalance(serving: Serving, settings: Settings) -> FloatArray:
    """Return the expert work of the busiest rank, relative to the mean over ranks that hold whole experts.

    It is 1 if all attention ranks gather all tokens, because the fitted expert rates already include the imbalance in
    that case.
    """
    count, uneven = float(serving.model.num_moe_experts or 1), settings.exchanges | (settings.data == 1.0)
    skew = 1.0 + SKEW / ((count + settings.copies) / settings.expert) ** SKEW_POWER
    return np.where(uneven & (settings.expert > 1.0), BALANCED * np.where(settings.balanced, 1.0, skew), 1.0)


def exchange(serving: Serving, settings: Settings, costs: Costs, tokens: FloatArray) -> FloatArray:
    """Return the seconds that one layer takes to send tokens of attention ranks to experts, and their results back.

    `tokens`: tokens of all attention ranks together. Without a library for such an exchange, all ranks gather all
    tokens and reduce-scatter the results.
    """
    ranks = (settings.tensor * settings.data).astype(np.int64)
    stride = np.ones(ranks.shape, dtype=np.int64)
    payload = tokens * (2.0 * serving.model.hidden_size)
    gathered = costs.collectives.seconds("all_gather", payload, ranks, stride)
    gathered = gathered + costs.collectives.seconds("reduce_scatter", payload, ranks, stride)
    sent = gathered
    if settings.exchanges.any():
        sent = _sent_to_experts(serving, settings, ranks.astype(np.float64), costs, tokens / ranks)
    return np.where(settings.data > 1.0, np.where(settings.exchanges, sent, gathered), 0.0)


def _summed(serving: Serving, settings: Settings, costs: Costs, tokens: FloatArray) -> FloatArray:
    """Return the seconds that one layer takes longer than in `exchange` if the ranks exchange `tokens` in two
    all-reduces: of tokens that each rank copies into zeros and out of the result, and of the experts' results."""
    ranks = (settings.tensor * settings.data).astype(np.int64)
    payload = tokens * (2.0 * serving.model.hidden_size)
    sums = 2.0 * costs.collectives.seconds("all_reduce", payload, ranks, np.ones(ranks.shape, dtype=np.int64))
    longer = sums + costs.kernels.memory_seconds(3.0 * payload) - exchange(serving, settings, costs, tokens)
    return np.where((settings.data > 1.0) & ~settings.exchanges, np.maximum(longer, 0.0), 0.0)


def _sent_to_experts(
    serving: Serving, settings: Settings, ranks: FloatArray, costs: Costs, tokens: FloatArray
) -> FloatArray:
    """Return the seconds to send the `tokens` of each rank only to the ranks of their experts, and results back.

    Each of the two messages takes `EXCHANGE_LATENCY`, plus the time of its bytes over the network or over the links of
    a host, whichever is slower. Of many tokens, each is sent to a host once, and forwarded to the ranks there. FP8
    tokens have a scale of 32 bits for 128 elements, NVFP4 tokens (lmsys.org/blog/2025-09-25-gb200-part-2) one of 8 bits
    for 16; results have 16 bits.
    """
    chosen, domain = float(serving.model.moe_router_topk), serving.link_domain
    token_bytes = {"fp8": 1.0 + 4.0 / 128.0, "nvfp4": 0.5625}.get(serving.precision, 2.0)
    sent = tokens * serving.model.expert_hidden_size * (token_bytes + 2.0)
    hosts, inside = np.maximum(ranks / domain, 1.0), np.minimum(ranks, domain)
    to_ranks, to_hosts = (distinct_experts(1.0 * each, 1.0, chosen) for each in (ranks, hosts))
    is_direct = np.where(np.isnan(settings.direct), tokens <= LOW_LATENCY_TOKENS, settings.direct == 1.0)
    over_network = np.where(is_direct, to_ranks, to_hosts) * (1.0 - 1.0 / hosts)
    over_links = to_ranks * (inside - 1.0) / np.where(is_direct, ranks, inside)
    seconds = sent * over_links * _seconds_per_byte(costs, 1)
    if (hosts > 1.0).any():
        seconds = np.maximum(seconds, sent * over_network * _seconds_per_byte(costs, domain))
    return 2.0 * EXCHANGE_LATENCY + seconds


def _seconds_per_byte(costs: Costs, stride: int) -> float:
    """Return the seconds per byte of a large message between two devices that are `stride` devices apart."""
    size = 1e9
    pair, distance = np.array([2]), np.array([stride])
    first, second = costs.collectives.seconds("send", np.array([size, 2.0 * size]), pair, distance).tolist()
    return float(second - first) / size
