"""Iteration times of an engine, for batches of prompts and decoding sequences.

The times of matrix products, small kernels and messages depend only on the number of tokens, so each candidate has a
table over a grid of token counts. Attention adds a time per cached token that is read, and per query-key pair.
"""

from dataclasses import dataclass, fields, replace

import numpy as np
from flagcore_models.formats import HEAD
from flagcore_models.layers import (
    attention_by_size,
    connections,
    head_of,
    latent_layers,
    layer_embeddings,
    layers_of,
    mixer_counts,
    network_counts,
    other_mixers,
    streams_of,
)
from flagcore_models.mixers.compressed_attention import CompressedAttention
from flagcore_models.networks.experts import Experts

from flagcore.contracts import Costs, KernelCosts
from flagcore.domain.model import Mixer, Network
from flagcore.domain.space import FloatArray
from flagcore_serving.model.adapters import adapter_launches, adapter_seconds, head_pair, pairs_of
from flagcore_serving.model.attention import attention_rates, mixer_seconds, shared_cache_seconds
from flagcore_serving.model.experts import (
    exchange,
    expert_seconds,
    host_experts,
    imbalance,
    offloaded_seconds,
    summed_exchange,
)
from flagcore_serving.model.products import ffn_seconds, linear, product_seconds
from flagcore_serving.model.work import Serving
from flagcore_serving.space.settings import Settings
from flagcore_serving.space.weights import DENSE

NODES: FloatArray = np.array(
    [
        *(1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144),
        *(8192, 12288, 16384, 24576, 32768, 65536),
    ],
    dtype=np.float64,
)
"""The grid of token counts of the tables. Times between them are interpolated linearly."""

WITHOUT_COST = ("instances", "max_running", "max_batched_tokens", "memory_fraction", "workspace_bytes", "ahead")
"""Fields of `Settings` that limit iterations, but do not change the time of one."""


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

    @property
    def arrays(self) -> list[FloatArray]:
        """All tables and arrays, in a fixed order."""
        return [getattr(self, name) for name in self.__slots__]

    def bytes_of(self, row: int) -> bytes:
        """Return all times of a candidate, to compare candidates, without `captured`."""
        return b"".join([getattr(self, name)[row].tobytes() for name in self.__slots__ if name != "captured"])


def interpolate(table: FloatArray, tokens: FloatArray) -> FloatArray:
    """Return each candidate's row of `table`, interpolated at its number of tokens. 0 tokens take 0 s."""
    tokens = np.minimum(tokens, NODES[-1])
    index = np.clip(np.searchsorted(NODES, tokens, side="right") - 1, 0, NODES.size - 2)
    places = index + table.shape[1] * np.arange(table.shape[0])
    low, high = table.take(places), table.take(places + 1)
    share = (np.maximum(tokens, NODES[0]) - NODES.take(index)) / (NODES.take(index + 1) - NODES.take(index))
    return np.where(tokens > 0, low + share * (high - low), 0.0)


def iteration_costs(serving: Serving, settings: Settings, costs: Costs) -> IterationCosts:
    """Return the iteration costs of each candidate, NaN if facts about the chip are missing.

    Costs are sums over all pipeline stages, because each token passes all of them, as if all were as slow as the
    slowest. If the device is the CPU itself, kernel launches do not overlap with compute. Candidates that differ only
    in WITHOUT_COST share the costs of one of them, whose values of these fields are NaN.
    """
    used = replace(settings, **dict.fromkeys(WITHOUT_COST, np.full(settings.tensor.shape, np.nan)))
    columns = {each.name: getattr(used, each.name) for each in fields(Settings)}
    table = np.stack([column.astype(np.float64) for column in columns.values()], axis=1)
    _, rows, of_row = np.unique(table.view(f"V{table.strides[0]}").ravel(), return_index=True, return_inverse=True)
    distinct = Settings(**{name: column[rows] for name, column in columns.items()})
    found = [each[of_row] for each in _of_distinct(serving, distinct, costs).arrays]
    captured = settings.captured(serving.overheads.captures)
    return replace(IterationCosts(**dict(zip(IterationCosts.__slots__, found, strict=True))), captured=captured)


def _of_distinct(serving: Serving, settings: Settings, costs: Costs) -> IterationCosts:
    """Return `iteration_costs` of settings without WITHOUT_COST; `captured` is NaN."""
    model, kernels, overheads, column = serving.model, costs.kernels, serving.overheads, settings.column
    tokens = np.minimum(NODES, column.pass_tokens)
    moe, messages = float(serving.moe_layers), _messages(serving, column, costs, tokens)
    local = messages + _layers(serving, column, kernels, tokens)
    local = local + column.pipeline * offloaded_seconds(serving, column, tokens)
    local = local + adapter_seconds(serving, column, costs, tokens, pairs_of(serving, column))
    shared, exchanged, summed = _of_experts(serving, column, costs, tokens)
    (described,) = head_of(model).products(model.hidden_size)
    described = replace(described, group=HEAD) if HEAD in serving.parts else described
    head = product_seconds(described, serving, column, kernels, tokens)
    head = head + adapter_seconds(serving, column, costs, tokens, head_pair(serving, column))
    passes = NODES / tokens
    cached, pair = attention_rates(serving, settings, kernels)
    pace, expert_pace = _paces(serving, settings)
    local = local * pace[:, None]
    shared, exchanged, summed = (each * expert_pace[:, None] for each in (shared, exchanged, summed))
    cached, pair, head = cached * pace, pair * pace, head * column.pipeline
    if (settings.sharing > 1.0).any():
        head = head + shared_cache_seconds(serving, column, costs, tokens)
    if settings.overlaps.any():
        overlapped = _overlapped(serving, shared, exchanged, local, cached[:, None], column)
        shared = np.where(column.overlaps, overlapped, shared)
    layers = sum(len(each.parts) for each in layers_of(model)) / 2.0  # a layer of Nemotron-H is a mixer or a network
    launches = overheads.eager_kernels * layers + overheads.eager_experts * moe
    launches += overheads.eager_latent * latent_layers(model)
    launches += overheads.eager_compressed * sum(
        number for each, number in other_mixers(model).items() if isinstance(each, CompressedAttention)
    )
    launched = launches + adapter_launches(serving, settings, costs)
    host = launched * (overheads.launch or kernels.launch_seconds()) * settings.crowding
    eager_s = np.where(settings.graph_tokens > 0, 0.0, host) if costs.synchronous else 0.0
    pieces = (overheads.layer * layers + overheads.expert_layer * moe) * settings.crowding
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


def _messages(serving: Serving, settings: Settings, costs: Costs, tokens: FloatArray) -> FloatArray:
    """Return the time of the messages of tensor ranks and pipeline stages in seconds: an all-reduce after each mixer
    and network, but that after experts is part of the exchange if there are attention ranks."""
    dense = sum(network_counts(serving.model).values()) - serving.moe_layers
    always = sum(mixer_counts(serving.model).values()) + dense
    number = always + serving.moe_layers * np.where(settings.data > 1.0, 0.0, 1.0)
    return number * _reduce(serving, settings, costs, tokens) + _stages(serving, settings, costs, tokens)


def _layers(serving: Serving, settings: Settings, kernels: KernelCosts, tokens: FloatArray) -> FloatArray:
    """Return the time of all layers on their own tokens in seconds, without routed experts and messages."""
    model, local = serving.model, np.zeros_like(tokens)
    mixers: dict[Mixer, int] = {each: sum(windows.values()) for each, windows in attention_by_size(model).items()}
    for mixer, number in (mixers | other_mixers(model)).items():
        local = local + number * mixer_seconds(mixer, serving, settings, kernels, tokens)
    for network, number in network_counts(model).items():
        local = local + number * _network_seconds(network, serving, settings, kernels, tokens)
    for product in layer_embeddings(model)[1:]:
        seconds = linear(serving, kernels, tokens, product.inputs, product.outputs, DENSE)
        local = local + product.copies * seconds
    if streams := streams_of(model):
        moved = 2.0 * (streams.moved * tokens * float(model.hidden_size) + streams.width)  # each rank mixes all of them
        local = local + connections(model) * (kernels.memory_seconds(moved) + serving.overheads.streams)
    return local


def _network_seconds(
    network: Network, serving: Serving, settings: Settings, kernels: KernelCosts, tokens: FloatArray
) -> FloatArray:
    """Return the time of a network of all tokens in seconds: of a dense one, or beside routed experts."""
    hidden = serving.model.hidden_size
    if not isinstance(network, Experts):
        return ffn_seconds(network.products(hidden), serving, settings, kernels, tokens) + serving.overheads.ffn
    seconds = np.zeros_like(tokens)
    if always := network.always(hidden):
        seconds = ffn_seconds(always, serving, settings, kernels, tokens)
    for product in network.routing(hidden):
        if product.group:  # the router's time is that of the experts
            seconds = seconds + product_seconds(product, serving, settings, kernels, tokens)
    return seconds


def _of_experts(
    serving: Serving, settings: Settings, costs: Costs, tokens: FloatArray
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return the tables `shared`, `exchanged` and `summed` of `IterationCosts`."""
    none, layers, on_host = np.zeros_like(tokens), float(serving.moe_layers), settings.experts_on_host
    if (experts := serving.experts) is None:
        return none, none, none
    busiest = imbalance(experts, settings)
    exchanged = layers * exchange(experts, serving, settings, costs, tokens)
    exchanged = exchanged * np.where(settings.exchanges, busiest, 1.0)  # gathers are of all tokens
    summed = none
    if serving.overheads.sums_prompts:
        summed = layers * summed_exchange(experts, serving, settings, costs, tokens)
    computed = expert_seconds(experts, serving, settings, costs.kernels, tokens)
    shared = (layers - on_host) * computed * busiest + exchanged
    if on_host.any():
        shared = shared + on_host * host_experts(experts, serving, settings, costs.kernels, tokens, computed)
    return shared, exchanged, summed


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


def _reduce(serving: Serving, settings: Settings, costs: Costs, tokens: FloatArray) -> FloatArray:
    """Return the time of one all-reduce of the activations of `tokens` among the tensor ranks, in seconds.

    For small messages, engines have their own kernels, which have a lower latency than the communication library. vLLM
    and SGLang use them only for ranks on linked devices, and on a bus (PCIe) for two ranks that can access each other's
    memory (`custom_all_reduce.py`).
    """
    overheads = serving.overheads
    ranks, stride = settings.tensor.astype(np.int64), np.ones(settings.tensor.shape, dtype=np.int64)
    payload = tokens * (2.0 * serving.model.hidden_size)
    library = costs.collectives.seconds("all_reduce", payload, ranks, stride)
    library_latency = costs.collectives.seconds("all_reduce", np.ones_like(payload), ranks, stride)
    kernel_latency = overheads.reduce + overheads.reduce_doubling * np.maximum(np.log2(settings.tensor) - 1.0, 0.0)
    own = np.where(settings.tensor > min(serving.bus_ranks, serving.link_domain), library_latency, kernel_latency)
    return np.where(settings.tensor > 1.0, np.minimum(library, np.maximum(library - library_latency, 0.0) + own), 0.0)


def _stages(serving: Serving, settings: Settings, costs: Costs, tokens: FloatArray) -> FloatArray:
    ranks, stride = settings.pipeline.astype(np.int64), (settings.tensor * settings.data).astype(np.int64)
    payload = tokens * (2.0 * serving.model.hidden_size)
    each = costs.collectives.seconds("send", payload, np.minimum(ranks, 2), stride)
    return np.where(settings.pipeline > 1.0, (settings.pipeline - 1.0) * (each + serving.overheads.handover), 0.0)
